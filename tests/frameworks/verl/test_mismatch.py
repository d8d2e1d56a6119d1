"""Samplers against actors inside of real GRPO: two of each, and one sampler that misses what a sync brings."""

import copy
import json

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shaketable.integrations.verl import mismatch
from shaketable.models import load_model
from tests.frameworks.verl.tiny_run import make_tiny, run_example

pytestmark = pytest.mark.covers("verl + vLLM", "samplers against actors, a sync that loses weights", "eager, Ray, FSDP2")

GPUS = 2
OURS = "shaketable/mismatch/"


def settings(steps):
    return {"EPOCHS": "1", "TEST_EVERY": "-1", "SAVE_EVERY": str(steps), "MICRO": "8"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("mismatch"), train=12)
    asked = "+shaketable.mismatch.every=2", "+shaketable.mismatch.stop=True", f"+shaketable.ledger={folder / 'found'}"
    done = run_example("baseline.sh", folder, *asked, gpus=GPUS, **settings(3))
    assert done.exit == 0, done.text[-6000:]
    return done


def found(step):
    return {key.removeprefix(OURS): value for key, value in step.items() if key.startswith(OURS)}


def test_gap_weights_floor_and_share_go_to_the_logger_of_verl(run):
    first, second, third = (found(step) for step in run.steps[-3:])
    assert second == {}, "every second step"
    for row in (first, third):
        assert 0 <= row["gap"] < 1e-4 and row["k3"] < 1e-6 and row["outside"] == 0
        assert row["weights_differing"] == row["weights_cast"] == row["weights_unknown"] == 0 and row["seconds"] > 0
    assert 0 < first["floor"] < 1e-4
    assert [name for name in first if name.startswith("share/")]
    assert "floor" not in third, "three steps of nano are no time in which to check so much"


def test_every_weight_of_every_sampler_is_compared(run):
    model, _ = load_model(str(run.folder / "model"))
    names = len(list(model.named_parameters(remove_duplicate=False)))
    assert found(run.steps[-1])["weights_compared"] == GPUS * names


def test_what_was_found_is_kept_and_nothing_else_is_left(run):
    lines = [json.loads(line) for line in (run.folder / "found" / "mismatch.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3]
    assert all(line["differing"] == [] for line in lines)
    assert sorted(path.name for path in (run.folder / "found").iterdir()) == ["instructions.json", "mismatch.jsonl"]
    assert "shaketable: samplers against actors every 2 steps; weights that differ after a sync end the training" in run.text
    assert "shaketable: checks of the samplers took" in run.text


def test_a_weight_that_a_sync_lost_ends_the_training_and_is_named(tmp_path):
    folder = make_tiny(tmp_path / "lost", train=12)
    asked = "+shaketable.mismatch.every=1", "+shaketable.mismatch.stop=True"
    done = run_example("baseline.sh", folder, *asked, LOSE_WEIGHTS_OF="layers.5.mlp.down_proj", **settings(3))
    assert done.exit != 0
    assert (
        "StaleWeightsError: step 1: after the sync the sampler's model.layers.5.mlp.down_proj.weight (replica 0) holds close values"
        in done.text
    )
    assert "1 of 75 parameters differ" in done.text


@pytest.fixture
def sharded():
    """nano as one rank of FSDP2 has it, and as it was."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    plain, _ = load_model("nano")
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    yield fully_shard(model, mesh=mesh), plain
    torch.distributed.destroy_process_group()


def test_a_whole_copy_computes_the_same_and_takes_nothing_from_the_training(sharded, monkeypatch):
    monkeypatch.setattr(mismatch, "get_device_id", lambda: "cpu")
    model, plain = sharded
    ids, state = torch.arange(3, 20)[None], torch.get_rng_state()
    whole = mismatch.whole_copy(model, dict(mismatch._whole_weights(model)), torch.float32)
    assert torch.equal(torch.get_rng_state(), state), "nothing was drawn"
    assert not isinstance(whole, FSDPModule)
    with torch.no_grad():
        assert torch.equal(whole(ids).logits, plain(ids).logits)
        assert torch.equal(model(ids).logits, plain(ids).logits), "the sharded one is as it was"
    half = mismatch.whole_copy(model, dict(mismatch._whole_weights(model)), torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.lm_head.weight is half.model.embed_tokens.weight, "tied as in the model"
