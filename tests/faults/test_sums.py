"""Sums over a tensor before and after, from which magnitudes are read."""

import pytest
import torch

from shaketable.faults.sums import CROSS, DEVIATION, ERROR, FINITE, NONZERO, RATIO, SIZE, SQUARE, VALUES, plain_sums


@pytest.mark.parametrize(("lanes", "values"), [(None, 32), (torch.arange(8) < 2, 8)])
def test_a_magnitude_is_read_from_faulty_channels_and_the_error_from_all(lanes, values):
    clean = torch.ones(4, 8)
    found = plain_sums(clean, clean + 0.5, lanes).tolist()
    assert [found[i] for i in (VALUES, SIZE, ERROR)] == [32, 32, 32 * 0.25]
    assert [found[i] for i in (FINITE, NONZERO, SQUARE)] == [values] * 3
    assert [found[i] for i in (RATIO, DEVIATION, CROSS)] == [values * 0.25, values * 0.5, values * 0.5]
