"""A plan on one model: its taps and their names, the modules that open frames, and every hook, in its order, set and gone."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import PlanError
from shaketable.inject import attach
from shaketable.inject.attach import Attached, forget_compiled, put_behind, refuse
from shaketable.inject.hooks import base, checkpointing
from shaketable.inject.hooks.modules import ModuleTaps
from shaketable.inject.hooks.residual_pair import PairTaps
from shaketable.inject.hooks.subclasses import LayerFrame
from shaketable.inject.injection import Injection
from shaketable.plan import Plan
from shaketable.sites.structure import Part

X = torch.ones(1, 4)


class RotaryEmbedding(nn.Module):
    def forward(self, x):
        return x


class Model(nn.Module):
    """Token embeddings, two layers of two modules, a norm, rotary angles and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.rotary = RotaryEmbedding()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.SiLU())) for _ in range(2))
        self.norm = nn.RMSNorm(4)
        self.lm_head = nn.Linear(4, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def made(plan, **options):
    return Injection(Plan.parse(plan, seed=0), **{"rank": 0, "allow_inert": True, **options})


def attached(plan, model=None, owner=0, lenient=False, skip=(), number=None, **options):
    injection = made(plan, **options)
    found = Attached(injection, Model() if model is None else model, owner, skip, lenient, number)
    injection.models.append(found)
    return injection, found


def hooks_of(model):
    return [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def names_of(found, modules):
    names = {module: name for name, module in found.model.named_modules()}
    return [names[module] for module in modules]


# ---- taps and their names


class Experts(nn.Module):
    """All experts of a mixture in two tensors, as transformers has them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.ones(2, 4, 8)), nn.Parameter(torch.ones(2, 4, 4))
        self.gate_up_bias = nn.Parameter(torch.ones(2, 8))


class Conv1D(nn.Module):
    """GPT-2's linear, whose weight is (in, out)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))


def test_every_weight_of_a_module_has_a_tap_that_is_called_by_it():
    model = nn.Module()
    model.experts, model.proj, model.plain = Experts(), Conv1D(), nn.Linear(4, 4)
    injection, found = attached("gain:1@module.linear,point=weight", model, owner=1)
    assert [(names_of(found, [m])[0], own.name) for m, own in found.weights] == [
        ("experts", "gate_up_proj"),
        ("experts", "down_proj"),
        ("proj", "weight"),
        ("plain", "weight"),
    ]
    names = ["experts.gate_up_proj", "experts.down_proj", "proj.weight", "plain.weight"]
    assert [tap.name for tap in injection.taps] == [f"model1.{name}" for name in names]
    assert list(injection.sites[0].spots) == [
        "model1.experts.gate_up_proj:weight",
        "model1.experts.down_proj:weight",
        "model1.proj:weight",
        "model1.plain:weight",
    ]
    assert [tap.transposed for tap in injection.taps] == [False, False, True, False]
    assert all(tap.point == "weight" and tap.straight is False for tap in injection.taps)
    assert [own.entry.index for _, own in found.weights] == [(1 << 16) + i for i in (1, 1, 2, 3)], "one entry per module"
    assert [own.tap for _, own in found.weights] == injection.taps and not any(own.gradient_only for _, own in found.weights)


def engine(name, **attributes):
    class Module(nn.Linear):
        pass

    module = type(name, (Module,), {"__module__": "vllm.model_executor.layers"})(4, 4)
    module.__dict__.update(attributes)
    return module


@pytest.mark.parametrize(("point", "shown"), [("output", "up"), ("input", "up:input"), ("weight", "up:weight")])
def test_shards_are_told_apart_in_keys_and_not_in_the_ledger(point, shown):
    model = nn.Module()
    model.up = engine("MergedLinear", tp_size=2, tp_rank=1, output_size=4)
    injection, _ = attached(f"gain:1@module.linear,point={point}", model)
    assert [tap.name for tap in injection.taps] == ["up#1.weight" if point == "weight" else "up#1"]
    assert list(injection.sites[0].spots) == [shown]


def test_the_taps_of_a_point_are_in_the_order_of_the_plan_and_points_apart():
    plan = "gain:1@module.linear,layers=0,point=input+output;gain:2@layer.0;gain:3@module.linear,layers=0,point=output"
    _, found = attached(plan)
    first = found.model.layers[0][0]
    assert [tap.clause for tap in found.points[id(first), "output"][1]] == [0, 2]
    assert [tap.clause for tap in found.points[id(first), "input"][1]] == [0]
    assert [tap.clause for tap in found.points[id(found.model.layers[0]), "output"][1]] == [1]
    assert len(found.points) == 5 and len(found.entries) == 3


def test_only_what_heads_take_and_return_is_a_tap_of_a_head():
    injection, found = attached("gain:1@module.linear,include=lm_head,point=input+output+weight")
    assert [(tap.name, tap.point) for tap in found.heads] == [("lm_head", "input"), ("lm_head", "output")]
    assert len(injection.taps) == 15


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ("gain:1@op.matmul", ["matmul", "layer.0.matmul", "layer.1.matmul"]),
        ("gain:1@op.matmul,layers=1", ["layer.1.matmul"]),
        ("gain:1@op.silu+matmul,layers=0", ["layer.0.silu", "layer.0.matmul"]),
        ("gain:1@module.linear", []),
    ],
)
def test_operators_have_taps_in_every_layer_that_is_asked_for(plan, wanted):
    injection, found = attached(plan, owner=3)
    assert [tap.name for tap in injection.taps if tap.site.level == "op"] == [f"model3.{name}" for name in wanted]
    assert found.points == ({} if wanted else found.points) and found.weights == []


def test_a_clause_that_names_layers_which_are_not_there_is_refused_also_on_operators():
    with pytest.raises(st.NoMatchError, match=r"layer 2 is out of range; this model has layers 0-1"):
        attached("gain:1@op.matmul,layers=2")
    _, found = attached("gain:1@op.matmul,layers=2;gain:1@module.norm", lenient=True)
    assert len(found.unmatched) == 1 and "layers 0-1" in found.unmatched[0] and len(found.points) == 1


def test_another_mistake_is_an_error_also_where_clauses_may_be_left_out():
    with pytest.raises(PlanError, match="integer token ids"):
        attached("gain:1@module.embedding,point=input", lenient=True)


def test_what_attention_hides_is_noted_once_per_clause_and_model():
    class Attention(nn.Module):
        config = SimpleNamespace(_attn_implementation="sdpa")

    injection = made("gain:1@op.matmul;gain:1@module.linear")
    for _ in range(2):
        model = nn.Module()
        model.attention, model.proj = Attention(), nn.Linear(2, 2)
        injection.attach(model)
    assert [len(lines) for lines in injection.models[1].hidden] == [1, 0]
    assert [len(site.notes) for site in injection.sites] == [1, 0]
    assert injection.sites[0].notes == injection.models[0].hidden[0]


@pytest.mark.parametrize(("kind", "closed"), [(nn.MultiheadAttention, True), (nn.Linear, False)])
def test_attention_of_torch_itself_is_known(kind, closed):
    model = nn.Sequential(nn.Linear(4, 4), kind(4, 2))
    assert attached("gain:1@op.matmul", model)[1].has_closed_attention is closed


# ---- what is left out


def test_parts_are_left_out_for_their_reason_and_embeddings_hold_no_operator():
    model = Model()
    model.layers[0].add_module("lora_A", nn.ModuleDict({"default": nn.Linear(4, 2)}))
    _, found = attached("gain:1@op.matmul", model)
    assert found.left_out == {"rotary": "rotary", "lm_head": "lm_head", "layers.0.lora_A.default": "lora"}
    parts = {part.name: part for part in found.anatomy.parts}
    assert found._excluded(parts["embed"]) is None and found._excluded(parts["layers.0.lora_A"]) is None
    deep = Part(nn.Identity(), "layers.0.lora_A.default.more.inside", 0, None)
    assert found._excluded(deep) == "lora"
    assert found._excluded(Part(nn.Identity(), "lm_head_norm", None, None)) is None, "a name that only begins alike"


def test_a_router_is_left_out_of_operators():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 2)
            self.experts = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x):
            return self.experts[0](x) * self.gate(x).sum()

    model = nn.Sequential(Mixture())
    for include, fires in (("", 1), (",include=router", 2)):
        with st.inject(model, f"gain:1@op.matmul{include}") as ledger:
            model(X)
        assert ledger.forward == fires


def test_modules_that_are_left_out_are_known_by_their_weights_under_plans_on_operators_alone():
    for plan, known in (("gain:1@op.matmul", ["rotary", "lm_head"]), ("gain:1@module.linear", [])):
        injection, _ = attached(plan)
        injection.enable()
        assert [why for _, why in injection.operators.weights._modules] == known
        assert injection.operators.weights.has_head is bool(known)
        injection.close()


# ---- which modules open frames


CONTAINERS = ["", "layers", "layers.0", "layers.0.1", "layers.1", "layers.1.1"]


@pytest.mark.parametrize(
    ("plan", "more", "without"),
    [
        ("gain:1@op.matmul", ["embed", "rotary", "lm_head"], []),
        ("gain:1@op.silu", ["embed", "rotary", "lm_head", "layers.0.1.1", "layers.1.1.1"], []),
        ("gain:1@op.rms_norm+gelu", ["embed", "rotary", "lm_head", "norm"], []),
        ("gain:1@module.linear", [], ["layers", "layers.0.1", "layers.1.1"]),
        ("gain:1@module.linear,point=weight", [], ["layers", "layers.0.1", "layers.1.1"]),
    ],
)
def test_under_operators_every_container_opens_a_frame_and_elsewhere_the_model_and_its_layers(plan, more, without):
    _, found = attached(plan)
    framed = dict(found._framed())
    assert {part.name for part in framed} == (set(CONTAINERS) | set(more)) - set(without)
    atomic = {part.name: family for part, family in framed.items() if family}
    silu = {"layers.0.1.1": "silu", "layers.1.1.1": "silu"}
    assert atomic == {"gain:1@op.silu": silu, "gain:1@op.rms_norm+gelu": {"norm": "rms_norm"}}.get(plan, {})


def test_without_layers_every_container_opens_a_frame():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4)), "b": nn.Linear(4, 4)})
    _, found = attached("gain:1@module.linear", model)
    assert [part.name for part, _ in found._framed()] == ["", "a"]


def test_modules_of_another_model_open_no_frame_here():
    model = Model()
    _, found = attached("gain:1@module.linear", model, skip={model.layers[0], model.layers[0][0]})
    assert [part.name for part, _ in found._framed()] == ["", "layers.1"]


WEIGHT = "gain:1@module.linear,point=weight,phase=rollout"


@pytest.mark.parametrize(
    ("plan", "hold", "held"),
    [
        (WEIGHT, True, True),
        (WEIGHT, False, False),
        (f"{WEIGHT};{WEIGHT}", True, True),
        ("gain:1@module.linear,point=weight", True, False),
        (f"{WEIGHT};gain:1@module.linear,point=weight", True, False),
        (f"{WEIGHT}+train", True, False),
        (f"{WEIGHT},direction=both", True, False),
        (f"{WEIGHT},direction=backward", True, False),
        (f"{WEIGHT};gain:1@module.norm,phase=rollout", True, False),
        (f"{WEIGHT};gain:1@op.matmul,phase=rollout", True, False),
    ],
)
def test_noise_that_is_held_for_rollouts_needs_a_frame_of_the_model_alone(plan, hold, held):
    _, found = attached(plan, hold=hold)
    assert found._is_held is held
    assert ([part.name for part, _ in found._framed()] == [""]) is held


class Wrapper(nn.Module):
    """As DDP wraps a model."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def test_a_wrapper_is_the_whole_model_and_the_names_are_those_of_what_it_wraps():
    model = Wrapper(Model())
    injection = st.inject(model, "gain:1@module.linear").enable()
    roots = [e for e in injection.models[0].entries.values() if e.is_root]
    assert [e.module for e in roots] == [model]
    model(X)
    assert injection.inert_check.phases["train"] == 1
    assert list(injection.sites[0].spots) == ["layers.0.0", "layers.0.1.0", "layers.1.0", "layers.1.1.0"]
    model.module(X)
    assert injection.inert_check.phases["train"] == 1, "a part of what the plan was given for"
    injection.close()
    assert hooks_of(model) == []


def test_the_frame_of_a_module_is_open_when_its_own_taps_act_so_one_pass_counts_them_all():
    model = Model()
    injection = st.inject(model, "relative_gaussian:0.1@layer.all;gain:1@module.Model").enable()
    seen = []
    begin = injection.begin_pass
    injection.begin_pass = lambda *how: seen.append(how[0].module) or begin(*how)
    model(X)
    assert seen == [model]
    model.layers[0](X)
    assert seen == [model, model.layers[0]]
    injection.close()


def test_entries_know_the_layer_the_model_and_what_they_are():
    injection, found = attached("gain:1@op.silu", owner=2)
    injection.enable()
    known = {
        names_of(found, [e.module])[0]: (e.layer, e.owner, e.excluded, e.is_root, e.atomic) for e in found.entries.values()
    }
    injection.close()
    assert known[""] == (None, 2, None, True, None) and known["layers.1.1.1"] == (1, 2, None, False, "silu")
    assert known["lm_head"] == (None, 2, "lm_head", False, None) and known["layers.0"] == (0, 2, None, False, None)
    assert len({e.index for e in found.entries.values()}) == len(found.entries)


# ---- hooks


def test_a_sampler_whose_weights_alone_are_faulty_is_not_hooked():
    model = Model()
    injection, found = attached("gain:1@module.linear,point=weight", model, sampler=True)
    injection.enable()
    written = found.written
    assert written is not None and hooks_of(model) == [] and found.hooks == [] and type(model.lm_head) is nn.Linear
    injection.enable()
    assert found.written is written, "once is enough"
    injection.close()
    assert found.written is None


@pytest.mark.parametrize("more", ["gain:1@layer.0", "gain:1@op.matmul"])
def test_a_sampler_with_other_faults_is_hooked_and_its_weights_are_written_all_the_same(more):
    model = Model()
    before = model.layers[0][0].weight.detach().clone()
    injection, found = attached(f"gain:1@module.linear,point=weight;{more}", model, sampler=True)
    injection.enable()
    assert found.hooks and found.written is not None and type(model.layers[0][0]) is nn.Linear
    assert "_shaketable_weights" not in " ".join(model.layers[0][0].__dict__) and torch.equal(
        model.layers[0][0].weight, 2 * before
    )
    injection.close()
    assert hooks_of(model) == [] and torch.equal(model.layers[0][0].weight, before)


def test_weights_of_others_are_read_through_taps_and_not_written():
    model = Model()
    injection, found = attached("gain:1@module.linear,point=weight", model)
    injection.enable()
    assert found.written is None and type(model.layers[0][0]) is not nn.Linear
    injection.close()
    assert type(model.layers[0][0]) is nn.Linear and not any("shaketable" in k for m in model.modules() for k in vars(m))


def test_a_plan_counts_once_as_on_a_model_however_often_it_is_enabled_and_closed():
    before, watching = base._plans, list(checkpointing._watching)
    plans = [st.inject(Model(), "gain:1@module.linear", allow_inert=True) for _ in range(2)]
    for plan in plans:
        plan.enable()
        plan.enable()
    assert base._plans == before + 2 and checkpointing._watching == [*watching, *plans]
    plans[0].close()
    plans[0].close()
    assert base._plans == before + 1 and checkpointing._watching == [*watching, plans[1]]
    plans[1].close()
    assert base._plans == before and checkpointing._watching == watching


def test_a_plan_that_was_never_on_has_nothing_to_take_off():
    before = base._plans
    injection = st.inject(Model(), "gain:1@module.linear", allow_inert=True)
    injection.close()
    assert base._plans == before


class Generates(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        return self.proj(x)

    def generate(self, x):
        return self(x)


class Outer(Wrapper):
    def generate(self, x):
        return self.module.generate(x)


def test_generate_is_a_rollout_wherever_in_a_model_it_is_defined_and_not_where_another_model_has_it():
    inner, outer = Generates.__dict__["generate"], Outer.__dict__["generate"]
    model = Outer(nn.Sequential(Generates()))
    injection, found = attached("gain:1@module.linear", model, skip={model.module[0]})
    injection.enable()
    assert Generates.__dict__["generate"] is inner and found.generators == []
    injection.close()
    injection, found = attached("gain:1@module.linear", nn.Sequential(Generates(), Generates()))
    injection.enable()
    assert found.generators == [Generates, Generates] and Generates.__dict__["generate"] is not inner
    injection.close()
    assert Generates.__dict__["generate"] is inner and Outer.__dict__["generate"] is outer and found.generators == []


def test_a_norm_that_is_one_operator_has_faulty_gradients_of_its_input_and_of_its_weight():
    class RMSNorm(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 3.0)) if weight else None

        def forward(self, x):
            return x if self.weight is None else x * self.weight

    class SiLU(nn.Module):
        weight = 3  # a number, and no parameter

        def forward(self, x):
            return x * self.weight

    for norm, plan, gradients in ((RMSNorm(True), "rms_norm", 2), (SiLU(), "silu", 1)):
        model, x = nn.Sequential(norm), torch.ones(1, 4, requires_grad=True)
        with st.inject(model, f"gain:1@op.{plan}") as ledger:
            y = model(x)
            y.sum().backward()
        assert torch.equal(y, torch.full((1, 4), 6.0)) and torch.equal(x.grad, torch.full((1, 4), 6.0))
        assert (ledger.forward, ledger.backward) == (1, gradients)
        if gradients == 2:
            assert torch.equal(norm.weight.grad, torch.full((4,), 2.0))


@pytest.mark.parametrize(
    ("plan", "hooks", "weights"),
    [
        ("gain:1@op.rms_norm", 2, 1),
        ("gain:1@op.rms_norm,direction=forward", 2, 0),
        ("gain:1@op.rms_norm;gain:2@op.rms_norm", 2, 2),
        ("gain:1@op.rms_norm,layers=0", 0, 0),
    ],
)
def test_a_module_that_is_one_operator_is_hooked_where_its_layer_is_meant(plan, hooks, weights):
    model = Model()
    injection, found = attached(plan, model)
    injection.enable()
    entry = 2  # each frame opens in one hook and closes in another
    assert len(model.norm._forward_hooks) + len(model.norm._forward_pre_hooks) == hooks + entry + 2 * bool(weights)
    assert [(m is model.norm, own.name, own.gradient_only) for m, own in found.weights] == [(True, "weight", True)] * weights
    injection.close()
    assert hooks_of(model) == []


# ---- layers on a GPU open their frames without hooks


@pytest.fixture
def gpu(monkeypatch):
    """Every module is on a GPU, as far as its frames are concerned."""
    monkeypatch.setattr(attach, "reaches_gpu", lambda module: True)


def quick(found):
    return names_of(found, [hook.module for hook in found.hooks if isinstance(hook, LayerFrame)])


@pytest.mark.parametrize(
    ("plan", "options", "wanted"),
    [
        ("gain:1@module.linear", {}, ["", "layers.0", "layers.1"]),
        ("gain:1@layer.0", {}, ["", "layers.1"]),
        ("gain:1@module.Model", {}, ["layers.0", "layers.1"]),
        ("gain:1@module.linear,point=weight", {}, ["layers.0", "layers.1"]),
        ("gain:1@module.linear;gain:1@module.linear,point=weight", {}, ["layers.0", "layers.1"]),
        ("gain:1@module.linear", {"traced_once": True}, ["layers.0", "layers.1"]),
        ("gain:1@op.silu", {}, ["embed", "rotary", "layers", "layers.0", "layers.0.1", "layers.1", "layers.1.1", "lm_head"]),
        ("gain:1@op.silu;gain:1@module.lm_head", {}, ["embed", "rotary", *CONTAINERS[1:]]),
        ("gain:1@op.silu;gain:1@module.lm_head,point=weight", {}, ["embed", "rotary", *CONTAINERS[1:]]),
    ],
)
def test_a_module_on_a_gpu_that_nothing_else_is_on_opens_its_frames_without_hooks(gpu, plan, options, wanted):
    injection, found = attached(plan, **options)
    injection.enable()
    assert quick(found) == wanted
    injection.close()
    assert hooks_of(found.model) == [] and type(found.model) is Model


def test_a_module_whose_forward_somebody_has_replaced_keeps_its_hooks(gpu):
    model = Model()
    model.layers[0].forward = model.layers[0].forward
    injection, found = attached("gain:1@module.linear", model)
    injection.enable()
    assert quick(found) == ["", "layers.1"]
    injection.close()


def test_a_module_that_is_on_no_gpu_keeps_its_hooks():
    injection, found = attached("gain:1@module.linear")
    injection.enable()
    assert quick(found) == [] and len(found.hooks) == 4 + 2 * 3
    injection.close()


@pytest.mark.parametrize(
    ("plan", "inputs", "outputs"),
    [
        ("gain:1@module.lm_head", [], ["lm_head"]),
        ("gain:1@module.lm_head,point=input", ["lm_head"], []),
        ("gain:1@module.lm_head,point=input+output", [], []),
        ("gain:1@module.lm_head,point=output+weight", [], []),
        ("gain:1@module.lm_head,point=input+weight", ["lm_head"], []),
        ("gain:1@module.lm_head;gain:1@op.matmul", [], []),
        ("gain:1@module.lm_head;gain:2@module.lm_head", [], ["lm_head"]),
    ],
)
def test_a_quick_way_to_a_linear_is_taken_where_nothing_else_is_in_its_way(monkeypatch, plan, inputs, outputs):
    model, asked, removed = Model(), {"input": [], "output": []}, []

    def ways(place):
        def way(module, point, taps, entry):
            assert (point, entry.module) == (place, module) and taps
            asked[point].append(names_of(SimpleNamespace(model=model), [module])[0])
            return SimpleNamespace(remove=lambda: removed.append(point))

        return way

    monkeypatch.setattr(attach, "fast_linear", ways("output"))
    monkeypatch.setattr(attach, "fast_input", ways("input"))
    injection, found = attached(plan, model)
    injection.enable()
    assert asked == {"input": inputs, "output": outputs}
    slow = [hook for hook in hooks_of(model) if isinstance(hook, ModuleTaps)]
    assert len(slow) == len(found.points) - len(inputs) - len(outputs)
    injection.close()
    assert len(removed) == len(inputs) + len(outputs)


def test_an_engine_module_that_carries_a_pair_has_taps_that_know():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Identity()

        def forward(self, hidden_states, residual):
            return hidden_states, residual

    model = nn.Module()
    model.mine, model.theirs = Block(), type("Block", (Block,), {"__module__": "vllm.models"})()
    injection, _ = attached("gain:1@module.mine+theirs", model)
    injection.enable()
    kinds = [next(type(h) for h in m._forward_hooks.values() if isinstance(h, ModuleTaps)) for m in (model.mine, model.theirs)]
    assert kinds == [ModuleTaps, PairTaps]
    injection.close()


# ---- the order of two plans


def test_a_plan_is_put_behind_another_at_the_outputs_that_both_are_at():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    first, second = (made(plan) for plan in ("systematic_bias:1@module.0+1", "gain:1@module.0"))
    for injection in (second, first):
        injection.attach(model)
        injection.enable()
    x = torch.ones(2)
    assert torch.equal(model[0](x), torch.full((2,), 3.0)), "doubled, then one more"
    put_behind(second.models[0], first.models[0])
    assert torch.equal(model[0](x), torch.full((2,), 4.0)) and torch.equal(model[1](x), torch.full((2,), 2.0))
    put_behind(first.models[0], second.models[0])
    assert torch.equal(model[0](x), torch.full((2,), 3.0))
    for injection in (first, second):
        injection.close()
    assert hooks_of(model) == []


def test_inputs_and_outputs_of_other_modules_stay_in_their_order():
    model = nn.Sequential(nn.Identity())
    first, second = (made(f"{fault}@module.0,point=input") for fault in ("systematic_bias:1", "gain:1"))
    for injection in (second, first):
        injection.attach(model)
        injection.enable()
    order = list(model[0]._forward_pre_hooks)
    put_behind(second.models[0], first.models[0])
    assert list(model[0]._forward_pre_hooks) == order
    for injection in (first, second):
        injection.close()


# ---- what has been compiled


@pytest.mark.parametrize(("seen", "resets"), [(["code"], 1), ([], 0), (None, 0)])
def test_what_has_been_compiled_is_dropped_if_there_is_any(monkeypatch, seen, resets):
    found = []
    monkeypatch.setitem(torch.__dict__, "_dynamo", SimpleNamespace(reset=lambda: found.append(1)))
    frames = None if seen is None else SimpleNamespace(output_codes=SimpleNamespace(seen=seen))
    monkeypatch.setitem(sys.modules, "torch._dynamo.convert_frame", frames)
    forget_compiled()
    assert len(found) == resets


def test_it_is_dropped_when_hooks_are_set_and_when_they_go_and_when_they_change_places(monkeypatch):
    dropped = []
    monkeypatch.setattr(attach, "forget_compiled", lambda: dropped.append(1))
    model = Model()
    injection = st.inject(model, "gain:1@module.linear", allow_inert=True)
    assert dropped == []
    injection.enable()
    injection.enable()
    assert dropped == [1]
    injection.disable()
    put_behind(injection.models[0], injection.models[0])
    assert dropped == [1, 1]
    injection.close()
    assert dropped == [1, 1, 1]


# ---- what is refused


def test_a_model_with_a_script_deep_inside_is_refused_by_its_name():
    model = nn.Sequential(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))
    with pytest.raises(PlanError, match=r"^0\.0 is TorchScript"):
        refuse(model)
    refuse(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(PlanError, match=r"^inject needs a torch\.nn\.Module, not NoneType$"):
        refuse(None)
    with pytest.raises(PlanError, match=r"^inject needs a torch\.nn\.Module, not type$"):
        refuse(nn.Linear)


# ---- heads that nobody calls


def test_a_head_counts_as_called_in_whichever_direction_and_only_passes_of_its_phases_count():
    note = "lm_head was never called: its product, if there was one, is not covered"
    injection, found = attached("gain:1@module.lm_head;gain:1@module.lm_head,phase=train+eval;gain:1@module.norm")
    notes = [site.notes for site in injection.sites]
    found.note_heads({"rollout": 0, "train": 0, "eval": 0})
    assert notes == [[], [], []]
    found.note_heads({"rollout": 2, "train": 0, "eval": 0})
    assert notes == [[note], [], []]
    found.note_heads({"rollout": 2, "train": 0, "eval": 1})
    found.note_heads({"rollout": 2, "train": 0, "eval": 1})
    assert notes == [[note], [note], []], "said once"
    injection.taps[0].spot.counts["train"] = [0, 1]
    found.note_heads({"rollout": 2, "train": 0, "eval": 1})
    assert notes == [[], [note], []]
