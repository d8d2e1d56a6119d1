"""A clause that does nothing is an error when the next step begins, and one that may still act is left alone."""

import pytest
import torch
from torch import nn

import shaketable as st

NOTHING = "saturation:2@module.linear"
"""Clips at twice the largest value."""


def two_linears():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def run(injection, model, passes=1, backward=False, x=None):
    for _ in range(passes):
        y = model(torch.randn(16, 32) if x is None else x)
        if backward:
            y.sum().backward()


# ---- what is an error


@pytest.mark.parametrize("plan", [NOTHING, "relative_gaussian:1e-12@module.linear"])
def test_a_clause_that_changed_no_value_raises_when_the_next_step_begins(plan):
    model = two_linears()
    said = "fired 2 times and changed no value by the end of step 0"
    with pytest.raises(st.InertError, match=said), (injection := st.inject(model, plan)):
        run(injection, model)
        injection.step = 1
        raise AssertionError("not reached")
    assert injection.step == 0
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks, "and the model is clean"


# ---- what is not


def unharmed(plan, use, model=None, then=2):
    """No step raises; whether the end does."""
    model = two_linears() if model is None else model
    injection = st.inject(model, plan).enable()
    for step in range(then):
        use(injection, model)
        injection.step = step + 1
    try:
        injection.close()
    except st.InertError:
        return False
    return True


def evaluate(injection, model):
    run(injection, model.eval())


@torch.no_grad()
def sample(injection, model):
    run(injection, model)


@pytest.mark.parametrize(
    ("plan", "use"),
    [
        ("gain:0.1@module.linear,phase=rollout", run),
        ("gain:0.1@module.linear,phase=train", evaluate),
        ("gain:0.1@op.matmul,direction=backward", sample),
        ("spike:2,rate=1e-7@module.linear", run),
    ],
)
def test_what_has_not_occurred_or_is_rare_is_left_to_the_end(plan, use):
    assert not unharmed(plan, use)


@pytest.mark.parametrize(
    ("plan", "magnitudes"),
    [("gain:0.1@module.linear", (0, 0, 0.1, 0.1)), ("relative_gaussian:0.1@module.linear", (1e-12, 1e-12, 0.1))],
)
def test_a_magnitude_that_is_zero_or_too_small_at_first(plan, magnitudes):
    def schedule(injection, model):
        injection.set_magnitude(magnitudes[injection.step])
        run(injection, model)

    assert unharmed(plan, schedule, then=len(magnitudes))


def test_zeros_have_nothing_that_a_gain_could_change():
    """A projection that starts at 0, as many do."""
    model = two_linears()
    nn.init.zeros_(model[1].weight), nn.init.zeros_(model[1].bias)

    def learn(injection, model):
        run(injection, model)
        nn.init.ones_(model[1].weight)

    assert unharmed("gain:0.1@module.1", learn, model)


def test_a_pass_that_raised_does_not_count():
    model = two_linears()

    def fail(injection, model):
        if injection.step == 0:
            with pytest.raises(RuntimeError):
                model(torch.ones(4, 7))
        else:
            run(injection, model)

    assert unharmed("gain:0.1@module.1", fail, model)


def test_aqn_is_judged_by_its_own_rules():
    """The first third of this schedule is silent, and in bfloat16 rounding swallows the last."""
    model = nn.Sequential(nn.RMSNorm(64)).bfloat16()
    noise = st.AQN.load("global_decay:0.5-1e-6,stages=3").attach(model, 3).enable()
    for step in range(3):
        noise.step = step
        with st.phase("rollout"), torch.no_grad():
            model(torch.ones(2, 64, dtype=torch.bfloat16))
        assert noise.inert() == []
    noise.close()
