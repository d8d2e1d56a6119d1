"""Costs, matches, phases and nests on modules made by hand: every role, every name of a config, every refusal of an engine."""

import threading
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from shaketable.cli import flops
from shaketable.errors import PlanError
from shaketable.plan import Plan
from shaketable.sites.match import targets
from shaketable.sites.nested_tensors import map_tensors, tensors_of
from shaketable.sites.phases import current_rollout, phase
from shaketable.sites.structure import Anatomy


def around(*, name="Around", module=__name__, **children):
    """A module of a class of that name with these children."""
    made = type(name, (nn.Module,), {"__module__": module})()
    for key, child in children.items():
        made.add_module(key, child)
    return made


def engine(name, base=nn.Linear, *sizes, **attributes):
    """A module of a class of a sampling engine."""
    made = type(name, (base,), {"__module__": "vllm.model_executor.layers"})(*sizes)
    vars(made).update(attributes)
    return made


def part(anatomy, name):
    (found,) = [p for p in anatomy.parts if p.name == name]
    return found


# Costs


CONFIGS = [
    ({}, 1.0),
    ({"num_experts_per_tok": 2, "num_local_experts": 8}, 0.25),
    ({"num_experts_per_tok": 2, "num_experts": 8}, 0.25),
    ({"num_experts_per_tok": 2, "n_routed_experts": 16}, 0.125),
    ({"moe_topk": 1, "num_experts": 4}, 0.25),
    ({"top_k": 1, "num_experts": 2}, 0.5),
    ({"num_experts_per_tok": 2, "top_k": 50, "num_experts": 4}, 0.5),
    ({"num_experts_per_tok": 1, "num_local_experts": 4, "num_experts": 8}, 0.25),
    ({"num_experts_per_tok": None, "moe_topk": 2, "num_experts": 4}, 0.5),
    ({"num_experts_per_tok": 2}, 1.0),
    ({"num_experts": 4}, 1.0),
    ({"num_experts_per_tok": 2, "num_experts": 0}, 1.0),
    ({"moe_topk": [2, 2], "num_experts": 4}, 1.0),
]


@pytest.mark.parametrize(("config", "share"), CONFIGS)
def test_a_token_visits_the_share_of_experts_that_its_config_says(config, share):
    model = around(experts=nn.Sequential(nn.Linear(3, 5)), shared_experts=nn.Linear(3, 5), myexperts=nn.Linear(3, 5))
    model.config = SimpleNamespace(**config)
    anatomy = Anatomy.of(model)
    cost = {name: flops.part_flops(part(anatomy, name), anatomy) for name in ("experts.0", "shared_experts", "myexperts")}
    assert cost == {"experts.0": 30.0 * share, "shared_experts": 30.0, "myexperts": 30.0}


CORES = [
    (None, 0.0),
    ({}, 0.0),
    ({"num_attention_heads": 4, "hidden_size": 20}, 4.0 * 5 * 4 * 5),
    ({"num_attention_heads": 4, "hidden_size": 20, "head_dim": 7}, 4.0 * 5 * 4 * 7),
    ({"num_attention_heads": 4, "hidden_size": 20, "head_dim": None}, 4.0 * 5 * 4 * 5),
    ({"n_head": 2, "n_embd": 12}, 4.0 * 5 * 2 * 6),
    ({"n_head": 2, "hidden_size": 12}, 4.0 * 5 * 2 * 6),
    ({"hidden_size": 12}, 0.0),
    ({"num_attention_heads": 4}, 0.0),
    ({"num_attention_heads": 9, "hidden_size": 9, "text_config": SimpleNamespace(n_head=4, n_embd=20)}, 4.0 * 5 * 4 * 5),
    ({"num_attention_heads": 4, "hidden_size": 20, "text_config": None}, 4.0 * 5 * 4 * 5),
]


@pytest.mark.parametrize(("config", "cost"), CORES)
def test_the_core_of_attention_costs_what_a_config_says_for_half_of_the_context(config, cost):
    attention = around(name="SomeAttention", q=nn.Linear(2, 2))
    model = around(attn=attention, other=around(name="SomeAttention", q=nn.Linear(2, 2)))
    if config is not None:
        model.config = SimpleNamespace(**config)
    assert flops.costs(Anatomy.of(model), 10)["attention core"] == flops.RoleCost(2, 0, 2 * cost)
    assert flops.costs(Anatomy.of(model), 30)["attention core"].flops == 6 * cost


# Matches


def clause(site, fault="gain:1"):
    (found,) = Plan.parse(f"{fault}@{site}").clauses
    return found


def names(site, anatomy, **more):
    return [t.part.name for t in targets(clause(site, **more), anatomy)]


# Engines


def test_every_weight_of_the_experts_of_an_engine_is_looked_at():
    """As on a GPU, where they are not packed into an order of their own."""
    held = engine("RoutedExperts", nn.Module)
    held.w13 = nn.Parameter(torch.ones(2, 4, 4, device="meta"))
    held.w2 = nn.Parameter(torch.ones(2, 4, 2, device="meta"))
    model = around(experts=engine("MoERunner", nn.Module))
    model.experts.routed_experts = held
    anatomy = Anatomy.of(model)
    assert part(anatomy, "experts").weights == ("w13", "w2") and part(anatomy, "experts").holder is held
    assert names("module.linear,point=weight", anatomy) == ["experts"]
    held.w2 = nn.Parameter(torch.ones(0, 2, device="meta"))
    with pytest.raises(PlanError, match="the weight of 'experts' was packed when the model was loaded"):
        names("module.linear,point=weight", Anatomy.of(model))
    held.w2 = nn.Parameter(torch.ones(2, 4, 2, device="meta"))
    model.draft = engine("Linear", nn.Module)
    model.draft.weight = held.w2
    with pytest.raises(PlanError, match="'experts' and 'draft' have one weight"):
        names("module.experts,point=weight", Anatomy.of(model))


def tied(make):
    model = around(embed=make("Embedding", nn.Embedding, 4, 2), lm_head=make("Linear", nn.Linear, 2, 4))
    model.lm_head.weight = model.embed.weight
    return Anatomy.of(model)


def test_a_weight_that_two_modules_of_an_engine_read_is_refused():
    with pytest.raises(PlanError) as refused:
        names("module.lm_head,point=weight", tied(engine))
    assert (
        str(refused.value)
        == "gain:1@module.lm_head,point=weight: 'lm_head' and 'embed' have one weight, and both would be faulty"
    )
    with pytest.raises(PlanError, match="'embed' and 'lm_head' have one weight"):
        names("module.embedding,point=weight", tied(engine))
    assert names("module.embedding,point=output", tied(engine)) == ["embed"]


# Phases


def test_rollouts_of_two_threads_have_two_numbers():
    found = []

    def roll():
        with phase("rollout"):
            found.append(current_rollout())

    threads = [threading.Thread(target=roll) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 4 and None not in found


# Nests

Pair = namedtuple("Pair", "first second")


def test_an_output_of_a_model_is_changed_by_key_and_by_attribute_and_the_original_is_left():
    x, y = torch.tensor([1.0]), torch.tensor([2.0])
    output = BaseModelOutputWithPast(last_hidden_state=x, hidden_states=(x, y))
    changed = map_tensors(output, lambda t: t + 10)
    assert type(changed) is BaseModelOutputWithPast and changed.past_key_values is None
    assert changed.last_hidden_state.tolist() == changed["last_hidden_state"].tolist() == [11.0]
    assert [t.tolist() for t in changed.hidden_states] == [[11.0], [12.0]]
    assert output.last_hidden_state is x and output["hidden_states"][1] is y
    assert [t.item() for t in tensors_of(output)] == [1.0, 1.0, 2.0]
