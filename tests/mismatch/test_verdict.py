"""What is said of shares: a family is the first to fix only where these tokens can tell."""

import pytest

from shaketable.mismatch.results import FamilyShare, Shares
from shaketable.mismatch.verdict import causes


def shares(low, first="lm_head"):
    rows = [FamilyShare(first, 1.0, 0.56, low, 0.64), FamilyShare("linear", 0.6, 0.3, 0.2, 0.4)]
    return Shares(rows, 1.6, 28, 1.0, 1.0)


@pytest.mark.parametrize(("low", "is_told"), [(0.41, True), (0.39, False)])
def test_what_to_fix_first_is_said_only_of_a_family_whose_interval_is_clear_of_the_next(low, is_told):
    said = causes(shares(low))
    assert said.startswith(f"Of the KL: lm_head 56% ({low:.0%} to 64%), linear 30% (20% to 40%).")
    assert ("First fix: compute lm_head in float32 on both sides." in said) == is_told
    assert ("is not certain: the interval of lm_head overlaps that of linear" in said) != is_told
