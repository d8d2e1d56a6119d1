"""A tap that holds its noise for a rollout: when it keeps a weight, when it draws anew, and what it counts."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import PlanError
from shaketable.inject import other_plan
from shaketable.inject.injection import Injection
from shaketable.inject.weights import held_noise
from shaketable.inject.weights.held_noise import HeldTap, Rollouts
from shaketable.plan import Plan
from shaketable.sites.phases import phase

NOISE = "absolute_gaussian:0.1@module.linear,point=weight"
EYE = torch.eye(4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.proj(x)


def made(plan=NOISE, model=None, **options):
    model = model or Model()
    injection = Injection(Plan.parse(plan, seed=2), hold=True, allow_inert=True, **options)
    injection.attach(model)
    injection.enable()
    (tap,) = (own.tap for _, own in injection.models[0].weights)
    return model, injection, tap


def noise(model):
    """What is added to the weight of a model by its forward."""
    return (model(EYE).t() - model.proj._parameters["weight"]).detach()


def counts(injection):
    return next(iter(injection.ledger.sites[0].spots.values())).counts


# ---- rollouts


def test_whoever_waits_for_a_new_rollout_is_called_when_it_is_counted_and_may_ask_for_its_number():
    rollouts, seen = Rollouts(), []
    rollouts.on_new = lambda: seen.append((rollouts.total, rollouts.number(), rollouts._lock.locked()))
    for _ in range(2):
        with phase("rollout"):
            rollouts.number()
    assert seen == [(1, 0, False), (2, 1, False)]


def test_a_step_with_several_rollouts_ends_with_the_newest_and_the_next_begins_at_zero():
    rollouts = Rollouts()
    for step in range(2):
        rollouts.begin_step()
        assert rollouts.number() == 0
        for n in range(3):
            with phase("rollout"):
                assert rollouts.number() == n
        assert (rollouts.number(), rollouts.total) == (2, 3 * (step + 1))


def test_an_evaluation_inside_of_a_rollout_belongs_to_the_newest_one():
    rollouts = Rollouts()
    for n in range(2):
        with phase("rollout"):
            rollouts.number()
            with phase("eval"):
                assert rollouts.number() == n
    assert rollouts.total == 2


# ---- keys


def test_layers_that_are_grouped_in_another_way_have_the_same_noise():
    found = []
    for plan in (NOISE, f"gain:1@module.Model;{NOISE}"):
        model = Model()
        injection = Injection(Plan.parse(plan, seed=2), hold=True, allow_inert=True)
        injection.attach(model)
        with injection, phase("rollout"), torch.no_grad():
            seen = []
            model.proj.register_forward_pre_hook(lambda m, _, seen=seen: seen.append(m.weight.clone()))
            model(EYE)
        found.append(seen[0])
    assert torch.equal(*found) and not torch.equal(found[0], model.proj.weight)


def test_gradients_have_noise_of_their_own_at_every_pass_of_a_rollout():
    model, injection, tap = made(f"{NOISE},direction=backward")
    found = []
    with phase("rollout"):
        for _ in range(2):
            model.zero_grad()
            y = model(EYE)
            assert torch.equal(y.t(), model.proj.weight), "forward is clean"
            y.sum().backward()
            found.append(model.proj.weight.grad - 1)
    assert not torch.equal(*found) and all(0.02 < g.std() < 0.3 for g in found)
    assert counts(injection) == {"rollout": [0, 2]} and tap.reads_tables
    injection.close()


def test_both_directions_at_once_hold_forward_and_count_every_gradient():
    model, injection, tap = made(f"{NOISE},direction=both")
    seen = []
    with phase("rollout"):
        for _ in range(3):
            y = model(EYE)
            seen.append(y.detach())
            y.sum().backward()
    assert all(torch.equal(seen[0], y) for y in seen) and not torch.equal(seen[0].t(), model.proj.weight)
    assert counts(injection) == {"rollout": [1, 3]} and tap.reads_tables
    injection.close()


def test_a_graph_reads_a_weight_that_is_faulty_forward_and_needs_no_table():
    _, injection, tap = made()
    assert isinstance(tap, HeldTap) and tap.is_held and not tap.reads_tables
    injection.close()


# ---- keeping


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_weight_is_kept_in_rollouts_where_no_gradient_of_it_is_wanted(frozen, with_gradients):
    model, injection, tap = made()
    model.requires_grad_(not frozen)
    with phase("rollout"), torch.set_grad_enabled(with_gradients):
        first, second = model(EYE), model(EYE)
    assert torch.equal(first, second) and counts(injection) == {"rollout": [1, 0]}
    assert (tap._kept is not None) is (frozen or not with_gradients)
    if not frozen and with_gradients:
        first.sum().backward()
        assert torch.equal(model.proj.weight.grad, torch.ones(4, 4)), "noise that is added leaves gradients as they are"
    injection.close()


@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_outside_of_rollouts_noise_is_made_again_from_the_weight_of_now_and_not_kept(training):
    model, injection, tap = made()
    model.train(training)
    before = noise(model)
    model.proj.weight.data.add_(1.0)
    assert torch.allclose(noise(model), before, atol=1e-6) and tap._kept is None
    assert counts(injection) == {"train" if training else "eval": [1, 0]}
    injection.close()


@torch.no_grad()
def test_a_draw_counts_once_in_each_phase_and_once_more_under_another_magnitude():
    model, injection, _ = made()
    for _ in range(2):
        model.train()(EYE)
        model.eval()(EYE)
        with phase("rollout"):
            model(EYE)
            model(EYE)
    assert counts(injection) == {"train": [1, 0], "eval": [1, 0], "rollout": [2, 0]}
    model.train()(EYE)
    assert counts(injection)["train"] == [2, 0], "the newest rollout is another one"
    injection.set_magnitude(0.2)
    model(EYE)
    model(EYE)
    assert counts(injection)["train"] == [3, 0]
    injection.close()


@torch.no_grad()
def test_a_clause_of_another_phase_lets_the_weight_of_a_rollout_go():
    model, injection, tap = made(f"{NOISE},phase=rollout")
    with phase("rollout"):
        model(EYE)
    assert tap._kept is not None
    changes = injection.rollouts.changes
    assert torch.equal(model(EYE).t(), model.proj.weight)
    assert tap._kept is None and injection.rollouts.changes == changes + 1
    injection.close()


@torch.no_grad()
def test_inference_mode_has_a_weight_of_its_own_with_the_same_noise():
    model, injection, tap = made()
    with phase("rollout"):
        first = model(EYE)
        with torch.inference_mode():
            second = model(EYE)
            assert tap._kept.made_from[2] is True
        third = model(EYE)
    assert torch.equal(first, second) and torch.equal(first, third) and not third.is_inference()
    assert tap._kept.made_from[2] is False and counts(injection) == {"rollout": [1, 0]}
    injection.close()


def test_a_weight_that_was_made_in_inference_mode_has_no_version_and_is_kept():
    with torch.inference_mode():
        model, injection, tap = made()
        with phase("rollout"):
            first, kept = model(EYE), tap._kept
            assert torch.equal(first, model(EYE)) and tap._kept is kept and kept.made_from[1] == 0
    injection.close()


def test_the_identity_of_a_weight_is_its_address_its_version_and_the_mode():
    x = torch.zeros(4)
    address = x.data_ptr()
    assert held_noise._identity(x) == (address, 0, False)
    x.add_(1)
    assert held_noise._identity(x) == (address, 1, False)
    with torch.inference_mode():
        assert held_noise._identity(x) == (address, 1, True), "of a plain tensor it is known there too"
        y = torch.zeros(4)
        assert held_noise._identity(y) == (y.data_ptr(), 0, True)
    assert held_noise._identity(y) == (y.data_ptr(), 0, False)


@torch.no_grad()
def test_another_plan_at_the_same_sites_begins_without_what_was_kept_or_counted():
    model, injection, tap = made()
    with phase("rollout"):
        first = noise(model)
        other_plan.exchange(injection, Plan.parse(NOISE, seed=9), rank=0)
        assert tap._kept is None
        injection.enable()
        second = noise(model)
        assert not torch.equal(first, second) and counts(injection) == {"rollout": [1, 0]}
        other_plan.exchange(injection, Plan.parse(NOISE, seed=9), rank=0)
        injection.enable()
        assert torch.equal(noise(model), second) and counts(injection) == {"rollout": [1, 0]}, "counted anew"
    injection.close()


# ---- on a GPU


def test_a_capture_before_the_first_draw_is_refused_by_name(monkeypatch):
    _, injection, tap = made()
    monkeypatch.setattr(held_noise, "capturing", lambda: True)
    with pytest.raises(PlanError) as raised:
        tap._renewed(SimpleNamespace(is_cuda=True), None)
    said = "read the prompt before a graph is captured: proj.weight has no noise yet"
    assert str(raised.value) == f"{tap.site.label}: {said}"
    injection.close()


@torch.no_grad()
def test_weights_of_a_cpu_are_drawn_whatever_a_gpu_captures(monkeypatch):
    model, injection, _ = made()
    monkeypatch.setattr(held_noise, "capturing", lambda: True)
    with phase("rollout"):
        assert not torch.equal(noise(model), torch.zeros(4, 4))
    injection.close()


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@torch.no_grad()
def test_on_a_gpu_every_rollout_writes_its_noisy_weight_to_one_place(monkeypatch):
    """Captured graphs go on reading there."""
    _, injection, tap = made()
    monkeypatch.setattr(injection.tables, "apply", lambda x, what: None)
    entry, x, found = injection.models[0].weights[0][1].entry, torch.zeros(4, 4).as_subclass(OnGpu), []
    for _ in range(2):
        with phase("rollout"):
            frame = injection.calls.open(entry, (), {})
            y = tap.forward(x, frame)
            assert tap.forward(x, frame) is y is tap.home(x)
            found.append(y.clone())
    assert not torch.equal(*found) and not x.any() and counts(injection) == {"rollout": [2, 0]}
    injection.close()


def test_the_place_of_a_noisy_weight_is_of_its_shape_type_and_device_and_outlives_inference_mode():
    _, injection, tap = made()
    x = torch.ones(2, 3)
    with torch.inference_mode():
        home = tap.home(x)
    assert not home.is_inference() and tap.home(x) is home and home is not x
    for other in (torch.ones(3, 2), torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, device="meta")):
        assert tap.home(x).dtype is torch.float32
        found = tap.home(other)
        assert (found.shape, found.dtype, found.device) == (other.shape, other.dtype, other.device)
        assert tap.home(other) is found
    injection.close()


# ---- what is written into memory


@torch.no_grad()
def test_what_is_written_has_the_magnitude_of_now_and_counts_in_the_phase_it_is_for():
    _, injection, tap = made()
    x = torch.zeros(64)
    weak = tap.written(x, "eval")
    injection.set_magnitude(0.4)
    strong = tap.written(x, "train")
    assert torch.allclose(strong, 4 * weak, atol=1e-6) and 0.05 < weak.std() < 0.15 and not x.any()
    assert counts(injection) == {"eval": [1, 0], "train": [1, 0]}
    tap.written(x, "train")
    assert counts(injection)["train"] == [1, 0]
    tap.forget()
    tap.written(x, "train")
    assert counts(injection)["train"] == [2, 0], "another weight counts, whatever its key"
    injection.close()


@pytest.mark.parametrize("where", ["rollout", "train", "eval"])
def test_a_draw_is_counted_under_its_phase_and_measured_each_time(where):
    _, injection, tap = made()
    fault = injection.faults[0]
    for key in range(5):
        assert tap.count(where, key, fault) is True
    assert counts(injection) == {where: [5, 0]}
    injection.close()


def test_a_held_clause_takes_part_in_a_plan_with_others():
    model, x = Model(), torch.ones(1, 4)
    injection = Injection(Plan.parse(f"{NOISE};gain:1@module.linear", seed=2), hold=True)
    injection.attach(model)
    with injection as ledger, st.phase("rollout"), torch.no_grad():
        first, second = model(x), model(x)
    assert torch.equal(first, second) and [site.forward for site in ledger.sites] == [1, 2]
