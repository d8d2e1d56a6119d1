"""Faults on numbers that can be checked by hand: every type, odd scopes, and how kernels are built."""

import shutil

import pytest
import torch

from shaketable.faults import Draw, make_fault
from shaketable.faults.cpu import native

NAN, INF = float("nan"), float("inf")
MANTISSA = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7, torch.float64: 52}
every_dtype = pytest.mark.parametrize("dtype", MANTISSA, ids=str)


def fault(text, **fields):
    kind, _, magnitude = text.partition(":")
    return make_fault({"kind": kind} | ({"magnitude": float(magnitude)} if magnitude else {}) | fields)


class Given:
    """A draw of which the uniform numbers are given."""

    key, reference = 0, None

    def __init__(self, *uniforms):
        self.uniforms = torch.tensor(uniforms)

    def uniform(self, x, stream=0):
        return torch.zeros_like(self.uniforms) if stream else self.uniforms


def made(text, x, draw=None, dtype=torch.float32, **fields):
    """What a fault makes of these numbers."""
    return fault(text, **fields).apply(torch.tensor(x, dtype=dtype), draw or Draw(0)).tolist()


# Arithmetic in the tensor's own width

TINY = ["relative_gaussian:1e-12", "absolute_gaussian:1e-12", "noise:1e-12", "rms_gaussian:1e-12", "systematic_bias:1e-12", "bias:1e-12", "gain:1e-12"]  # fmt: skip


@pytest.mark.parametrize("text", TINY)
def test_a_fault_of_float64_is_computed_in_float64(text):
    """In float32 these would change nothing, or every value by a ten-millionth."""
    x = torch.linspace(1, 2, 64, dtype=torch.float64)
    error = (fault(text).apply(x, Draw(3)) - x).abs()
    assert error.dtype == torch.float64 and 1e-13 < float(error.mean()) < 5e-12


# Bits


@every_dtype
def test_the_lowest_and_the_highest_bit_of_every_type(dtype):
    width, draw = 8 * dtype.itemsize, Given(0.0, 0.5)
    assert made("bit_flip:0.25", [1.0, 1.0], draw, dtype, bit=0) == [1.0 + 2.0 ** -MANTISSA[dtype], 1.0]
    assert made("bit_flip:0.25", [1.5, 1.5], draw, dtype, bit=width - 1) == [-1.5, 1.5]
    with pytest.raises(ValueError, match=f"bit {width} does not exist in {dtype}, which has bits 0-{width - 1}") if width < 64 else pytest.raises(ValueError, match="63"):  # fmt: skip
        made("bit_flip:0.25", [1.0, 1.0], draw, dtype, bit=width)


@every_dtype
def test_mantissa_bits_are_counted_from_the_top_in_every_type(dtype):
    assert made("stuck_bit:1", [1.0, 1.25, -2.0, 1.5, -1.75], dtype=dtype) == [1.5, 1.75, -3.0, 1.5, -1.75]
    assert made("truncation:1", [1.75, -1.75, 3.9, 0.3, 1.0, 0.0], dtype=dtype) == [1.5, -1.5, 3.0, 0.25, 1.0, 0.0]
    assert made("truncation:0", [1.9, -3.9, 0.7], dtype=dtype) == [1.0, -2.0, 0.5]


# Spikes


def test_a_number_is_hit_with_exactly_the_chance_that_was_asked_for():
    """Uniform numbers are multiples of 2^-24 from 0 on: below the rate there are as many of them as the rate says."""
    x, draw = torch.tensor([1.0, 1.0, 1.0]), Given(0.25 - 2**-24, 0.25, 0.0)
    spike = make_fault({"kind": "spike", "magnitude": 8, "rate": 0.25})
    assert spike.apply(x, draw).tolist() == [8.0, 1.0, 8.0]
    flip = make_fault({"kind": "bit_flip", "magnitude": 0.25, "bit": 31})
    assert flip.apply(x, draw).tolist() == [-1.0, 1.0, -1.0]
    largest = make_fault({"kind": "spike", "magnitude": 2, "rate": 0.25, "mode": "max"})
    assert largest.gradient(x, None, draw).tolist() == [0.0, 1.0, 0.0]


# Clipping


@pytest.mark.parametrize(
    ("block", "wanted"),
    [(1, [1.0, 10.0, 3.0, 4.0]), (2, [0.0, 10.0, 3.0, 4.0]), (3, [0.0, 10.0, 0.0, 4.0]), (4, [0.0, 10.0, 0.0, 0.0]), (99, [0.0, 10.0, 0.0, 0.0])],
)  # fmt: skip
def test_a_block_has_as_many_values_as_was_asked_for(block, wanted):
    x, g = torch.tensor([[1.0, 10.0, 3.0, 4.0]]), torch.ones(1, 4)
    dead = fault("dead_zone:0.5", scope="block", block=block)
    assert dead.apply(x, Draw(0)).tolist() == [wanted]
    assert dead.gradient(g, x, Draw(0)).tolist() == [[float(v != 0) for v in wanted]]
    if block > 1:
        found = float(dead.read_back(x, dead.apply(x, Draw(0))))
        assert found == pytest.approx(max(v / 10 for v, w in zip(x[0].tolist(), wanted, strict=True) if w == 0))


# Kernels


def test_a_compiler_that_fails_leaves_torch_to_make_the_noise(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "compiler", lambda: shutil.which("false"))
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    monkeypatch.delenv("SHAKETABLE_NATIVE", raising=False)
    assert native._built() is None
    assert not any(path.is_file() for path in tmp_path.rglob("*")), "nothing half built is left"
