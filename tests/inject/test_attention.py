"""Attention that is opened operator by operator, and what is said of attention that is one kernel."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import InertError
from tests.tensors import draw


def test_torchs_own_attention_is_opened_and_computes_what_it_did():
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), draw(1, 3, 8)
    wanted, weights = model(x, x, x, need_weights=True)
    with st.inject(model, "gain:1@op.silu", allow_inert=True):
        found, also = model(x, x, x, need_weights=True)
    assert torch.equal(found, wanted) and torch.equal(also, weights)
    with st.inject(model, "gain:1@op.softmax,direction=forward") as ledger:
        _, doubled = model(x, x, x, need_weights=True)
    assert torch.allclose(doubled, 2 * weights) and ledger.forward == 1


class Attention(nn.Module):
    """Says how it computes, as those of transformers do."""

    def __init__(self, how):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=how)


def test_only_the_clauses_on_a_softmax_that_is_hidden_are_warned_of(recwarn):
    st.inject(nn.Sequential(Attention("sdpa")), "gain:1@op.matmul;gain:2@op.softmax;gain:1@op.all")
    said = [str(w.message) for w in recwarn if w.category is RuntimeWarning]
    assert [text.partition(": attention")[0] for text in said] == ["gain:2@op.softmax"]
    recwarn.clear()
    st.inject(nn.Sequential(Attention("eager")), "gain:1@op.softmax")
    assert [w for w in recwarn if w.category is RuntimeWarning] == []


IDS = torch.tensor([[3, 7, 11, 5]])
SOFTMAX = "attention is one kernel (sdpa), inside of which its softmax (op.softmax) cannot be hit"


@pytest.mark.filterwarnings("ignore:gain")
def test_a_clause_that_nothing_came_of_ends_with_the_reason(tiny_llama):
    injection = st.inject(tiny_llama, "gain:0.1@op.softmax").enable()
    tiny_llama(IDS)
    assert injection.ledger.sites[0].fused == 4
    assert SOFTMAX in str(injection.ledger)
    with pytest.raises(InertError, match=r"never fired \(attention is one kernel \(sdpa\)"):
        injection.close()
