"""Two ranks of `accelerate launch` over gloo, with the callback.

In accelerate 1.15 `--cpu` starts one process whatever `--num_processes` says (more only through MPI); `--multi_gpu` starts as many
as asked, and a script that says `use_cpu=True` trains on them with gloo.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shaketable import Ledger

pytestmark = [pytest.mark.slow, pytest.mark.covers("Accelerate", "two ranks, gloo: callback", "eager")]

PROGRAMS = Path(__file__).parent / "programs"
BESIDE = Path(sys.executable).parent
LAUNCH = [BESIDE / "accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]


def run(*command):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What two ranks of a GRPO script with the callback saw, the ledger it wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("ranks")
    printed = run(*LAUNCH, PROGRAMS / "accelerated.py", folder)
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return ranks, folder / "ledger.json", printed


def test_one_ledger_for_all_ranks(launched):
    ranks, file, printed = launched
    assert [rank["ranks"] for rank in ranks] == [2, 2]
    ledger = Ledger.load(file)
    assert ledger.processes == 2 and [rank["processes"] for rank in ranks] == [2, 2]
    assert ledger.forward == ranks[0]["own"] + ranks[1]["own"] == ranks[0]["merged"] == ranks[1]["merged"]
    assert [w["forward"] for w in json.loads(file.read_text())["workers"]] == [rank["own"] for rank in ranks]
    assert ledger.sites[0].magnitude == pytest.approx(0.1, rel=0.15)
    assert printed.count("2 processes") == 1, "one table, from one rank"


def test_ranks_have_the_same_broken_lanes_other_noise_and_in_the_end_the_same_weights(launched):
    (first, second), _, _ = launched
    assert len(first["lanes"]) == 8 and first["lanes"] == second["lanes"]
    assert first["noise"] != second["noise"]
    assert first["weights"] == second["weights"]


def test_one_rank_that_is_never_hit_stops_all_after_the_first_step(launched):
    (first, second), _, _ = launched
    assert first["early"] == second["early"]
    error, steps = first["early"]
    assert steps == 1
    assert error.startswith("rank 1: ") and "never fired" in error and "rank 0" not in error
