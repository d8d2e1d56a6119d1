"""Complex numbers part by part: which functions are judged, and how far a product and a polar form may be off."""

import math
from functools import partial

import pytest
import torch

from shaketable.locate.probes.complex_ops import BOUNDED, is_defined, parts
from shaketable.locate.probes.operator_rounding import Call
from shaketable.locate.probes.rounding import Precision

UA, TINY = 2.0**-24, 2.0**-125
called = partial(Call, None, precision=Precision(), wide=lambda t: t.double())


def test_parts_are_neighbouring_channels():
    z = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6 + 0j]])
    assert parts(z).tolist() == [[1, 2, 3, -4], [0, 5, 6, 0]]
    assert parts(z.conj()).tolist() == [[1, -2, 3, 4], [0, -5, 6, 0]]
    assert parts(torch.ones(2, 3, 4, dtype=torch.complex128)).shape == (2, 3, 8)
    assert parts(torch.ones(2, dtype=torch.complex128)).dtype == torch.float64


JUDGED = """
    mul multiply __mul__ __rmul__ __imul__ mul_ polar add __add__ __radd__ __iadd__ add_ sub rsub subtract __sub__ __rsub__
    __isub__ sub_ neg __neg__ cat stack clone reshape __getitem__ where contiguous
"""
NOT_JUDGED = "div true_divide divide __truediv__ __rtruediv__ __itruediv__ div_ abs exp matmul sqrt softmax linear sum mean pow"


@pytest.mark.parametrize("name", JUDGED.split())
def test_products_sums_and_moves_of_complex_numbers_are_judged(name):
    assert is_defined(name)


@pytest.mark.parametrize("name", NOT_JUDGED.split())
def test_other_functions_of_complex_numbers_are_only_compared(name):
    assert not is_defined(name)


A, B = torch.tensor([1.5 - 2j, 0.25 + 8j]), torch.tensor([3 + 0.5j, -2 + 1j])


@pytest.mark.parametrize("name", ["mul", "multiply", "__mul__", "__rmul__", "__imul__", "mul_"])
@pytest.mark.parametrize("kind", ["positional", "named"])
def test_a_product_and_its_bound(name, kind):
    """(1.5 − 2i)(3 + 0.5i) = 5.5 − 5.25i with parts of |4.5| + |1| and |0.75| + |6|; the other likewise."""
    call = called((A, B), {}, torch.complex64) if kind == "positional" else called((A,), {"other": B}, torch.complex64)
    found = BOUNDED[name](call)
    assert found.value.tolist() == [5.5, -5.25, -8.5, -15.75] and found.dtype == torch.float32
    sizes = torch.tensor([5.5, 6.75, 8.5, 16.25]).double()
    assert torch.allclose(found.slack, 2 * UA * sizes + TINY, rtol=1e-12)


def test_a_product_of_double_precision_is_judged_in_its_own_dtype():
    found = BOUNDED["mul"](called((A.to(torch.complex128), B.to(torch.complex128)), {}, torch.complex128))
    assert found.dtype == torch.float64


@pytest.mark.parametrize("number", [2, 0.5, 1 - 3j])
def test_a_number_meets_complex_numbers_in_their_dtype(number):
    found = BOUNDED["mul"](called((A, number), {}, torch.complex64))
    expected = [complex(a) * complex(number) for a in A.tolist()]
    assert found.value.tolist() == [part for z in expected for part in (z.real, z.imag)]
    third = BOUNDED["mul"](called((A, 1 / 3), {}, torch.complex64))
    assert third.value.tolist()[0] == 1.5 * float(torch.tensor(1 / 3))


def test_a_real_factor_has_no_imaginary_part():
    found = BOUNDED["mul"](called((A, torch.tensor([2.0, 3.0])), {}, torch.complex64))
    assert found.value.tolist() == [3.0, -4.0, 0.75, 24.0]
    assert torch.allclose(found.slack, 2 * UA * torch.tensor([3.0, 4.0, 0.75, 24.0]).double() + TINY, rtol=1e-12)


@pytest.mark.parametrize("kind", ["positional", "named"])
def test_a_polar_form_and_its_bound(kind):
    radius, angle = torch.tensor([2.0, -3.0]), torch.tensor([0.5, 2.0])
    call = (
        called((radius, angle), {}, torch.complex64)
        if kind == "positional"
        else called((), {"abs": radius, "angle": angle}, torch.complex64)
    )
    found = BOUNDED["polar"](call)
    y = [2 * math.cos(0.5), 2 * math.sin(0.5), -3 * math.cos(2.0), -3 * math.sin(2.0)]
    assert found.value.tolist() == pytest.approx(y, rel=1e-15) and found.dtype == torch.float32
    slack = [UA * (6 * abs(part) + 4 * r) + TINY for part, r in zip(y, (2, 2, 3, 3), strict=True)]
    assert found.slack.tolist() == pytest.approx(slack, rel=1e-12)


def test_the_factors_of_a_product_are_not_changed():
    a, b = A.clone(), B.clone()
    BOUNDED["mul_"](called((a, b), {}, torch.complex64))
    assert torch.equal(a, A) and torch.equal(b, B)
