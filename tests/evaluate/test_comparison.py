"""What a comparison says, and Holm's correction against closed testing by brute force."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shaketable.evaluate.statistics import Comparison, Interval, corrected, holm


def comparison(**changes):
    fields = {
        "difference": 0.031,
        "interval": Interval(-0.01, 0.072),
        "p": 0.14,
        "method": "exact McNemar",
        "over": "paired over 200 problems",
        "detectable": 0.058,
    }
    return Comparison(**{**fields, **changes})


def closed_testing(ps):
    """A hypothesis falls when every set of hypotheses that holds it falls, each by Bonferroni."""
    every = range(len(ps))
    sets = [s for k in every for s in itertools.combinations(every, k + 1)]
    return [max(min(1.0, len(s) * min(ps[i] for i in s)) for s in sets if at in s) for at in every]


@given(some.lists(some.floats(0, 1), max_size=6))
def test_holm_is_closed_testing(ps):
    assert holm(ps) == pytest.approx(closed_testing(ps))


def test_the_sentence_says_difference_interval_p_and_reach():
    assert comparison().sentence() == (
        "+3.1 points (95 % CI −1.0 to +7.2, p = 0.14, paired over 200 problems): not distinguishable; "
        "this design can see a difference of 5.8 points"
    )


def test_the_corrected_p_decides():
    family = corrected([comparison(p=0.03), comparison(p=0.2), comparison(p=0.5)])
    assert comparison(p=0.03).distinguishable
    assert [c.adjusted for c in family] == pytest.approx([0.09, 0.4, 0.5])
    assert not family[0].distinguishable
    assert "p = 0.03, after Holm p = 0.09" in family[0].sentence()
