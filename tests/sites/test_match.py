"""Which modules a clause means, on a small tree: names, classes, roles, layers, and every refusal word for word."""

import pytest
from torch import nn

from shaketable.errors import NoMatchError, PlanError
from shaketable.plan import Plan
from shaketable.sites.match import targets
from shaketable.sites.structure import Anatomy


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(4, 4), nn.Linear(4, 4)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.norm, self.up_proj = Attention(), nn.LayerNorm(4), nn.Linear(4, 4)


class Rotary(nn.Module):
    pass


class Small(nn.Module):
    """Two layers between an embedding and a head."""

    def __init__(self, layers=2):
        super().__init__()
        self.embed_tokens, self.lm_head, self.norm = nn.Embedding(8, 4), nn.Linear(4, 8), nn.LayerNorm(4)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.rotary = Rotary()


ANATOMY = Anatomy.of(Small())
FIRST = ["layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj", "layers.0.up_proj"]
SECOND = [name.replace("0", "1") for name in FIRST]


def found(site, fault="gain:1", anatomy=ANATOMY):
    return targets(Plan.parse(f"{fault}@{site}").clauses[0], anatomy)


def names(site, **more):
    return [target.part.name for target in found(site, **more)]


@pytest.mark.parametrize(
    ("site", "wanted"),
    [
        ("module.linear", FIRST + SECOND),
        ("module.linear,layers=1", SECOND),
        ("module.linear,include=lm_head", ["lm_head", *FIRST, *SECOND]),
        ("module.embedding,point=output", ["embed_tokens"]),
        ("module.layernorm", ["norm", "layers.0.norm", "layers.1.norm"]),
        ("module.layers.?.norm", ["layers.0.norm", "layers.1.norm"]),
        ("module.self_attn.*", [*FIRST[:2], *SECOND[:2]]),
        ("module.all,layers=0", [*FIRST[:2], "layers.0.norm", FIRST[2]]),
        ("module.o_proj+q_proj,layers=0", FIRST[1::-1]),
        ("module.Small", [""]),
        ("layer.1", ["layers.1"]),
    ],
)
def test_what_a_site_means(site, wanted):
    assert names(site) == wanted


def test_every_module_is_a_target_at_every_point_of_the_clause():
    assert [(t.part.name, t.point) for t in found("module.up_proj,point=weight+input,layers=0")] == [
        ("layers.0.up_proj", "weight"),
        ("layers.0.up_proj", "input"),
    ]
    assert [t.point for t in found("module.up_proj,layers=0", fault="mxfp4")] == ["weight", "input"]


REFUSALS = {
    "module.linears": (
        NoMatchError,
        "module.linears: nothing in Small matches 'linears'; did you mean 'linear'? valid: Attention, ",
    ),
    "module.embed_tokens,point=output": (
        NoMatchError,
        "module.embed_tokens,point=output: 'embed_tokens' is left out by default (embedding); add include=embedding",
    ),
    "layer.2": (NoMatchError, "layer.2: layer 2 is out of range; this model has layers 0-1"),
    "module.rotary,point=weight": (
        PlanError,
        "gain:1@module.rotary,point=weight: 'rotary' has no weight of its own; use point=input or point=output",
    ),
    "module.embedding,point=input": (
        PlanError,
        "gain:1@module.embedding,point=input: 'embed_tokens' reads integer token ids; use point=output or point=weight",
    ),
}


@pytest.mark.parametrize("site", REFUSALS)
def test_a_refusal_says_what_was_wrong_and_what_to_write(site):
    kind, said = REFUSALS[site]
    with pytest.raises(kind) as refused:
        found(site)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("site", ["layer.all", "module.linear,layers=0"])
def test_a_model_without_layers_has_none_to_name(site):
    with pytest.raises(NoMatchError) as refused:
        found(site, anatomy=Anatomy.of(nn.Linear(2, 2)))
    assert str(refused.value) == f"{site}: Linear has no decoder layers"
