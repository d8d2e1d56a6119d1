"""What is said of shares: a family is the first to fix only where these tokens can tell."""

import pytest

from shaketable.mismatch.results import FamilyShare, Shares
from shaketable.mismatch.verdict import LEADS, causes


def shares(leads, first="lm_head"):
    rows = [FamilyShare(first, 1.0, 0.46, 0.04, 0.64, leads, 0.1), FamilyShare("linear", 0.6, 0.3, 0.2, 0.4, 1 - leads, 0.1)]
    return Shares(rows, 1.6, 28, 1.0, None, [])


def test_a_share_is_told_with_its_interval():
    assert causes(shares(1.0)).startswith("Of the KL: lm_head 46% (4% to 64%), linear 30% (20% to 40%).")


@pytest.mark.parametrize(("leads", "is_told"), [(1.0, True), (LEADS, True), (LEADS - 0.001, False), (0.5, False)])
def test_what_to_fix_first_is_said_only_of_a_family_that_leads(leads, is_told):
    said = causes(shares(leads))
    assert ("First fix: compute lm_head in float32 on both sides." in said) == is_told
    assert ("is not certain: lm_head has most in" in said and "28 tokens; compare more rollouts." in said) != is_told


def test_a_family_without_advice_of_its_own_gets_the_general_one():
    assert "First fix: compute rms_norm in the same dtype and order on both sides." in causes(shares(1.0, "rms_norm"))
