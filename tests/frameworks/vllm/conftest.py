"""Real vLLM, on a CPU. Where vLLM is not installed (the core environment) nothing of this folder is collected.

An engine takes ten seconds to start, so there are few: most tests share one, in this process and eager, and talk to it
through the live calls. Each test finds it cleared.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """vLLM in this process, eager, started with a plan."""
    from tests.frameworks.vllm.small_engines import START, start

    return start("nano", plan=START, ledger=str(tmp_path_factory.mktemp("ledgers")))


@pytest.fixture
def llm(engine):
    """The shared engine, with nothing on."""
    engine.clear()
    return engine


@pytest.fixture(scope="session")
def oracle():
    """The same model in transformers."""
    from tests.frameworks.vllm.small_engines import NANO, Oracle

    return Oracle(NANO)
