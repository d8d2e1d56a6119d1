"""Samplers against actors inside of real GRPO: two of each, and one sampler that misses what a sync brings."""

import json

import pytest

from shaketable.models import load_model
from tests.frameworks.verl.tiny_run import make_tiny, run_example

pytestmark = pytest.mark.covers("verl + vLLM", "samplers against actors, a sync that loses weights", "eager, Ray, FSDP2")

GPUS = 2
OURS = "shaketable/mismatch/"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("mismatch"), train=12)
    asked = "+shaketable.mismatch.every=2", "+shaketable.mismatch.stop=True", f"+shaketable.ledger={folder / 'found'}"
    done = run_example("baseline.sh", folder, *asked, gpus=GPUS, SAVE_EVERY="3", MICRO="8")
    assert done.exit == 0, done.text[-6000:]
    return done


def found(step):
    return {key.removeprefix(OURS): value for key, value in step.items() if key.startswith(OURS)}


def test_what_was_compared_goes_to_the_logger_of_verl(run):
    first, second, third = (found(step) for step in run.steps[-3:])
    assert second == {}, "every second step"
    for row in (first, third):
        assert row["weights_differing"] == row["weights_cast"] == row["weights_unknown"] == 0
    model, _ = load_model(str(run.folder / "model"))
    names = len(list(model.named_parameters(remove_duplicate=False)))
    assert third["weights_compared"] == GPUS * names, "every weight of every sampler"


def test_what_was_found_is_kept_and_nothing_else_is_left(run):
    lines = [json.loads(line) for line in (run.folder / "found" / "mismatch.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3]
    assert all(line["differing"] == [] for line in lines)
    assert sorted(path.name for path in (run.folder / "found").iterdir()) == ["instructions.json", "mismatch.jsonl"]
    assert "shaketable: samplers against actors every 2 steps; weights that differ after a sync end the training" in run.text


def test_a_weight_that_a_sync_lost_ends_the_training_and_is_named(tmp_path):
    folder = make_tiny(tmp_path / "lost", train=12)
    asked = "+shaketable.mismatch.every=1", "+shaketable.mismatch.stop=True"
    done = run_example("baseline.sh", folder, *asked, LOSE_WEIGHTS_OF="layers.5.mlp.down_proj", SAVE_EVERY="3", MICRO="8")
    assert done.exit != 0
    assert (
        "StaleWeightsError: step 1: after the sync the sampler's model.layers.5.mlp.down_proj.weight (replica 0) holds other values"
        in done.text
    )
    assert "1 of 75 parameters differ" in done.text
