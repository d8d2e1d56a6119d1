"""Passes and frames in use: interrupts, recursion, threads, and parts that others compute a second time."""

import copy
import threading

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.faults.rng import mix64
from shaketable.inject import pass_context
from shaketable.inject.injection import Injection
from shaketable.inject.pass_context import Calls, Entry, Frame, Pass, in_backward
from shaketable.plan import Plan
from tests.inject.recomputation import Again

X = torch.ones(2, 4)


def made(plan="gain:1@module.linear", **options):
    injection = Injection(Plan.parse(plan, seed=0), **{"rank": 0, "allow_inert": True, **options})
    injection.enabled = True
    return injection


class Interrupts(nn.Module):
    """Calls a linear, and is interrupted as often as it was told."""

    def __init__(self, times=1):
        super().__init__()
        self.proj, self.times = nn.Linear(4, 4), times

    def forward(self, x):
        y = self.proj(x)
        if self.times:
            self.times -= 1
            raise KeyboardInterrupt
        return y


def test_the_frames_that_an_interrupt_left_open_are_forgotten_at_the_next_call():
    """Hooks of torch that run always do not run for those."""
    model = Interrupts()
    with st.inject(model, "gain:1@module.linear") as ledger:
        injection = ledger.settle.__self__
        with pytest.raises(KeyboardInterrupt):
            model(X)
        assert len(injection.calls.stack) == 1
        with st.phase("eval"):
            model(X)
        assert injection.calls.stack == []
        assert ledger.sites[0].by("phase") == {
            "train": {"forward": 1, "backward": 0},
            "eval": {"forward": 1, "backward": 0},
        }


class Recursive(nn.Module):
    """Calls itself, as a model does that searches."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4, bias=False)

    def forward(self, x, depth=2):
        return self.proj(x) if depth == 0 else self(self.proj(x), depth - 1)


def test_a_model_that_calls_itself_is_in_one_pass():
    model, begun = Recursive(), []
    injection = st.inject(model, "relative_gaussian:0.5@module.linear").enable()
    begin = injection.begin_pass
    injection.begin_pass = lambda *how: begun.append(1) or begin(*how)
    model(X)
    assert begun == [1] and injection.ledger.forward == 3 and injection.calls.stack == []
    model(X)
    assert begun == [1, 1]
    injection.close()


def test_a_frame_knows_who_called_the_outermost_one_and_only_of_that():
    injection = made()
    calls = injection.calls
    outer, inner = (calls.open(Entry(i, nn.Identity(), None), (X,), {}) for i in (1, 2))
    injection.enter(outer.entry, (X,), {})
    injection.enter(inner.entry, (X,), {})
    first, second = calls.stack
    assert first.caller is not None and second.caller is None and second.outer is first
    calls.stack.clear()


def test_threads_have_stacks_of_their_own_and_count_passes_together():
    injection, seen = made(), {}
    entry = Entry(1, nn.Identity(), None)
    injection.enter(entry, (X,), {})

    def work():
        seen["before"] = list(injection.calls.stack)
        injection.enter(entry, (X,), {})
        seen["moment"] = injection.calls.stack[0].current.moment
        injection.leave(entry)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen["before"] == [] and len(injection.calls.stack) == 1
    assert seen["moment"] == mix64(mix64(mix64(0) ^ (1 << 8 | 1)) + 1), "the second pass of this module"
    injection.leave(entry)


def test_two_injections_have_stacks_of_their_own():
    first, second = made(), made()
    first.enter(Entry(1, nn.Identity(), None), (X,), {})
    assert len(first.calls.stack) == 1 and second.calls.stack == [] and second.calls.top() is None
    first.calls.stack.clear()


def test_calls_begin_at_the_step_that_is_given_and_outside_of_engines():
    calls = Calls(made(), 9)
    assert (calls.step, calls.phase, calls.stack) == (9, None, [])
    assert Calls(made()).step == 0


def test_the_phase_of_a_pass_is_that_of_the_module_it_begins_with():
    injection = made()
    for training, phase in ((True, "train"), (False, "eval")):
        assert injection.calls.open(Entry(1, nn.Identity().train(training), None), (X,), {}).current.phase == phase
    injection.calls.phase = "rollout"
    assert injection.calls.open(Entry(1, nn.Identity(), None), (X,), {}).current.phase == "rollout"
    with st.phase("eval"):
        assert injection.calls.open(Entry(1, nn.Identity(), None), (X,), {}).current.phase == "eval"


def test_an_inner_frame_has_the_pass_of_the_outer_one_and_remembers_how_often_it_was_called():
    injection = made()
    calls, root, part = injection.calls, Entry(1, nn.Identity(), None, is_root=True), Entry(2, nn.Identity(), 5)
    injection.enter(root, (X,), {})
    outer = calls.stack[0]
    for n in range(3):
        given = torch.ones(1) * n
        frame = calls.open(part, (given,), {})
        assert frame.current is outer.current and part.passes[given.data_ptr()] == (outer.current, n) and not frame.recomputing
        assert (frame.layer, frame.outer, frame.base) == (5, outer, 0)
        calls.push(frame)
        deeper = calls.open(Entry(3, nn.Identity(), None), (X,), {})
        assert deeper.outer is outer and deeper.layer == 5
        calls.pop()
    calls.pop()


def test_whether_this_is_inside_of_backward_is_known():
    seen, x = [], torch.ones(1, requires_grad=True)
    x.register_hook(lambda g: seen.append(in_backward()))
    assert in_backward() is False
    x.sum().backward()
    assert seen == [True] and in_backward() is False


class Tied(nn.Module):
    """One layer that is called three times, and may be computed again."""

    def __init__(self, again=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
        self.again = again

    def forward(self, x):
        for _ in range(3):
            x = Again.apply(x, self.layers[0]) if self.again else self.layers[0](x)
        return x


@pytest.mark.parametrize("plan", ["relative_gaussian:0.5@module.linear", "relative_gaussian:0.5@op.matmul,direction=forward"])
def test_a_layer_that_is_called_often_and_computed_again_has_the_noise_of_its_own_call(plan):
    found = []
    for again in (False, True):
        model, x = Tied(again), X.clone().requires_grad_()
        with st.inject(model, plan, seed=1) as ledger:
            model(x).square().sum().backward()
        assert ledger.forward == 3 and ledger.to_dict()["sites"][0]["recomputed"] == (3 if again else 0)
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_pass_that_begins_inside_of_backward_with_an_input_that_is_not_known_is_a_pass_of_its_own():
    model, x, seen = nn.Sequential(nn.Linear(4, 4)), torch.ones(1, requires_grad=True), []
    with st.inject(model, "gain:1@module.linear") as ledger:
        x.register_hook(lambda g: seen.append(model(torch.ones(1, 4))) or None)
        x.sum().backward()
        assert ledger.forward == 1 and ledger.to_dict()["sites"][0]["recomputed"] == 0


def test_outside_of_backward_the_same_input_is_a_new_pass():
    model = nn.Sequential(nn.Linear(4, 4))
    with st.inject(model, "relative_gaussian:0.5@module.linear") as ledger:
        assert not torch.equal(model(X), model(X)) and ledger.forward == 2


def test_what_is_computed_again_is_not_remembered_as_a_call():
    injection = made()
    entry = Entry(1, nn.Identity(), None)
    current = Pass(injection, "train", 1, (True,), tuple(injection.faults))
    injection.calls.stack.append(Frame(Entry(2, nn.Identity(), None), current, 3, "lora", recomputing=True))
    frame = injection.calls.open(entry, (X,), {})
    assert frame.recomputing and entry.passes == {} and (frame.layer, frame.excluded) == (3, "lora")
    injection.calls.stack.clear()


def test_so_many_calls_are_remembered_and_no_more():
    entry, frame = Entry(1, nn.Identity(), None), Frame(None, object(), None, None, recomputing=False)
    for address in range(pass_context._REMEMBERED + 5):
        entry.remember(address, frame, 0)
    assert len(entry.passes) == 256 and next(iter(entry.passes)) == 5


def test_a_frame_for_a_recomputation_counts_on_for_itself_from_where_the_pass_was():
    injection = made()
    current = Pass(injection, "train", 1, (True,), tuple(injection.faults))
    outer = Frame(Entry(1, nn.Identity(), None), current, None, None, recomputing=False, base=2)
    inner = Frame(Entry(2, nn.Identity(), 4), current, 4, "router", recomputing=False, outer=outer)
    outer.count("a")
    again = inner.again()
    assert (again.entry, again.layer, again.excluded, again.recomputing, again.outer) == (inner.entry, 4, "router", True, None)
    assert again.counts == {"a": 3} and again.counts is not outer.counts and again.base == 2
    assert again.count("a") == 3 and again.count("b") == 2 and outer.counts == {"a": 3}


def test_moments_differ_by_module_phase_number_and_step():
    calls = Calls(made())
    moments = [calls.new_moment(who, phase) for who in (1, 2) for phase in ("rollout", "train", "eval") for _ in range(2)]
    calls.set_step(1)
    moments += [calls.new_moment(1, "train")]
    assert len(set(moments)) == 13 and all(0 <= m < 1 << 64 for m in moments)


def test_a_pass_mixes_its_moment_once_and_every_use_of_its_own():
    current = Pass(None, "train", 7, (), ())
    assert current.mix is None and current.mixed(3) == mix64(10) and current.mix is None
    assert current.mixed(0) == mix64(7) == current.mix == current.mixed(0) and current.mixed(1) == mix64(8)
    assert (current.captured, current.with_gradients, current.pages, current.last) == (False, False, {}, None)


def test_a_tensor_of_a_keyword_stands_for_a_call_whose_arguments_have_none():
    """A model of transformers is called with keywords alone, and its layers with both."""
    model, plan = nn.Sequential(nn.Linear(4, 4)), "relative_gaussian:0.5@module.linear"
    twin = copy.deepcopy(model)
    with st.inject(model, plan, seed=2), st.inject(twin, plan, seed=2):
        assert torch.equal(model(X), twin(input=X))
