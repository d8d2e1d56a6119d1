"""How layers are wired: the spaces and matrices of every architecture, against the shapes of its weights."""

import pytest
import torch
import transformers

from shaketable.locate.twins import WIRINGS, Circuit, circuit_of, free_spaces, gauge_of, paired
from tests.locate.architectures import ARCHITECTURES, ROUTED, SIZES, UNWIRED

WIRED = [name for name in ARCHITECTURES if name not in UNWIRED]


def wired(name):
    with torch.device("meta"):
        prefix, extra = ARCHITECTURES[name]
        config = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")(**SIZES | extra)
        model = transformers.AutoModelForCausalLM.from_config(config)
    stack = model.transformer.h if name == "gpt2" else model.model.layers
    return stack[0], model.config


@pytest.mark.parametrize("name", WIRED)
def test_every_matrix_has_the_sides_of_the_spaces_that_it_joins(name):
    layer, config = wired(name)
    circuit = circuit_of(layer, config)
    assert isinstance(circuit, Circuit), circuit
    for m in circuit.maps:
        weight, rows = layer.get_parameter(m.parameter), sum(circuit.sizes[space] for space in m.writes)
        sides = {"out,in": (rows, circuit.sizes[m.reads]), "in,out": (circuit.sizes[m.reads], rows)}
        assert tuple(weight.shape[-2:]) == sides.get(m.layout, sides["out,in"]), m
        assert (m.bias is not None) == (layer.get_submodule(m.module)._parameters.get("bias") is not None)
        assert m.bias is None or layer.get_parameter(m.bias).shape == (rows,)
    for n in circuit.norms:
        assert (
            layer.get_submodule(n.module).weight.shape == (circuit.sizes[n.reads],)
            and circuit.sizes[n.writes] == config.hidden_size
        )
        assert hasattr(layer.get_submodule(n.module), n.eps)
    known = (
        {m.parameter for m in circuit.maps}
        | {m.bias for m in circuit.maps}
        | {f"{n.module}.{w}" for n in circuit.norms for w in ("weight", "bias")}
    )
    assert {p for p, _ in layer.named_parameters() if "q_norm" not in p and "k_norm" not in p} <= known


@pytest.mark.parametrize("name", WIRED)
def test_heads_groups_rotation_routing_and_causality_are_those_of_the_config(name):
    layer, config = wired(name)
    circuit = circuit_of(layer, config)
    heads, pairs = 4, 4 if name == "gpt2" else 2
    assert (circuit.head, circuit.groups) == (8, heads // pairs)
    assert circuit.rotary == (0 if name == "gpt2" else 8)
    assert circuit.routed == (name in ROUTED) and circuit.causal
    assert circuit.head_norms == (("q_norm", "k_norm") if name in ("qwen3", "qwen3_moe", "gemma3") else ())
    assert (circuit.sizes["q"], circuit.sizes["k"], circuit.sizes["v"], circuit.sizes["mixed"]) == (
        32,
        8 * pairs,
        8 * pairs,
        32,
    )


def test_what_reads_and_writes_which_space_in_a_llama():
    layer, config = wired("llama")
    circuit = circuit_of(layer, config)
    assert {(m.module, m.reads, m.writes) for m in circuit.maps} == {
        ("self_attn.q_proj", "n1", ("q",)), ("self_attn.k_proj", "n1", ("k",)), ("self_attn.v_proj", "n1", ("v",)),
        ("self_attn.o_proj", "mixed", ("stream",)), ("mlp.gate_proj", "n2", ("gate",)), ("mlp.up_proj", "n2", ("up",)),
        ("mlp.down_proj", "hidden", ("stream",)),
    }  # fmt: skip
    assert [(n.module, n.reads, n.writes) for n in circuit.norms] == [
        ("input_layernorm", "stream", "n1"),
        ("post_attention_layernorm", "stream", "n2"),
    ]
    assert circuit.inputs()["mlp.down_proj"] == "hidden" and circuit.inputs()["input_layernorm"] == "stream"
    assert circuit.outputs()["self_attn.q_proj"] == ("q",) and circuit.outputs()["input_layernorm"] == ("n1",)
    assert free_spaces(circuit) == ["n1", "n2", "v", "k", "up"]


def test_gemma_has_norms_behind_attention_and_mlp_and_none_that_can_be_scaled():
    layer, config = wired("gemma2")
    circuit = circuit_of(layer, config)
    assert [(n.module, n.reads, n.writes) for n in circuit.norms] == [
        ("input_layernorm", "stream", "n1"), ("post_attention_layernorm", "attended", "stream"),
        ("pre_feedforward_layernorm", "stream", "n2"), ("post_feedforward_layernorm", "fed", "stream"),
    ]  # fmt: skip
    assert circuit.outputs()["self_attn.o_proj"] == ("attended",) and circuit.outputs()["mlp.down_proj"] == ("fed",)
    assert free_spaces(circuit) == ["v", "k", "up"]


def test_experts_are_maps_that_are_not_called_one_by_one():
    layer, config = wired("qwen2_moe")
    circuit = circuit_of(layer, config)
    assert "mlp.experts" in circuit.inputs() and "mlp.experts" not in circuit.outputs()
    assert (
        circuit.sizes["choice"] == 4
        and circuit.sizes["shared choice"] == 1
        and circuit.sizes["shared up"] == 24 == circuit.sizes["up"]
    )
    assert free_spaces(circuit) == ["n1", "n2", "v", "k", "up", "shared up"]
    assert circuit.outputs()["mlp.shared_expert.down_proj"] == ("stream",)
    normed, config = wired("qwen3")
    assert "k" not in free_spaces(circuit_of(normed, config)), "a norm has taken its size"


def test_what_is_not_wired_has_a_reason():
    layer, config = wired("llama")
    layer.extra = torch.nn.Linear(2, 2, device="meta")
    assert circuit_of(layer, config) == "this llama layer is not wired as expected: extra.weight is not explained"
    layer, config = wired("llama")
    layer.input_layernorm = torch.nn.Linear(2, 2, device="meta")
    assert (
        circuit_of(layer, config)
        == "this llama layer is not wired as expected: input_layernorm is a Linear, a norm without a definition"
    )
    assert circuit_of(layer, None) == "no gauge is known for the architecture LlamaDecoderLayer"
    assert set(WIRINGS.values()) == {"llama", "gemma", "gpt2"}


@pytest.mark.parametrize(("rotary", "found"), [(0, [1, 2, 3, 4, 5, 6]), (4, [1, 2, 1, 2, 5, 6]), (6, [1, 2, 3, 1, 2, 3])])
def test_channels_that_are_rotated_together_get_one_factor(rotary, found):
    assert paired(torch.tensor([1, 2, 3, 4, 5, 6]), rotary).tolist() == found


def test_a_gauge_follows_from_the_factors_of_the_free_spaces():
    layer, config = wired("llama")
    circuit = circuit_of(layer, config)
    two = {name: 2.0 ** torch.arange(size) for name, size in circuit.sizes.items() if name in free_spaces(circuit)}
    two = {name: factors.clamp_max(64.0) for name, factors in two.items()}
    stream = torch.where(torch.arange(32) % 2 == 0, 4.0, -4.0)
    gauge = gauge_of(circuit, two, stream)
    assert torch.equal(gauge.spaces["mixed"], two["v"].view(2, 8).repeat_interleave(2, 0).flatten())
    assert torch.equal(gauge.spaces["q"], (1 / two["k"]).view(2, 8).repeat_interleave(2, 0).flatten())
    assert torch.equal(gauge.spaces["hidden"], two["up"]) and torch.equal(gauge.spaces["gate"], torch.ones(48))
    assert torch.equal(gauge.spaces["stream"], stream)
    for norm in circuit.norms:
        assert gauge.attributes[norm.module, norm.eps] == 16.0
        assert torch.equal(gauge.weights[f"{norm.module}.weight"], two[norm.writes] * stream.sign())
    plain = gauge_of(circuit, {})
    assert plain.attributes == {} and all(bool((factors == 1).all()) for factors in plain.spaces.values())


def test_a_mean_needs_its_bias_scaled_and_one_plus_a_weight_takes_signs_alone():
    for name, biased in (("gpt2", True), ("gemma2", False)):
        layer, config = wired(name)
        circuit = circuit_of(layer, config)
        gauge = gauge_of(circuit, {}, torch.full((32,), -1.0))
        keys = {f"{n.module}.{word}" for n in circuit.norms for word in (("weight", "bias") if biased else ())}
        assert set(gauge.weights) == keys
        assert bool((gauge.spaces["n1"] == (1.0 if biased else -1.0)).all())
