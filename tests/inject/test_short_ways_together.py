"""All short ways on one model at once, as `shaketable train` has them: a plan, AQN, rollouts and losses; played on a CPU."""

import numpy as np
import pytest
import torch
from card_on_cpu import card

import shaketable as st
from shaketable.faults.gpu import dispatch
from shaketable.inject import attached, weights
from shaketable.inject.short import ready, swift, swift_inputs

__all__ = ["card"]
PLANS = [
    "relative_gaussian:0.1@op.matmul",
    "relative_gaussian:0.1@op.all",
    "relative_gaussian:0.1@module.linear",
    "mxfp4@module.linear",
    "relative_gaussian:0.1@op.matmul,phase=train",
    "relative_gaussian:0.1@module.linear;gain:0.05@layer.all",
]


@pytest.fixture
def short(card, monkeypatch):
    """All that asks for a card is told that there is one."""
    with monkeypatch.context() as patch, np.errstate(all="ignore"):
        for module in (attached, swift, swift_inputs, weights):
            patch.setattr(module, "on_a_card", lambda module: True)
        patch.setattr(ready, "on_card", lambda parameter: True)
        patch.setattr(swift_inputs, "is_capturing", lambda: False)
        patch.setattr(swift_inputs, "_on_card", lambda x: type(x) is torch.Tensor)
        patch.setattr(dispatch, "fits", lambda x: x.dtype in dispatch._floats() and x.numel() > 0)
        yield patch


def program(model, plan, order, cast):
    """Two steps of a rollout of three passes and a loss, both switched off and on in between."""
    ids, found = torch.arange(32).view(2, 16), []
    model.zero_grad()
    injection = st.inject(model, plan, seed=3, allow_inert=True)
    noise = st.AQN.load("constant:0.1").attach(model, 10, allow_inert=True)
    for thing in (injection, noise)[::order]:
        thing.enable()
    for step in range(2):
        injection.step = noise.step = step
        with st.phase("rollout"), torch.no_grad():
            found += [model(ids + i).logits for i in range(3)]
        with st.phase("train"), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            loss = model(ids, labels=ids).loss
        loss.backward()
        found.append(loss.detach())
        injection.disable()
        found.append(model(ids).logits.detach())
        injection.enable()
    ledgers = injection.ledger, noise.ledger
    for thing in (noise, injection)[::order]:
        thing.close(check=False)
    found += [p.grad.clone() for p in model.parameters()]
    return found, [(ledger.forward, ledger.backward, ledger.sites[0].by("phase")) for ledger in ledgers]


@pytest.mark.parametrize(
    ("plan", "order", "cast"),
    [*((plan, 1, False) for plan in PLANS), *((plan, *how) for plan in PLANS[:3:2] for how in [(-1, False), (1, True)])],
)
def test_they_are_the_ordinary_way(tinier_llama, short, card, plan, order, cast):
    model = tinier_llama
    classes = [type(m) for m in model.modules()]
    quick = program(model, plan, order, cast)
    assert bool(card) == ("gaussian" in plan)
    assert [type(m) for m in model.modules()] == classes
    short.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shaketable.inject.short.keyed.on_card", lambda x: False)
        slow = program(model, plan, order, cast)
    assert quick[1] == slow[1]
    for a, b in zip(quick[0], slow[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
