"""Attention written out operator by operator, against float64 formulas, and what is said of attention that is one kernel."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shaketable as st
from shaketable.errors import InertError
from shaketable.inject.operators import attention_in_the_open
from tests.tensors import draw

Q, K, V = draw(2, 4, 3, 8, seed=1), draw(2, 4, 5, 8, seed=2), draw(2, 4, 5, 6, seed=3)
SEEN = torch.tensor([[1, 0, 1, 0, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)


def by_hand(q, k, v, mask=None, causal=False, scale=None):
    """Attention in float64, row by row."""
    q, k, v = q.double(), k.double(), v.double()
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.einsum("...qd,...kd->...qk", q, k) * scale
    rows, columns = scores.shape[-2:]
    if causal:
        for i in range(rows):
            scores[..., i, i + 1 :] = -math.inf
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=-1e300))
    total = weights.sum(-1, keepdim=True)
    assert weights.shape[-1] == columns
    return torch.einsum("...qk,...kv->...qv", weights / total.where(total > 0, 1.0), v)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"scale": 2.0, "is_causal": True},
        {"attn_mask": SEEN},
        {"attn_mask": SEEN[None, None].expand(2, 1, 3, 5)},
        {"attn_mask": draw(3, 5, seed=4)},
        {"attn_mask": draw(2, 1, 3, 5, seed=5), "scale": 0.1},
        {"dropout_p": 0.0},
    ],
    ids=str,
)
def test_attention_in_the_open_is_the_formula(options):
    named = {"attn_mask": "mask", "is_causal": "causal", "scale": "scale"}
    wanted = by_hand(Q, K, V, **{named[k]: v for k, v in options.items() if k in named})
    found = attention_in_the_open(Q, K, V, **options)
    assert found.dtype == torch.float32 and torch.allclose(found.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_share_keys_and_values_in_groups_that_follow_each_other(groups):
    k, v = draw(2, groups, 5, 8, seed=6), draw(2, groups, 5, 6, seed=7)
    wanted = torch.cat([by_hand(Q[:, h : h + 1], k[:, [h * groups // 4]], v[:, [h * groups // 4]]) for h in range(4)], 1)
    found = attention_in_the_open(Q, k, v, enable_gqa=True)
    assert torch.allclose(found.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_its_gradients_are_those_of_attention(causal):
    given = [x.clone().requires_grad_() for x in (Q, K, V)]
    found = torch.autograd.grad(attention_in_the_open(*given, is_causal=causal).square().sum(), given)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = torch.autograd.grad(F.scaled_dot_product_attention(*given, is_causal=causal).square().sum(), given)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, wanted, strict=True))


# ---- met by plans


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=False)


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


# ---- what is said beforehand


class Attention(nn.Module):
    """Says how it computes, as those of transformers do."""

    def __init__(self, how):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=how)


def test_only_the_clauses_on_a_softmax_that_is_hidden_are_warned_of(recwarn):
    model = nn.Sequential(Attention("sdpa"))
    st.inject(model, "gain:1@op.matmul;gain:1@op.sdpa;gain:1@op.all")
    assert [w for w in recwarn if w.category is RuntimeWarning] == []
    st.inject(model, "gain:1@op.matmul;gain:2@op.softmax;gain:3@op.softmax+silu")
    said = [str(w.message) for w in recwarn if w.category is RuntimeWarning]
    assert [text.partition(": attention")[0] for text in said] == ["gain:2@op.softmax", "gain:3@op.softmax+silu"]
    recwarn.clear()
    st.inject(nn.Sequential(Attention("eager")), "gain:1@op.softmax")
    assert [w for w in recwarn if w.category is RuntimeWarning] == []


IDS = torch.tensor([[3, 7, 11, 5]])
SOFTMAX = "attention is one kernel (sdpa), inside of which its softmax (op.softmax) cannot be hit"


def notes(model, plan):
    """Those of a plan that was attached and never ran."""
    injection = st.inject(model, plan)
    found = injection.ledger.sites[0].notes
    injection.close(check=False)
    return found


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
