"""Activation checkpointing, on any device: what is computed a second time sees the noise of the first."""

import shaketable as st
from tests.tensors import same


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
