"""The whole way on an accelerator that is neither a CPU nor CUDA, on the stand-in of `torch_npu/`.

In a process of its own: torch can be given one device of others, once, and then everything that asks for an accelerator gets it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TRAINING = "tests/train/test_run_on_accelerator.py"
CUDA_ALONE = f"--deselect={TRAINING}::test_memory_of_the_loss_is_that_of_a_micro_batch"
TESTS = ("tests/npu/on_npu.py", TRAINING, CUDA_ALONE)
PROGRAM = "import os, pytest, sys; os._exit(pytest.main(sys.argv[1:]))"
"""Without Python's own end: there torch's thread for the device's gradients may find the interpreter gone."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_on_the_stand_in(tmp_path):
    paths = os.pathsep.join([str(HERE), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", PROGRAM, "-q", "-p", "torch_npu", "-p", "no:cacheprovider", "-p", "no:cov", *TESTS]
    env = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout
