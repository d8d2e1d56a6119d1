"""An injection as a switch: what it hooks, counts, writes and lets go when it is enabled, disabled, changed and closed."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import InertError
from shaketable.inject import op, passes
from shaketable.inject.injection import Injection, inject
from shaketable.plan import Plan

X = torch.ones(2, 4)
GAIN = "gain:1@module.linear"


def made(plan=GAIN, **options):
    return Injection(Plan.parse(plan, seed=0), **{"rank": 0, "allow_inert": True, **options})


def linear():
    """A linear that adds up what it is given, in a model."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.ones_(model[0].weight)
    return model


def is_hooked(model):
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ---- inject


def test_inject_matches_and_hooks_nothing_before_it_is_enabled():
    model = linear()
    injection = inject(model, GAIN)
    assert [attached.model for attached in injection.models] == [model] and len(injection.taps) == 1
    assert not is_hooked(model) and torch.equal(model(X), torch.full((2, 4), 4.0))
    with pytest.raises(st.NoMatchError):
        inject(model, "gain:1@module.none")


class Attention(nn.Module):
    """Says how it computes, as those of transformers do."""

    def __init__(self, how):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=how)


def test_only_the_clauses_on_a_softmax_that_is_hidden_are_warned_of(recwarn):
    model = nn.Sequential(Attention("sdpa"))
    inject(model, "gain:1@op.matmul;gain:1@op.sdpa;gain:1@op.all")
    assert [w for w in recwarn if w.category is RuntimeWarning] == []
    inject(model, "gain:1@op.matmul;gain:2@op.softmax;gain:3@op.softmax+silu")
    said = [str(w.message) for w in recwarn if w.category is RuntimeWarning]
    assert [text.partition(": attention")[0] for text in said] == ["gain:2@op.softmax", "gain:3@op.softmax+silu"]
    recwarn.clear()
    inject(nn.Sequential(Attention("eager")), "gain:1@op.softmax")
    assert [w for w in recwarn if w.category is RuntimeWarning] == []


# ---- on, off, closed


def test_a_model_that_comes_while_the_plan_is_on_is_hooked_at_once_and_one_that_comes_before_is_not():
    first, second, third = linear(), linear(), linear()
    injection = made()
    injection.attach(first)
    assert not is_hooked(first)
    assert injection.enable() is injection
    injection.attach(second)
    assert is_hooked(first) and is_hooked(second)
    assert injection.disable() is injection
    injection.attach(third)
    assert not is_hooked(third) and is_hooked(first)
    injection.enable()
    assert [attached.owner for attached in injection.models] == [0, 1, 2]
    for model in (first, second, third):
        assert torch.equal(model(X), torch.full((2, 4), 8.0))
    injection.close()
    assert not any(map(is_hooked, (first, second, third)))
    assert {name: s.fires(False) for name, s in injection.sites[0].spots.items()} == {"0": 1, "model1.0": 1, "model2.0": 1}


def test_what_a_closed_injection_leaves_behind_is_its_ledger():
    model = linear()
    injection = inject(model, "gain:1@op.matmul").enable()
    assert injection in passes._watching
    model(X)
    ledger = injection.ledger
    assert ledger.settle is not None and ledger.forget is not None
    injection.close()
    assert ledger.settle is None and ledger.forget is None and ledger.forward == 1
    assert injection not in passes._watching
    assert op.present[injection.handle] is False
    assert torch.overrides._get_current_function_mode_stack() == [] and not is_hooked(model)
    assert not injection.tables.all and torch.equal(model(X), torch.full((2, 4), 4.0))


@pytest.mark.parametrize(("check", "allow", "raises"), [(True, False, True), (False, False, False), (True, True, False)])
def test_a_plan_that_did_nothing_is_an_error_at_the_end_unless_that_is_allowed(check, allow, raises):
    model = linear()
    injection = inject(model, GAIN, allow_inert=allow).enable()
    if raises:
        with pytest.raises(InertError, match=r"^gain:1@module\.linear matched 1 spots and never fired \(allow_inert=True"):
            injection.close(check=check)
    else:
        injection.close(check=check)
    assert injection.closed and not is_hooked(model), "it is off all the same"
    injection.close()


def test_blocks_nest_and_the_outermost_closes_whatever_raised_inside():
    model = linear()
    injection = inject(model, GAIN)
    with injection as outer:
        with pytest.raises(KeyError), injection as inner:
            raise KeyError
        assert inner is outer is injection.ledger and injection.enabled and not injection.closed
        model(X)
    assert injection.closed
    broken = inject(model, GAIN)
    with pytest.raises(ZeroDivisionError), broken:
        _ = 1 / 0
    assert broken.closed and not is_hooked(model)


def test_enabling_again_in_the_middle_of_a_pass_keeps_the_pass():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    injection = inject(model, "gain:1@module.linear")
    depths = []

    def again(*_):
        injection.enable()
        depths.append(len(injection.calls.stack))

    with injection:
        model[0].register_forward_hook(again)
        model(X)
        assert depths == [1] and injection.calls.stack == []
        assert injection.inert_check.phases["train"] == 1


@pytest.mark.parametrize("plan", [GAIN, "gain:1@op.matmul"])
def test_a_plan_that_is_switched_off_inside_of_a_pass_does_no_more_in_it_and_closes_its_frame(plan):
    model = nn.Sequential(linear(), nn.Identity(), linear())
    injection = inject(model, plan).enable()
    handle = model[1].register_forward_hook(lambda *_: injection.disable() and None)
    assert torch.equal(model(X), torch.full((2, 4), 32.0)), "one of two was doubled"
    assert injection.calls.stack == []
    handle.remove()
    injection.enable()
    assert torch.equal(model(X), torch.full((2, 4), 64.0))
    injection.close()


@pytest.mark.parametrize("raises", [False, True])
def test_a_plan_that_is_switched_on_inside_of_a_pass_acts_on_the_rest_and_leaves_no_frame(raises):
    model = nn.Sequential(linear(), nn.Identity(), linear())
    injection = inject(model, GAIN).enable().disable()

    def on(*_):
        injection.enable()
        if raises:
            raise KeyError

    handle = model[1].register_forward_hook(on)
    if raises:
        with pytest.raises(KeyError):
            model(X)
    else:
        assert torch.equal(model(X), torch.full((2, 4), 32.0))
    assert injection.calls.stack == []
    handle.remove()
    assert torch.equal(model(X), torch.full((2, 4), 64.0))
    injection.close()


@pytest.mark.parametrize("plan", [GAIN, "gain:1@op.matmul"])
def test_a_forward_that_raises_closes_its_frames_and_a_mode_of_another_thread(plan):
    class Fails(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    model, stacks = nn.Sequential(linear(), Fails()), []
    injection = inject(model, plan).enable()

    def work():
        with pytest.raises(ZeroDivisionError):
            model(X)
        stacks.append((len(injection.calls.stack), len(torch.overrides._get_current_function_mode_stack())))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert stacks == [(0, int(injection.has_operators)), (0, 0)]
    assert injection.inert_check.phases.total() == 0
    injection.close()


# ---- what changes


def test_a_step_that_is_refused_leaves_the_step_as_it_was():
    model = linear()
    injection = inject(model, "saturation:2@module.linear").enable()
    model(torch.randn(64, 4))
    with st.phase("rollout"):
        injection.rollouts.number()
    with pytest.raises(InertError):
        injection.step = 1
    assert injection.step == 0 and injection.calls._passes, "nothing was forgotten"
    injection.close(check=False)


def test_a_step_of_an_engine_draws_its_weights_anew_and_the_same_step_the_same():
    model = linear()
    injection = made("relative_gaussian:0.5@module.linear,point=weight", sampler=True)
    injection.attach(model)
    injection.enable()
    seen = []
    for step in (0, 1, 0):
        injection.step = step
        seen.append(model[0].weight.detach().clone())
    assert not torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    with injection.changing():
        injection.step = 1
        injection.set_magnitude(0.25)
        assert torch.equal(model[0].weight, seen[2]), "nothing is written before all is known"
    assert not torch.equal(model[0].weight, seen[1]) and not torch.equal(model[0].weight, seen[0])
    injection.close()
    assert torch.equal(model[0].weight, torch.ones(4, 4))


def test_a_fault_without_a_magnitude_keeps_a_plan_there():
    injection = made("mxfp4@module.linear;gain:1@module.linear").enable()
    injection.set_magnitude(0)
    assert op.present[injection.handle] is True
    assert [site.asked for site in injection.sites] == [None, 0.0]


def test_a_part_inside_of_a_model_is_no_pass_of_its_own():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))).eval()
    injection = made()
    injection.attach(model)
    injection.enable()
    model(X)
    model[0](X)
    assert dict(injection.inert_check.phases) == {"rollout": 0, "train": 0, "eval": 1}
    injection.close()
