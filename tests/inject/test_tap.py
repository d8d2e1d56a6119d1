"""A tap and the operator it places: what is drawn, on which side, what is counted of it, and what its gradient is."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import shaketable as st
from shaketable.errors import PlanError
from shaketable.faults import make_fault
from shaketable.faults.rng import Draw, key_of, lanes, mix64
from shaketable.inject import fault_operator
from shaketable.inject.compile import custom_ops
from shaketable.inject.fault_operator import Application, apply, pull_back
from shaketable.inject.injection import Injection
from shaketable.inject.pass_context import Entry, Frame, Pass
from shaketable.ledger.spot import Spot
from shaketable.plan import Plan
from tests.tensors import draw

NOISE = make_fault({"kind": "relative_gaussian", "magnitude": 0.5})
X = draw(4, 8)
MOMENT = 5


def made(plan="relative_gaussian:0.5@module.linear", **options):
    injection = Injection(Plan.parse(plan, seed=options.pop("seed", 3)), **{"rank": 1, "allow_inert": True, **options})
    injection.enabled = True
    return injection


def opened(injection, recomputing=False, **options):
    current = Pass(injection, "train", MOMENT, (True,) * len(injection.faults), tuple(injection.faults), **options)
    return Frame(Entry(0, nn.Identity(), None), current, None, None, recomputing)


def key(way="forward", use=0, place=(3, 0, "a", "output"), rank=1):
    return mix64(key_of(*place, way, rank) ^ mix64(MOMENT + use))


def noisy(x, k):
    return NOISE.apply(x, Draw(k))


def tap_of(injection, name="a", point="output"):
    return injection.make_tap(0, name, point, None)


# ---- forward


@pytest.mark.parametrize("grad", [False, True])
def test_uses_of_a_tap_in_one_pass_are_numbered_and_drawn_by_their_number(grad):
    injection = made()
    tap, frame = tap_of(injection), opened(injection)
    for use in range(3):
        found = tap.forward(X.clone().requires_grad_(grad), frame)
        assert torch.equal(found, noisy(X, key(use=use))) and found.requires_grad is grad
    assert injection.ledger.forward == 3


def test_a_tap_that_does_not_act_gives_back_the_tensor_itself_and_counts_no_use():
    injection = made()
    tap, frame = tap_of(injection), opened(injection)
    injection.enabled = False
    assert tap.forward(X, frame) is X and tap.gradient(X, frame) is X and tap.touch(X, frame) is X
    injection.enabled = True
    assert torch.equal(tap.forward(X, frame), noisy(X, key())), "the first use of all"
    silent = opened(injection)
    silent.current.acts = (False,)
    assert tap.forward(X, silent) is X and injection.ledger.forward == 1


@pytest.mark.parametrize(("wants", "enabled"), [(True, False), (False, True), (False, False)])
def test_where_no_gradient_is_wanted_nothing_is_kept_for_one(wants, enabled):
    injection = made("saturation:0.5@module.linear")
    tap, x = tap_of(injection), X.clone().requires_grad_(wants)
    with torch.set_grad_enabled(enabled):
        found = tap.forward(x, opened(injection))
        assert found.grad_fn is None and tap.gradient(x, opened(injection)) is x


def test_the_fault_is_that_of_when_the_pass_began():
    injection = made("gain:1@module.linear")
    tap, frame = tap_of(injection), opened(injection)
    injection.set_magnitude(4)
    assert torch.equal(tap.forward(X, frame), 2 * X) and tap.fault.magnitude == 4
    assert torch.equal(tap.forward(X, opened(injection)), 5 * X)


@pytest.mark.parametrize(("direction", "value", "slope"), [("forward", 3.0, 3.0), ("backward", 1.0, 3.0), ("both", 3.0, 9.0)])
def test_a_tensor_is_touched_in_the_directions_of_its_clause(direction, value, slope):
    injection = made(f"gain:2@module.linear,direction={direction}")
    tap, x = tap_of(injection), torch.ones(3, requires_grad=True)
    y = tap.touch(x, opened(injection))
    y.sum().backward()
    assert (y[0].item(), x.grad[0].item()) == (value, slope)


# ---- the gradient


def test_a_gradient_has_the_noise_of_its_argument_and_number_and_keys_of_its_own():
    injection = made("relative_gaussian:0.5@module.linear,direction=backward")
    tap, frame, given = tap_of(injection), opened(injection), draw(4, 8, seed=1)
    for argument, number, use in ((0, None, 0), (0, None, 1), (2, None, 2 << 32), (0, None, 2), (1, 7, (1 << 32) + 7)):
        x = X.clone().requires_grad_()
        y = tap.gradient(x, frame, argument, number)
        assert torch.equal(y, X)
        y.backward(given)
        assert torch.equal(x.grad, noisy(given, key("backward", use)))
    assert injection.ledger.backward == 5 and injection.ledger.forward == 0


def test_uses_are_counted_where_no_gradient_is_wanted_too_and_a_number_that_is_given_counts_nothing():
    """Reentrant checkpointing runs the first pass without gradients."""
    injection = made("relative_gaussian:0.5@module.linear,direction=backward")
    tap, frame = tap_of(injection), opened(injection)
    with torch.no_grad():
        assert tap.gradient(X, frame) is X
    tap.gradient(X, frame, number=9)
    x = X.clone().requires_grad_()
    tap.gradient(x, frame).sum().backward()
    assert torch.equal(x.grad, noisy(torch.ones_like(X), key("backward", 1)))


@pytest.mark.parametrize("level", ["module.linear", "op.matmul"])
def test_what_a_module_returns_is_copied_and_what_an_operator_reads_is_a_view(level):
    injection = made(f"gain:1@{level},direction=backward")
    x = X.clone().requires_grad_()
    y = tap_of(injection).gradient(x, opened(injection))
    assert torch.equal(y, x) and (y.data_ptr() == x.data_ptr()) is level.startswith("op")


@pytest.mark.parametrize("off", [False, True])
def test_a_plan_that_is_switched_off_before_backward_leaves_the_gradient_alone(off):
    injection = made("gain:1@module.linear,direction=backward")
    x = X.clone().requires_grad_()
    y = tap_of(injection).gradient(x, opened(injection))
    injection.set_magnitude(5)
    injection.enabled = not off
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 1.0 if off else 2.0)), "the magnitude is that of the pass"
    injection.enabled = True
    assert injection.ledger.backward == int(not off)


def test_the_gradient_of_what_was_done_forward_stays_when_the_plan_is_switched_off():
    injection = made("gain:1@module.linear")
    x = X.clone().requires_grad_()
    y = tap_of(injection).forward(x, opened(injection))
    injection.enabled = False
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 2.0))


def test_noise_is_pulled_back_with_the_draw_of_the_forward():
    injection = made()
    tap, frame, x = tap_of(injection), opened(injection), torch.ones(4, 8, requires_grad=True)
    tap.forward(x.detach(), frame)
    y = tap.forward(x, frame)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()), "the factor of each value, of its second use"
    assert torch.equal(x.grad, noisy(torch.ones(4, 8), key(use=1))) and injection.ledger.backward == 0


@pytest.mark.parametrize(("level", "slope"), [("module.linear", 0.0), ("op.matmul", 1.0)])
def test_what_clips_has_no_gradient_where_it_clips_but_for_operators_whose_backward_is_their_own(level, slope):
    injection = made(f"saturation:2,scope=absolute@{level},direction=forward")
    x = torch.tensor([1.0, -5.0, 5.0], requires_grad=True)
    y = tap_of(injection).forward(x, opened(injection))
    assert (len(y.grad_fn.saved_tensors) == 1) is (slope == 0.0), "kept where it is asked for"
    y.sum().backward()
    assert y.tolist() == [1.0, -2.0, 2.0] and x.grad.tolist() == [1.0, slope, slope]


def test_a_gradient_has_a_gradient_where_operators_are_faulty_and_is_refused_one_elsewhere():
    for level in ("op.matmul", "module.linear"):
        injection = made(f"gain:1@{level},direction=forward")
        x, g = torch.full((3,), 2.0, requires_grad=True), torch.ones(3, requires_grad=True)
        y = tap_of(injection).forward(x**3, opened(injection))
        (first,) = torch.autograd.grad(y, x, g, create_graph=True)
        assert torch.equal(first, torch.full((3,), 12.0 if level == "op.matmul" else 24.0))
        if level == "op.matmul":
            second = torch.autograd.grad(first.sum(), (x, g))
            assert [s.tolist() for s in second] == [[12.0] * 3, [12.0] * 3]
        else:
            with pytest.raises(RuntimeError, match="once_differentiable"):
                first.sum().backward()


def test_a_captured_pass_pulls_back_by_the_table(monkeypatch):
    injection = made()
    tap, told = tap_of(injection), []
    monkeypatch.setattr(injection.tables, "pull_back", lambda *how: told.append(how) or "by the table")
    what = Application(tap, opened(injection, captured=True).current, False, 0, 0)
    assert pull_back(X, None, what) == "by the table" and told == [(X, None, what)]
    plain = Application(tap, opened(injection).current, False, 0, 0)
    assert torch.equal(pull_back(X, None, plain), noisy(X, key())) and len(told) == 1


# ---- weights that are stored the other way round


def test_a_fault_acts_on_the_rows_of_a_weight_that_is_stored_as_columns():
    injection = made("dead_zone:0.5,scope=token@module.linear,point=weight")
    tap = tap_of(injection, point="weight")
    tap.transposed = True
    x = torch.tensor([[1.0, 10.0], [0.4, 9.0], [0.6, 1.0]])
    assert tap.forward(x, opened(injection)).tolist() == [[1.0, 10.0], [0.0, 9.0], [pytest.approx(0.6), 0.0]]
    tap.transposed = False
    assert tap.forward(x, opened(injection)).tolist() == [[0.0, 10.0], [0.0, 9.0], [pytest.approx(0.6), 1.0]]


def test_the_gradient_of_such_a_weight_is_that_of_its_rows():
    injection = made("dead_zone:0.5,scope=token@module.linear,point=weight")
    tap = tap_of(injection, point="weight")
    tap.transposed = True
    x = torch.tensor([[1.0, 10.0], [0.4, 9.0], [0.6, 1.0]], requires_grad=True)
    given = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    tap.forward(x, opened(injection)).backward(given)
    assert x.grad.tolist() == [[1.0, 2.0], [0.0, 4.0], [5.0, 0.0]]


def test_noise_on_such_a_weight_is_drawn_along_its_rows_forward_and_back():
    injection = made("relative_gaussian:0.5@module.linear,point=weight")
    tap, x = tap_of(injection, point="weight"), torch.ones(3, 5, requires_grad=True)
    tap.transposed = True
    y = tap.forward(x, opened(injection))
    wanted = noisy(torch.ones(5, 3), key(place=(3, 0, "a", "weight"))).T
    assert torch.equal(y, wanted)
    y.sum().backward()
    assert torch.equal(x.grad, wanted)


# ---- broken lanes


@pytest.mark.parametrize("transposed", [False, True])
def test_clean_channels_stay_clean_forward_and_backward(transposed):
    injection = made("gain:1,sparsity=0.25@module.linear,point=weight")
    tap, x = tap_of(injection, point="weight"), torch.ones(8, 8, requires_grad=True)
    tap.transposed = transposed
    y = tap.forward(x, opened(injection))
    hit = lanes(8, 0.25, key_of(3, 0, "a", "weight", "lanes"))
    factor = 1.0 + (hit.float() if transposed else hit.float()[:, None]).expand(8, 8)
    assert torch.equal(y, factor)
    y.sum().backward()
    assert torch.equal(x.grad, factor)
    site = injection.ledger.sites[0]
    assert site.magnitude == pytest.approx(1) and site.measured().changed == 16 and site.measured().values == 64


def test_lanes_are_kept_by_their_number_and_for_rows_apart():
    injection = made("gain:1,sparsity=0.5@module.linear,point=weight")
    tap, fault = tap_of(injection, point="weight"), injection.faults[0]
    four, eight = tap.mask(torch.zeros(4, 2), fault), tap.mask(torch.zeros(8, 2), fault)
    assert (tuple(four.shape), tuple(eight.shape)) == ((4, 1), (8, 1))
    assert tuple(tap.mask(torch.zeros(4), fault).shape) == (4,), "a bias has no rows"
    assert tap.mask(torch.zeros(4, 7), fault) is four, "looked up the second time"
    bare = make_fault({"kind": "gain", "magnitude": 1.0})
    assert tap.mask(torch.zeros(4, 2), bare) is None


def test_a_number_without_a_side_has_no_channel_and_is_faulty():
    injection = made("gain:1,sparsity=0.5@module.linear")
    assert float(tap_of(injection).forward(torch.tensor(3.0), opened(injection))) == 6.0


# ---- statistics of a first use


def test_a_statistic_that_another_process_took_is_used_where_its_name_is_known():
    injection = made("bias:1@module.linear")
    injection.references = {"0 a output forward 0": 100.0, "0 a output backward 0": 7.0}
    known, fresh = tap_of(injection), tap_of(injection, "b")
    frame, x = opened(injection), torch.tensor([-1.0, 1.0])
    assert known.forward(x, frame).tolist() == [99.0, 101.0] and fresh.forward(x, frame).tolist() == [0.0, 2.0]
    assert known.references() == [("0 a output forward 0", 100.0)] and fresh.references() == [("0 b output forward 0", 1.0)]
    assert known.forward(50 * x, frame).tolist() == [50.0, 150.0], "kept from then on"


def test_a_statistic_of_zero_is_one_and_is_kept_and_handed_on():
    injection = made("bias:1@module.linear")
    tap, other, x = tap_of(injection), tap_of(injection, "b"), torch.tensor([-1.0, 1.0])
    tap.forward(torch.ones(2), opened(injection))
    assert tap.references() == [("0 a output forward 0", 0.0)] and torch.equal(tap.forward(x, opened(injection)), x)
    injection.references = {"0 b output forward 0": 0.0}
    assert torch.equal(other.forward(x, opened(injection)), x)


def test_a_fault_that_takes_no_statistic_is_given_none():
    injection = made("gain:1@module.linear")
    injection.references = {"0 a output forward 0": 100.0}
    tap = tap_of(injection)
    assert torch.equal(tap.forward(X, opened(injection)), 2 * X) and tap.references() == []


def test_a_gradient_takes_its_own_statistic():
    injection = made("bias:1@module.linear,direction=both")
    tap, x = tap_of(injection), torch.tensor([-1.0, 1.0], requires_grad=True)
    y = tap.touch(x, opened(injection))
    y.backward(torch.tensor([-3.0, 3.0]))
    assert x.grad.tolist() == [0.0, 6.0]
    assert tap.references() == [("0 a output forward 0", 1.0), ("0 a output backward 0", 3.0)]


# ---- a tap as such


def test_a_tap_that_begins_anew_forgets_what_it_took_and_has_the_keys_of_now():
    injection = made("bias:1,sparsity=0.5@module.linear")
    tap = tap_of(injection)
    tap.forward(torch.tensor([-1.0, 1.0, -1.0, 1.0]), opened(injection))
    before = tap.mask(X, injection.faults[0])
    injection.plan, injection.rank = Plan.parse("bias:1,sparsity=0.5@op.matmul", seed=8), 5
    spot = Spot("other", 2)
    tap.begin(spot)
    assert tap.spot is spot and tap.site.level == "op" and tap.references() == []
    assert tap.keys == tuple(key_of(8, 0, "a", "output", way, 5) for way in ("forward", "backward"))
    after = tap.mask(X, injection.faults[0])
    assert after is not before and torch.equal(after, lanes(8, 0.5, key_of(8, 0, "a", "output", "lanes")))


def test_a_tap_is_known_to_graphs_until_its_injection_is_closed():
    injection = made()
    first, second = tap_of(injection), tap_of(injection, "b")
    assert custom_ops.live(first.handle) is first and custom_ops.live(second.handle) is second
    assert (first.index, second.index) == (0, 1) and first.reads_tables and not first.is_held and not first.transposed
    injection.close()
    assert custom_ops.live(first.handle) is None


@pytest.mark.parametrize(("level", "straight"), [("op.matmul", True), ("module.linear", False), ("layer.0", False)])
def test_operators_alone_leave_gradients_to_an_operator_of_their_own(level, straight):
    assert tap_of(made(f"gain:1@{level}")).straight is straight


# ---- the operator


def test_a_fire_is_counted_in_its_phase_measured_and_timed():
    injection = made("gain:0.5@module.linear")
    tap = tap_of(injection)
    current = Pass(injection, "eval", MOMENT, (True,), tuple(injection.faults))
    apply(X, Application(tap, current, False, 0, 0))
    apply(X, Application(tap, current, True, 0, 0))
    site = injection.ledger.sites[0]
    assert site.by("phase") == {"eval": {"forward": 1, "backward": 1}} and injection.fires == 2
    assert tap.spot.forward.magnitude == pytest.approx(0.5) == tap.spot.backward.magnitude and tap.spot.seconds > 0
    assert (tap.spot.forward.values, tap.spot.forward.changed) == (32, 32)


def test_what_is_computed_again_is_no_fire_but_its_gradient_is_one():
    injection = made("gain:0.5@module.linear,direction=both")
    tap, x = tap_of(injection), X.clone().requires_grad_()
    y = tap.touch(x, opened(injection, recomputing=True))
    assert torch.allclose(y, 1.5 * X)
    y.sum().backward()
    assert (injection.ledger.forward, injection.ledger.backward, tap.spot.recomputed) == (0, 1, 1)
    assert injection.fires == 2, "a copy of the ledger is out of date all the same"


def test_an_application_that_is_no_fire_is_not_counted(monkeypatch):
    injection = made("gain:0.5@module.linear")
    tap = tap_of(injection)
    monkeypatch.setattr(type(tap), "is_fire", lambda self, what: False)
    assert torch.allclose(tap.forward(X, opened(injection)), 1.5 * X) and injection.ledger.forward == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("point", ["input", "output"])
def test_what_is_no_floating_tensor_is_refused_by_its_place(point, dtype):
    injection = made(f"gain:1@module.thing,point={point}")
    with pytest.raises(PlanError) as refused:
        tap_of(injection, "net.thing", point).forward(torch.ones(2, dtype=dtype), opened(injection))
    assert str(refused.value) == f"module.thing: net.thing {point} is {dtype}; faults act on floating tensors"
    assert injection.ledger.forward == 0 and injection.fires == 0


class Watching(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_no_mode_sees_how_a_tensor_became_faulty():
    injection = made("dead_zone:0.5,scope=token@module.linear")
    what = Application(tap_of(injection), opened(injection).current, False, 0, 0)
    with Watching() as mode:
        found = apply(X, what)
    assert mode.seen == [] and not torch.equal(found, X)


def test_measuring_keeps_nothing_for_a_gradient(monkeypatch):
    injection, seen = made("gain:1@module.linear"), []
    measure = fault_operator.measure

    def watched(fault, clean, faulty, mask):
        seen.append((clean.requires_grad, faulty.requires_grad, torch.is_grad_enabled(), mask))
        return measure(fault, clean, faulty, mask)

    monkeypatch.setattr(fault_operator, "measure", watched)
    apply(X.clone().requires_grad_(), Application(tap_of(injection), opened(injection).current, False, 0, 0))
    assert seen == [(False, False, False, None)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_faulty_tensor_has_the_type_and_the_shape_of_the_clean_one(dtype):
    for plan in ("gain:1@module.linear", "relative_gaussian:0.5,sparsity=0.5@module.linear"):
        injection = made(plan)
        x = X.to(dtype).requires_grad_()
        y = tap_of(injection).forward(x, opened(injection))
        y.sum().backward()
        assert (y.dtype, y.shape, x.grad.dtype) == (dtype, X.shape, dtype)


def test_a_gradient_belongs_to_the_pass_of_its_forward_whatever_came_between():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8, bias=False), X.clone().requires_grad_()
    grads = []
    for between in (False, True):
        with st.inject(model, "relative_gaussian:0.5@module.linear,direction=backward", seed=1):
            y = model(x)
            if between:
                model(x).sum().backward()
                x.grad = None
            y.sum().backward()
        grads.append(x.grad.clone())
        x.grad = None
    assert torch.equal(*grads)
