"""Weights that are made ready when a pass begins: whose pass it is, what a value holds for, and what is counted when it is read.

A GPU is played by the CPU, and kernels by the formula of the fault: so what is ready has the bits of the general path.
"""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.faults import Draw, make_fault
from shaketable.faults.rng import mix64
from shaketable.inject.injection import Injection
from shaketable.inject.tap import Tap
from shaketable.inject.weights import on_read, prepared, prepared_noise, property_classes
from shaketable.inject.weights.prepared import CodedWeights, Gate, Held, PreparedWeights
from shaketable.inject.weights.prepared_noise import DrawnWeights
from shaketable.inject.weights.property_classes import SLOT
from shaketable.plan import Plan

GAIN = "gain:1@module.linear,point=weight"
NOISE = "absolute_gaussian:0.1@module.linear,point=weight,phase=rollout"
EYE = torch.eye(4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, during=None):
        x = self.a(x)
        if during is not None:
            during()
        return self.b(x)


@pytest.fixture
def gpu(monkeypatch):
    """What was done there: batches that were laid out, launches, and how often the general path was taken."""
    done = SimpleNamespace(laid_out=[], launches=[], general=[], draws=lambda fault, x: True)

    class CodedBatch:
        def __init__(self, fault, pairs):
            self.fault, self.pairs = fault, pairs
            done.laid_out.append(len(pairs))

        def __call__(self):
            done.launches.append(len(self.pairs))
            for x, y in self.pairs:
                y.copy_(self.fault.apply(x, Draw(0)))

    class NoiseBatch:
        def __init__(self, fault, pairs, places):
            self.fault, self.pairs, self.places = fault, pairs, places
            done.laid_out.append(len(pairs))

        def __call__(self, moment, magnitude):
            done.launches.append(len(self.pairs))
            rows, fault = [], self.fault.with_magnitude(magnitude)
            for (x, y), place in zip(self.pairs, self.places, strict=True):
                y.copy_(fault.apply(x, Draw(mix64(place ^ moment))))
                error, size = (y - x).double().square().sum().item(), x.double().square().sum().item()
                rows.append([x.numel(), (x != y).sum().item(), (x != 0).sum().item(), x.numel(), error, size, 0.0])
            return torch.tensor(rows, dtype=torch.float64)

    compute = Tap.compute
    monkeypatch.setattr(Tap, "compute", lambda self, x, what: done.general.append(self.name) or compute(self, x, what))
    monkeypatch.setattr(on_read, "on_gpu", lambda module: True)
    monkeypatch.setattr(prepared, "is_on_gpu", lambda parameter: True)
    batched = SimpleNamespace(
        CodedBatch=CodedBatch,
        NoiseBatch=NoiseBatch,
        codes=lambda fault, x: fault.kind == "gain",
        draws=lambda fault, x: done.draws(fault, x),
        magnitude=prepared_noise.batched.magnitude,
    )
    monkeypatch.setattr(prepared, "batched", batched)
    monkeypatch.setattr(prepared_noise, "batched", batched)
    return done


def put_on(plan=GAIN, model=None, **options):
    model = model or Model()
    injection = Injection(Plan.parse(plan, seed=3), allow_inert=True, **options)
    injection.attach(model)
    return model, injection.enable()


def groups(injection):
    return list(injection.prepared_of(0)._groups.values())


def doubled(model):
    """What a model does whose weights are twice as large."""
    a, b = (part._parameters["weight"].detach() for part in (model.a, model.b))
    return EYE @ (2 * a).T @ (2 * b).T


def ready(injection):
    return [entry for group in groups(injection) for entry in group.entries]


# ---- formats


@torch.no_grad()
def test_from_the_second_pass_on_one_launch_makes_all_weights(gpu):
    model, injection = put_on()
    for n in range(4):
        assert torch.equal(model(EYE), doubled(model))
        assert (gpu.laid_out, gpu.launches, len(gpu.general)) == ([2] * (n > 0), [2] * n, 2)
    assert (injection.ledger.forward, injection.fires) == (8, 8)
    injection.close()


@torch.no_grad()
@pytest.mark.parametrize("where", ["train", "eval", "rollout"])
def test_what_is_ready_is_counted_in_the_phase_of_its_pass_and_measured(gpu, where):
    model, injection = put_on()
    with st.phase(where):
        for _ in range(3):
            model(EYE)
    assert gpu.launches and injection.ledger.sites[0].by("phase") == {where: {"forward": 6, "backward": 0}}
    measured = injection.ledger.sites[0].measured()
    assert measured.changed == measured.values > 0 and measured.fires >= 4 and injection.ledger.sites[0].magnitude == 1.0
    injection.close()


@torch.no_grad()
def test_a_value_that_is_read_several_times_in_a_call_counts_once_and_one_that_is_not_read_does_not(gpu):
    class Reads(nn.Linear):
        times = 1

        def forward(self, x):
            for _ in range(self.times):
                weight = self.weight
            return x @ weight.T if self.times else x

    model = Model()
    model.a = Reads(4, 4, bias=False)
    _, injection = put_on("gain:1@module.a+b,point=weight", model)
    for times, fires in ((1, 2), (3, 4), (0, 5), (2, 7)):
        model.a.times = times
        model(EYE)
        assert injection.ledger.forward == fires == injection.fires
    injection.close()


@torch.no_grad()
def test_a_weight_that_was_written_to_between_passes_is_ready_in_the_next_one(gpu):
    model, injection = put_on()
    for _ in range(4):
        model.a.weight.mul_(1.5)
        assert torch.equal(model(EYE), doubled(model))
    assert len(gpu.general) == 2 and gpu.launches == [2, 2, 2] and gpu.laid_out == [2]
    injection.close()


@torch.no_grad()
@pytest.mark.parametrize("both", [False, True])
def test_a_weight_that_was_moved_takes_the_general_path_once_and_is_ready_again(gpu, both):
    model, injection = put_on()
    for _ in range(2):
        model(EYE)
    moved = 1 + both
    kept = [model.a.weight.data, model.b.weight.data]  # so that no address is used again
    for part in (model.a, model.b)[:moved]:
        part.weight.data = 3 * part.weight.data
    gpu.general.clear()
    assert torch.equal(model(EYE), doubled(model)) and len(gpu.general) == moved
    assert torch.equal(model(EYE), doubled(model)) and len(gpu.general) == moved, "from the next pass on it is ready again"
    assert gpu.launches == ([2, 2] if both else [2, 1, 2]), "in the pass between, of those that have not moved"
    assert len(ready(injection)) == 2 and injection.ledger.forward == 8 and len(kept) == 2
    injection.close()


@torch.no_grad()
def test_a_pass_in_which_all_weights_have_moved_has_nothing_to_launch(gpu):
    model, injection = put_on()
    model(EYE)
    model(EYE)
    before = len(gpu.launches)
    for part in (model.a, model.b):
        part.weight.data = part.weight.data.clone()
    (group,) = groups(injection)
    frame = SimpleNamespace()
    group.renew(frame)
    assert len(gpu.launches) == before and group.entries == [] and group.frame is None
    injection.close()


@torch.no_grad()
def test_inside_a_rollout_weights_are_made_once_and_again_when_one_is_written_to(gpu):
    model, injection = put_on()
    model(EYE)
    with st.phase("rollout"):
        for _ in range(3):
            model(EYE)
        assert gpu.launches == [2]
        model.b.weight.add_(1)
        assert torch.equal(model(EYE), doubled(model)) and gpu.launches == [2, 2]
        model(EYE)
        assert gpu.launches == [2, 2]
    with st.phase("rollout"):
        model(EYE)
        model(EYE)
    assert gpu.launches == [2, 2, 2]
    for n in (4, 5):
        model(EYE)
        assert len(gpu.launches) == n, "outside of rollouts, in each pass: writes through .data leave no trace"
    assert len(gpu.general) == 2
    injection.close()


@torch.no_grad()
def test_values_stay_where_they_are_when_another_weight_joins_or_leaves(gpu):
    class Later(Model):
        is_both = False

        def forward(self, x):
            x = self.a(x)
            return self.b(x) if self.is_both else x

    model, injection = put_on(model=Later())
    model(EYE)
    model(EYE)
    (entry,) = ready(injection)
    value = entry.value
    model.is_both = True
    for _ in range(2):
        assert torch.equal(model(EYE), doubled(model))
    assert gpu.laid_out == [1, 2] and ready(injection)[0] is entry and entry.value is value
    (group,) = groups(injection)
    other = ready(injection)[1]
    group.drop(other)
    group.drop(other)
    assert group.entries == [entry]
    with torch.no_grad():
        model(EYE)
    assert gpu.laid_out[2] == 1
    injection.close()


def test_a_value_that_was_made_in_inference_mode_can_be_used_outside_of_it(gpu):
    model, injection = put_on()
    with torch.inference_mode():
        for _ in range(3):
            model(EYE)
    entries = ready(injection)
    assert len(entries) == 2 and not any(entry.value.is_inference() for entry in entries) and len(gpu.general) == 2
    with torch.no_grad():
        assert torch.equal(model(EYE), doubled(model))
    injection.close()


@torch.no_grad()
def test_clauses_and_types_have_groups_of_their_own(gpu):
    model = Model()
    model.b.double()
    model.a.register_forward_hook(lambda module, args, y: y.double())
    _, injection = put_on("gain:1@module.a,point=weight;gain:2@module.b,point=weight", model)
    same = Model()
    _, other = put_on("gain:1@module.a,point=weight;gain:2@module.b,point=weight", same)
    for _ in range(2):
        y = model(EYE)
        same(EYE)
    assert [key[:2] for key in injection.prepared_of(0)._groups] == [(0, torch.float32), (1, torch.float64)]
    assert [(key[0], len(group.entries)) for key, group in other.prepared_of(0)._groups.items()] == [(0, 1), (1, 1)]
    a, b = (part._parameters["weight"] for part in (model.a, model.b))
    assert torch.equal(y, (EYE @ (2 * a).T).double() @ (3 * b).T)
    injection.close()
    other.close()


@torch.no_grad()
def test_weights_of_one_clause_and_two_types_are_made_apart(gpu):
    model = Model()
    model.b.double()
    model.a.register_forward_hook(lambda module, args, y: y.double())
    _, injection = put_on(GAIN, model)
    for _ in range(2):
        model(EYE)
    assert [len(group.entries) for group in groups(injection)] == [1, 1] and gpu.launches == [1, 1]
    injection.close()
    assert groups(injection) == []


# ---- whose pass it is


def opened(injection, **more):
    """Opens a pass by hand; the thread that has weights ready for it then."""
    mine = injection.prepared_of(0)
    current = SimpleNamespace(captured=False, phase="eval", acts_on=lambda tap: True)
    frame = SimpleNamespace(recomputing=False, current=current)
    vars(current).update({k: v for k, v in more.items() if k in vars(current)})
    vars(frame).update({k: v for k, v in more.items() if k in vars(frame)})
    mine.open(frame)
    assert mine.frame is (frame if mine.gate.thread else None)
    return mine.gate.thread


@torch.no_grad()
@pytest.mark.parametrize("more", [{}, {"recomputing": True}, {"captured": True}])
def test_a_pass_that_is_recomputed_or_captured_does_without(gpu, more):
    model, injection = put_on()
    assert opened(injection) == 0, "nothing can be ready yet"
    model(EYE)
    assert opened(injection, **more) == (0 if more else threading.get_ident())
    assert [group.frame is None for group in groups(injection)] == [bool(more)]
    injection.prepared_of(0).close()
    assert injection.prepared_of(0).gate.thread == 0 and groups(injection)[0].frame is None
    injection.close()


def test_a_pass_with_gradients_does_without(gpu):
    model, injection = put_on()
    with torch.no_grad():
        model(EYE)
    assert opened(injection) == 0
    with torch.no_grad():
        assert opened(injection) == threading.get_ident()
    assert opened(injection) == 0, "the pass before is over"
    injection.close()


@torch.no_grad()
def test_a_pass_of_another_thread_keeps_the_weights(gpu):
    model, injection = put_on()
    model(EYE)
    mine = injection.prepared_of(0)
    frame, mine.gate.thread = object(), threading.get_ident() + 1
    mine.frame = frame
    mine.open(SimpleNamespace(recomputing=False, current=SimpleNamespace(captured=False)))
    assert mine.frame is frame and mine.gate.thread == threading.get_ident() + 1
    mine.close()
    injection.close()


@torch.no_grad()
def test_a_clause_that_does_not_act_in_a_pass_leaves_its_weights_alone_and_others_are_ready(gpu):
    model, injection = put_on("gain:1@module.a,point=weight;gain:2@module.b,point=weight,phase=train")
    model.train()
    model(EYE)
    model(EYE)
    assert gpu.launches == [1, 1]
    model.eval()
    a, b = (part._parameters["weight"] for part in (model.a, model.b))
    assert torch.equal(model(EYE), EYE @ (2 * a).T @ b.T) and gpu.launches == [1, 1, 1]
    assert [site.forward for site in injection.ledger.sites] == [3, 2]
    injection.close()


@torch.no_grad()
@pytest.mark.parametrize(("plan", "launches"), [(GAIN, 0), (NOISE, 1)])
def test_under_autocast_of_a_gpu_formats_take_the_general_path_and_held_noise_does_not(gpu, monkeypatch, plan, launches):
    model, injection = put_on(plan, hold=plan is NOISE)
    with st.phase("rollout"):
        model(EYE)
    asked = []
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: asked.append(kind) or kind == "cuda")
    with st.phase("rollout"):
        model(EYE)
    assert len(gpu.launches) == launches and "cuda" in asked
    injection.close()


@torch.no_grad()
def test_a_plan_that_is_switched_off_in_the_middle_of_a_pass_is_off_at_once(gpu):
    model, injection = put_on()
    model(EYE)
    model(EYE)
    a, b = (part._parameters["weight"] for part in (model.a, model.b))
    assert torch.equal(model(EYE, injection.disable), EYE @ (2 * a).T @ b.T)
    assert injection.prepared_of(0).gate.thread == 0 and injection.ledger.forward == 5
    injection.close()


@torch.no_grad()
def test_after_a_pass_whether_it_returned_or_raised_the_weights_are_clean_and_nobody_has_them(gpu):
    model, injection = put_on()
    for _ in range(2):
        model(EYE)

    def fails():
        raise ZeroDivisionError

    for during in (None, fails):
        if during:
            with pytest.raises(ZeroDivisionError):
                model(EYE, during)
        mine = injection.prepared_of(0)
        assert (mine.frame, mine.gate.thread) == (None, 0) and model.a.__dict__[SLOT].inside == 0
        assert model.a.weight is model.a._parameters["weight"]
    injection.close()


# ---- the forward and the properties of a module


@torch.no_grad()
def test_a_module_that_raises_is_not_running_any_more(gpu):
    class Fails(nn.Linear):
        fails = False

        def forward(self, x):
            y = super().forward(x)
            if self.fails:
                raise ZeroDivisionError
            return y

    model = Model()
    model.a = Fails(4, 4, bias=False)
    _, injection = put_on("gain:1@module.a+b,point=weight", model)
    for _ in range(2):
        model(EYE)
    taps, seen = model.a.__dict__[SLOT], []

    class Around(nn.Module):
        def forward(self, x):
            model.a.fails = True
            with pytest.raises(ZeroDivisionError):
                model.a(x)
            model.a.fails = False
            seen.append((taps.inside, model.a.weight is model.a._parameters["weight"]))
            return x

    around = Around()
    model(EYE, lambda: around(EYE))
    assert seen == [(0, True)]
    injection.close()


@torch.no_grad()
@pytest.mark.parametrize("how", ["write", "move", "replace"])
def test_a_weight_that_changes_in_the_middle_of_a_pass_falls_back_and_leaves_no_call_open(gpu, how):
    model, injection = put_on()
    for _ in range(2):
        model(EYE)
    new = torch.full((4, 4), 3.0)

    def change():
        if how == "write":
            model.b.weight.copy_(new)
        elif how == "move":
            model.b.weight.data = new
        else:
            model.b._parameters["weight"] = nn.Parameter(new)

    y = model(EYE, change)
    assert torch.equal(y, doubled(model)) and gpu.general[2:] == ["b.weight"]
    taps = model.b.__dict__[SLOT]
    assert not taps.fell_back and "call" not in taps.local.__dict__ and model.b.weight is model.b._parameters["weight"]
    assert torch.equal(model(EYE), doubled(model)) and injection.ledger.forward == 8
    assert len(gpu.general) == 3, "from the next pass on it is ready"
    injection.close()


@torch.no_grad()
def test_a_module_whose_weight_is_not_there_reads_nothing(gpu):
    model, injection = put_on()
    for _ in range(2):
        model(EYE)
    parameter = model.a._parameters["weight"]
    model.a._parameters["weight"] = None
    assert model.a.weight is None
    model.a._parameters["weight"] = parameter
    assert model.a.weight is parameter
    injection.close()


def entry_of(model, injection, **more):
    """A value that is ready, in a module that is running."""
    taps = model.a.__dict__[SLOT]
    taps.inside = threading.get_ident()
    (entry,) = (entry for entry in ready(injection) if entry.taps is taps)
    entry.version, entry.value, entry.group.frame = model.a._parameters["weight"]._version, torch.zeros(4, 4), object()
    counted = []
    entry.unread, entry.group.count = False, counted.append
    for name, value in more.items():
        setattr(entry, name, value)
    return taps, entry, counted


@torch.no_grad()
@pytest.mark.parametrize(
    "more",
    [{"version": -1}, {"value": None}, {"address": 0}, {"parameter": torch.ones(4, 4)}],
    ids=lambda more: next(iter(more)),
)
def test_a_value_holds_for_its_parameter_its_version_and_its_address(gpu, more):
    model, injection = put_on()
    model(EYE)
    taps, entry, _ = entry_of(model, injection)
    assert model.a.weight is entry.value
    for name, value in more.items():
        setattr(entry, name, value)
    assert torch.equal(model.a.weight, 2 * model.a._parameters["weight"]), "made now"
    taps.inside = 0
    taps.end()
    injection.close()


@torch.no_grad()
def test_a_value_is_for_the_thread_in_which_the_module_runs_and_for_a_pass_that_is_open(gpu):
    model, injection = put_on()
    model(EYE)
    taps, entry, _ = entry_of(model, injection)
    taps.inside += 1
    assert model.a.weight is model.a._parameters["weight"], "another thread"
    taps.inside = 0
    assert model.a.weight is model.a._parameters["weight"], "it is not running"
    taps.inside = threading.get_ident()
    assert model.a.weight is entry.value
    entry.group.frame = None
    assert torch.equal(model.a.weight, 2 * model.a._parameters["weight"]), "nothing is ready in this pass"
    taps.inside = 0
    taps.end()
    injection.close()


@torch.no_grad()
def test_a_value_is_counted_at_its_first_read_alone(gpu):
    model, injection = put_on()
    model(EYE)
    taps, entry, counted = entry_of(model, injection, unread=True)
    for _ in range(3):
        assert model.a.weight is entry.value
    assert counted == [entry] and entry.unread is False
    taps.inside = 0
    injection.close()


@pytest.mark.parametrize("held", [False, True])
def test_the_forward_of_our_class_is_that_of_the_module_where_there_are_no_taps(held):
    class Named(nn.Linear):
        def forward(self, x, *, scale=1):
            """Multiply."""
            return scale * super().forward(x)

    layer = Named(4, 4)
    gate = Gate()
    forward = property_classes._held_forward(Named, gate) if held else property_classes._forward(Named)
    assert torch.equal(forward(layer, EYE, scale=3), layer(EYE, scale=3))
    assert (forward.__name__, forward.__doc__) == ("forward", "Multiply.") and gate.thread == 0


# ---- which class a module is given


def test_where_everything_is_held_a_class_belongs_to_the_gate_of_one_model(gpu):
    model, injection = put_on(NOISE, hold=True)
    assert type(model.a) is type(model.b) and list(injection.prepared_of(0).kinds) == [(nn.Linear, ("weight",))]
    other, second = put_on(NOISE, hold=True)
    assert type(other.a) is not type(model.a), "another model, another gate"
    injection.close()
    second.close()
    assert type(model.a) is nn.Linear


class Experts(nn.Module):
    """Two stacked weights, of which a plan may hit one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (nn.Parameter(torch.randn(1, 4, 4)) for _ in range(2))

    def forward(self, x):
        return x @ self.up[0] @ self.down[0]


def test_classes_are_told_apart_by_the_weights_that_are_properties(gpu):
    model, injection = put_on(NOISE, Experts(), hold=True)
    taps = model.__dict__[SLOT]
    one, both = (property_classes.kind_of(taps, names) for names in (("up",), ("down", "up")))
    assert one is not both and "down" in both.__dict__ and "down" not in one.__dict__
    assert property_classes.kind_of(taps, ("up",)) is one
    injection.close()


def test_a_module_on_which_something_is_not_held_is_given_the_ordinary_class(gpu):
    model, injection = put_on(NOISE, Experts(), hold=True)
    taps = model.__dict__[SLOT]
    held = property_classes.kind_of(taps, ("up",))
    plain = on_read.WeightTap("up", SimpleNamespace(), None)
    taps.taps.append(plain)
    ordinary = property_classes.kind_of(taps, ("up",))
    taps.taps.remove(plain)
    assert ordinary is not held is property_classes.kind_of(taps, ("up",))
    assert ordinary is property_classes._subclass(taps.original, ("up",), True) and "forward" in ordinary.__dict__
    assert "forward" not in property_classes._subclass(taps.original, ("up",), False).__dict__
    injection.close()


# ---- noise that is held


def general(plan, act, **options):
    """The same without a GPU."""
    model, injection = put_on(plan, **options)
    found = act(model, injection)
    injection.close()
    return found, [site.by("phase") for site in injection.ledger.sites]


def both_ways(gpu, monkeypatch, plan, act):
    model, injection = put_on(plan, hold=True)
    found = act(model, injection)
    injection.close()
    told = [site.by("phase") for site in injection.ledger.sites]
    monkeypatch.setattr(on_read, "on_gpu", lambda module: False)
    other, also = general(plan, act, hold=True)
    assert told == also
    assert all(torch.equal(x, y) for x, y in zip(found, other, strict=True)), [
        n for n, (x, y) in enumerate(zip(found, other, strict=True)) if not torch.equal(x, y)
    ]
    return found


@torch.no_grad()
def test_steps_rollouts_and_magnitudes_have_the_noise_of_the_general_path(gpu, monkeypatch):
    def act(model, injection):
        seen = []
        for step, magnitude in ((0, 0.1), (1, 0.1), (1, 0.3), (0, 0.1), (2, 0.0), (3, 0.2)):
            injection.step = step
            injection.set_magnitude(magnitude)
            for _ in range(2):
                with st.phase("rollout"):
                    seen += [model(EYE), model(EYE)]
            seen.append(model(EYE))
        return seen

    found = both_ways(gpu, monkeypatch, NOISE, act)
    assert len({y.numpy().tobytes() for y in found}) == 9 and len(gpu.launches) >= 8 and gpu.laid_out == [2]


@torch.no_grad()
def test_changes_in_the_middle_of_a_rollout_are_seen(gpu, monkeypatch):
    def act(model, injection):
        seen = []
        with st.phase("rollout"):
            model(EYE)
        with st.phase("rollout"):
            seen.append(model(EYE))
            model.a.weight.mul_(2)
            seen.append(model(EYE))
            injection.set_magnitude(0.4)
            seen.append(model(EYE))
            for step in (5, 6):
                injection.step = step
                seen += [model(EYE), model(EYE)]
            with torch.inference_mode():
                seen.append(model(EYE).clone())
            seen.append(model(EYE))
            model.b.weight.data = model.b.weight.data + 1
            seen += [model(EYE), model(EYE)]
            with st.phase("eval"):
                seen.append(model(EYE))
            seen.append(model(EYE))
            injection.disable()
            seen.append(model(EYE))
            injection.enable()
            seen.append(model(EYE))
        model.a._parameters["weight"] = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
        for _ in range(2):
            with st.phase("rollout"):
                seen += [model(EYE), model(EYE)]
        return seen

    assert len({y.numpy().tobytes() for y in both_ways(gpu, monkeypatch, NOISE, act)}) >= 6


@torch.no_grad()
@pytest.mark.parametrize("moved", ["a", "b", "ab"])
def test_weights_that_moved_between_two_rollouts_or_in_one_are_drawn_from_where_they_are(gpu, monkeypatch, moved):
    def act(model, injection):
        seen, kept = [rollout(model), rollout(model)], []

        def move():
            for name in moved:
                weight = getattr(model, name)._parameters["weight"]
                kept.append(weight.data)
                weight.data = 2 * weight.data

        move()
        seen += [rollout(model), rollout(model)]
        with st.phase("rollout"):
            seen.append(model(EYE))
            move()
            seen += [model(EYE), model(EYE)]
        return [*seen, rollout(model)]

    found = both_ways(gpu, monkeypatch, NOISE, act)
    assert len({y.numpy().tobytes() for y in found}) == 7


@torch.no_grad()
def test_passes_of_other_phases_let_the_noisy_weights_go_and_are_not_ready(gpu, monkeypatch):
    def act(model, injection):
        seen = []
        for _ in range(3):
            with st.phase("rollout"):
                seen += [model(EYE), model(EYE)]
            model.train()
            seen.append(model(EYE))
            seen.append(model(EYE))
        return seen

    found = both_ways(gpu, monkeypatch, NOISE.replace("rollout", "rollout+train"), act)
    assert torch.equal(found[0], found[2]) and torch.equal(found[4], found[6]) and not torch.equal(found[0], found[4])


@torch.no_grad()
def test_a_rollout_draws_once_and_its_values_are_let_go_with_it(gpu):
    model, injection = put_on(NOISE, hold=True)
    with st.phase("rollout"):
        model(EYE)
    for n in (1, 2):
        with st.phase("rollout"):
            for _ in range(3):
                model(EYE)
            assert gpu.launches == [2] * n and all(entry.value is not None for entry in ready(injection))
    clean = model(EYE)
    assert torch.equal(clean, EYE @ model.a._parameters["weight"].T @ model.b._parameters["weight"].T)
    assert all(entry.value is None for entry in ready(injection)) and len(gpu.general) == 2
    assert injection.ledger.forward == 6 == injection.fires
    injection.close()


@torch.no_grad()
def test_a_weight_that_one_kernel_cannot_draw_is_drawn_by_itself_and_those_beside_it_together(gpu, monkeypatch):
    def act(model, injection):
        gpu.draws = lambda fault, x: x.data_ptr() != model.a._parameters["weight"].data_ptr()
        seen = []
        for _ in range(3):
            with st.phase("rollout"):
                seen += [model(EYE), model(EYE)]
        return seen

    found = both_ways(gpu, monkeypatch, NOISE, act)
    assert gpu.launches == [1, 1] and gpu.general[:4] == ["a.weight", "b.weight", "a.weight", "a.weight"]
    assert len({y.numpy().tobytes() for y in found}) == 3


@torch.no_grad()
def test_where_no_weight_can_be_drawn_together_nothing_is_launched(gpu, monkeypatch):
    gpu.draws = lambda fault, x: False
    both_ways(gpu, monkeypatch, NOISE, lambda model, injection: [rollout(model) for _ in range(3)])
    assert gpu.launches == [] == gpu.laid_out


def rollout(model):
    with st.phase("rollout"):
        return model(EYE)


@torch.no_grad()
def test_what_draws_changed_is_in_the_ledger_when_it_is_read(gpu):
    model, injection = put_on(NOISE, hold=True)
    for n in range(1, 5):
        rollout(model)
        site = injection.ledger.sites[0]
        assert (site.forward, site.measured().fires, site.measured().values) == (2 * n, 2 * n, 32 * n)
    assert site.magnitude == pytest.approx(0.1, rel=0.3) and site.measured().changed == 32 * 4
    injection.close()


@torch.no_grad()
def test_passes_of_one_rollout_look_at_the_draws_once_and_the_next_draw_tells_of_the_one_before(gpu, monkeypatch):
    model, injection = put_on(NOISE, hold=True)
    rollout(model)
    (group,) = groups(injection)
    looked, renew = [], group.drawn.renew
    monkeypatch.setattr(group.drawn, "renew", lambda *given: looked.append(1) or renew(*given))
    for n in (1, 2, 3):
        with st.phase("rollout"):
            for _ in range(3):
                model(EYE)
        assert len(looked) == n and len(group.drawn._read) == 2, "what is to be told is that of one draw"
    assert group.drawn._thread == threading.get_ident()
    injection.close()


@torch.no_grad()
def test_a_draw_that_nobody_reads_is_forgotten_with_the_next(gpu):
    model, injection = put_on(NOISE, hold=True)
    rollout(model)

    def fails():
        raise ZeroDivisionError

    with st.phase("rollout"), pytest.raises(ZeroDivisionError):
        model(EYE, fails)
    assert injection.ledger.sites[0].by("phase")["rollout"]["forward"] == 3
    rollout(model)
    spots = injection.ledger.sites[0].spots
    assert {name: spot.counts["rollout"][0] for name, spot in spots.items()} == {"a:weight": 3, "b:weight": 2}
    assert {name: spot.forward.fires for name, spot in spots.items()} == {"a:weight": 3, "b:weight": 2}
    injection.close()


@torch.no_grad()
def test_in_the_pass_of_a_thread_only_that_thread_sees_noisy_weights(gpu):
    model, injection = put_on(NOISE, hold=True)
    rollout(model)
    parameter, seen = model.a._parameters["weight"], {}

    def other():
        with torch.no_grad():
            seen["other"] = model.a.weight

    def look():
        seen["own"] = model.a.weight
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with torch.enable_grad():
            seen["gradients"] = model.a.weight

    with st.phase("rollout"):
        model(EYE, look)
    assert seen["own"] is not parameter and seen["other"] is seen["gradients"] is model.a.weight is parameter
    injection.close()


@torch.no_grad()
def test_a_module_of_another_thread_is_hit_while_a_pass_is_running(gpu):
    model, injection = put_on(NOISE, hold=True)
    rollout(model)
    seen = {}

    def other():
        with torch.no_grad(), st.phase("rollout"):
            seen["noisy"] = model.a(EYE)

    def look():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with st.phase("rollout"):
        model(EYE, look)
    assert not torch.equal(seen["noisy"], EYE @ model.a._parameters["weight"].T)
    injection.close()


def test_gradients_that_are_wanted_in_the_middle_of_a_pass_flow_to_the_parameter(gpu):
    class Wants(Model):
        def forward(self, x):
            y = self.a(x)
            with torch.enable_grad():
                self.found = torch.autograd.grad(self.b(y).sum(), self.b._parameters["weight"])[0]
            return y

    model, injection = put_on(NOISE, Wants(), hold=True)
    for _ in range(3):
        with torch.no_grad():
            y = rollout(model)
        assert torch.allclose(model.found, y.sum(0).expand(4, 4), atol=1e-6)
    injection.close()


@torch.no_grad()
def test_a_held_weight_that_is_not_ready_is_made_now_and_leaves_no_call_open(gpu):
    model, injection = put_on(NOISE, hold=True)
    rollout(model)
    seen = []

    def forget():
        entry = model.b.__dict__[f"{SLOT}weight"]
        entry.value = None
        seen.append(model.b.weight)
        taps = model.b.__dict__[SLOT]
        assert "call" not in taps.local.__dict__

    with st.phase("rollout"):
        expected = model(EYE)
        assert torch.equal(model(EYE, forget), expected) and seen[0] is not model.b._parameters["weight"]
    assert injection.ledger.forward == 4, "a draw that was counted does not count again"
    injection.close()


def test_what_is_made_now_of_a_module_without_taps_or_weight_is_what_is_there():
    layer = nn.Linear(4, 4, bias=False)
    assert property_classes._made_now(layer, "weight") is layer.weight and property_classes._made_now(layer, "bias") is None
    layer.__dict__[SLOT] = SimpleNamespace(begin=None)
    assert property_classes._made_now(layer, "bias") is None
    del layer.__dict__[SLOT]


def test_what_is_made_now_is_closed_also_when_it_raises():
    layer, done = nn.Linear(4, 4), []

    def read(name, parameter):
        done.append((name, parameter is layer._parameters["weight"]))
        raise ZeroDivisionError

    layer.__dict__[SLOT] = SimpleNamespace(begin=lambda *given: done.append(given), read=read, end=lambda: done.append("end"))
    with pytest.raises(ZeroDivisionError):
        property_classes._made_now(layer, "weight")
    assert done == [((), {}), ("weight", True), "end"]
    del layer.__dict__[SLOT]


@torch.no_grad()
def test_a_graph_that_is_compiled_is_traced_and_not_given_what_is_ready(gpu, monkeypatch):
    model, injection = put_on(NOISE, hold=True)
    rollout(model)
    rollout(model)
    mine, parameter, done = injection.prepared_of(0), model.a._parameters["weight"], []
    mine.gate.thread = threading.get_ident()
    assert model.a.weight is not parameter
    monkeypatch.setattr(property_classes, "is_dynamo_compiling", lambda: True)
    assert model.a.weight is parameter, "no call of the module is running"
    monkeypatch.setattr(on_read.WeightTaps, "around", lambda self, *given: done.append(given) or "around")
    assert type(model.a).forward(model.a, EYE) == "around" and len(done) == 1
    monkeypatch.setattr(property_classes, "is_dynamo_compiling", lambda: False)
    assert torch.is_tensor(type(model.a).forward(model.a, EYE)) and len(done) == 1
    mine.gate.thread += 1
    assert type(model.a).forward(model.a, EYE) == "around", "another thread has the pass"
    mine.gate.thread -= 1
    with torch.enable_grad():
        assert type(model.a).forward(model.a, EYE) == "around"
    mine.close()
    monkeypatch.undo()
    injection.close()


@torch.no_grad()
@pytest.mark.parametrize("why", ["compiling", "several plans", "another thread", "gradients", None])
def test_a_forward_takes_the_general_path_unless_this_pass_has_values_for_it(gpu, monkeypatch, why):
    model, injection = put_on()
    model(EYE)
    taps, done = model.a.__dict__[SLOT], []
    taps.prepared.gate.thread = threading.get_ident() + (why == "another thread")
    if why == "compiling":
        monkeypatch.setattr(property_classes, "is_dynamo_compiling", lambda: True)
    mine = taps.prepared
    if why == "several plans":
        taps.prepared = None
    monkeypatch.setattr(on_read.WeightTaps, "around", lambda self, *given: done.append(given) or "around")
    with torch.set_grad_enabled(why == "gradients"):
        found = type(model.a).forward(model.a, EYE)
    assert (found == "around" if why else torch.is_tensor(found)) and len(done) == bool(why)
    taps.prepared = mine
    mine.close()
    monkeypatch.undo()
    injection.close()


# ---- which weights can be ready


def can_be(parameter=None, fault="mxfp4", is_held=False, **more):
    own = {"gradient_only": False, "transposed": False, "directions": ("forward",), "kind": None} | more
    injection = Injection(Plan.parse(f"{fault}@module.linear,point=weight"), hold=is_held, allow_inert=True)
    tap = injection.make_tap(0, "a.weight", "weight", None)
    if own["kind"] is not None:
        tap.__class__ = own["kind"]
    tap.transposed, tap.site = own["transposed"], SimpleNamespace(directions=own["directions"])
    parameter = nn.Parameter(torch.ones(4, 32)) if parameter is None else parameter
    return prepared._can_be(SimpleNamespace(tap=tap, gradient_only=own["gradient_only"]), parameter)


class OtherTap(Tap):
    """A tap of another kind."""


class OtherParameter(nn.Parameter):
    """A parameter of another kind, as quantized ones are."""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, True),
        ({"gradient_only": True}, False),
        ({"transposed": True}, False),
        ({"directions": ("backward",)}, False),
        ({"directions": ("forward", "backward")}, False),
        ({"parameter": torch.ones(4, 32)}, False),
        ({"parameter": OtherParameter(torch.ones(4, 32))}, False),
        ({"kind": OtherTap}, False),
        ({"fault": "gain:1"}, False),
    ],
    ids=str,
)
def test_a_weight_can_be_ready_that_is_plain_and_hit_forward_by_a_format(monkeypatch, more, expected):
    monkeypatch.setattr(prepared, "is_on_gpu", lambda parameter: True)
    monkeypatch.setattr(prepared.batched, "codes", lambda fault, x: fault.kind == "mxfp4")
    assert can_be(**more) is expected
    if "kind" not in more and "fault" not in more:
        assert can_be(is_held=True, fault="gain:1", **more) is expected, "held noise of any kind"
    monkeypatch.setattr(prepared, "is_on_gpu", lambda parameter: False)
    assert can_be(**more) is False


def test_a_parameter_of_inference_mode_or_of_the_cpu_is_not_ready(monkeypatch):
    assert prepared.is_on_gpu(nn.Parameter(torch.ones(1))) is False
    assert prepared.is_on_gpu(SimpleNamespace(is_cuda=True)) is True
    monkeypatch.setattr(prepared, "is_on_gpu", lambda parameter: True)
    with torch.inference_mode():
        parameter = nn.Parameter(torch.ones(4, 32))
    assert can_be(parameter, is_held=True) is False


@torch.no_grad()
def test_a_weight_that_is_noted_again_stays_the_same_entry_and_a_new_one_takes_its_place(gpu):
    model, injection = put_on()
    model(EYE)
    mine, taps = injection.prepared_of(0), model.a.__dict__[SLOT]
    first, parameter = taps.ready["weight"], model.a._parameters["weight"]
    mine.note(taps, "weight", parameter)
    assert taps.ready["weight"] is first and len(ready(injection)) == 2
    parameter.data = parameter.data.clone()
    mine.note(taps, "weight", parameter)
    moved = taps.ready["weight"]
    assert moved is not first and moved.address == parameter.data_ptr() and len(ready(injection)) == 2
    other = nn.Parameter(torch.ones(4, 4))
    mine.note(taps, "weight", other)
    assert taps.ready["weight"].parameter is other and moved not in ready(injection) and len(ready(injection)) == 2
    mine.note(taps, "weight", torch.ones(4, 4))
    assert "weight" not in taps.ready and len(ready(injection)) == 1, "one that cannot be ready is not"
    mine.forget(ready(injection))
    assert groups(injection) == [] and model.b.__dict__[SLOT].ready == {}
    mine.settle()
    injection.close()


def test_groups_begin_empty_and_have_nothing_to_tell():
    injection = Injection(Plan.parse(GAIN), allow_inert=True)
    mine = PreparedWeights(injection)
    assert (mine.frame, mine.gate.thread, mine.kinds, mine.injection) == (None, 0, {}, injection)
    coded, held = CodedWeights(injection.faults[0]), Held()
    for group in (coded, held):
        assert group.frame is None and group.entries == []
        group.rest()
        group.settle()
    assert (coded.each, held.each) == (True, False)


# ---- draws of many


@pytest.mark.parametrize(
    ("kind", "magnitude"), [("rms_gaussian", 0.5), ("absolute_gaussian", 0.25), ("relative_gaussian", 2.0)]
)
def test_what_a_draw_tells_the_ledger(kind, magnitude):
    sums = [16.0, 14.0, 8.0, 7.0, 1.0, 4.0, 32.0]
    found = prepared_noise._columns(make_fault({"kind": kind, "magnitude": 0.1}), sums)
    assert found == [1.0, 0.25, 16.0, 14.0, 8.0, 7.0, 1.0, magnitude, magnitude**2]


@pytest.mark.parametrize("kind", ["rms_gaussian", "relative_gaussian"])
def test_a_draw_on_zeros_tells_no_magnitude_and_no_error(kind):
    found = prepared_noise._columns(make_fault({"kind": kind, "magnitude": 0.1}), [16.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert found == [1.0, 0.0, 16.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


class Sums:
    """Sums on a GPU that notes when it is asked."""

    def __init__(self, asked):
        self.asked = asked

    def tolist(self):
        self.asked.append(1)
        return [[4.0, 4.0, 4.0, 4.0, 1.0, 4.0, 0.0], [9.0, 8.0, 7.0, 6.0, 1.0, 4.0, 0.0]]


def read_draws(injection):
    """Two draws of one launch that were read, and are to be told."""
    taps = [injection.make_tap(0, f"{name}.weight", "weight", None) for name in "ab"]
    asked = []
    draw = prepared_noise._NoiseDraw(5, injection.faults[0], Sums(asked))
    drawn = DrawnWeights()
    for row, tap in enumerate(taps):
        drawn._new[tap] = draw, row
        drawn.count(tap)
    return drawn, taps, asked


def held_injection():
    return Injection(Plan.parse(NOISE), hold=True, allow_inert=True)


def test_a_launch_is_asked_once_for_all_draws_that_were_read_and_each_gets_its_row():
    injection = held_injection()
    drawn, taps, asked = read_draws(injection)
    assert injection.fires == 2 and drawn._new == {}
    drawn.settle()
    drawn.settle()
    assert asked == [1]
    injection.settle()
    assert [tap.spot.forward.values for tap in taps] == [4, 9] and [tap.spot.forward.changed for tap in taps] == [4, 8]
    assert all(tap.spot.counts == {"rollout": [1, 0]} for tap in taps)


def test_a_draw_that_was_made_anew_does_not_count_again():
    injection = held_injection()
    drawn, taps, asked = read_draws(injection)
    draw = prepared_noise._NoiseDraw(5, injection.faults[0], Sums(asked))
    drawn._new[taps[0]] = draw, 0
    drawn.count(taps[0])
    assert injection.fires == 2 and drawn._new == {}
    drawn.settle()
    injection.settle()
    assert taps[0].spot.counts == {"rollout": [1, 0]} and taps[0].spot.forward.fires == 1
    other = prepared_noise._NoiseDraw(6, injection.faults[0], Sums(asked))
    drawn._new[taps[0]] = other, 1
    drawn.count(taps[0])
    assert injection.fires == 3


@pytest.mark.parametrize(
    ("main", "drew", "captures", "told"),
    [
        (True, False, False, True), (True, True, False, True), (False, True, False, True), (False, False, False, False),
        (True, True, True, False), (False, True, True, False),
    ],
)  # fmt: skip
def test_the_thread_that_drew_and_the_main_one_may_ask_unless_a_graph_is_captured(monkeypatch, main, drew, captures, told):
    drawn, _, asked = read_draws(held_injection())
    monkeypatch.setattr(prepared_noise, "capturing", lambda: captures)

    def settle():
        drawn._thread = threading.get_ident() if drew else -1
        drawn.settle()

    if main:
        settle()
    else:
        thread = threading.Thread(target=settle)
        thread.start()
        thread.join()
    assert bool(asked) is told
    monkeypatch.undo()
    drawn.settle()
    assert asked == [1], "what was not told is told later"


@torch.no_grad()
def test_a_launch_is_laid_out_again_for_other_weights_another_kind_or_another_shape(gpu):
    injection = held_injection()
    taps = [injection.make_tap(0, f"{name}.weight", "weight", None) for name in "abc"]
    entries = [SimpleNamespace(tap=tap, parameter=nn.Parameter(torch.ones(4, 2))) for tap in taps]
    fault = injection.faults[0]
    layout = prepared_noise._Layout(entries[:2], fault)
    assert layout.rows == [0, 1] and [home.shape for home in layout.homes] == [(4, 2), (4, 2)]
    assert layout.fits(entries[:2], fault) and layout.fits(list(entries[:2]), fault.with_magnitude(0.7))
    assert not layout.fits(entries, fault) and not layout.fits(entries[1::-1], fault) and not layout.fits(entries[1:], fault)
    for other in ({"kind": "rms_gaussian", "magnitude": 0.1}, {"kind": "absolute_gaussian", "magnitude": 0.1, "sparsity": 0.5}):
        assert not layout.fits(entries[:2], make_fault(other))
    for data in (torch.ones(2, 4).t(), torch.ones(8, 4), torch.ones(4, 2).double()):
        before = entries[0].parameter.data
        entries[0].parameter.data = data
        assert not layout.fits(entries[:2], fault)
        entries[0].parameter.data = before
    assert layout.fits(entries[:2], fault)


def drawn_entry(injection, **more):
    tap = injection.make_tap(0, "a.weight", "weight", None)
    return SimpleNamespace(
        **{"tap": tap, "parameter": nn.Parameter(torch.ones(4)), "value": "old", "version": 0, "unread": True} | more
    )


@pytest.mark.parametrize(("unread", "counted", "after"), [(True, True, False), (True, False, True), (False, False, False)])
def test_a_draw_that_is_kept_for_this_rollout_stays_and_is_to_be_counted_unless_it_was(gpu, unread, counted, after):
    injection = held_injection()
    entry, fault, value = drawn_entry(injection, unread=unread), injection.faults[0], torch.zeros(4)
    moment, origin = entry.tap.moment(), (1, 7, False)
    entry.tap.keep(moment, origin, value)
    if counted:
        entry.tap.count("rollout", entry.tap.key_at(moment), fault)
    DrawnWeights().renew([entry], [origin], fault)
    assert (entry.value, entry.version, entry.unread) == (value, 7, after) and gpu.launches == []


@pytest.mark.parametrize("fault", ["absolute_gaussian:0.1", "mxfp4"])
def test_a_weight_that_cannot_be_drawn_together_is_not_ready_and_not_to_be_counted(gpu, fault):
    injection = Injection(Plan.parse(f"{fault}@module.linear,point=weight"), hold=True, allow_inert=True)
    entry = drawn_entry(injection)
    gpu.draws = lambda given, x: given.kind == "mxfp4"  # which has no magnitude to draw with
    DrawnWeights().renew([entry], [(1, 7, False)], injection.faults[0])
    assert (entry.value, entry.version, entry.unread) == (None, 7, False) and gpu.launches == []


def test_the_places_of_a_launch_are_those_of_the_weights_that_it_draws(gpu):
    injection = held_injection()
    taps = [injection.make_tap(0, f"{name}.weight", "weight", None) for name in "abc"]
    entries = [SimpleNamespace(tap=tap, parameter=nn.Parameter(torch.ones(2 + i))) for i, tap in enumerate(taps)]
    gpu.draws = lambda fault, x: x.numel() != 3
    layout = prepared_noise._Layout(entries, injection.faults[0])
    assert layout.rows == [0, 2] and layout.launch.places == [taps[0].place, taps[2].place]
    assert [(x.numel(), x.requires_grad, y.numel()) for x, y in layout.launch.pairs] == [(2, False, 2), (4, False, 4)]
    gpu.draws = lambda fault, x: False
    assert prepared_noise._Layout(entries, injection.faults[0]).launch is None


@torch.no_grad()
def test_a_weight_that_is_replaced_inside_a_rollout_is_seen(gpu, monkeypatch):
    def act(model, injection):
        with st.phase("rollout"):
            model(EYE)
        with st.phase("rollout"):
            seen = [model(EYE)]
            model.a._parameters["weight"] = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
            return [*seen, model(EYE), model(EYE)]

    both_ways(gpu, monkeypatch, NOISE, act)
