"""Models whose code is not what their config makes, or that overwrite a tensor: nothing is wrong with them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

import shaketable as st
from shaketable.locate.capture.recorder import Recorder
from tests.locate.architectures import build, tokens


def _and(y):
    y &= 1


def _or(y):
    y |= 4


def _xor(y):
    y ^= 1


def _left(y):
    y <<= 1


def _right(y):
    y >>= 1


def _function(y):
    F.relu(y, inplace=True)


def _by_position(y):
    F.relu(y, True)


class Changed(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        y = x.clone()
        self.change(y)
        return y + 0


@pytest.mark.parametrize("change", [_and, _or, _xor, _left, _right, _function, _by_position])
def test_every_way_to_overwrite_leaves_earlier_records_alone(change):
    model, x = Changed(change), torch.tensor([-3, 2, 5])
    with Recorder(model, lambda path, module: False).watching() as recording:
        model(x)
    copied, changed, _ = recording.records
    assert torch.equal(copied.output, x) and torch.equal(changed.args[0], x) and not torch.equal(changed.output, x)
    assert "inplace" not in changed.kwargs, "what is computed again would overwrite what is kept"


class Function(LlamaMLP):
    def forward(self, x):
        gate = self.gate_proj(x)
        F.silu(gate, inplace=True)
        return self.down_proj(gate * self.up_proj(x))


class Masked(LlamaMLP):
    def forward(self, x):
        gate = self.gate_proj(x)
        keep = gate > 0
        keep |= gate < 0.1
        return self.down_proj(self.act_fn(gate) * keep * self.up_proj(x))


class Module(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.act_fn = nn.SiLU(inplace=True)


@pytest.mark.parametrize("mode", ["host", "all"])
@pytest.mark.parametrize("kind", [Function, Masked, Module])
def test_a_healthy_model_that_overwrites_is_healthy(kind, mode):
    model = build("llama")
    for layer in model.model.layers:
        new = kind(model.config)
        new.load_state_dict(layer.mlp.state_dict())
        layer.mlp = new.eval()
    found = st.locate(model, mode=mode, input_ids=tokens())
    assert found.verdict != "FAULT" and not found.evidence, found.sentence


def test_a_fault_in_what_is_overwritten_is_found():
    model = build("llama")
    for layer in model.model.layers:
        new = Function(model.config)
        new.load_state_dict(layer.mlp.state_dict())
        layer.mlp = new.eval()
    with st.inject(model, "gain:0.05@module.gate_proj,layers=1"):
        found = st.locate(model, mode="host", input_ids=tokens())
    assert found.verdict == "FAULT" and "layer 1, mlp.gate_proj" in found.sentence, found.sentence


class Positive(LlamaMLP):
    def forward(self, x):
        up = self.up_proj(x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up * (up > 0))


@pytest.mark.parametrize(("mode", "verdict"), [("host", "HEALTHY"), ("device", "INCONCLUSIVE"), ("all", "HEALTHY")])
def test_a_block_of_somebody_s_own_has_symmetries_of_its_own(mode, verdict):
    model = build("llama")
    for layer in model.model.layers:
        new = Positive(model.config)
        new.load_state_dict(layer.mlp.state_dict())
        layer.mlp = new.eval()
    found = st.locate(model, mode=mode, input_ids=tokens())
    assert found.verdict == verdict and not found.evidence, found.sentence
