"""Hooks of modules: what they are given, what they hand on, where they are refused, and what autocast makes of it."""

from collections import OrderedDict, UserDict

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import PlanError
from shaketable.inject import op
from shaketable.inject.injection import Injection
from shaketable.inject.modules import ModuleTaps, as_multiplied, change_first, change_input
from shaketable.plan import Plan

X = torch.ones(2, 4)


class Thing(nn.Module):
    """Calls a function."""

    def __init__(self, function=lambda x: x):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def model_of(function=lambda x: x):
    return nn.ModuleDict({"thing": Thing(function)})


# ---- what a module returns and takes


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (OrderedDict(a=None, b=X), {"a": None, "b": -X}),
        (UserDict(a="text", b=X, c=X), {"a": "text", "b": -X, "c": X}),
    ],
)
def test_a_mapping_of_any_kind_keeps_its_kind_and_is_left_alone(value, wanted):
    found, there = change_first(value, torch.neg)
    assert there is True and type(found) is type(value) and found is not value and list(found) == list(wanted)
    assert all(torch.equal(found[k], v) if isinstance(v, torch.Tensor) else found[k] == v for k, v in wanted.items())
    assert torch.equal(value["b"], X)


@pytest.mark.parametrize("value", [None, 3, "text", (), [], {}, (None, 3), {"a": (X,)}, [[X]], ((X,),)], ids=str)
def test_where_there_is_no_tensor_the_value_itself_comes_back(value):
    found, there = change_first(value, lambda x: pytest.fail("nothing to change"))
    assert found is value and there is False


def test_an_integer_tensor_is_the_first_tensor_of_an_output_too():
    found, there = change_first((torch.arange(2), X), lambda x: x + 1)
    assert there and found[0].tolist() == [1, 2] and found[1] is X


def test_only_one_argument_is_changed_and_the_others_are_handed_on_themselves():
    ids, extra, mask = torch.arange(3), object(), torch.ones(1)
    args, kwargs, found = change_input((ids, extra, X, mask), {"hidden_states": X, "flag": extra}, torch.neg)
    assert found is True and args[0] is ids and args[1] is extra and args[3] is mask
    assert torch.equal(args[2], -X) and kwargs["hidden_states"] is X and kwargs["flag"] is extra


@pytest.mark.parametrize("first", ["hidden_states", "input", "x"])
def test_a_keyword_that_is_known_comes_before_those_that_stand_before_it(first):
    given = {"mask": torch.ones(1), "bias": torch.ones(2), first: X}
    _, kwargs, found = change_input((torch.arange(2),), given, torch.neg)
    assert found and torch.equal(kwargs[first], -X) and kwargs["mask"] is given["mask"] and list(kwargs) == list(given)


def test_known_keywords_have_an_order_among_themselves():
    names = ["x", "input", "hidden_states"]
    given = {name: torch.ones(1) for name in names}
    for wanted in ("hidden_states", "input", "x"):
        _, kwargs, _ = change_input((), given, torch.neg)
        assert [k for k in given if kwargs[k] is not given[k]] == [wanted]
        del given[wanted]


def test_an_integer_keyword_that_is_known_gives_way_to_a_floating_one_that_is_not():
    _, kwargs, _ = change_input((), {"input": torch.arange(2), "embeds": X}, torch.neg)
    assert torch.equal(kwargs["embeds"], -X) and torch.equal(kwargs["input"], torch.arange(2))


def test_arguments_without_a_tensor_come_back_as_they_are():
    args, kwargs = (None, [X]), {"a": (X,)}
    found = change_input(args, kwargs, torch.neg)
    assert found[0] is args and found[1] is kwargs and found[2] is False


# ---- hooks


@pytest.mark.parametrize("point", ["input", "output"])
@pytest.mark.parametrize("value", [None, "text", (1, 2)])
def test_a_module_without_a_tensor_there_is_named(point, value):
    model = model_of(lambda x: value)
    with pytest.raises(PlanError) as refused, st.inject(model, f"gain:1@module.thing,point={point}"):
        model["thing"](value)
    said = "was called without a tensor to change" if point == "input" else "returned no tensor to change"
    assert str(refused.value) == f"module.thing: thing {said}"


@pytest.mark.parametrize("point", ["input", "output"])
def test_a_plan_that_is_off_looks_at_nothing(point):
    model = model_of(lambda x: None)
    injection = st.inject(model, f"gain:1@module.thing,point={point}", allow_inert=True).enable().disable()
    assert model["thing"]("text") is None
    injection.close()


@pytest.mark.parametrize("point", ["input", "output"])
def test_a_plan_whose_phase_is_another_hands_on_the_tensor_itself(point):
    model = model_of()
    with st.inject(model, f"gain:1@module.thing,point={point},phase=rollout", allow_inert=True) as ledger:
        assert model["thing"](X) is X
        with st.phase("rollout"):
            assert torch.equal(model["thing"](X), 2 * X)
    assert ledger.forward == 1


def test_the_taps_of_several_clauses_act_one_after_the_other_at_each_point():
    seen = []
    model = model_of(lambda x, k=0.0: seen.append(x) or x + k)
    plan = "systematic_bias:1@module.thing,point=input+output;gain:1@module.thing,point=input+output"
    with st.inject(model, plan) as ledger:
        found = model["thing"](torch.ones(2), k=3.0)
    assert seen[0].tolist() == [4.0, 4.0] and found.tolist() == [16.0, 16.0]
    assert [site.forward for site in ledger.sites] == [2, 2]
    assert list(ledger.sites[0].spots) == ["thing:input", "thing"]


def test_calls_of_one_pass_have_noise_of_their_own_and_repeat_with_the_seed():
    layer = nn.Linear(4, 4)
    model = Thing(lambda x: torch.stack([model.layer(x), model.layer(x)]))
    model.layer = layer
    found = []
    for _ in range(2):
        with st.inject(model, "relative_gaussian:0.5@module.linear", seed=2):
            found.append(model(X))
    assert torch.equal(*found) and not torch.equal(found[0][0], found[0][1])


def test_a_module_that_is_called_by_keywords_is_hit_there():
    model = model_of(lambda mask=None, hidden_states=None: hidden_states)
    with st.inject(model, "gain:1@module.thing,point=input"):
        assert torch.equal(model["thing"](mask=X, hidden_states=X), 2 * X)


@pytest.mark.parametrize("point", ["input", "output"])
def test_a_hook_is_of_its_point_and_the_input_of_a_product_is_what_is_multiplied(point):
    for module, multiplies in ((nn.Linear(4, 4), True), (nn.LayerNorm(4), False)):
        model = nn.ModuleDict({"thing": module})
        injection = Injection(Plan.parse(f"gain:1@module.thing,point={point}"), allow_inert=True)
        injection.attach(model)
        injection.enable()
        own = [h for h in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()) if isinstance(h, ModuleTaps)]
        assert len(own) == 1 and own[0].point == point and own[0].multiplies is (multiplies and point == "input")
        assert (own[0] in module._forward_pre_hooks.values()) is (point == "input") and own[0].entry.module is module
        injection.close()


# ---- autocast


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ("gain:1@module.linear,point=input", torch.bfloat16),
        ("gain:1@module.linear,point=input,phase=rollout", torch.float32),
        ("gain:0@module.linear,point=input", torch.float32),
        ("gain:0@module.linear,point=input;gain:1@module.linear,point=input", torch.bfloat16),
    ],
)
def test_what_a_product_is_given_is_cast_before_the_fault_where_one_acts(plan, wanted):
    layer, seen = nn.Linear(4, 4), []
    model = nn.Sequential(layer)
    with torch.autocast("cpu", torch.bfloat16), st.inject(model, plan, allow_inert=True):
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        model(X)
    assert seen == [wanted]


def test_what_a_norm_is_given_is_not_cast():
    norm, seen = nn.LayerNorm(4), []
    with torch.autocast("cpu", torch.bfloat16), st.inject(nn.Sequential(norm), "gain:1@module.0,point=input"):
        norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        norm(X)
    assert seen == [torch.float32]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_autocast_casts_to_the_type_that_it_is_set_to(kind):
    with torch.autocast("cpu", kind):
        assert [as_multiplied(X.to(t)).dtype for t in (torch.float32, torch.float16, torch.bfloat16)] == [kind] * 3
        assert as_multiplied(X.double()).dtype == torch.float64
        assert as_multiplied(X.to(kind)).dtype == kind
    with torch.autocast("cpu", kind, enabled=False):
        assert as_multiplied(X) is X


# ---- while a graph is traced


@pytest.mark.parametrize(("point", "direction"), [("input", "forward"), ("output", "forward"), ("output", "backward")])
def test_while_a_graph_is_traced_a_hook_leaves_its_operators_where_the_plan_is_there(monkeypatch, point, direction):
    layer, said = nn.Linear(4, 4), []
    injection = Injection(Plan.parse(f"gain:1@module.linear,point={point},direction={direction}"), allow_inert=True)
    injection.attach(nn.Sequential(layer))
    injection.enable()
    (hook,) = (h for h in (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()) if isinstance(h, ModuleTaps))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(op, "trace_forward", lambda x, handle: said.append(("forward", handle)) or x + 1)
    monkeypatch.setattr(op, "trace_gradient", lambda x, *how: said.append(("gradient", *how)) or x + 1)
    given = ((X,), {}) if point == "input" else ((X,), {}, X)
    found = hook(layer, *given)
    handle = injection.taps[0].handle
    assert said == [("forward", handle) if direction == "forward" else ("gradient", handle, 0, None, True)]
    assert torch.equal(found[0][0] if point == "input" else found, X + 1)
    op.present[injection.handle] = False
    assert hook(layer, *given) is None and len(said) == 1
    monkeypatch.undo()
    injection.close()
