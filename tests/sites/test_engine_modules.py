"""A sampling engine's own modules: packed linears, fused projections, and what tensor-parallel ranks share."""

import pytest
import torch
from torch import nn

from shaketable.errors import PlanError
from shaketable.inject.injection import Injection
from shaketable.plan import Plan
from shaketable.sites.match import targets
from shaketable.sites.structure import Anatomy
from tests.sites.role_counts import role_counts


def engine_class(name: str, base: type = nn.Module, **body) -> type:
    return type(name, (base,), {"__module__": "vllm.model_executor.layers", **body})


class Product(nn.Module):
    """What vLLM's linears have in common: sizes as attributes, and a pair as result."""

    def __init__(self, size: int, rank: int, ranks: int, packed: bool = False) -> None:
        super().__init__()
        self.output_size, self.tp_rank, self.tp_size = size, rank, ranks
        self.weight = nn.Parameter(torch.empty(0) if packed else torch.eye(size))

    def forward(self, x):
        return x * 1.0, None


Column, Row = engine_class("QKVParallelLinear", Product), engine_class("RowParallelLinear", Product)


class Layer(nn.Module):
    def __init__(self, rank: int, ranks: int, packed: bool) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = Column(16, rank, ranks, packed), Row(16, rank, ranks, packed)

    def forward(self, x):
        return self.o_proj(self.qkv_proj(x)[0])[0]


def model(rank: int = 0, ranks: int = 1, packed: bool = False) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([Layer(rank, ranks, packed)])})


def test_linears_are_found_after_their_weights_were_packed_away():
    assert role_counts(Anatomy.of(model(packed=True)))["linear"] == 2


@pytest.mark.parametrize(
    ("module", "point", "differs"),
    [
        ("qkv_proj", "output", True),
        ("qkv_proj", "input", False),
        ("o_proj", "output", False),
        ("o_proj", "input", True),
    ],
)
@pytest.mark.covers("vLLM", "tensor parallelism: keys of the noise, on look-alike modules", "eager")
def test_ranks_have_noise_of_their_own_on_shards_and_the_same_on_what_all_hold(module, point, differs):
    def hit(rank: int) -> torch.Tensor:
        part = model(rank, 2)
        injection = Injection(Plan.parse(f"relative_gaussian:0.1@module.{module},point={point}"), sampler=True)
        injection.attach(part)
        injection.enable()
        found = part["layers"][0](torch.ones(2, 16))
        injection.close()
        return found

    assert torch.equal(hit(0), hit(1)) is not differs


class Experts(nn.Module):
    """What vLLM's experts have in common: a router of their own, and stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w13_weight = nn.Linear(4, 2), nn.Parameter(torch.ones(2, 8, 4))


@pytest.mark.parametrize(
    ("point", "words"), [("input", "the router reads the same input"), ("weight", "an order of its own"), ("output", None)]
)
def test_experts_are_refused_where_they_cannot_be_faulty(point, words):
    experts = engine_class("FusedMoE", Experts)()
    clause = Plan.parse(f"gain:0.1@module.experts,point={point}").clauses[0]
    anatomy = Anatomy.of(nn.ModuleDict({"experts": experts}))
    if words is None:
        assert [t.part.module for t in targets(clause, anatomy)] == [experts]
        return
    with pytest.raises(PlanError, match=f"'experts' cannot be faulty there: .*{words}"):
        targets(clause, anatomy)


def test_every_weight_of_the_experts_of_an_engine_is_looked_at():
    """As on a GPU, where they are not packed into an order of their own."""
    held = engine_class("RoutedExperts")()
    held.w13 = nn.Parameter(torch.ones(2, 4, 4, device="meta"))
    held.w2 = nn.Parameter(torch.ones(2, 4, 2, device="meta"))
    experts = engine_class("MoERunner")()
    experts.routed_experts = held
    model = nn.ModuleDict({"experts": experts})
    clause = Plan.parse("gain:1@module.linear,point=weight").clauses[0]
    assert [t.part.name for t in targets(clause, Anatomy.of(model))] == ["experts"]
    held.w2 = nn.Parameter(torch.ones(0, 2, device="meta"))
    with pytest.raises(PlanError, match="the weight of 'experts' was packed when the model was loaded"):
        targets(clause, Anatomy.of(model))
