"""Activation checkpointing, on any device: what is computed a second time sees the noise of the first."""

import copy

import torch

import shaketable as st
from tests.tensors import same


def accumulated_gradients(model, plan, order, checkpoint, tokens):
    """The gradients of a copy of a model after two forward passes under a plan and then both backward passes, in an order."""
    model = copy.deepcopy(model).train()
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with st.inject(model, plan, seed=3):
        losses = [model(ids, labels=tokens).loss for ids in (tokens, tokens + 1)]
        for i in order:
            losses[i].backward()
    return [p.grad for p in model.parameters()]


def assert_recomputation_sees_the_same_noise(model, plan, reentrant, step, settle=lambda: None):
    """A training step of a model of transformers under a plan, and the same one with its layers checkpointed."""
    model.train()
    with st.inject(model, plan, seed=3) as ledger:
        plain = step(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    with st.inject(model, plan, seed=3) as checkpointed:
        again = step(model)
    settle()
    assert same(plain, again)
    assert (checkpointed.forward, checkpointed.backward) == (ledger.forward, ledger.backward)
    assert checkpointed.to_dict()["sites"][0]["recomputed"] > 0
    assert checkpointed.sites[0].by("layer") == ledger.sites[0].by("layer")


class Again(torch.autograd.Function):
    """Checkpointing that is not torch's own: computes a part a second time, without what is around it."""

    @staticmethod
    def forward(ctx, x, part):
        ctx.save_for_backward(x)
        ctx.part = part
        return part(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.part(x).backward(g)
        return x.grad, None
