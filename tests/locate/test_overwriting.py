"""Models whose code is not what their config makes, or that overwrite a tensor: nothing is wrong with them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import shaketable as st
from tests.locate.architectures import build, tokens


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


def _adds_into_its_input(layer, hidden_states, **others):
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **others)
    hidden_states += attended
    hidden_states += layer.mlp(layer.post_attention_layernorm(hidden_states))
    return hidden_states


@pytest.mark.parametrize("mode", ["host", "all"])
def test_layers_that_add_into_what_they_are_given_are_healthy(monkeypatch, mode):
    monkeypatch.setattr(LlamaDecoderLayer, "forward", _adds_into_its_input)
    found = st.locate(build("llama"), mode=mode, input_ids=tokens())
    assert found.verdict == "HEALTHY", found.sentence


def test_a_fault_in_a_layer_that_adds_into_what_it_is_given_is_found(monkeypatch):
    monkeypatch.setattr(LlamaDecoderLayer, "forward", _adds_into_its_input)
    found = st.locate(build("llama"), mode="host", input_ids=tokens(), plan="gain:0.05@module.down_proj,layers=1")
    assert found.verdict == "FAULT" and "layer 1, mlp.down_proj" in found.sentence, found.sentence


class Autocast(LlamaMLP):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
            mixed = torch.softmax(hidden @ hidden.mT, -1) @ hidden
            y = self.down_proj(mixed + hidden)
        return y.to(x.dtype)


@pytest.mark.parametrize("plan", [None, "gain:0.01@module.gate_proj,layers=1"])
def test_code_that_puts_autocast_on_is_judged_by_what_autocast_does(plan):
    model = build("llama")
    for layer in model.model.layers:
        new = Autocast(model.config)
        new.load_state_dict(layer.mlp.state_dict())
        layer.mlp = new.eval()
    found = st.locate(model, mode="host", input_ids=tokens(), plan=plan)
    assert (found.verdict, found.layer) == (("HEALTHY", None) if plan is None else ("FAULT", 1)), found.sentence
