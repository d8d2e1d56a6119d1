"""How reports word what was found."""

import pytest

from shaketable.report.wording import unit_of


@pytest.mark.parametrize(
    ("curve", "unit"), [("accuracy", "points"), ("accuracy, noise", "points"), ("reward", ""), ("loss", "")]
)
def test_only_accuracies_are_read_in_points(curve, unit):
    assert unit_of(curve) == unit
