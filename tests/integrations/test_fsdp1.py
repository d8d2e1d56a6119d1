"""FSDP1, which verl calls `strategy=fsdp`: operators, layers and modules by name are hit as in the model alone, bit for bit."""

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT

PLANS = [
    "relative_gaussian:0.05@op.matmul",
    "dead_zone:0.3,scope=token,sparsity=0.5@layer.3",
    "gain:0.1@module.q_proj,layers=2-3,point=input",
    "gain:0.1@module.mlp",
    "gain:0.1@layer.2,direction=backward",
]


@pytest.mark.covers("FSDP1", "operators, layers and modules by name, as in verl's actor; two ranks", "eager")
def test_a_plan_acts_as_in_the_model_alone():
    program = ROOT / "tests" / "integrations" / "programs" / "fsdp1_actor.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program), *PLANS]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["plan"] for row in rows] == PLANS
    for row in rows:
        assert row["same"], row["plan"]
        assert row["ledgers"][0] == row["ledgers"][1]
        assert sum(row["ledgers"][0][:2]) > 0
