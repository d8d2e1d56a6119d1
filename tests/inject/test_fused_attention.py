"""What attention hides from an operator plan is said when the plan is attached, by name, and not only when it is over."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import shaketable as st
from shaketable.errors import InertError

IDS = torch.tensor([[3, 7, 11, 5]])
SOFTMAX = "attention is one kernel (sdpa), inside of which its softmax (op.softmax) cannot be hit"


def notes(model, plan):
    """Those of a plan that was attached and never ran."""
    injection = st.inject(model, plan)
    found = injection.ledger.sites[0].notes
    injection.close(check=False)
    return found


def test_softmax_under_sdpa_is_said_to_be_out_of_reach_when_the_plan_is_attached(tiny_llama):
    with pytest.warns(RuntimeWarning, match="op.softmax.*attn_implementation=eager") as caught:
        (note,) = notes(tiny_llama, "gain:0.1@op.softmax")
    assert note.startswith(SOFTMAX)
    assert caught[0].filename == __file__


def test_products_are_named_beside_it(tiny_llama):
    assert "two matrix products (op.matmul) and softmax (op.softmax)" in notes(tiny_llama, "gain:0.1@op.all")[0]
    assert "softmax" not in notes(tiny_llama, "gain:0.1@op.matmul")[0]


@pytest.mark.parametrize("plan", ["gain:0.1@op.silu", "gain:0.1@module.linear", "gain:0.1@op.sdpa"])
def test_nothing_is_said_where_nothing_is_hidden(tiny_llama, plan):
    assert notes(tiny_llama, plan) == []


def test_nothing_is_said_where_the_operators_are_met(tiny_llama):
    with sdpa_kernel(SDPBackend.MATH):
        assert notes(tiny_llama, "gain:0.1@op.softmax") == []
    tiny_llama.set_attn_implementation("eager")
    with st.inject(tiny_llama, "gain:0.1@op.softmax") as ledger:
        tiny_llama(IDS)
    assert ledger.sites[0].notes == []
    assert ledger.forward == 4


@pytest.mark.filterwarnings("ignore:gain")
def test_a_clause_that_nothing_came_of_ends_with_the_reason(tiny_llama):
    injection = st.inject(tiny_llama, "gain:0.1@op.softmax").enable()
    tiny_llama(IDS)
    assert injection.ledger.sites[0].fused == 4
    assert SOFTMAX in str(injection.ledger)
    with pytest.raises(InertError, match=r"never fired \(attention is one kernel \(sdpa\)"):
        injection.close()
