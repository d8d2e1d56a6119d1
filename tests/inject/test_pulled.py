"""Shaken linears trained on a card, tried on a CPU: the short way gives the bits, the counts and the refusals of hooks."""

import copy
from functools import partial

import pytest
import torch
from card_on_cpu import card
from test_products import batch, end, loss, louder, net, shaken, step, switch
from torch import nn

import shaketable as st
from shaketable.inject.short import keyed, swift

__all__ = ["card"]
NOISE = "relative_gaussian:0.1@module.linear"


@pytest.fixture(autouse=True)
def linears_on_a_card(monkeypatch):
    monkeypatch.setattr(swift, "on_a_card", lambda module: True)


def agree(card, program, plan=NOISE, launches=True, **options):
    """The program under the plan, the short way and by hooks."""
    short = shaken(program, net(**options), plan)
    made = card.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swift, "on_a_card", lambda module: False)
        patch.setattr(keyed, "on_card", lambda x: False)
        hooked = shaken(program, net(**options), plan)
    assert card == made
    assert all(torch.equal(a, b) for a, b in zip(short[0], hooked[0], strict=True))
    assert short[1] == hooked[1]
    assert bool(made) == launches
    return short[1]


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", ["relative", "absolute"])
def test_the_noise_and_its_gradient_are_those_of_hooks(card, shape, grad, kind):
    sites = agree(card, partial(step, shape=shape, grad=grad), f"{kind}_gaussian:0.1@module.linear")
    assert (sites[0]["forward"], sites[0]["backward"]) == (4, 0)
    assert ("beside" in card) == (kind == "relative")


@pytest.mark.parametrize("again", [True, False])
def test_what_is_computed_twice_sees_the_same_noise(card, again):
    sites = agree(card, partial(step, shape=(2, 3)), again=again)
    assert sites[0]["recomputed"] > 0
    once, twice = (shaken(partial(step, shape=(2, 3)), net(again=how))[0] for how in (None, again))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("change", [switch, louder, end])
def test_the_gradient_is_that_of_what_happened(card, change):
    """Whatever happens to the plan between forward and backward."""

    def program(model, injection):
        x = batch(2, 3)
        y = model(x)
        change(injection)
        loss(y).backward()
        return y.detach(), x.grad

    agree(card, program)


def test_two_forwards_and_one_graph_twice(card):
    def program(model, _):
        losses = [loss(model(batch(4, seed=seed))) for seed in (1, 2)]
        for y in reversed(losses):
            y.backward(retain_graph=True)
        losses[0].backward()
        return [y.detach() for y in losses]

    agree(card, program)


@pytest.mark.parametrize("bias", [True, False])
def test_who_changes_the_output_in_place(card, bias):
    """With a bias the output is a view, which autograd then takes out of the graph."""

    def program(model, _):
        linear = model.up if bias else model.down
        x = torch.randn(2, 3, linear.in_features, generator=torch.Generator().manual_seed(2)).requires_grad_()
        y = linear(x)
        y.mul_(torch.arange(1.0, 1 + linear.out_features)).add_(1)
        loss(y).backward()
        return y.detach(), x.grad

    agree(card, program)


def test_a_gradient_that_others_hold_is_left_alone(card):
    def program(model, _):
        x = batch(4)
        y = model.up(x)
        g = torch.ones_like(y)
        y.backward(g)
        assert torch.equal(g, torch.ones_like(y))
        return y.detach(), x.grad

    agree(card, program)


def test_frozen_linears_and_adapters(card):
    def program(model, injection):
        for p in model.parameters():
            p.requires_grad_(False)
        found = step(model, injection, (2, 3))
        return [*found, model(batch(4, grad=False))]

    agree(card, program)


def test_gradients_of_gradients_are_refused(card):
    def program(model, _):
        x = batch(4)
        (g,) = torch.autograd.grad(loss(model(x)), [x], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            loss(g).backward()
        return [g.detach()]

    agree(card, program)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types(card, dtype):
    def program(model, _):
        y = model.to(dtype)(batch(2, 3, grad=False).to(dtype))
        loss(y).backward()
        return [y.detach()]

    agree(card, program, launches=dtype is torch.bfloat16)


def test_autocast_is_no_hindrance(card):
    """It casts what a product is given; what the product returns is as new as ever, and so is `shaketable train` served."""

    def program(model, injection):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(batch(2, 3))
        loss(y.float()).backward()
        return [y.detach(), *[p.grad for p in model.parameters()]]

    agree(card, program)


def test_an_operator_plan_beside_it(card):
    def program(model, injection):
        other = st.inject(model, "relative_gaussian:0.2@op.matmul", seed=9).enable()
        found = step(model, injection, (2, 3))
        other.close()
        return found

    agree(card, program)


def test_copies_are_clean_and_closing_leaves_no_trace(card):
    model = net()
    clean = step(model, None)
    model.zero_grad()
    with st.inject(model, NOISE, seed=3):
        step(model, None)
        twin = copy.deepcopy(model)
    assert card
    assert type(twin.up) is type(model.up) is nn.Linear
    for after in (model, twin):
        after.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(step(after, None), clean, strict=True))
