"""What torch.utils.checkpoint computes a second time: in the frames of the first, and in nobody else's."""

import threading

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint

import shaketable as st
from shaketable.inject import passes
from shaketable.inject.injection import Injection
from shaketable.inject.passes import Entry, Frame, Pass
from shaketable.plan import Plan
from tests.tensors import draw

X = draw(2, 4)
NOISE = "relative_gaussian:0.5"


class Tower(nn.Module):
    """Three products of which the second is checkpointed, together with what is told."""

    def __init__(self, reentrant=None, inside=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.reentrant, self.inside = reentrant, inside

    def middle(self, x, scale=1.0):
        if self.inside is not None:
            self.inside()
        return torch.tanh(self.second(x) @ self.second.weight) * scale

    def forward(self, x):
        x = self.first(x)
        if self.reentrant is None:
            x = self.middle(x, 2.0)
        elif self.reentrant:
            x = checkpoint(self.middle, x, 2.0, use_reentrant=True)
        else:
            x = checkpoint(self.middle, x, scale=2.0, use_reentrant=False)
        return self.third(x @ self.second.weight)


def gradients(model, plan, **options):
    x = X.clone().requires_grad_()
    with st.inject(model, plan, seed=1, **options) as ledger:
        y = model(x)
        y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())], ledger


def same(a, b):
    """Up to the order in which the gradients of one weight are added up; noise of another key is far from that."""
    return torch.equal(a[0], b[0]) and all(torch.allclose(x, y, atol=1e-6) for x, y in zip(a, b, strict=True))


def made(plan="gain:1@op.matmul"):
    injection = Injection(Plan.parse(plan, seed=0), rank=0, allow_inert=True)
    injection.enabled = True
    return injection


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "plan", [f"{NOISE}@module.linear", f"{NOISE}@op.matmul", f"{NOISE}@module.linear,point=weight", f"{NOISE}@op.matmul,direction=backward"]
)  # fmt: skip
def test_what_is_checkpointed_inside_of_a_pass_is_what_it_is_without(plan, reentrant):
    plain, ledger = gradients(Tower(), plan)
    again, counted = gradients(Tower(reentrant), plan)
    assert same(plain, again) and (ledger.forward, ledger.backward) == (counted.forward, counted.backward)
    recomputed = counted.to_dict()["sites"][0]["recomputed"]
    assert recomputed == {"module": 1, "op": 2}[plan.partition("@")[2].partition(".")[0]] * ("backward" not in plan)


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_plans_each_have_their_own_noise_in_what_is_computed_again(reentrant):
    found = []
    for how in (None, reentrant):
        model = Tower(how)
        with st.inject(model, f"{NOISE}@op.matmul", seed=2):
            found.append(gradients(model, f"{NOISE}@module.linear")[0])
    assert same(*found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_after_what_was_computed_again_the_frames_and_the_mode_are_as_they_were(reentrant):
    """Inside of backward no frame is open, so none may be left; the mode is on in this thread as long as the plan is."""
    seen = []
    model = Tower(reentrant)
    injection = st.inject(model, f"{NOISE}@op.matmul").enable()
    model.inside = lambda: seen.append((len(injection.calls.stack), injection.calls.stack[-1].recomputing))
    model(X.clone().requires_grad_()).sum().backward()
    assert seen == [(1, False), (1, True)]
    assert injection.calls.stack == [] and len(torch.overrides._get_current_function_mode_stack()) == 1
    injection.close()
    assert torch.overrides._get_current_function_mode_stack() == []


def test_what_raises_while_it_is_computed_again_leaves_no_frame_and_no_mode():
    model, calls = Tower(False), []

    def fail():
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError

    model.inside = fail
    injection = st.inject(model, f"{NOISE}@op.matmul").enable()
    y = model(X.clone().requires_grad_())
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert injection.calls.stack == [] and len(torch.overrides._get_current_function_mode_stack()) == 1
    injection.close()


def test_a_backward_in_another_thread_recomputes_in_the_frames_of_the_first_thread():
    found = []
    for elsewhere in (False, True):
        model, x = Tower(False), X.clone().requires_grad_()
        with st.inject(model, f"{NOISE}@op.matmul", seed=1) as ledger:
            y = model(x).square().sum()
            if elsewhere:
                thread = threading.Thread(target=y.backward)
                thread.start()
                thread.join()
            else:
                y.backward()
            assert ledger.to_dict()["sites"][0]["recomputed"] == 2
        found.append(x.grad)
    assert torch.equal(*found)


def test_a_forward_of_the_first_time_opens_no_frames_of_its_own():
    injection = made()
    passes.watch(injection)
    entry = Entry(1, nn.Identity(), None)
    frame = Frame(entry, Pass(injection, "train", 1, (True,), tuple(injection.faults)), 3, None, recomputing=False)
    injection.calls.stack.append(frame)
    seen = []
    run = passes._remember(lambda *args, **kwargs: seen.append((args, kwargs, injection.calls.stack[-1])) or 7)
    assert run(1, b=2) == 7 and seen == [((1,), {"b": 2}, frame)]
    injection.calls.stack.clear()
    passes.unwatch(injection)


def test_inside_of_backward_it_runs_each_time_in_a_copy_of_the_frame_of_then():
    injection = made("gain:1@op.matmul")
    passes.watch(injection)
    entry = Entry(1, nn.Identity(), None)
    frame = Frame(entry, Pass(injection, "train", 1, (True,), tuple(injection.faults)), 3, "lora", recomputing=False)
    frame.count("a")
    injection.calls.stack.append(frame)
    seen = []

    def work():
        (top,) = injection.calls.stack
        seen.append((top.layer, top.excluded, top.recomputing, top.current is frame.current, top.count("a"), top is frame))

    run = passes._remember(work)
    frame.count("a")
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda g: [run() for _ in range(2)] and None)
    x.sum().backward()
    assert seen == [(3, "lora", True, True, 1, False)] * 2, "counted on from when it was remembered"
    assert injection.calls.stack == [frame] and torch.overrides._get_current_function_mode_stack() == []
    injection.calls.stack.clear()
    passes.unwatch(injection)


def test_what_is_off_or_outside_of_a_pass_is_not_remembered():
    on, off, idle = made(), made(), made()
    for injection in (on, off, idle):
        passes.watch(injection)
    for injection in (on, off):
        current = Pass(injection, "train", 1, (True,), tuple(injection.faults))
        injection.calls.stack.append(Frame(Entry(1, nn.Identity(), None), current, None, None, recomputing=False))
    off.enabled = False
    seen = []
    run = passes._remember(lambda: seen.append([i.calls.stack and i.calls.stack[-1].recomputing for i in (on, off, idle)]))
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda g: run() and None)
    x.sum().backward()
    assert seen == [[True, False, []]]
    for injection in (on, off, idle):
        injection.calls.stack.clear()
        passes.unwatch(injection)


def test_a_plan_that_was_switched_off_before_backward_puts_no_mode_on():
    model, seen = Tower(False), []
    injection = st.inject(model, f"{NOISE}@op.matmul").enable()
    y = model(X.clone().requires_grad_())
    injection.disable()
    injection.drop_mode()
    model.inside = lambda: seen.append(torch.overrides._get_current_function_mode_stack())
    y.sum().backward()
    assert seen == [[]]
    injection.close()


# ---- torch's own functions


def now():
    return torch_checkpoint._checkpoint_without_reentrant_generator, torch_checkpoint.CheckpointFunction.__dict__[
        "forward"
    ].__func__


@pytest.fixture
def alone():
    """As if no other test had left a plan on its model."""
    watching = list(passes._watching)
    for injection in watching:
        passes.unwatch(injection)
    yield
    for injection in watching:
        passes.watch(injection)


def test_torchs_functions_are_replaced_once_and_put_back_by_the_last(alone):
    before, first, second = now(), made(), made()
    passes.watch(first)
    patched = now()
    assert all(a is not b for a, b in zip(before, patched, strict=True))
    passes.watch(first)
    passes.watch(second)
    assert now() == patched and passes._watching == [first, second]
    passes.unwatch(first)
    passes.unwatch(first)
    assert now() == patched and passes._watching == [second]
    passes.unwatch(second)
    assert now() == before and passes._watching == []
    assert isinstance(torch_checkpoint.CheckpointFunction.__dict__["forward"], staticmethod)
    passes.unwatch(second)
    assert now() == before


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_without_a_plan_computes_what_it_did(reentrant):
    model, x = Tower(reentrant), X.clone().requires_grad_()
    with st.inject(nn.Linear(4, 4), "gain:1@module.linear", allow_inert=True):
        model(x).square().sum().backward()
    first, x.grad = x.grad, None
    model(x).square().sum().backward()
    assert torch.equal(first, x.grad)
