"""Passes, frames and taps by themselves: what keys the noise, what is counted where, and what is remembered."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import InertError, PlanError
from shaketable.faults.rng import key_of, lanes, mix64
from shaketable.inject import passes, weights
from shaketable.inject.injection import Injection, this_rank
from shaketable.inject.op import Application
from shaketable.inject.passes import Calls, Entry, Frame, Pass, _address
from shaketable.inject.weights import HeldTap
from shaketable.plan import Plan

X = torch.ones(2, 4)


def made(plan="gain:1@module.linear", **options):
    return Injection(Plan.parse(plan, seed=options.pop("seed", 0)), **{"rank": 0, "allow_inert": True, **options})


def opened(injection, entry=None, **options):
    entry = entry or Entry(0, nn.Identity(), None)
    current = Pass(injection, "train", 5, (True,) * len(injection.faults), tuple(injection.faults), **options)
    return Frame(entry, current, entry.layer, entry.excluded, recomputing=False)


# ---- keys


def test_a_moment_is_made_of_step_entry_phase_and_number():
    calls = Calls(SimpleNamespace(), step=7)
    found = [calls.new_key(3, phase) for phase in ("rollout", "train", "eval", "train")]
    wanted = [mix64(mix64(mix64(7) ^ (3 << 8 | i)) + n) for i, n in ((0, 0), (1, 0), (2, 0), (1, 1))]
    assert found == wanted and calls.new_key(4, "train") == mix64(mix64(mix64(7) ^ (4 << 8 | 1)))
    calls.set_step(8)
    assert calls.step == 8 and calls.new_key(3, "train") == mix64(mix64(mix64(8) ^ (3 << 8 | 1)))
    calls.set_step(7)
    assert calls.new_key(3, "train") == wanted[1], "a step that begins again counts from zero"


def test_a_use_of_a_tap_is_keyed_by_its_place_its_pass_and_its_number():
    injection = made("gain:1@layer.0;gain:1@layer.1", seed=9, rank=2)
    tap = injection.make_tap(1, "layers.1", "input", 1)
    keys = tuple(key_of(9, 1, "layers.1", "input", way, 2) for way in ("forward", "backward"))
    current = opened(injection).current
    assert tap.keys == keys
    for backward in (False, True):
        assert tap.key(current, backward, 0) == mix64(keys[backward] ^ mix64(5))
        assert tap.key(current, backward, 3) == mix64(keys[backward] ^ mix64(5 + 3))
    assert current.mixed(0) == current.mixed(0) == mix64(5)
    what = Application(tap, current, True, 2, 7)
    assert what.key == tap.key(current, True, (2 << 32) + 7) and what.fault is injection.faults[1]


# ---- frames


def test_what_is_counted_is_counted_in_the_outermost_frame():
    outer = opened(made())
    inner = Frame(outer.entry, outer.current, 1, None, recomputing=False, outer=outer)
    assert [inner.count("a"), outer.count("a"), inner.count("b"), inner.count("a")] == [0, 1, 0, 2]
    assert outer.counts == {"a": 3, "b": 1} and inner.counts == {}
    again = inner.again()
    assert again.recomputing and (again.layer, again.outer, again.current) == (1, None, outer.current)
    assert again.count("a") == 3 and outer.counts["a"] == 3, "a recomputation counts on, and for itself"
    based = Frame(outer.entry, outer.current, None, None, recomputing=True, base=4)
    assert [based.count("a"), based.count("a"), based.again().base] == [4, 5, 4]


def test_a_module_remembers_its_last_calls_and_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(passes, "_REMEMBERED", 3)
    entry, frames = Entry(0, nn.Identity(), None), [opened(made()) for _ in range(4)]
    for address, frame in zip((1, 2, 1, 3), frames, strict=True):
        entry.remember(address, frame, address * 10)
    assert list(entry.passes) == [2, 1, 3] and entry.passes[1] == (frames[2].current, 10)
    entry.remember(4, frames[0], 40)
    assert list(entry.passes) == [1, 3, 4]


@pytest.mark.parametrize(
    ("args", "kwargs", "which"),
    [((X, X + 1), {}, 0), ((None, 3, X), {}, 2), ((), {"a": 1, "b": X}, "b"), (([X],), {}, None), ((), {}, None)],
)
def test_a_call_is_known_by_the_address_of_its_first_tensor(args, kwargs, which):
    wanted = 0 if which is None else (kwargs[which] if isinstance(which, str) else args[which]).data_ptr()
    assert _address(args, kwargs) == wanted


def test_a_tensor_of_a_class_of_its_own_has_no_address_that_counts():
    strange = X.as_subclass(type("Strange", (torch.Tensor,), {}))
    assert _address((strange, X), {}) == X.data_ptr() and _address((nn.Parameter(X),), {}) == X.data_ptr()


def test_a_module_without_a_layer_belongs_to_that_of_its_caller_and_one_with_keeps_its_own():
    injection = made()
    injection.enabled = True
    calls = injection.calls
    inside = Entry(1, nn.Identity(), 2, excluded="router")
    calls.push(calls.open(Entry(0, nn.Identity(), 0, is_root=True), (X,), {}))
    calls.push(calls.open(inside, (X,), {}))
    deeper = calls.open(Entry(2, nn.Identity(), None), (X,), {})
    assert (deeper.layer, deeper.excluded, deeper.outer) == (2, "router", calls.stack[0])
    zero = calls.open(Entry(3, nn.Identity(), 0, excluded="lora"), (X,), {})
    assert (zero.layer, zero.excluded) == (0, "lora")
    calls.pop()
    assert calls.top() is calls.stack[0] and len(calls.stack) == 1
    calls.pop()
    assert calls.top() is None


@pytest.mark.parametrize(("graded", "training", "kept"), [(False, False, 0), (True, False, 1), (False, True, 1)])
def test_calls_are_remembered_where_they_may_be_recomputed(graded, training, kept):
    injection = made()
    entry = Entry(0, nn.Identity().train(training), None)
    with torch.set_grad_enabled(graded):
        injection.calls.open(entry, (X,), {})
    assert len(entry.passes) == kept


# ---- what a pass decides


def test_a_clause_acts_in_its_phases_when_it_is_on_and_not_off_by_itself():
    injection = made("gain:1@layer.0;gain:0@layer.0;gain:1@layer.0,phase=train+eval;gain:1@layer.0,phase=rollout")
    assert injection.acting("train") == (False,) * 4
    injection.enabled = True
    assert injection.acting("train") == (True, False, True, False) == injection.acting("eval")
    assert injection.acting("rollout") == (True, False, False, True)
    assert injection.acting("rollout", captured=True) == (True, True, False, True), "a magnitude may come later"


def test_a_pass_has_the_faults_of_when_it_began_and_a_plan_that_is_switched_off_does_nothing_more():
    injection = made()
    injection.enabled = True
    entry = Entry(4, nn.Identity(), None)
    current = injection.begin_pass(entry, "eval")
    tap = injection.make_tap(0, "a", "output", None)
    assert (current.phase, current.acts, current.captured, current.with_gradients) == ("eval", (True,), False, True)
    assert current.key == mix64(mix64(mix64(0) ^ (4 << 8 | 2))) and current.acts_on(tap)
    injection.set_magnitude(0.25)
    assert current.faults[0].magnitude == 1 and injection.faults[0].magnitude == 0.25 == injection.sites[0].asked
    injection.enabled = False
    assert not current.acts_on(tap)
    with torch.no_grad():
        assert injection.begin_pass(entry, "eval").with_gradients is False


@pytest.mark.parametrize("skipped", [False, True])
def test_a_pass_that_is_spared_is_left_alone_and_is_counted_all_the_same(skipped):
    injection = made()
    injection.enabled = True
    injection.skip_pass = lambda: skipped
    entry = Entry(0, nn.Identity(), None)
    first, second = (injection.begin_pass(entry, "train") for _ in range(2))
    assert first.acts == (not skipped,) and first.key != second.key


# ---- taps


def test_a_tap_is_called_by_its_module_and_by_its_point_where_that_is_not_the_output():
    injection = made(hold=True)
    taps = [injection.make_tap(0, "a", point, 1) for point in ("output", "input", "weight")]
    shown = injection.make_tap(0, "a", "output", 2, shown="b")
    assert [t.spot.name for t in (*taps, shown)] == ["a", "a:input", "a:weight", "b"]
    assert [t.index for t in (*taps, shown)] == [0, 1, 2, 3] and [t.spot.layer for t in taps] == [1, 1, 1]
    assert [type(t) is HeldTap for t in taps] == [False, False, True] and [t.is_held for t in taps] == [False, False, True]
    assert injection.make_tap(0, "a", "output", 1).spot is taps[0].spot, "one place in the ledger"
    assert list(injection.sites[0].spots) == ["a", "a:input", "a:weight", "b"]


@pytest.mark.parametrize(
    ("point", "shape", "transposed", "channels", "column"),
    [
        ("output", (2, 8), False, 8, False), ("input", (2, 3, 8), False, 8, False), ("weight", (8, 3), False, 8, True),
        ("weight", (3, 8), True, 8, False), ("weight", (8,), False, 8, False), ("weight", (2, 8, 3), False, 8, True),
    ],
)  # fmt: skip
def test_faulty_channels_are_the_last_side_of_an_activation_and_the_outputs_of_a_weight(
    point, shape, transposed, channels, column
):
    injection = made("gain:1,sparsity=0.25@module.linear", seed=3)
    tap = injection.make_tap(0, "a", point, None)
    tap.transposed = transposed
    mask = tap.mask(torch.zeros(shape), injection.faults[0])
    wanted = lanes(channels, 0.25, key_of(3, 0, "a", point, "lanes"))
    assert torch.equal(mask, wanted.unsqueeze(-1) if column else wanted) and int(mask.sum()) == 2
    assert tap.mask(torch.zeros(()), injection.faults[0]) is None
    assert tap.mask(torch.zeros(shape), made().faults[0]) is None, "all of them"


def test_statistics_of_a_first_use_are_kept_per_direction_and_argument_and_told_by_name():
    injection = made("bias:0.5@module.linear")
    tap = injection.make_tap(0, "a", "output", None)
    current = opened(injection).current
    small, large = torch.tensor([[0.0, 2.0]]), torch.tensor([[0.0, 20.0]])
    for backward, argument, x in ((False, 0, small), (True, 0, large), (True, 1, small), (False, 0, large)):
        tap.compute(x, Application(tap, current, backward, argument, 0))
    assert tap.references() == [("0 a output forward 0", 1.0), ("0 a output backward 0", 10.0), ("0 a output backward 1", 1.0)]
    assert made().make_tap(0, "a", "output", None).references() == []


def test_a_fault_that_scales_scales_its_gradient_and_that_of_clean_channels_stays():
    model = nn.Linear(4, 4, bias=False)
    with st.inject(model, "gain:1,sparsity=0.5@module.linear", seed=0) as ledger:
        x = X.clone().requires_grad_()
        y = model(x)
        y.backward(torch.ones_like(y))
    clean = X @ model.weight.T
    hit = ~torch.isclose(y, clean).all(0)
    assert int(hit.sum()) == 2 and torch.allclose(x.grad, (model.weight * (1 + hit.float())[:, None]).sum(0).expand(2, 4))
    assert ledger.sites[0].magnitude == pytest.approx(1)


def test_integers_are_refused_with_their_place_and_type():
    injection = made("gain:1@module.embedding,point=input")
    tap = injection.make_tap(0, "embed", "input", None)
    with pytest.raises(PlanError) as refused:
        tap.forward(torch.arange(3), opened(_on(injection)))
    assert str(refused.value) == "module.embedding: embed input is torch.int64; faults act on floating tensors"


def _on(injection):
    injection.enabled = True
    return injection


# ---- the switch


def test_an_injection_that_was_closed_is_not_switched_on_again():
    injection = made()
    injection.close(check=False)
    injection.close()
    with pytest.raises(PlanError, match=r"^this injection is closed; make a new one with inject\(\)$"):
        injection.enable()


def test_it_is_closed_when_the_outermost_block_ends_and_an_error_inside_is_not_hidden():
    model = nn.Linear(4, 4)
    injection = st.inject(model, "gain:1@module.linear")
    with injection:
        with injection:
            model(X)
        assert not injection.closed and injection.enabled
    assert injection.closed and not injection.enabled
    with pytest.raises(KeyError), st.inject(model, "gain:1@module.linear"):
        raise KeyError
    with pytest.raises(InertError), st.inject(model, "gain:1@module.linear"):
        pass


@pytest.mark.parametrize("sampler", [False, True])
def test_only_a_sampler_has_a_phase_and_it_must_be_one(sampler):
    injection = made(sampler=sampler)
    assert (injection.phase, injection.hold, injection.sampler) == (
        ("rollout", True, True) if sampler else (None, False, False)
    )
    message = r"^unknown phase 'evl'; did you mean 'eval'\? valid: eval, rollout, train$"
    message = (
        message
        if sampler
        else r"^only the models of a sampling engine are told their phase; elsewhere write `with st\.phase\(\.\.\.\)`$"
    )
    with pytest.raises(PlanError, match=message):
        injection.phase = "evl"
    if sampler:
        injection.phase = "eval"
        assert injection.phase == "eval" == injection.phase_now()


@pytest.mark.parametrize(("clause", "magnitudes"), [(None, [0.5, 0.5, None]), (0, [0.5, 2.0, None]), (1, [1.0, 0.5, None])])  # fmt: skip
def test_a_magnitude_is_set_for_the_clause_that_is_named(clause, magnitudes):
    injection = made("gain:1@layer.0;gain:2@layer.0;mxfp4@module.linear")
    injection.set_magnitude(0.5, clause)
    assert [fault.asked() for fault in injection.faults] == magnitudes == [site.asked for site in injection.sites]


def test_what_was_counted_goes_on_in_another_process_with_its_statistics():
    first = made("bias:0.5@module.linear")
    tap = first.make_tap(0, "a", "output", None)
    tap.forward(torch.tensor([[0.0, 2.0]]), opened(_on(first)))
    counted = first.counted()
    assert counted["references"] == {"0 a output forward 0": 1.0} and counted["gpus"] == []
    later = made("bias:0.5@module.linear")
    again = later.make_tap(0, "a", "output", None)
    later.go_on(counted)
    assert torch.equal(again.forward(torch.tensor([[0.0, 20.0]]), opened(_on(later))), torch.tensor([[0.5, 20.5]]))
    assert later.ledger.forward == 1, "what the other process did is not told again"
    later.forget()
    assert later.counters.saved() == [[0.0] * 16] * 2


@pytest.mark.parametrize(("modes", "training"), [((), False), ((False, False), False), ((False, True), True)])
def test_an_injection_trains_if_one_of_its_models_does(modes, training):
    injection = made()
    for mode in modes:
        injection.attach(nn.Linear(4, 4).train(mode))
    assert injection.is_training is training


def test_the_step_keys_the_noise_from_the_first_pass_on():
    assert made(step=5).step == 5 == made(step=5).calls.step and made().step == 0
    injection = made()
    injection.step = 9
    assert injection.calls.step == 9


def test_a_process_of_a_group_has_the_rank_that_torch_says(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert this_rank() == 3
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    assert this_rank() == 5 == Injection(Plan.parse("gain:1@layer.0")).rank and made(rank=1).rank == 1


def test_a_softmax_that_attention_hides_is_warned_of_when_a_plan_is_given(tiny_llama):
    with pytest.warns(RuntimeWarning, match=r"^gain:1@op\.softmax: attention is one kernel \(sdpa\)"):
        st.inject(tiny_llama, "gain:1@op.softmax", allow_inert=True)


def test_a_weight_that_is_still_sharded_is_refused(monkeypatch):
    class DTensor(torch.Tensor):
        pass

    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(DTensor=DTensor))
    own = SimpleNamespace(tap=SimpleNamespace(site=SimpleNamespace(label="module.linear"), name="a.weight"))
    assert weights._whole(X, own) is X
    with pytest.raises(PlanError) as refused:
        weights._whole(X.as_subclass(DTensor), own)
    assert str(refused.value) == (
        "module.linear: a.weight is still sharded when it is used (tensor parallel, or called past FSDP2's root); "
        "weight faults act on whole weights"
    )
