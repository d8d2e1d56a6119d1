"""What a comparison of two devices says, from rows made up by hand."""

import pytest

from shaketable.compare.compare import ComparisonRow, DeviceComparison, Difference, LayerRow
from shaketable.numerics.fit import ROUNDING, Fit

NAN, INF = float("nan"), float("inf")
SAME, APART = Difference(8, 0, 0.0, 0.0, 0), Difference(8, 3, 0.5, 0.25, 0)
GOOD = {"model": "nano", "dtype": "float32", "device": "cpu", "date": "2026-01-01"}
HERE = {"model": "nano", "dtype": "bfloat16", "device": "npu", "date": "2026-01-02"}


def row(layer=1, op="mlp", difference=SAME, **more):
    return ComparisonRow(layer, op, more.pop("point", "output"), f"module.{op},layers={layer}", difference, **more)


def fit(kind="relative_gaussian", magnitude=0.25):
    return Fit(kind, magnitude, values=64, log_gain=9.0, ks=0.05)


def comparison(*rows, before=(), after=(), **more):
    return DeviceComparison(GOOD, HERE, list(before), [LayerRow(1, "layers.1", SAME, list(rows))], list(after), **more)


PAIR = "float32 on cpu and bfloat16 on npu"
SENTENCES = [
    ([row(), row()], f"SAME: 2 operators in 1 layers agree bit for bit, {PAIR}."),
    ([row(), row(difference=APART)], f"EXPLAINED: 1 of 2 operators differ, none beyond what rounding explains, {PAIR}."),
    (
        [row(), row(difference=APART, here=2)],
        "BEYOND: layer 1 is the first, mlp: 2 of 8 values on this device are not what rounding allows (relative error 2.50e-01).",
    ),
    (
        [row(layer=None, op="lm_head", point="input", difference=APART, here=2, stored=3, fit=fit())],
        "BEYOND: the first is outside of the layers, what reaches lm_head: 3 of 8 values on both devices are not what rounding "
        "allows (relative error 2.50e-01, best described as relative_gaussian:0.25).",
    ),
    (
        [row(difference=APART, stored=1, fit=fit(ROUNDING))],
        "BEYOND: layer 1 is the first, mlp: 1 of 8 values in the fingerprint are not what rounding allows (relative error 2.50e-01).",
    ),
]


@pytest.mark.parametrize(("rows", "sentence"), SENTENCES)
def test_the_sentence_says_exactly_this(rows, sentence):
    assert comparison(*rows).sentence == sentence


@pytest.mark.parametrize(
    ("here", "rounds", "written"), [(2, False, True), (0, False, False), (None, False, True), (0, True, True)]
)
def test_a_clause_is_written_for_what_the_dtype_does_not_explain(here, rounds, written):
    found = comparison(row(difference=APART, here=here, fit=fit()), rounds_factors=rounds)
    assert [(r.op, f.kind) for r, f, _ in found.clauses()] == ([("mlp", "relative_gaussian")] if written else [])
    assert (found.plan_text() is None) is not written
