"""What a hardening run prints of its intervals."""

import pytest

from shaketable.harden.summary import interval_end


@pytest.mark.parametrize(("low", "high", "shown"), [(None, None, ("−∞", "∞")), (-0.031, 0.62, ("−3%", "62%"))])
def test_an_end_that_is_not_finite_has_its_sign(low, high, shown):
    share = {"share": 0.5, "interval": {"low": low, "high": high}}
    assert (interval_end(share, "low"), interval_end(share, "high")) == shown
