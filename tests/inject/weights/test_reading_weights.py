"""The weight that a module reads while a plan is on it: in which type, by which taps, and what is left when they are taken off."""

import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import PlanError
from shaketable.inject.injection import Injection
from shaketable.inject.weights import on_read
from shaketable.inject.weights.on_read import WeightTap, WeightTaps, add_tap, has_taps, rebase, remove_taps
from shaketable.inject.weights.property_classes import SLOT
from shaketable.plan import Plan

GAIN = "gain:1@module.linear,point=weight"
X = torch.ones(1, 4)


def linear():
    return nn.Linear(4, 4, bias=False)


def injected(plan=GAIN, model=None, **options):
    model = model or linear()
    injection = Injection(Plan.parse(plan), allow_inert=True, **options)
    injection.attach(model)
    injection.enable()
    return model, injection


# ---- the type in which it is multiplied


@pytest.mark.parametrize(("dtype", "seen"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float64)])
def test_under_autocast_the_fault_of_a_product_acts_on_the_type_that_is_multiplied(dtype, seen):
    layer = linear().to(dtype)
    found = []
    with st.inject(layer, GAIN):
        layer.register_forward_pre_hook(lambda m, _: found.append(m.weight.dtype))
        layer(X.to(dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(X.to(dtype))
    assert found == [dtype, seen]


def test_a_weight_that_is_not_multiplied_or_not_hit_stays_in_its_own_type_under_autocast():
    model = nn.Sequential(nn.LayerNorm(4), linear())
    found = []
    with st.inject(model, "gain:1@module.0+linear,point=weight,phase=train"):
        for part in model:
            part.register_forward_pre_hook(lambda m, _: found.append(m.weight.dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.train()(X)
            model.eval()(X)
    assert found == [torch.float32, torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize(("phase", "dtype"), [("train", torch.bfloat16), ("eval", torch.float32)])
def test_a_tap_casts_only_where_it_acts(phase, dtype):
    layer, injection = injected(f"{GAIN},phase=train")
    own = injection.models[0].weights[0][1]
    with st.phase(phase), torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        frame = injection.frame(own.entry, (), {})
        y = own.touch(layer._parameters["weight"], frame)
    assert y.dtype is dtype and (y is layer._parameters["weight"]) is (phase == "eval")
    injection.close()


def test_a_tap_on_the_gradient_alone_leaves_the_weight_in_its_type_and_has_keys_of_a_second_argument():
    layer, injection = injected()
    own = injection.models[0].weights[0][1]
    seen = []
    tap = SimpleNamespace(gradient=lambda *given: seen.append(given) or given[0])
    gradient_only = WeightTap("weight", tap, own.entry, gradient_only=True)
    frame = SimpleNamespace(current=SimpleNamespace(acts_on=lambda tap: True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gradient_only.touch(layer._parameters["weight"], frame) is layer._parameters["weight"]
    assert seen == [(layer._parameters["weight"], frame, 1)] and not own.gradient_only
    injection.close()


# ---- which taps act


def test_clauses_on_one_weight_act_in_the_order_of_the_plan():
    layer = linear()
    clean = layer.weight.detach().clone()
    for plan, expected in (
        ("gain:1@module.linear,point=weight;saturation:0.1,scope=absolute@module.linear,point=weight", (2 * clean).clamp(-0.1, 0.1)),
        ("saturation:0.1,scope=absolute@module.linear,point=weight;gain:1@module.linear,point=weight", 2 * clean.clamp(-0.1, 0.1)),
    ):  # fmt: skip
        with torch.no_grad(), st.inject(layer, plan, allow_inert=True):
            assert torch.allclose(layer(torch.eye(4)).t(), expected, atol=1e-6)


def test_a_weight_that_is_read_twice_in_a_call_is_made_and_counted_once():
    class Twice(nn.Linear):
        def forward(self, x):
            self.seen = self.weight, self.weight
            return super().forward(x)

    layer = Twice(4, 4)
    with st.inject(layer, "relative_gaussian:0.1@module.Twice,point=weight") as ledger:
        layer(X)
        first = layer.seen
        layer(X)
    assert first[0] is first[1] and ledger.forward == 2 and not torch.equal(first[0], layer.seen[0]), "another for each call"


def test_a_call_inside_of_a_call_has_frames_of_its_own_and_leaves_the_weight_clean():
    class Again(nn.Linear):
        depth = 0

        def forward(self, x):
            self.depth += 1
            y = super().forward(x)
            return self(y) if self.depth < 2 else y

    layer = Again(4, 4, bias=False)
    with st.inject(layer, "gain:1@module.Again,point=weight") as ledger:
        y = layer(X)
        assert layer.weight is layer._parameters["weight"]
    weight = layer.weight.detach()
    assert torch.allclose(y, 4 * X @ weight.T @ weight.T) and ledger.forward == 2


def test_a_plan_that_is_off_on_a_module_that_another_is_on_does_nothing():
    layer = linear()
    clean = layer(X)
    first, second = (injected(plan, layer)[1] for plan in (GAIN, "gain:2@module.linear,point=weight"))
    first.disable()
    assert torch.allclose(layer(X), 3 * clean)
    second.disable()
    assert torch.equal(layer(X), clean)
    first.enable()
    assert torch.allclose(layer(X), 2 * clean)
    first.close()
    second.close()
    assert type(layer) is nn.Linear and torch.equal(layer(X), clean)


def test_keywords_reach_a_module_that_has_taps():
    class Named(nn.Linear):
        def forward(self, *, x, scale=1.0):
            return scale * super().forward(x)

    layer = Named(4, 4, bias=False)
    with st.inject(layer, "gain:1@module.Named,point=weight"):
        assert torch.allclose(layer(x=X, scale=3.0), 6 * X @ layer._parameters["weight"].T)


def test_after_an_exception_and_in_other_threads_the_weight_is_clean_and_the_next_call_is_hit():
    class Fails(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if x.sum() < 0:
                raise ZeroDivisionError
            return y

    layer = Fails(4, 4, bias=False)
    clean = layer(X).detach()
    with st.inject(layer, "gain:1@module.Fails,point=weight") as ledger:
        with pytest.raises(ZeroDivisionError):
            layer(-X)
        assert layer.weight is layer._parameters["weight"]
        seen = []
        thread = threading.Thread(target=lambda: seen.append(layer(X).detach()))
        thread.start()
        thread.join()
        assert torch.allclose(seen[0], 2 * clean) and torch.allclose(layer(X), 2 * clean) and ledger.forward == 3


def test_a_weight_that_is_nothing_is_read_as_nothing():
    model = linear()
    with st.inject(model, GAIN):
        model(X)
        parameter = model._parameters["weight"]
        model._parameters["weight"] = None
        assert model.weight is None
        model._parameters["weight"] = parameter
    assert model.weight is parameter


def test_a_module_may_look_whether_it_has_a_weight():
    class Maybe(nn.Linear):
        def forward(self, x):
            return x if self.weight is None else super().forward(x)

    layer = Maybe(4, 4, bias=False)
    with st.inject(layer, "gain:1@module.Maybe,point=weight") as ledger:
        layer(X)
        layer._parameters["weight"] = None
        assert torch.equal(layer(X), X) and ledger.forward == 1


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.eye(4)[None])

    def forward(self, x):
        return x @ self.up[0]


@pytest.mark.parametrize(("make", "name"), [(linear, "weight"), (Experts, "up")])
def test_a_weight_that_was_taken_out_cannot_be_replaced_by_a_tensor(make, name):
    model = make()
    with st.inject(model, GAIN):
        model(X)
        parameter = model._parameters.pop(name)
        with pytest.raises(AttributeError, match=rf"^{name} cannot be replaced by a plain tensor while a plan acts on it$"):
            setattr(model, name, torch.ones(4, 4))
        model._parameters[name] = parameter
        assert getattr(model, name) is parameter


def test_a_weight_that_is_a_shard_when_it_is_used_is_refused_by_name(monkeypatch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = linear()

        def forward(self, x):
            return self.proj(x)

    model = Net()
    with st.inject(model, GAIN, allow_inert=True):
        monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(DTensor=nn.Parameter))
        with pytest.raises(PlanError) as raised:
            model(X)
        label = "module.linear"
        assert str(raised.value) == (
            f"{label}: proj.weight is still sharded when it is used (tensor parallel, or called past FSDP2's root); "
            "weight faults act on whole weights"
        )
        monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(DTensor=dict))
        model(X)
        monkeypatch.delitem(sys.modules, "torch.distributed.tensor")
        model(X)


# ---- putting taps on and taking them off


def test_a_module_has_taps_while_a_plan_acts_on_its_weight():
    model = nn.Sequential(linear(), nn.LayerNorm(4))
    assert not any(has_taps(part) for part in model)
    with st.inject(model, GAIN):
        assert [has_taps(part) for part in model] == [True, False]
        model(X)
    assert not any(has_taps(part) for part in model)
    remove_taps(model[0], set())
    assert type(model[0]) is nn.Linear


def test_nothing_is_left_on_a_module_when_its_last_tap_is_taken_off():
    layer = linear()
    before = set(vars(layer)), len(layer._forward_hooks), len(layer._forward_pre_hooks)
    with st.inject(layer, GAIN):
        layer(X)
        assert SLOT in vars(layer) and isinstance(layer, nn.Linear) and type(layer) is not nn.Linear
        assert type(layer).__name__ == "Linear" and type(layer).__module__ == nn.Linear.__module__
    assert (set(vars(layer)), len(layer._forward_hooks), len(layer._forward_pre_hooks)) == before


def taps_of(layer, plans):
    """Taps of several injections on one weight, put on by hand."""
    found = []
    for plan in plans:
        injection = Injection(Plan.parse(plan), allow_inert=True)
        injection.attach(layer)
        found.append(injection.models[0].weights[0][1])
        add_tap(layer, found[-1])
    return found


def test_the_class_of_a_module_has_a_property_for_each_tapped_weight_whoever_taps_it():
    layer = linear()
    first, second = taps_of(layer, (GAIN, GAIN))
    kind = type(layer)
    assert kind is not nn.Linear and kind.__mro__[1] is nn.Linear, "one class for two taps of one weight"
    remove_taps(layer, {first.tap})
    assert type(layer) is kind and layer.__dict__[SLOT].taps == [second]
    remove_taps(layer, {first.tap})
    assert type(layer) is kind
    remove_taps(layer, {second.tap})
    assert type(layer) is nn.Linear and not has_taps(layer)


def test_modules_of_one_class_share_the_class_that_we_make_of_it():
    first, second = linear(), linear()
    with st.inject(first, GAIN, allow_inert=True), st.inject(second, GAIN, allow_inert=True):
        assert type(first) is type(second)
        other = nn.Bilinear(4, 4, 4)
        assert type(other) is nn.Bilinear
    again = linear()
    with st.inject(again, GAIN, allow_inert=True):
        assert type(again) is not nn.Linear


def test_a_class_that_somebody_made_of_ours_keeps_its_name_and_loses_ours_from_below():
    layer, injection = injected()
    below = type(layer)
    layer.__class__ = type("Sharded", (below,), {"more": lambda self: "more"})
    assert torch.allclose(layer(X), 2 * X @ layer._parameters["weight"].T)
    injection.close()
    assert type(layer).__name__ == "Sharded" and layer.more() == "more" and type(layer).__mro__[1] is nn.Linear
    assert not has_taps(layer)


class Other(nn.Linear):
    """What a linear may be exchanged for."""

    def forward(self, x):
        return 10 * super().forward(x)


def test_a_class_below_ours_can_be_exchanged_while_taps_are_on_and_stays_when_they_are_gone():
    layer, injection = injected()
    rebase(layer, nn.Linear, Other)
    assert isinstance(layer, Other) and type(layer) is not Other
    assert torch.allclose(layer(X), 20 * X @ layer._parameters["weight"].T)
    injection.close()
    assert type(layer) is Other


def test_a_class_of_a_module_without_taps_is_exchanged_as_it_is():
    layer = linear()
    rebase(layer, nn.Linear, Other)
    assert type(layer) is Other and not has_taps(layer)
    rebase(layer, Other, nn.Linear)
    assert type(layer) is nn.Linear


def test_a_fast_path_that_a_module_has_becomes_a_hook_before_a_tap_is_put_on():
    layer, done = linear(), []
    fast = SimpleNamespace(become_hook=lambda: done.append(has_taps(layer)))
    layer.__dict__["_shaketable_fast_linear"] = fast
    (own,) = taps_of(layer, (GAIN,))
    assert done == [False]
    remove_taps(layer, {own.tap})


def test_taps_of_a_module_do_not_keep_it_alive():
    layer = linear()
    taps = WeightTaps(layer)
    parameter = layer._parameters["weight"]
    assert taps.parameter("weight") is parameter and taps.original is taps.subclass is nn.Linear
    seen = weakref.ref(layer)
    for hook in taps.hooks:
        hook.remove()
    del layer
    gc.collect()
    assert seen() is None and taps.parameter("weight") is None


# ---- with and without hooks


@pytest.mark.parametrize(
    ("on_gpu", "own_forward", "is_fast"),
    [(False, False, False), (True, False, True), (True, True, False), (False, True, False)],
)
def test_a_module_is_hooked_unless_it_is_on_a_gpu_with_the_forward_of_its_class(monkeypatch, on_gpu, own_forward, is_fast):
    layer = linear()
    if own_forward:
        layer.forward = layer.forward
    monkeypatch.setattr(on_read, "on_gpu", lambda module: on_gpu)
    taps = WeightTaps(layer)
    assert taps.is_fast is is_fast
    assert len(taps.hooks) == len(layer._forward_hooks) + len(layer._forward_pre_hooks) == (0 if is_fast else 2)


@pytest.mark.parametrize("raises", [False, True])
def test_around_a_forward_a_call_is_open_and_afterwards_it_is_not(raises):
    layer, injection = injected()
    taps, seen = layer.__dict__[SLOT], []

    def forward(module, *args, **kwargs):
        seen.append((module, args, kwargs, "call" in taps.local.__dict__))
        if raises:
            raise ZeroDivisionError
        return "result"

    if raises:
        with pytest.raises(ZeroDivisionError):
            taps.around(layer, forward, (1,), {"a": 2})
    else:
        assert taps.around(layer, forward, (1,), {"a": 2}) == "result"
    assert seen == [(layer, (1,), {"a": 2}, True)] and "call" not in taps.local.__dict__
    taps.end()
    injection.close()


class Entry:
    """What is known of a weight that may be ready."""

    def __init__(self, name, each):
        self.name, self.group = name, SimpleNamespace(each=each)


def test_what_may_be_ready_is_known_to_the_taps_and_to_the_module_until_it_is_forgotten():
    layer, injection = injected()
    taps = layer.__dict__[SLOT]
    coded, held, newer = Entry("weight", True), Entry("bias", False), Entry("weight", True)
    taps.know(coded)
    taps.know(held)
    assert taps.ready == {"weight": coded, "bias": held} and taps.each == [coded]
    assert (layer.__dict__[f"{SLOT}weight"], layer.__dict__[f"{SLOT}bias"]) == (coded, held)
    taps.know(newer)
    taps.forget(coded)
    assert taps.ready == {"weight": newer, "bias": held} and taps.each == [newer], "one that was replaced is known no more"
    assert layer.__dict__[f"{SLOT}weight"] is newer
    taps.forget(newer)
    assert taps.ready == {"bias": held} and taps.each == [] and f"{SLOT}weight" not in layer.__dict__
    taps.forget(held)
    taps.forget(held)
    assert taps.ready == {} and f"{SLOT}bias" not in layer.__dict__
    injection.close()


class Prepared:
    """Notes what it is told."""

    def __init__(self):
        self.noted = []

    def note(self, *given):
        self.noted.append(given)

    def forget(self, entries):
        pass


@pytest.mark.parametrize(
    ("phase", "gradients", "noted"), [("train", False, 1), ("train", True, 0), ("eval", False, 0), ("eval", True, 0)]
)
def test_a_weight_that_was_faulty_where_no_gradient_was_wanted_is_noted_for_the_next_pass(phase, gradients, noted):
    layer, injection = injected(f"{GAIN},phase=train")
    taps, prepared = layer.__dict__[SLOT], Prepared()
    taps.prepared = prepared
    with st.phase(phase), torch.set_grad_enabled(gradients):
        layer(X)
    assert prepared.noted == [(taps, "weight", layer._parameters["weight"])] * noted
    taps.prepared = None
    injection.close()


def test_inside_of_a_pass_that_has_values_ready_a_read_falls_back_in_its_own_thread_alone():
    layer, injection = injected()
    taps, parameter = layer.__dict__[SLOT], layer._parameters["weight"]
    assert taps.read("weight", parameter) is parameter and not taps.fell_back, "no call is running"
    taps.inside = threading.get_ident() + 1
    assert taps.read("weight", parameter) is parameter and not taps.fell_back
    taps.inside = threading.get_ident()
    with torch.no_grad():
        assert torch.equal(taps.read("weight", parameter), 2 * parameter) and taps.fell_back
    taps.inside = 0
    taps.end()
    assert taps.read("weight", parameter) is parameter
    injection.close()


def shelved(layer, *plans):
    own = [injected(plan, layer)[1] for plan in plans]
    taps = layer.__dict__[SLOT]
    taps.is_fast = True
    on_read._shelve(taps)
    return taps, own


def close(injections):
    for injection in injections:
        injection.close()


def test_values_can_be_ready_where_one_tap_of_one_plan_is_on_each_weight():
    taps, own = shelved(linear(), GAIN)
    assert taps.prepared is own[0].prepared_of(0)
    close(own)
    taps, own = shelved(linear(), GAIN, GAIN)
    assert taps.prepared is None, "two plans"
    close(own)
    taps, own = shelved(linear(), f"{GAIN};gain:2@module.linear,point=weight")
    assert taps.prepared is None, "two taps on one weight"
    close(own)


def test_values_are_not_ready_where_there_are_hooks_and_what_was_ready_is_forgotten():
    taps, own = shelved(linear(), GAIN)
    told = []
    taps.prepared = SimpleNamespace(forget=lambda entries: told.append(list(entries)))
    taps.ready = {"weight": "an entry"}
    taps.is_fast = False
    on_read._shelve(taps)
    assert told == [["an entry"]] and taps.prepared is None
    taps.ready = {}
    close(own)


# ---- graphs that are compiled


@pytest.fixture
def compiling(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    done = []
    for name in ("trace", "trace_gradient"):
        monkeypatch.setattr(
            on_read.custom_ops, name, lambda weight, *given, name=name: done.append((name, *given)) or weight + 1
        )
    return done


def test_a_graph_that_is_traced_has_the_tap_in_it_while_the_module_runs(monkeypatch):
    layer, injection = injected()
    taps, parameter = layer.__dict__[SLOT], layer._parameters["weight"]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    own = taps.taps[0]
    monkeypatch.setattr(WeightTap, "trace", lambda self, weight: (self, weight))
    assert taps.read("weight", parameter) is parameter, "it is not running"
    taps.begin((), {})
    assert taps.tracing and taps.read("weight", parameter) == (own, parameter) and taps.read("bias", parameter) is parameter
    taps.end()
    assert not taps.tracing and taps.read("weight", parameter) is parameter
    assert taps.around(layer, lambda module: taps.tracing, (), {}) is True and not taps.tracing
    monkeypatch.undo()
    injection.close()


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize("gradient_only", [False, True])
def test_what_is_traced_of_a_tap(compiling, monkeypatch, present, gradient_only):
    layer = linear()
    injection = Injection(Plan.parse(GAIN), allow_inert=True)
    injection.attach(layer)
    own = injection.models[0].weights[0][1]
    own = WeightTap(own.name, own.tap, own.entry, gradient_only)
    asked = []
    monkeypatch.setattr(on_read.custom_ops, "is_present", lambda handle: asked.append(handle) or present)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        y = own.trace(layer.weight)
    assert asked == [own.tap.handle]
    if gradient_only:
        assert compiling == ([("trace_gradient", own.tap.handle, 1, None, False)] if present else [])
        assert y.dtype is torch.float32 and (y is layer.weight) is not present
    else:
        assert compiling == [("trace", own.tap)] and y.dtype is (torch.bfloat16 if present else torch.float32)


def test_a_weight_that_is_not_multiplied_is_traced_in_its_own_type(compiling):
    norm = nn.LayerNorm(4)
    injection = Injection(Plan.parse("gain:1@module.LayerNorm,point=weight"), traced_once=True, allow_inert=True)
    injection.attach(norm)
    own = injection.models[0].weights[0][1]
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert on_read.custom_ops.is_present(own.tap.handle) and own.trace(norm.weight).dtype is torch.float32
    assert compiling == [("trace", own.tap)]
