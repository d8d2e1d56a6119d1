"""`shaketable locate`, as its users call it."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from tests.cli.command_server import shaketable
from tests.locate.architectures import build

PLAN = "dead_zone:0.2,scope=token,sparsity=0.1@module.mlp.down_proj,layers=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a tokenizer of bytes, saved as anybody would."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=512)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def locate(tmp_path):
    return functools.partial(shaketable, tmp_path, "locate")


def test_a_healthy_model_exits_0(locate, folder, tmp_path):
    done = locate(folder, "--tokens", 48, "--json", tmp_path / "d.json", "--html", tmp_path / "d.html")
    assert done.code == 0, done.stderr
    assert "HEALTHY: all 3 layers" in done.stdout
    assert "This holds if" in done.stdout
    assert json.loads((tmp_path / "d.json").read_text())["verdict"] == "HEALTHY"
    assert (tmp_path / "d.html").read_text().startswith("<!doctype html>")


def test_a_planted_fault_exits_1_and_is_named(locate, folder, tmp_path):
    done = locate(folder, "--tokens", 48, "--plan", PLAN, "--json", tmp_path / "d.json", "--dtype", "bfloat16")
    assert done.code == 1, done.stderr
    assert "FAULT: layer 1, mlp.down_proj" in done.stdout
    data = json.loads((tmp_path / "d.json").read_text())
    assert (data["layer"], data["op"], data["fault_class"], data["dtype"]) == (1, "mlp.down_proj", "dead_zone", "bfloat16")
    assert len(data["lanes"]) == 3


def test_a_layer_that_cannot_be_judged_exits_4(locate, folder, tmp_path):
    for file in folder.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    build("gpt_neox", vocabulary=vocabulary).save_pretrained(tmp_path)
    done = locate(tmp_path, "--tokens", 16, "--mode", "device")
    assert done.code == 4, done.stderr
    assert "INCONCLUSIVE: layer 0, twin: no symmetries are known" in done.stdout
    assert "Device mode cannot see" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-model-here/at-all/x",), "does not exist"),
        (("MODEL", "--plan", "gain:0.1@module.nothing_like_it"), "matches"),
        (("MODEL", "--plan", "saturation:1.0,scope=tensor@layer.1"), "changed no value: there was nothing to find"),
        (("MODEL", "--prompts", "EMPTY"), "prompts are empty"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(locate, folder, tmp_path, arguments, message):
    (tmp_path / "empty").write_text("\n \n")
    names = {"MODEL": folder, "EMPTY": tmp_path / "empty"}
    done = locate(*(names.get(a, a) for a in arguments), "--tokens", 16)
    lines = [line for line in done.stderr.splitlines() if "Loading weights" not in line and line.strip()]
    assert done.code == 2, done.stdout + done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error:")
    assert message in lines[0]


@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--strict"], 4)])
def test_strict_does_not_believe_a_hook(folder, monkeypatch, flags, code):
    """In this process, as a saved model has no hooks."""
    import importlib

    from typer.testing import CliRunner

    from shaketable.cli import app

    verb = importlib.import_module("shaketable.cli.locate")
    model, tokenizer = verb.load(str(folder), "cpu", None, None)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, y: y * 2)
    monkeypatch.setattr(verb, "load", lambda *options: (model, tokenizer))
    done = CliRunner().invoke(app, ["locate", str(folder), "--mode", "host", "--tokens", "16", *flags])
    assert done.exit_code == code, done.output
    assert "the hook <lambda> of model.layers.1.mlp" in done.output.replace("\n", " ")


OWN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Net(nn.Module):
    def __init__(self, stack):
        super().__init__()
        self.wte, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        blocks = [Block() for _ in range(3)]
        if stack:
            self.stack = nn.ModuleDict(dict(zip("abc", blocks)))
        else:
            self.layer_0, self.layer_1, self.layer_2 = blocks

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.stack.values() if hasattr(self, "stack") else (self.layer_0, self.layer_1, self.layer_2):
            x = block(x)
        return self.head(x)

def numbered():
    torch.manual_seed(0)
    return Net(False)

def stacked():
    torch.manual_seed(0)
    return Net(True), torch.arange(20)[None]
"""


def test_a_model_of_one_s_own_is_judged_compared_and_asked_for(locate, tmp_path):
    file = tmp_path / "own_model_of_a_test.py"
    file.write_text(OWN)
    done = locate(f"{file}:numbered")
    assert (done.code, "--allow-code" in done.stderr) == (2, True)
    done = locate(f"{file}:numbered", "--allow-code", "--tokens", 16, "--statistics")
    assert done.code == 0, done.stderr
    assert "HEALTHY: all 3 layers" in done.stdout
    assert "min_gain" in done.stdout and "drop_z" in done.stdout
    done = locate(f"{file}:stacked", "--allow-code")
    assert (done.code, "name one as layers=: stack (3 × Block)" in done.stderr) == (2, True)
    own = (f"{file}:stacked", "--allow-code", "--layers", "stack")
    assert locate(*own).code == 0
    run = functools.partial(shaketable, tmp_path)
    assert run("fingerprint", *own, "-o", tmp_path / "f.safetensors").code == 0
    assert run("compare", tmp_path / "f.safetensors", *own).code == 0
