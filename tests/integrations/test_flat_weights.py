"""Weights that are views of one buffer, as DeepSpeed's ZeRO-1 and 2 and other flat optimizers keep them: `lm_head` alone is left out."""

import copy

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import shaketable as st
from shaketable.errors import PlanError

PLAN = "relative_gaussian:0.05@op.matmul;mxfp4@module.o_proj,point=weight"


def one_step(model):
    ids = torch.arange(1, 9)[None]
    with st.inject(model, PLAN, seed=3) as ledger:
        loss = model(ids, labels=ids).loss
        loss.backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters()}, ledger


def test_a_plan_acts_on_weights_in_one_buffer_as_on_any_others(tiny_llama):
    flat = copy.deepcopy(tiny_llama)
    vector_to_parameters(parameters_to_vector(flat.parameters()), flat.parameters())
    assert len({p.untyped_storage().data_ptr() for p in flat.parameters()}) == 1
    (loss, gradients, ledger), (same, again, found) = one_step(tiny_llama), one_step(flat)
    assert torch.equal(loss, same) and all(torch.equal(gradients[name], again[name]) for name in gradients)
    assert (found.forward, found.backward) == (ledger.forward, ledger.backward)
    assert found.forward > 7


def test_zero_3_is_refused(tiny_llama):
    next(tiny_llama.parameters()).ds_id = 0
    with pytest.raises(PlanError, match="ZeRO-3"):
        st.inject(tiny_llama, PLAN)
