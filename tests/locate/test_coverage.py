"""Every row of every operator is judged at the default length, the head's too, and what was not replayed is said."""

from __future__ import annotations

import pytest
import torch

import shaketable as st
from shaketable.numerics import operators as operator_rounding
from tests.locate.architectures import build, tokens

pytestmark = pytest.mark.attack("coverage of locate")

DTYPES = [torch.float32, torch.bfloat16]
LENGTH = 256


def long(dtype=torch.float32, vocabulary=96):
    return build("llama", dtype, "sdpa", positions=512, vocabulary=vocabulary)


def judged(model, **options):
    return st.locate(model, mode="host", input_ids=tokens(n=LENGTH), **options)


def with_fault(model, path, change):
    """The model with some values of a module's result changed in place."""

    def broken(module, args, y):
        y = y.clone()
        change(y)
        return y

    model.get_submodule(path).register_forward_hook(broken)
    return model


# ---- the head


def two_words_swapped(y):
    y[:, 101, [17, 8000]] = y[:, 101, [8000, 17]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_of_a_large_head_is_judged(dtype):
    found = judged(with_fault(long(dtype, 9001), "lm_head", two_words_swapped))
    assert (found.verdict, found.layer, found.op) == ("FAULT", None, "lm_head"), found.sentence


# ---- rows of products


@pytest.mark.parametrize("leaf", ["self_attn.q_proj", "mlp.down_proj"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_swapped_channels_are_found_in_any_row(dtype, leaf):
    pairs = torch.randperm(32, generator=torch.Generator().manual_seed(0)).view(-1, 2).tolist()
    for row, (a, b) in zip(range(1, LENGTH, 32), pairs, strict=False):

        def swap(y, at=row, pair=(a, b)):
            y[:, at, list(pair)] = y[:, at, list(reversed(pair))]

        found = judged(with_fault(long(dtype), f"model.layers.1.{leaf}", swap))
        assert (found.layer, found.op) == (1, leaf), (row, a, b, found.sentence)
        assert {example["token"] for example in found.evidence[0].examples} == {row}


def test_one_value_beside_its_interval_is_found_in_any_row_of_a_reduced_dtype():
    """One unit in the last place of bfloat16, in one value of the whole model: what 32 tokens show, 256 show too."""

    def next_value(y):
        y.view(torch.int16)[0, 133, 7] += 2

    found = judged(with_fault(long(torch.bfloat16), "model.layers.1.mlp.up_proj", next_value))
    assert (found.layer, found.op, found.lanes) == (1, "mlp.up_proj", [7]), found.sentence


# ---- what was judged is said


def coverage(diagnosis, layer, op):
    return next(p for p in diagnosis.as_dict()["probes"] if p["layer"] == layer)["coverage"][op]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_is_replayed(dtype):
    found = judged(long(dtype, 9001))
    assert found.coverage["rows"] == found.coverage["replayed"] > 0
    assert "as far as a replay on the host can see. Not run: compiled graphs" in found.sentence


def test_quick_runs_one_short_sequence_and_says_so():
    found = judged(long(), quick=True)
    assert found.tokens == 64 and not any({"batch", "decode"} & probe.results.keys() for probe in found.probes)
    assert "Not run: a batch of two (quick), cached decoding (quick)" in found.sentence


def test_a_function_without_a_definition_is_named(monkeypatch):
    """Host and device make the same bits: on one CPU that is little, and the sentence says so."""
    monkeypatch.delitem(operator_rounding.BOUNDED, "scaled_dot_product_attention")
    found = st.locate(long(), mode="host", input_ids=tokens())
    assert found.verdict == "HEALTHY"
    assert "of scaled_dot_product_attention only that the host makes the same bits is known" in found.sentence
    assert found.coverage["agreed"] == 3 * 24 * 4


def test_device_mode_says_what_it_only_repeated_and_that_it_is_blind_to_tokens():
    found = st.locate(long(), mode="device", input_ids=tokens(n=64))
    assert "embeddings, rotation, last norm and head were only repeated" in found.sentence
    assert any("residual" in line and "rotation" in line for line in found.not_covered)
    assert coverage(found, 1, "mlp.down_proj") == {"rows": 64, "twin": 64}
    assert "Not run: a batch of two, cached decoding" in found.sentence
