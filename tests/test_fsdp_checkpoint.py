"""A checkpoint folder of verl is a MODEL: two real ranks have sharded nano with FSDP2 and saved it as verl does."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.tensor
from typer.testing import CliRunner

from shaketable.cli import app
from shaketable.errors import ModelError
from shaketable.fsdp_checkpoint import merged_weights
from shaketable.models import load_model, servable_path
from tests import ROOT

RANK_1 = "model_world_size_2_rank_1.pt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "global_step_116" / "actor"
    folder.mkdir(parents=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(ROOT / "tests" / "fsdp_checkpoint_writer.py"), str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "actor")


def test_the_model_is_the_one_that_was_sharded(saved):
    shards = [torch.load(saved / f"model_world_size_2_rank_{rank}.pt", weights_only=True) for rank in range(2)]
    assert shards[0]["model.embed_tokens.weight"].to_local().shape != shards[1]["model.embed_tokens.weight"].to_local().shape
    (model, tokenizer), (nano, _) = load_model(str(saved)), load_model("nano")
    for (name, a), b in zip(model.state_dict().items(), nano.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert model.lm_head.weight is model.model.embed_tokens.weight, "tied, as the config says"
    assert not model.training and tokenizer("1 + 2")["input_ids"]


def test_verbs_take_the_folder_of_a_step(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["inspect", str(saved.parent), "--plan", "gain:0.1@layer.3"])
    assert done.exit_code == 0, done.output


def test_a_model_that_verl_has_saved_whole_is_preferred(copied):
    shutil.copy(ROOT / "src/shaketable/data/nano/model.safetensors", copied / "huggingface")
    (copied / RANK_1).unlink()
    assert load_model(str(copied))[0].config.num_hidden_layers == 8


def test_a_shard_that_is_missing_or_of_another_run_is_named(copied):
    shutil.copy(copied / RANK_1, copied / "model_world_size_4_rank_1.pt")
    with pytest.raises(ModelError, match=r"has 2 shards of rank 1; bring those of all machines"):
        load_model(str(copied))
    for file in copied.glob("*_rank_1.pt"):
        file.unlink()
    with pytest.raises(ModelError, match=r"has 0 shards of rank 1"):
        load_model(str(copied))


def test_parts_that_make_no_whole_are_refused(copied):
    shutil.copy(copied / "model_world_size_2_rank_0.pt", copied / RANK_1)
    with pytest.raises(ModelError, match=r"the shards of model.embed_tokens.weight make \(100, 128\), and it is \(99, 128\)"):
        merged_weights(copied)


def test_without_a_config_it_says_where_to_get_one(copied):
    shutil.rmtree(copied / "huggingface")
    with pytest.raises(ModelError, match=r"is a checkpoint of verl without huggingface/config.json"):
        load_model(str(copied))


def test_an_engine_is_told_how_to_merge(saved):
    with pytest.raises(ModelError, match=r"an engine needs them merged: python -m verl.model_merger merge --backend fsdp"):
        servable_path(str(saved))


class Trap:
    def __reduce__(self):
        return exec, ("raise AssertionError('the file was run')",)


def test_nothing_in_a_file_is_run(copied):
    torch.save({"model.embed_tokens.weight": Trap()}, copied / RANK_1)
    with pytest.raises(ModelError, match=r"rank_1.pt cannot be opened .* verl may be able to merge it"):
        load_model(str(copied))
