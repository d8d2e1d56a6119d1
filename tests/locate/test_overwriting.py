"""Models whose code is not what their config makes, or that overwrite a tensor: nothing is wrong with them."""

import pytest
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import shaketable as st
from tests.locate.architectures import build, tokens


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


def test_layers_that_add_into_what_they_are_given_are_healthy_and_a_fault_in_them_is_found(monkeypatch):
    monkeypatch.setattr(LlamaDecoderLayer, "forward", _adds_into_its_input)
    for mode in ("host", "all"):
        found = st.locate(build("llama"), mode=mode, input_ids=tokens())
        assert found.verdict == "HEALTHY", found.sentence
    found = st.locate(build("llama"), mode="host", input_ids=tokens(), plan="gain:0.05@module.down_proj,layers=1")
    assert found.verdict == "FAULT" and "layer 1, mlp.down_proj" in found.sentence, found.sentence
