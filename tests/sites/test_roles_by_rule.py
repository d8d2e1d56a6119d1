"""Roles, stacks of layers and names, one rule at a time: what each name, class and shape makes of a module."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

from shaketable.plan import Plan
from shaketable.sites.match import targets
from shaketable.sites.structure import Anatomy, class_name, find_layers


def kind(name, base=nn.Module, **body):
    """A class of that name."""
    return type(name, (base,), body)


def holding(name="Thing", *, module=__name__, **shapes):
    """A module of a class of that name whose parameters have these shapes; None is a parameter that is not there."""
    made = kind(name, __module__=module)()
    for key, shape in shapes.items():
        made.register_parameter(key, None if shape is None else nn.Parameter(torch.ones(shape)))
    return made


def around(*modules, name="Around", **children):
    """A module of a class of that name with these children."""
    made = kind(name)()
    for key, child in (*((str(i), m) for i, m in enumerate(modules)), *children.items()):
        made.add_module(key, child)
    return made


def block():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def nested(path, inner):
    """A model with a module at a path."""
    for name in reversed(path.split(".")):
        inner = around(**{name: inner})
    return inner


def roles(model):
    return {p.name: p.role for p in Anatomy.of(model).parts}


def role(module, path="model.thing", **beside):
    """What a module is called at a path, beside others."""
    model = nested(path, module)
    for name, other in beside.items():
        model.add_module(name, other)
    return roles(model)[path]


# Roles of single modules


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        (holding("LlamaRMSNorm", weight=2), "rmsnorm"),
        (holding("Qwen3RMSNorm"), None),
        (nn.LayerNorm(2), "layernorm"),
        (nn.Embedding(3, 2), "embedding"),
        (holding("VocabParallelEmbedding", weight=(3, 2)), "embedding"),
        (holding("LlamaRotaryEmbedding"), None),
        (nn.Linear(2, 3), "linear"),
        (holding("Linear4bit", weight=(2, 2)), "linear"),
        (holding("Linear4bit", weight=4), None),
        (holding("MixtralExperts", up=(2, 2, 2), down=(2, 2, 2), scale=2), "linear"),
        (holding("SomeExperts", module="vllm.layers", up=(2, 2, 2)), None),
        (holding("Conv1D", weight=(2, 2)), "linear"),
        (holding("Linear", weight=None), None),
        (around(nn.Linear(2, 2), name="LlamaAttention"), "attention"),
        (around(nn.Linear(2, 2), name="LlamaMLP"), "mlp"),
        (around(nn.Linear(2, 2), name="Qwen3MoeSparseMoeBlock"), "mlp"),
        (nn.Sequential(nn.Linear(2, 2)), None),
    ],
)  # fmt: skip
def test_a_class_and_a_shape_make_a_role(module, wanted):
    assert role(module) == wanted


@pytest.mark.parametrize("name", ["lm_head", "embed_out"])
def test_a_head_is_known_by_its_name_where_the_model_does_not_say(name):
    assert role(nn.Linear(2, 4), name) == role(nn.Linear(2, 4), f"model.{name}") == "lm_head"
    assert role(nn.Sequential(nn.Linear(2, 4)), name) is None, "which has no weight of its own"
    assert role(nn.Linear(2, 4), f"{name}.dense") == "linear", "of the last word alone"


def model_that_says(head, **children):
    model = around(**children)
    model.get_output_embeddings = lambda: head
    return model


def test_the_head_that_a_model_names_is_the_head_whatever_it_is_called():
    out = nn.Linear(2, 4)
    assert roles(model_that_says(out, out=out, other=nn.Linear(2, 4))) == {"": None, "out": "lm_head", "other": "linear"}
    inside = around(model=model_that_says(out, out=out))
    assert roles(inside)["model.out"] == "lm_head", "a model inside of another may say it"


# Stacks of layers


def test_a_sequential_of_several_of_a_class_of_its_own_is_a_stack_and_what_is_inside_of_them_is_not():
    one = around(nn.Linear(2, 2), heads=nn.ModuleList([block(), block()]), name="Own")
    trunk = nn.Sequential(*(copy.deepcopy(one) for _ in range(3)))
    assert find_layers(nested("model.trunk", trunk))[1] == [f"model.trunk.{i}" for i in range(3)]


def test_a_decoder_wins_over_an_encoder_and_both_over_eyes_whatever_their_size():
    def stack(width):
        return around(layers=nn.ModuleList([nn.Sequential(nn.Linear(width, width))]))

    model = around(vision=stack(9), encoder=stack(5), decoder=stack(2))
    assert find_layers(model)[1] == ["decoder.layers.0"]
    del model.decoder
    assert find_layers(model)[1] == ["encoder.layers.0"]
    del model.encoder
    assert find_layers(model)[1] == ["vision.layers.0"]


# Names


def test_a_module_under_fsdp2_has_the_class_that_it_had():
    layer = nn.Linear(2, 2)
    layer.__class__ = type("FSDPLinear", (fsdp.FSDPModule, nn.Linear), {})
    assert class_name(layer) == "Linear" and class_name(nn.Linear(2, 2)) == "Linear" and class_name(nn.Identity()) == "Identity"
    attention = around(nn.Linear(2, 2), name="LlamaAttention")
    attention.__class__ = type("FSDPLlamaAttention", (fsdp.FSDPModule, type(attention)), {})
    model = around(x=attention)
    assert roles(model)["x"] == "attention"
    clause = Plan.parse("gain:1@module.LlamaAttention").clauses[0]
    assert [t.part.name for t in targets(clause, Anatomy.of(model))] == ["x"]


@pytest.mark.parametrize("wrap", ["module", "_orig_mod", "_fsdp_wrapped_module"])
@pytest.mark.parametrize("inner", ["_checkpoint_wrapped_module", "_orig_mod", None])
def test_parts_know_their_layer_through_wrappers_around_the_model_and_the_layers(wrap, inner):
    def layer():
        return around(**{inner: around(q=nn.Linear(2, 2))}) if inner else around(q=nn.Linear(2, 2))

    model = around(**{wrap: around(norm=nn.LayerNorm(2), layers=nn.ModuleList(layer() for _ in range(3)))})
    found = {p.name: p.layer for p in Anatomy.of(model).parts if p.role}
    assert found == {"norm": None, "layers.0.q": 0, "layers.1.q": 1, "layers.2.q": 2}
    clause = Plan.parse("gain:1@module.linear,layers=1-2").clauses[0]
    assert [t.part.name for t in targets(clause, Anatomy.of(model))] == ["layers.1.q", "layers.2.q"]


# Heads of models of somebody's own


def with_embedding(**heads):
    return around(embedding=nn.Embedding(9, 4), positions=nn.Embedding(6, 4), adapter=nn.Linear(4, 4), **heads)


def test_a_head_of_any_name_is_known_by_the_shape_of_an_embedding():
    assert roles(with_embedding(output=nn.Linear(4, 9)))["output"] == "lm_head"
    assert roles(with_embedding(output=nn.Linear(4, 8)))["output"] == "linear"
    found = roles(with_embedding(output=nn.Linear(4, 9), lm_head=nn.Linear(4, 8)))
    assert (found["output"], found["lm_head"]) == ("linear", "lm_head")
    assert "lm_head" not in roles(with_embedding()).values()
