"""What the interpreter does not show: that a compiler takes every kernel, loads 16 bytes at once, and divides exactly.

The interpreter runs Python; a name, a type or a return that Triton's language does not have passes there. The compiler and
the assembler come with Triton and need no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("compile_kernels.py")


@pytest.fixture(scope="module")
def ptx(tmp_path_factory):
    """Per kernel: whether it divides exactly, and how it loads and stores."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton here")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}


def test_every_kernel_compiles_for_a_gpu(ptx):
    assert len(ptx) == 65


def test_formats_divide_exactly(ptx):
    formats = {name: found[0] for name, found in ptx.items() if name.startswith(("mxfp4", "nvfp4", "e4m3", "e5m2"))}
    assert set(formats.values()) == {"exact"}, formats


@pytest.mark.parametrize("move", ["ld.global", "st.global"])
def test_tensors_are_moved_16_bytes_at_a_time(ptx, move):
    for name, found in ptx.items():
        if not name.startswith(("begin", "tell", "moments", "top_of_tops")) and not (
            move == "st.global" and name in ("sums", "tops")
        ):
            assert any(f.startswith(move) and ".v4.b32" in f for f in found), name
