"""Rotations by complex numbers: allowed in whatever order a device takes them, and no further."""

import pytest
import torch

from tests.numerics.replayed_functions import judged
from tests.tensors import draw


def rotated(x, angles):
    """As DeepSeek-V2 rotates: pairs of a slice, whose rows do not touch, are complex numbers."""
    return torch.view_as_complex(x[..., :8].unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)


def in_parts(z, contracted):
    """What another kernel makes of the same product: with the first of two products exact, as a fused multiply-add has it."""
    a, b = z
    wide = torch.float64 if contracted else torch.float32
    real = (a.real.to(wide) * b.real.to(wide) - (a.imag * b.imag).to(wide)).float()
    imag = (a.real.to(wide) * b.imag.to(wide) + (a.imag * b.real).to(wide)).float()
    return torch.complex(real, imag)


def test_a_slice_that_is_rotated_is_healthy():
    x, angles = draw(1, 24, 72), draw(1, 24, 4, seed=1)
    found = judged(lambda x: rotated(x, angles), x)
    assert not found.violations and not found.unknown
    assert found.coverage["mul"] == {"rows": 24, "replayed": 24}


@pytest.mark.parametrize("contracted", [True, False])
def test_a_complex_product_may_be_contracted_or_not(contracted):
    a, b = (torch.view_as_complex(draw(6, 40, 2, seed=s)) for s in (1, 2))
    other = in_parts((a, b), contracted)
    found = judged(lambda x: a * b, tamper=lambda y: other)
    assert not found.violations and not found.unknown


@pytest.mark.parametrize("wrong", [lambda y: y * (1 + 1e-5), lambda y: y.conj(), lambda y: y * float("nan")])
@pytest.mark.parametrize(
    "function", [lambda a, b: a * b, lambda a, b: a.clone().mul_(b), lambda a, b: torch.polar(a.abs(), b.real)]
)
def test_a_wrong_rotation_is_blamed(function, wrong):
    a, b = (torch.view_as_complex(draw(6, 40, 2, seed=s)) for s in (1, 2))
    assert not judged(lambda x: function(a, b)).violations
    found = judged(lambda x: function(a, b), tamper=wrong)
    assert len(found.violations) == 1 and found.violations[0].share > 0.4


def test_sums_of_complex_numbers_are_rounded_once_and_moving_changes_nothing():
    z = torch.view_as_complex(draw(6, 4, 2))
    for function in (lambda x: z + 1.5 * z, lambda x: -z, lambda x: torch.cat([z, z]), lambda x: z * 0.7):
        assert not judged(function).violations
        assert judged(function, tamper=lambda y: y * (1 + 2.0**-20)).violations
