"""The wiring of every architecture, space by space, and the reasons for layers that are not what they should be."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from shaketable.locate.probes.wiring import WIRINGS, Circuit, Map, Norm, circuit_of
from tests.locate.architectures import ARCHITECTURES, SIZES


def wired(name, **more):
    prefix, extra = ARCHITECTURES[name]
    with torch.device("meta"):
        config = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")(
            **SIZES | {"num_hidden_layers": 1} | extra | more
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
    return (model.transformer.h if name == "gpt2" else model.model.layers)[0], model.config


ATTENTION = {
    "self_attn.q_proj": ("n1", ("q",)),
    "self_attn.k_proj": ("n1", ("k",)),
    "self_attn.v_proj": ("n1", ("v",)),
    "self_attn.o_proj": ("mixed", ("stream",)),
}
GATED = {"mlp.gate_proj": ("n2", ("gate",)), "mlp.up_proj": ("n2", ("up",)), "mlp.down_proj": ("hidden", ("stream",))}
EXPERTS = {
    "mlp.gate": ("n2", ("choice",)),
    "mlp.experts.gate_up_proj": ("n2", ("gate", "up")),
    "mlp.experts.down_proj": ("hidden", ("stream",)),
}
SHARED = {
    "mlp.shared_expert.gate_proj": ("n2", ("shared gate",)),
    "mlp.shared_expert.up_proj": ("n2", ("shared up",)),
    "mlp.shared_expert.down_proj": ("shared hidden", ("stream",)),
    "mlp.shared_expert_gate": ("n2", ("shared choice",)),
}
MAPS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), ATTENTION | GATED),
    "phi3": {
        "self_attn.qkv_proj": ("n1", ("q", "k", "v")),
        "self_attn.o_proj": ("mixed", ("stream",)),
        "mlp.gate_up_proj": ("n2", ("gate", "up")),
        "mlp.down_proj": ("hidden", ("stream",)),
    },
    **dict.fromkeys(
        ("gemma2", "gemma3"),
        ATTENTION | GATED | {"self_attn.o_proj": ("mixed", ("attended",)), "mlp.down_proj": ("hidden", ("fed",))},
    ),
    "gpt2": {
        "attn.c_attn": ("n1", ("q", "k", "v")),
        "attn.c_proj": ("mixed", ("stream",)),
        "mlp.c_fc": ("n2", ("gate",)),
        "mlp.c_proj": ("hidden", ("stream",)),
    },
    **dict.fromkeys(("mixtral", "qwen3_moe"), ATTENTION | EXPERTS),
    "qwen2_moe": ATTENTION | EXPERTS | SHARED,
}


def in_words(m):
    """A map's path without the name of its weight, where it has that."""
    return m.parameter.removesuffix(".weight"), (m.reads, m.writes)


@pytest.mark.parametrize("name", MAPS)
def test_the_maps_of_every_architecture(name):
    circuit = circuit_of(*wired(name))
    assert isinstance(circuit, Circuit), circuit
    assert dict(in_words(m) for m in circuit.maps) == MAPS[name] and len(circuit.maps) == len(MAPS[name])
    layouts = {m.layout for m in circuit.maps}
    assert layouts == ({"in,out"} if name == "gpt2" else {"out,in", "expert,out,in"} if circuit.routed else {"out,in"})
    for m in circuit.maps:
        assert (m.layout == "expert,out,in") == ("experts." in m.parameter)


@pytest.mark.parametrize(
    ("name", "biased"),
    [
        ("llama", ()),
        ("qwen2", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("gpt2", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    ],
)
def test_biases_are_those_that_the_layer_has(name, biased):
    circuit = circuit_of(*wired(name))
    assert {m.module: m.bias for m in circuit.maps if m.bias is not None} == {path: f"{path}.bias" for path in biased}


@pytest.mark.parametrize(
    ("name", "kind", "eps"),
    [
        ("llama", "rmsnorm", "variance_epsilon"),
        ("qwen3", "rmsnorm", "variance_epsilon"),
        ("gemma2", "rmsnorm_one", "eps"),
        ("gemma3", "rmsnorm_one", "eps"),
        ("gpt2", "layernorm", "eps"),
    ],
)
def test_norms_have_a_kind_and_the_name_of_their_eps(name, kind, eps):
    layer, config = wired(name)
    circuit = circuit_of(layer, config)
    assert {(n.kind, n.eps) for n in circuit.norms} == {(kind, eps)}
    assert all(isinstance(getattr(layer.get_submodule(n.module), eps), float) for n in circuit.norms)
    assert len(circuit.norms) == (4 if "gemma" in name else 2)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {"gate": 48, "up": 48, "hidden": 48, "n1": 32, "n2": 32}),
        ("gemma2", {"gate": 48, "up": 48, "hidden": 48, "n1": 32, "n2": 32, "attended": 32, "fed": 32}),
        ("mixtral", {"choice": 4, "gate": 48, "up": 48, "hidden": 48, "n1": 32, "n2": 32}),
        (
            "qwen2_moe",
            {"choice": 4, "gate": 24, "up": 24, "hidden": 24, "n1": 32, "n2": 32}
            | {"shared gate": 40, "shared up": 40, "shared hidden": 40, "shared choice": 1},
        ),
    ],
)
def test_the_sizes_of_all_spaces(name, more):
    extra = {"shared_expert_intermediate_size": 40} if name == "qwen2_moe" else {}
    circuit = circuit_of(*wired(name, **extra))
    assert circuit.sizes == {"stream": 32, "q": 32, "k": 16, "v": 16, "mixed": 32} | more


def test_gpt2_has_a_gate_and_hidden_channels_and_no_up():
    circuit = circuit_of(*wired("gpt2", n_inner=80))
    sizes = {"stream": 32, "q": 32, "k": 32, "v": 32, "mixed": 32, "n1": 32, "n2": 32, "gate": 80, "hidden": 80}
    assert circuit.sizes == sizes
    assert [(n.module, n.reads, n.writes) for n in circuit.norms] == [("ln_1", "stream", "n1"), ("ln_2", "stream", "n2")]
    assert (circuit.rotary, circuit.groups, circuit.routed) == (0, 1, False)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("llama", {"mlp.act_fn"}),
        ("gpt2", {"attn.attn_dropout", "attn.resid_dropout", "mlp.act", "mlp.dropout"}),
        ("phi3", {"mlp.activation_fn", "resid_attn_dropout", "resid_mlp_dropout"}),
        ("qwen3", {"mlp.act_fn"}),
    ],
)
def test_leaves_without_weights_are_kept(name, others):
    assert set(circuit_of(*wired(name)).others) == others


# ---- heads


def test_a_head_may_be_larger_than_the_streams_share():
    circuit = circuit_of(*wired("qwen3", head_dim=16))
    assert (circuit.head, circuit.groups, circuit.rotary) == (16, 2, 16)
    assert [circuit.sizes[s] for s in ("stream", "q", "k", "v", "mixed")] == [32, 64, 32, 32, 64]


@pytest.mark.parametrize("kind", ["missing", "none"])
def test_a_config_without_a_head_size_means_the_streams_share(kind):
    layer, config = wired("llama")
    given = SimpleNamespace(**{k: v for k, v in config.to_dict().items() if k != "head_dim"})
    if kind == "none":
        given.head_dim = None
    given.model_type = "llama"
    assert circuit_of(layer, given).head == 8


@pytest.mark.parametrize(("heads", "pairs", "groups"), [(4, 4, 1), (4, 2, 2), (4, 1, 4)])
def test_groups_are_query_heads_per_key_head(heads, pairs, groups):
    circuit = circuit_of(*wired("llama", num_attention_heads=heads, num_key_value_heads=pairs))
    assert circuit.groups == groups and circuit.sizes["k"] == circuit.sizes["v"] == 8 * pairs


@pytest.mark.parametrize(("factor", "rotary"), [(0.5, 4), (0.25, 2), (1.0, 8)])
def test_a_part_of_a_head_may_be_rotated(factor, rotary):
    layer, config = wired("llama")
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}
    assert circuit_of(layer, config).rotary == rotary


def test_without_parameters_of_the_rotation_all_is_rotated():
    layer, config = wired("llama")
    config.rope_parameters = None
    assert circuit_of(layer, config).rotary == 8


@pytest.mark.parametrize("value", [False, None, 1, "yes"])
def test_attention_is_causal_only_where_it_says_so(value):
    layer, config = wired("llama")
    layer.self_attn.is_causal = value
    assert circuit_of(layer, config).causal is False
    layer.self_attn.is_causal = True
    assert circuit_of(layer, config).causal is True


def test_one_norm_of_the_keys_is_one():
    layer, config = wired("qwen3")
    del layer.self_attn.q_norm
    assert circuit_of(layer, config).head_norms == ("k_norm",)


# ---- reasons


def test_the_text_part_of_a_larger_config_counts():
    layer, config = wired("llama")
    outer = SimpleNamespace(model_type="seeing", get_text_config=lambda: config)
    assert isinstance(circuit_of(layer, outer), Circuit)
    outer = SimpleNamespace(model_type="llama", get_text_config=lambda: SimpleNamespace(model_type="else"))
    assert circuit_of(layer, outer) == "no gauge is known for the architecture else"


def test_an_architecture_without_name_is_told_by_its_layer():
    assert circuit_of(nn.Linear(2, 2), SimpleNamespace()) == "no gauge is known for the architecture Linear"
    assert circuit_of(nn.Linear(2, 2), SimpleNamespace(model_type="")) == "no gauge is known for the architecture Linear"


@pytest.mark.parametrize(
    ("name", "wiring"),
    [(n, "llama") for n in ("llama", "qwen2", "qwen3", "mistral", "phi3", "mixtral", "qwen2_moe", "qwen3_moe")]
    + [(n, "gemma") for n in ("gemma2", "gemma3_text", "gemma3")]
    + [("gpt2", "gpt2")],
)
def test_which_wiring_an_architecture_has(name, wiring):
    assert WIRINGS[name] == wiring and len(WIRINGS) == 12


@pytest.mark.parametrize("part", ["self_attn.o_proj", "mlp.down_proj", "mlp.up_proj", "post_attention_layernorm", "self_attn"])
def test_a_part_that_is_missing_is_a_reason(part):
    layer, config = wired("llama")
    owner, _, last = part.rpartition(".")
    delattr(layer.get_submodule(owner), last)
    reason = circuit_of(layer, config)
    assert isinstance(reason, str)
    assert reason.startswith("this llama layer is not wired as expected: ") and last in reason


def test_a_config_without_heads_is_a_reason():
    layer, _ = wired("llama")
    reason = circuit_of(layer, SimpleNamespace(model_type="llama"))
    assert reason.startswith("this llama layer is not wired as expected: ") and "num_attention_heads" in reason


def test_a_parameter_of_the_layer_itself_is_not_explained():
    layer, config = wired("llama")
    layer.gamma = nn.Parameter(torch.ones(2, device="meta"))
    assert circuit_of(layer, config).endswith("gamma is not explained")


def test_a_part_without_parameters_and_one_whose_parameter_is_none_are_explained():
    layer, config = wired("llama")
    layer.mlp.extra = nn.Dropout(0.1)
    layer.register_parameter("gamma", None)
    assert set(circuit_of(layer, config).others) == {"mlp.act_fn", "mlp.extra"}


# ---- maps, norms and what they join


def test_the_module_of_a_map_is_its_parameters_owner():
    assert Map("a.b.weight", "x", ("y",)).module == "a.b"
    assert Map("mlp.experts.down_proj", "x", ("y",)).module == "mlp.experts"


def test_defaults_of_maps_norms_and_circuits():
    m, n = Map("a.weight", "x", ("y",)), Norm("n", "x", "y", "rmsnorm")
    assert (m.bias, m.layout, n.eps) == (None, "out,in", "variance_epsilon")
    c = Circuit({}, (m,), (n,), 1, 1, 0)
    assert (c.head_norms, c.routed, c.causal, c.others) == ((), False, False, ())


def test_what_is_read_and_written_is_told_of_maps_and_norms_and_written_not_of_stacked_experts():
    maps = (
        Map("q.weight", "n1", ("q", "k")),
        Map("t.weight", "hidden", ("stream",), layout="in,out"),
        Map("e.down", "hidden", ("fed",), layout="expert,out,in"),
    )
    c = Circuit({}, maps, (Norm("n", "stream", "n1", "rmsnorm"),), 1, 1, 0)
    assert c.inputs() == {"q": "n1", "t": "hidden", "e": "hidden", "n": "stream"}
    assert c.outputs() == {"q": ("q", "k"), "t": ("stream",), "n": ("n1",)}
