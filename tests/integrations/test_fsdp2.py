"""Plans and AQN on a model that FSDP2 has sharded over ranks of gloo, against the same model in one piece."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.covers("FSDP2", "module, layer, operator and weight plans, AQN; two ranks", "eager, compiled blocks")

PROGRAM = Path(__file__).parent / "programs" / "sharded.py"
PLANS = ("weights", "norms", "mxfp4", "layer", "operators")


def ways(rows):
    """How the model was sharded, and before or after the plan was put on it."""
    return [way for way in rows if way != "effect"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank of the program saw."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, PROGRAM, folder], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("plan", PLANS)
def test_loss_gradients_and_new_weights_are_those_of_the_whole_model(ranks, plan):
    for seen in ranks:
        assert seen[plan]["effect"] > 1e-3, "the plan does something"
        for way in ways(seen[plan]):
            assert seen[plan][way]["difference"] < min(1e-5, 1e-2 * seen[plan]["effect"]), way


@pytest.mark.parametrize("plan", PLANS)
def test_the_ledger_is_that_of_the_whole_model(ranks, plan):
    for seen in ranks:
        for way in ways(seen[plan]):
            row = seen[plan][way]
            assert row["fires"] == row["expected fires"] and row["fires"][0] > 0
            assert row["error"] == pytest.approx(row["expected error"], rel=1e-4)
            if plan not in ("mxfp4", "layer"):
                assert row["measured"] == pytest.approx(row["asked"], rel=0.1)


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_saved_and_what_stays_is_clean_and_sharded(ranks, plan):
    for seen in ranks:
        for way in ways(seen[plan]):
            facts = {k: v for k, v in seen[plan][way].items() if isinstance(v, bool)}
            assert len(facts) == 5 and all(facts.values()), (way, facts)


def test_aqn_on_sharded_norms(ranks):
    for seen in ranks:
        assert seen["aqn"]["difference"] < 1e-5 and seen["aqn"]["steps differ"]
        assert seen["aqn"]["kept"] == [True, True]
        assert seen["aqn"]["measured"][1] == pytest.approx(0.2, rel=0.1)


def test_blocks_that_are_compiled_and_sharded(ranks):
    for seen in ranks:
        weights, sharded_weights, outputs, sharded_outputs = seen["compiled"]
        assert sharded_weights == pytest.approx(weights, rel=1e-5)
        assert sharded_outputs == pytest.approx(outputs, rel=1e-5)
        assert weights[2] == outputs[2] == 4


def test_a_shard_is_refused_in_one_line(ranks):
    for seen in ranks:
        assert "model.norm.weight is still sharded" in seen["refused"] and "\n" not in seen["refused"]
