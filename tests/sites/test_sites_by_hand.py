"""Costs, matches, phases and nests on modules made by hand: every role, every name of a config, every refusal of an engine."""

import itertools
import threading
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from shaketable.cli import flops
from shaketable.errors import NoMatchError, PlanError
from shaketable.plan import Plan
from shaketable.sites import phases
from shaketable.sites.match import check_layers, check_range, is_wanted, targets
from shaketable.sites.nested_tensors import map_tensors, tensors_of
from shaketable.sites.phases import as_rollout, current_phase, current_rollout, mark_generate, phase, unmark_generate
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

ROLE_COSTS = [
    ("x", nn.Linear(3, 5), "linear", 15 + 5, 2.0 * 15),
    ("lm_head", nn.Linear(3, 5), "lm_head", 20, 30.0),
    ("gate", nn.Linear(3, 5, bias=False), "router", 15, 30.0),
    ("lora_A", nn.Linear(3, 5), "lora", 20, 30.0),
    ("x", nn.LayerNorm(7), "layernorm", 14, 28.0),
    ("x", nn.RMSNorm(7), "rmsnorm", 7, 28.0),
    ("x", nn.Embedding(3, 5), "embedding", 15, 0.0),
    ("mlp", nn.Sequential(nn.Dropout()), "mlp", 0, 0.0),
]


@pytest.mark.parametrize(("name", "module", "role", "parameters", "cost"), ROLE_COSTS, ids=[row[2] for row in ROLE_COSTS])
def test_a_role_costs_what_its_weights_do_and_counts_all_its_parameters(name, module, role, parameters, cost):
    model = around(experts=nn.Identity(), **{name: module})
    anatomy = Anatomy.of(model)
    assert flops.costs(anatomy)[role] == flops.RoleCost(1, parameters, cost)
    assert flops.part_flops(part(anatomy, name), anatomy) == cost


def test_rows_of_one_role_are_summed_and_the_rest_is_other():
    model = around(a=nn.Linear(3, 5), b=nn.Linear(2, 2, bias=False), c=nn.Conv1d(1, 1, 3))
    assert flops.costs(Anatomy.of(model)) == {
        "linear": flops.RoleCost(2, 15 + 5 + 4, 2.0 * 19),
        "attention core": flops.RoleCost(0, 0, 0.0),
        "other": flops.RoleCost(0, 4, 0.0),
    }


def test_a_weight_that_two_modules_share_is_counted_where_it_comes_first():
    one, two = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
    two.weight = one.weight
    assert flops.costs(Anatomy.of(around(a=one, b=two)))["linear"] == flops.RoleCost(2, 15, 2 * 30.0)


def test_a_model_without_anything_costs_nothing():
    assert flops.costs(Anatomy.of(nn.Identity())) == {"attention core": flops.RoleCost(0, 0, 0.0)}


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


def test_experts_of_a_model_without_a_config_are_all_visited():
    anatomy = Anatomy.of(around(experts=nn.Sequential(nn.Linear(3, 5))))
    assert flops.part_flops(part(anatomy, "experts.0"), anatomy) == 30.0


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


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.up_proj, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(4, 2), nn.Linear(2, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.layers[1].lora_A = nn.Linear(2, 1)
        self.layers[1].experts, self.layers[1].gate = nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)


ANATOMY = Anatomy.of(Model())


def clause(site, fault="gain:1"):
    (found,) = Plan.parse(f"{fault}@{site}").clauses
    return found


def names(site, anatomy=ANATOMY, **more):
    return [t.part.name for t in targets(clause(site, **more), anatomy)]


@pytest.mark.parametrize(
    ("site", "wanted"),
    [
        ("module.linear,layers=1", ["layers.1.q_proj", "layers.1.up_proj", "layers.1.experts.0"]),
        ("module.linear,layers=1,include=lora", ["layers.1.q_proj", "layers.1.up_proj", "layers.1.lora_A", "layers.1.experts.0"]),
        ("module.linear,layers=1,include=router", ["layers.1.q_proj", "layers.1.up_proj", "layers.1.experts.0", "layers.1.gate"]),
        ("module.linear,layers=0+2,include=lora+router+lm_head", ["layers.0.q_proj", "layers.0.up_proj", "layers.2.q_proj", "layers.2.up_proj"]),
        ("module.router", ["layers.1.gate"]),
        ("module.lora", ["layers.1.lora_A"]),
        ("module.router+lora", ["layers.1.gate", "layers.1.lora_A"]),
        ("module.gate,include=router", ["layers.1.gate"]),
        ("module.embed,point=output,include=embedding", ["embed"]),
        ("module.all,layers=1", ["layers.1.q_proj", "layers.1.up_proj", "layers.1.norm", "layers.1.experts.0"]),
        ("module.all,layers=1,include=router", ["layers.1.q_proj", "layers.1.up_proj", "layers.1.norm", "layers.1.experts.0", "layers.1.gate"]),
        ("module.*.norm", ["layers.0.norm", "layers.1.norm", "layers.2.norm"]),
        ("module.layers.[02].norm", ["layers.0.norm", "layers.2.norm"]),
        ("module.layers.[!0].norm", ["layers.1.norm", "layers.2.norm"]),
        ("module.layers.1", ["layers.1"]),
        ("module.1", ["layers.1"]),
        ("module.layers.1.q_proj+layers.0.q_proj", ["layers.1.q_proj", "layers.0.q_proj"]),
        ("module.Layer", ["layers.0", "layers.1", "layers.2"]),
        ("module.Lay*", ["layers.0", "layers.0.norm", "layers.1", "layers.1.norm", "layers.2", "layers.2.norm"]),
        ("module.LayerNorm,layers=2", ["layers.2.norm"]),
        ("module.layernorm+norm,layers=0", ["layers.0.norm"]),
        ("module.Model", [""]),
        ("layer.2+0", ["layers.0", "layers.2"]),
        ("layer.1,include=router", ["layers.1"]),
    ],
)  # fmt: skip
def test_what_a_site_means(site, wanted):
    assert names(site) == wanted


def test_a_glob_takes_what_is_not_left_out_and_says_nothing_of_the_rest():
    found = names("module.layers.1.*")
    assert "layers.1.q_proj" in found and "layers.1.gate" not in found and "layers.1.lora_A" not in found
    assert {"layers.1.gate", "layers.1.lora_A"} <= set(names("module.layers.1.*,include=router+lora"))
    assert "" not in names("module.*") and "lm_head" not in names("module.*")


@pytest.mark.parametrize(
    "near", ["module.proj", "module.xnorm", "module.yers.1", "module.q_proj.x", "module.LAYER", "module.Q_PROJ"]
)
def test_a_name_is_whole_words_of_a_path_in_their_own_letters(near):
    with pytest.raises(NoMatchError, match="nothing in Model matches"):
        names(near)


def test_a_role_that_the_model_has_not_is_nothing_and_layers_are_named():
    with pytest.raises(NoMatchError) as refused:
        names("module.rmsnorm,layers=0-1")
    assert str(refused.value).startswith("module.rmsnorm,layers=0-1: nothing in Model matches 'rmsnorm' in layers 0-1; ")
    with pytest.raises(NoMatchError) as refused:
        names("module.rmsnorm")
    assert str(refused.value).startswith(
        "module.rmsnorm: nothing in Model matches 'rmsnorm'; did you mean 'norm'? valid: Embedding, "
    )


@pytest.mark.parametrize(
    ("site", "name", "reason"),
    [
        ("module.gate", "layers.1.gate", "router"),
        ("module.lora_A", "layers.1.lora_A", "lora"),
        ("module.embed,point=output,include=lm_head", "embed", "embedding"),
        ("module.q_proj+gate", "layers.1.gate", "router"),
        ("module.Embedding,point=output", "embed", "embedding"),
    ],
)
def test_what_is_left_out_says_its_name_and_how_to_get_it(site, name, reason):
    with pytest.raises(NoMatchError) as refused:
        names(site)
    assert str(refused.value) == f"{site}: {name!r} is left out by default ({reason}); add include={reason}"


def test_layers_that_hold_nothing_of_a_name_are_told():
    with pytest.raises(
        NoMatchError, match=r"^module\.gate,layers=0\+2: nothing in Model matches 'gate' in layers 0\+2; did you mean"
    ):
        names("module.gate,layers=0+2")


@pytest.mark.parametrize(
    ("site", "point", "name"),
    [("module.embedding", "input", "embed"), ("module.q_proj+embedding", "input", "embed"), ("module.embed,include=embedding", "input", "embed")],
)  # fmt: skip
def test_an_embedding_has_no_input_that_could_be_faulty(site, point, name):
    with pytest.raises(PlanError, match=f"'{name}' reads integer token ids; use point=output or point=weight"):
        names(f"{site},point={point}")
    with pytest.raises(PlanError, match="reads integer token ids"):
        names(f"{site},point=output+{point}")
    assert name in names(f"{site},point=output+weight")


def test_every_point_of_a_clause_is_checked():
    for point in ("weight", "weight+output", "output+weight"):
        with pytest.raises(PlanError, match=r"'layers\.0' has no weight of its own; use point=input or point=output"):
            names(f"module.Layer,point={point}")
    assert names("module.Layer,point=input+output,layers=0") == ["layers.0", "layers.0"]


def test_layers_are_checked_before_names():
    with pytest.raises(NoMatchError, match=r"layer 3 is out of range; this model has layers 0-2$"):
        names("module.nothing_such,layers=0-3")


@pytest.mark.parametrize(
    ("site", "count"), [("layer.0", 1), ("layer.0-4", 5), ("op.matmul,layers=2", 3), ("module.x,layers=0+7", 8)]
)
def test_the_last_layer_that_is_named_must_be_there(site, count):
    check_range(clause(site).site, count)
    with pytest.raises(NoMatchError) as refused:
        check_range(clause(site).site, count - 1)
    assert str(refused.value) == f"{site}: layer {count - 1} is out of range; this model has layers 0-{count - 2}"


def test_layers_of_operators_are_checked_as_those_of_modules():
    with pytest.raises(NoMatchError, match=r"^op\.matmul,layers=0: Linear has no decoder layers$"):
        check_layers(clause("op.matmul,layers=0").site, Anatomy.of(nn.Linear(2, 2)))
    with pytest.raises(NoMatchError, match=r"^layer\.all: Linear has no decoder layers$"):
        check_layers(clause("layer.all").site, Anatomy.of(nn.Linear(2, 2)))
    check_layers(clause("layer.all").site, ANATOMY)
    check_layers(clause("op.matmul").site, Anatomy.of(nn.Linear(2, 2)))
    check_layers(clause("op.matmul,layers=2").site, ANATOMY)


@pytest.mark.parametrize("role", ["lm_head", "embedding", "router", "lora"])
def test_a_part_is_wanted_by_the_name_of_its_role_and_no_other(role):
    (found,) = [p for p in ANATOMY.parts if p.role == role]
    for include in ("lm_head", "embedding", "router", "lora", "rotary"):
        assert is_wanted(found, clause(f"module.x,include={include}").site, ANATOMY) is (include == role)
    assert not is_wanted(found, clause("module.x").site, ANATOMY)


# Engines


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("q_proj", "qkv_proj"),
        ("k_proj", "qkv_proj"),
        ("v_proj", "qkv_proj"),
        ("gate_proj", "gate_up_proj"),
        ("up_proj", "gate_up_proj"),
    ],
)
def test_what_an_engine_computes_together_is_named(name, fused):
    layer = around(**{fused: engine("Linear", nn.Linear, 2, 2)})
    with pytest.raises(NoMatchError) as refused:
        names(f"module.{name}", Anatomy.of(around(name="Engine", block=layer)))
    assert str(refused.value) == f"module.{name}: Engine computes {name} inside of {fused}, for which write module.{fused}"


@pytest.mark.parametrize("child", [nn.Linear(2, 2), None])
def test_a_model_that_is_no_engine_or_lacks_the_product_computes_nothing_inside(child):
    model = around(name="Plain", block=around(qkv_proj=child) if child else around(o_proj=engine("Linear", nn.Linear, 2, 2)))
    with pytest.raises(NoMatchError, match="nothing in Plain matches 'q_proj'; did you mean"):
        names("module.q_proj", Anatomy.of(model))


def test_only_weights_that_an_engine_packed_are_refused():
    model = around(a=engine("Linear", nn.Linear, 2, 2), b=engine("Linear", nn.Linear, 2, 2, output_size=2))
    model.b.weight = nn.Parameter(torch.empty(0))
    assert names("module.a,point=weight", Anatomy.of(model)) == ["a"]
    assert names("module.linear,point=output", Anatomy.of(model)) == ["a", "b"]
    with pytest.raises(PlanError) as refused:
        names("module.linear,point=weight", Anatomy.of(model))
    assert str(refused.value) == (
        "gain:1@module.linear,point=weight: the weight of 'b' was packed when the model was loaded; "
        "give the plan before the engine loads it"
    )


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


def test_a_weight_that_two_plain_modules_read_is_not():
    assert names("module.lm_head,point=weight", tied(lambda name, base, *sizes: base(*sizes))) == ["lm_head"]


def test_the_head_of_a_plain_model_is_called():
    assert names("module.lm_head,point=input") == names("module.lm_head,point=output") == ["lm_head"]


@pytest.mark.parametrize("point", ["input", "output", "input+weight"])
def test_the_head_of_an_engine_has_a_weight_and_no_call(point):
    model = around(a=nn.Linear(2, 2), lm_head=engine("Head", nn.Linear, 2, 4))
    with pytest.raises(PlanError, match="a sampling engine never calls 'lm_head', it only reads its weight"):
        names(f"module.a+lm_head,point={point}", Anatomy.of(model))


# Phases


@pytest.mark.parametrize("inner", ["train", "eval"])
def test_what_is_no_rollout_inside_of_one_has_no_number_and_the_rollout_goes_on(inner):
    with phase("rollout"):
        number = current_rollout()
        with phase(inner):
            assert current_rollout() is None and current_phase(True) == inner
            assert as_rollout(current_rollout)() is None, "an evaluation that samples is an evaluation"
        assert current_rollout() == number is not None

    def sample():
        number = current_rollout()
        with phase(inner):
            inside = current_rollout()
        return number, inside, current_rollout()

    number, inside, after = as_rollout(sample)()
    assert number == after is not None and inside is None


def test_generate_inside_of_an_evaluation_is_no_rollout_and_the_next_one_is():
    with phase("eval"):
        assert as_rollout(lambda: (current_phase(True), current_rollout()))() == ("eval", None)
    assert as_rollout(lambda: current_phase(True))() == "rollout"


def test_the_very_first_rollout_is_one_whatever_is_called_inside(monkeypatch):
    """Its number is 0, which is a number."""
    monkeypatch.setattr(phases, "_rollouts", itertools.count())
    with phase("rollout"):
        first = current_rollout()
        with phase("rollout"):
            assert current_rollout() == first == as_rollout(current_rollout)()
        assert current_rollout() == first is not None


def test_generate_goes_on_when_one_inside_of_it_ends():
    def outer():
        before = current_rollout()
        as_rollout(lambda: None)()
        return current_phase(True), current_rollout() == before

    assert as_rollout(outer)() == ("rollout", True)
    with phase("rollout"):
        before = current_rollout()
        as_rollout(lambda: None)()
        assert (current_phase(True), current_rollout()) == ("rollout", before)


def test_phases_inside_of_each_other_end_one_by_one():
    with phase("eval"):
        with phase("rollout"):
            with phase("train"):
                assert current_phase(False) == "train"
            assert current_phase(False) == "rollout"
        assert current_phase(True) == "eval" and current_rollout() is None
    assert current_phase(True) == "train"


def test_a_rollout_that_breaks_off_inside_of_another_leaves_it():
    with phase("rollout"):
        number = current_rollout()
        with pytest.raises(KeyError), phase("rollout"):
            raise KeyError
        assert (current_rollout(), current_phase(False)) == (number, "rollout")


def test_an_unknown_phase_leaves_the_phase_as_it_was():
    with phase("train"):
        with pytest.raises(PlanError, match="unknown phase 'rollouts'"), phase("rollouts"):
            raise AssertionError
        assert current_phase(False) == "train"


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


class Parent:
    def generate(self):
        return [(current_phase(True), current_rollout())]


class Overriding(Parent):
    def generate(self):
        return [(current_phase(True), current_rollout()), *super().generate()]


class Silent(Overriding):
    generate = None


def test_generate_is_marked_in_the_class_that_the_model_would_use():
    kept = Parent.__dict__["generate"], Overriding.__dict__["generate"]
    assert mark_generate(Overriding) is Overriding
    try:
        assert Parent.__dict__["generate"] is kept[0]
        inner, outer = Overriding().generate()
        assert inner == outer and inner[0] == "rollout"
        assert Parent().generate() == [("train", None)]
    finally:
        unmark_generate(Overriding)
    assert (Parent.__dict__["generate"], Overriding.__dict__["generate"]) == kept


def test_two_classes_are_marked_apart():
    assert (mark_generate(Overriding), mark_generate(Parent)) == (Overriding, Parent)
    unmark_generate(Overriding)
    try:
        (outer, inner), (only,) = Overriding().generate(), Parent().generate()
        assert outer == ("train", None) and inner[0] == only[0] == "rollout" and inner[1] != only[1]
    finally:
        unmark_generate(Parent)
    assert Parent().generate() == [("train", None)] and phases._marked == {}


def test_a_method_that_was_marked_thrice_is_put_back_by_the_third():
    original = Parent.__dict__["generate"]
    for _ in range(3):
        mark_generate(Parent)
    for left in (True, True, False):
        unmark_generate(Parent)
        assert (Parent.__dict__["generate"] is not original) is left
    with pytest.raises(KeyError):
        unmark_generate(Parent)


def test_a_class_whose_own_generate_is_no_method_uses_the_one_above():
    assert mark_generate(Silent) is Overriding
    unmark_generate(Overriding)


def test_a_marked_method_takes_and_returns_what_it_did():
    def sample(*args, **kwargs):
        """Words."""
        return args, kwargs

    marked = as_rollout(sample)
    assert marked(1, 2, a=3) == ((1, 2), {"a": 3}) and marked.__name__ == "sample" and marked.__wrapped__ is sample


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


@pytest.mark.parametrize(
    "nest",
    [
        defaultdict(list, a=torch.ones(1)),
        OrderedDict(a=torch.ones(1)),
        UserDict(a=torch.ones(1)),
        [torch.ones(1)],
        (torch.ones(1),),
        Pair(torch.ones(1), None),
        {"a": [Pair(None, {"b": (torch.ones(1),)})]},
    ],
)
def test_a_nest_keeps_its_kind_and_its_rest(nest):
    changed = map_tensors(nest, lambda t: t * 3)
    assert type(changed) is type(nest) and len(changed) == len(nest) and changed is not nest
    assert [t.item() for t in tensors_of(changed)] == [3.0] and [t.item() for t in tensors_of(nest)] == [1.0]
    assert getattr(changed, "default_factory", None) is getattr(nest, "default_factory", None)


@pytest.mark.parametrize("other", [None, 5, "text", {1, 2}, torch.Size([2, 3]), range(3), object()])
def test_what_holds_no_tensors_is_left_as_it_is(other):
    def never(t):
        raise AssertionError

    assert map_tensors(other, never) == other and list(tensors_of(other)) == []


def test_a_parameter_is_a_tensor_and_one_tensor_in_two_places_is_changed_in_both():
    weight = nn.Parameter(torch.ones(1))
    calls = []
    found = map_tensors([weight, (weight,)], lambda t: calls.append(t) or t.detach() * 2)
    assert len(calls) == 2 and found[0].item() == found[1][0].item() == 2.0
    assert [id(t) for t in tensors_of({"a": weight})] == [id(weight)]


@pytest.mark.parametrize("text", ["mxfp4@module.embedding", "gain:1@module.embedding,point=input"])
def test_the_points_that_a_fault_has_by_itself_are_checked_too(text):
    model = nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 32))
    with pytest.raises(PlanError, match="embedding"):
        targets(Plan.parse(text).clauses[0], Anatomy.of(model))
