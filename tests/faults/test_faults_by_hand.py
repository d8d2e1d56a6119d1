"""Faults on numbers that can be checked by hand: every type, odd scopes, zeros, constants, and how kernels are built."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from shaketable.faults import KINDS, Draw, make_fault
from shaketable.faults import sums as s
from shaketable.faults.clipping import top
from shaketable.faults.cpu import native
from shaketable.faults.noise import deviation, in_units, middle, scaled, size, spread
from shaketable.faults.rng import lanes, mix64, normals, plain_normals, uniforms
from tests.tensors import bits, same_bits

NAN, INF = float("nan"), float("inf")
CPU = torch.device("cpu")
MANTISSA = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7, torch.float64: 52}
every_dtype = pytest.mark.parametrize("dtype", MANTISSA, ids=str)


def fault(text, **fields):
    kind, _, magnitude = text.partition(":")
    return make_fault({"kind": kind} | ({"magnitude": float(magnitude)} if magnitude else {}) | fields)


class Given:
    """A draw of which every number is given."""

    def __init__(self, *, normal=(), uniform=(), stream=(), number=0.0, reference=None):
        self.key, self.normal_key, self.reference = 0, 0, reference
        self.normals, self.uniforms, self.stream, self.one = normal, uniform, stream, number

    def normal(self, x):
        return torch.tensor(self.normals).view(x.shape)

    def uniform(self, x, stream=0):
        return torch.tensor(self.stream if stream else self.uniforms).view(x.shape)

    def number(self):
        return self.one


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


@pytest.mark.parametrize("text", ["relative_gaussian:1e-12", "gain:1e-12", "spike:1.000000000001"])
def test_the_gradient_of_float64_is_computed_in_float64(text):
    g = torch.linspace(1, 2, 64, dtype=torch.float64)
    more = {"rate": 1.0} if text.startswith("spike") else {}
    error = (fault(text, **more).gradient(g, None, Draw(3)) - g).abs()
    assert 1e-13 < float(error.mean()) < 5e-12


def test_a_gain_of_float64_is_exact():
    x = torch.tensor([1.0, -3.0, 1e-300, 1e300], dtype=torch.float64)
    assert torch.equal(fault("gain:0.5").apply(x, Draw(0)), x * 1.5)
    assert torch.equal(fault("gain:0.5").gradient(x, None, Draw(0)), x * 1.5) and torch.equal(scaled(x, 0.25), x / 4)


def test_clipping_of_float64_compares_in_float64():
    x = [1.0, 1.0 + 2**-40]
    assert made("saturation:1", x, dtype=torch.float64, scope="absolute") == [1.0, 1.0]
    assert made("dead_zone:1", x, dtype=torch.float64) == [0.0, 1.0 + 2**-40]


# Bits


@every_dtype
def test_the_lowest_and_the_highest_bit_of_every_type(dtype):
    width, draw = 8 * dtype.itemsize, Given(uniform=(0.0, 0.5))
    assert made("bit_flip:0.25", [1.0, 1.0], draw, dtype, bit=0) == [1.0 + 2.0 ** -MANTISSA[dtype], 1.0]
    assert made("bit_flip:0.25", [1.5, 1.5], draw, dtype, bit=width - 1) == [-1.5, 1.5]
    with pytest.raises(ValueError, match=f"bit {width} does not exist in {dtype}, which has bits 0-{width - 1}") if width < 64 else pytest.raises(ValueError, match="63"):  # fmt: skip
        made("bit_flip:0.25", [1.0, 1.0], draw, dtype, bit=width)


@every_dtype
def test_a_random_bit_is_taken_from_a_number_of_its_own(dtype):
    width = 8 * dtype.itemsize
    draw = Given(uniform=(0.0, 0.0, 0.0, 0.9), stream=(0.0, (width - 1) / width, 1 - 2**-24, 0.0))
    x = torch.ones(4, dtype=dtype)
    flipped = bits(fault("bit_flip:0.5").apply(x, draw)) ^ bits(x)
    top_bit = -(1 << (width - 1))
    assert flipped.tolist() == [1, top_bit, top_bit, 0]


@pytest.mark.parametrize(
    ("n", "x", "wanted"),
    [
        (1, [1.0, 1.25, -2.0, 1.5, -1.75], [1.5, 1.75, -3.0, 1.5, -1.75]),
        (2, [1.0, 1.5, -4.0, 1.25], [1.25, 1.75, -5.0, 1.25]),
    ],
)
@every_dtype
def test_a_stuck_bit_reads_one(dtype, n, x, wanted):
    assert made(f"stuck_bit:{n}", x, dtype=dtype) == wanted


@pytest.mark.parametrize(
    ("n", "x", "wanted"),
    [
        (1, [1.75, -1.75, 3.9, 0.3, 1.0, 0.0], [1.5, -1.5, 3.0, 0.25, 1.0, 0.0]),
        (2, [1.9, -1.4, 7.9], [1.75, -1.25, 7.0]),
        (0, [1.9, -3.9, 0.7], [1.0, -2.0, 0.5]),
    ],
)
@every_dtype
def test_what_is_cut_off_is_cut_toward_zero(dtype, n, x, wanted):
    assert made(f"truncation:{n}", x, dtype=dtype) == wanted


@every_dtype
def test_a_type_that_has_no_more_bits_loses_none(dtype):
    x = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    for n in (MANTISSA[dtype], min(52, MANTISSA[dtype] + 3), 52):
        assert same_bits(fault(f"truncation:{n}").apply(x, Draw(0)), x)
    assert not same_bits(fault(f"truncation:{MANTISSA[dtype] - 1}").apply(x, Draw(0)), x)


@every_dtype
def test_the_last_bit_of_a_type_may_be_stuck_and_the_next_may_not(dtype):
    n = MANTISSA[dtype]
    assert made(f"stuck_bit:{n}", [1.0], dtype=dtype) == [1.0 + 2.0**-n]
    if n < 52:
        with pytest.raises(ValueError, match=f"^stuck_bit: {dtype} has {n} mantissa bits, not {n + 1}$"):
            made(f"stuck_bit:{n + 1}", [1.0], dtype=dtype)


def test_of_two_stuck_bits_the_highest_is_read_back_and_of_none_nothing():
    x = torch.tensor([1.5, 1.625, 1.875])
    assert float(fault("stuck_bit:3").read_back(x, x)) == 1
    y = torch.tensor([1.375, 1.875, 1.25])
    assert float(fault("stuck_bit:3").read_back(y, y)) == 2
    assert math.isnan(float(fault("stuck_bit:3").read_back(x, torch.tensor([1.0, 1.5, 1.25]))))
    assert float(fault("truncation:3").read_back(x, torch.tensor([1.0, 2.0]))) == 0
    assert float(fault("truncation:3").read_back(x, torch.tensor([1.5, 1.25]))) == 2


# Spikes


def test_a_spike_scales_a_value_or_takes_the_largest_with_its_sign():
    x, draw = [1.0, -2.0, 4.0, -0.0, 0.0, 3.0], Given(uniform=(0.0, 0.0, 0.9, 0.0, 0.0, 0.9))
    assert made("spike:8", x, draw, rate=0.5) == [8.0, -16.0, 4.0, -0.0, 0.0, 3.0]
    assert made("spike:8", x, draw, rate=0.5, mode="max") == [32.0, -32.0, 4.0, -32.0, 32.0, 3.0]


def test_the_largest_is_the_largest_finite_value():
    draw = Given(uniform=(0.0, 0.9, 0.0))
    assert made("spike:2", [1.0, -INF, 3.0], draw, rate=0.5, mode="max") == [6.0, -INF, 6.0]


def test_zeros_and_what_is_not_finite_tell_nothing_of_a_spike():
    clean, faulty = torch.tensor([0.0, 2.0, 1.0, INF, NAN]), torch.tensor([5.0, 16.0, 1.0, 1.0, 2.0])
    assert float(fault("spike:8").read_back(clean, faulty)) == 8.0
    assert float(fault("spike:8", mode="max").read_back(clean, faulty)) == 8.0
    assert math.isnan(float(fault("spike:8").read_back(clean, faulty, torch.tensor([True, False, True, True, True]))))


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


@pytest.mark.parametrize(
    ("block", "wanted"), [(1, [0.5, 5.0, 1.5, 2.0]), (2, [1.0, 5.0, 2.0, 2.0]), (3, [1.0, 5.0, 3.0, 2.0]), (99, [1.0, 5.0, 3.0, 4.0])]
)  # fmt: skip
def test_a_ceiling_is_that_of_its_block(block, wanted):
    x = torch.tensor([1.0, 10.0, 3.0, 4.0])
    cut = fault("saturation:0.5", scope="block", block=block)
    assert cut.apply(x, Draw(0)).tolist() == wanted
    kept = [float(v == w) for v, w in zip(x.tolist(), wanted, strict=True)]
    assert cut.gradient(torch.ones(4), x, Draw(0)).tolist() == kept
    assert float(cut.read_back(x, cut.apply(x, Draw(0)))) == 0.5


def test_a_threshold_is_read_back_as_a_share_of_the_maximum_of_its_own_block():
    x = torch.tensor([[1.0, 4.0, 6.0, 100.0]])
    for scope, block, wanted in (("block", 2, 0.25), ("block", 32, 0.06), ("token", 2, 0.06), ("tensor", 2, 0.06)):
        dead = fault("dead_zone:0.5", scope=scope, block=block)
        assert float(dead.read_back(x, dead.apply(x, Draw(0)))) == pytest.approx(wanted)


@pytest.mark.parametrize("kind", ["dead_zone", "saturation"])
def test_blocks_have_32_values_where_nobody_says_otherwise(kind):
    x = torch.cat([torch.full((32,), 1.0), torch.full((32,), 100.0)])
    found = fault(f"{kind}:0.5", scope="block").apply(x, Draw(0))
    wanted = x if kind == "dead_zone" else x / 2
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("scope", "wanted"), [("tensor", [[0.0, 0.0], [4.0, 8.0]]), ("token", [[0.0, 2.0], [4.0, 8.0]])])
def test_a_maximum_is_that_of_its_scope(scope, wanted):
    x = torch.tensor([[0.5, 2.0], [4.0, 8.0]])
    assert fault("dead_zone:0.5", scope=scope).apply(x, Draw(0)).tolist() == wanted
    assert top(x, scope, 1).tolist() == (8.0 if scope == "tensor" else [[2.0], [8.0]])
    assert top(x, "block", 1).tolist() == x.tolist() and top(-x, "block", 2).tolist() == [[2.0, 2.0], [8.0, 8.0]]


@pytest.mark.parametrize("scope", ["tensor", "token", "block"])
def test_a_single_number_is_its_own_maximum(scope):
    x = torch.tensor(-3.0)
    assert float(top(x, scope, 32)) == 3.0
    assert float(fault("saturation:0.5", scope=scope).apply(x, Draw(0))) == -1.5
    assert float(fault("dead_zone:0.5", scope=scope).apply(x, Draw(0))) == -3.0


@pytest.mark.parametrize("scope", ["tensor", "token", "block"])
def test_the_largest_of_nothing_finite_is_zero(scope):
    x = torch.tensor([[NAN, INF, -INF]])
    assert (top(x, scope, 2) == 0).all()
    assert same_bits(fault("dead_zone:0.5", scope=scope).apply(x, Draw(0)), x)
    assert top(torch.zeros(0, 3), scope, 2).tolist() == 0.0


def test_what_is_not_finite_is_no_maximum_and_is_cut_to_the_ceiling():
    x = [1.0, -4.0, INF, -INF, NAN]
    found = made("saturation:0.5", x)
    assert found[:4] == [1.0, -2.0, 2.0, -2.0] and math.isnan(found[4])
    assert made("dead_zone:0.5", x)[:4] == [0.0, -4.0, INF, -INF]
    absolute = made("saturation:3", x, scope="absolute")
    assert absolute[:4] == [1.0, -3.0, 3.0, -3.0] and math.isnan(absolute[4])


def test_an_absolute_ceiling_cuts_the_gradient_of_what_is_above_it():
    x = torch.tensor([1.0, -3.0, 3.0, 3.5, -4.0])
    cut = fault("saturation:3", scope="absolute")
    assert cut.gradient(torch.full((5,), 2.0), x, Draw(0)).tolist() == [2.0, 2.0, 2.0, 0.0, 0.0]
    assert cut.apply(x, Draw(0)).tolist() == [1.0, -3.0, 3.0, 3.0, -3.0]


def test_zeros_are_not_zeroed_and_a_tensor_of_zeros_tells_nothing():
    x = torch.tensor([0.0, -0.0])
    assert same_bits(fault("dead_zone:1").apply(x, Draw(0)), x)
    assert math.isnan(float(fault("dead_zone:1").read_back(x, x)))


def test_what_was_zeroed_in_other_lanes_or_was_no_number_tells_nothing():
    clean, faulty = torch.tensor([[1.0, 3.0, 8.0, NAN]]), torch.tensor([[0.0, 0.0, 8.0, 0.0]])
    dead = fault("dead_zone:0.5")
    assert float(dead.read_back(clean, faulty)) == 0.375
    assert float(dead.read_back(clean, faulty, torch.tensor([True, False, True, True]))) == 0.125


# Noise, bias and gain


def test_zeros_have_no_sign_to_be_biased_by():
    assert made("systematic_bias:0.5", [0.0, -0.0, 1.0, -2.0]) == [0.0, 0.0, 1.5, -2.5]
    clean, faulty = torch.tensor([0.0, 1.0, -2.0]), torch.tensor([0.0, 1.5, -2.5])
    assert float(fault("systematic_bias:0.5").read_back(clean, faulty)) == 0.5


def test_zeros_tell_nothing_of_a_relative_error_and_all_of_an_absolute_one():
    clean, faulty = torch.tensor([0.0, 1.0, 2.0, 4.0]), torch.tensor([3.0, 1.5, 1.0, 4.0])
    assert float(fault("relative_gaussian:1").read_back(clean, faulty)) == pytest.approx((0.5 / 3) ** 0.5)
    assert float(fault("absolute_gaussian:1").read_back(clean, faulty)) == pytest.approx(((9 + 0.25 + 1) / 4) ** 0.5)
    assert float(fault("gain:1").read_back(clean, faulty)) == pytest.approx((0.5 - 2.0) / 21)


@pytest.mark.parametrize("text", ["noise:0.5", "bias:0.5", "non_determinism:2"])
def test_a_constant_has_no_spread_to_be_shaken_by_and_reads_back_as_no_fault(text):
    x = torch.full((3, 4), 2.0)
    found = fault(text).apply(x, Draw(0))
    assert torch.equal(found, x)
    assert float(fault(text).read_back(x, found)) == (1.0 if text.startswith("non") else 0.0)


def test_noise_in_units_is_noise_times_factor_times_unit():
    x = torch.tensor([1.0, -1.0, 3.0, 5.0])
    draw = Given(normal=(1.0, -1.0, 0.0, 2.0))
    assert in_units(x, draw, 0.5, torch.tensor(4.0)).tolist() == [3.0, -3.0, 3.0, 9.0]
    root = 9.0**0.5
    assert fault("rms_gaussian:0.5").apply(x, draw).tolist() == pytest.approx([1 + root / 2, -1 - root / 2, 3, 5 + root])
    deviation_ = 5.0**0.5
    assert fault("noise:0.5").apply(x, draw).tolist() == pytest.approx(
        [1 + deviation_ / 2, -1 - deviation_ / 2, 3, 5 + deviation_]
    )


@pytest.mark.parametrize(("number", "factor"), [(0.0, 1.0), (1.0, 2.0), (5 / 12, 1.5)])
def test_amplified_deviations_grow_by_a_factor_from_one_to_the_root_of_the_magnitude(number, factor):
    x, draw = torch.tensor([0.0, 2.0, 4.0]), Given(number=number)
    one = fault("non_determinism:4", mode="amplified")
    assert one.apply(x, draw).tolist() == pytest.approx([2 - 2 * factor, 2.0, 2 + 2 * factor])
    assert one.gradient(torch.ones(3), None, draw).tolist() == pytest.approx([factor] * 3)


def test_the_mean_around_which_deviations_grow_is_that_of_all_finite_values():
    clean = torch.tensor([[0.0, 4.0, 1.0, NAN], [0.0, 4.0, 3.0, INF]])
    factor = 1.5**0.5
    faulty = clean.clone()
    faulty[:, :2] = 2 + (clean[:, :2] - 2) * factor
    one = fault("non_determinism:2", mode="amplified")
    assert float(one.read_back(clean, faulty, torch.tensor([True, True, False, True]))) == pytest.approx(2.0)
    found = one.apply(clean, Given(number=0.5))
    assert found[:, :2].tolist() == [pytest.approx([2 - 2 * factor, 2 + 2 * factor])] * 2
    assert found[:, 2].tolist() == pytest.approx([2 - factor, 2 + factor])


def test_a_bias_is_that_of_its_reference_in_any_type():
    unit = torch.tensor(2.0)
    assert made("bias:0.5", [1.0, -1.0], Given(reference=unit)) == [2.0, 0.0]
    assert made("bias:0.5", [1.0, -1.0], Given(reference=unit), torch.bfloat16) == [2.0, 0.0]
    assert made("bias:0.5", [1.0, -1.0], Given(reference=unit.double()), torch.float64) == [2.0, 0.0]
    assert made("bias:0.5", [1.0, -1.0], Given(reference=torch.tensor(0.0))) == [1.0, -1.0], "zero is a unit"
    x = torch.tensor([1.0, 5.0], requires_grad=True)
    found = fault("bias:0.5").reference(x)
    assert float(found) == 2.0 and not found.requires_grad and found.dim() == 0


@pytest.mark.parametrize("unit", [middle, spread, size])
@every_dtype
def test_units_are_single_numbers_of_the_width_of_the_arithmetic(unit, dtype):
    found = unit(torch.tensor([[1.0, 3.0], [5.0, 7.0]], dtype=dtype))
    assert found.dim() == 0 and found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(found) == pytest.approx({middle: 4.0, spread: 5.0**0.5, size: 21.0**0.5}[unit])


def test_a_deviation_is_measured_in_float64():
    clean = torch.tensor([1.0, 1.0])
    found = deviation(clean, torch.tensor([1.0 + 2**-23, 1.0 - 2**-23]), None)
    assert found.dtype == torch.float64 and float(found) == 2**-23


# What every fault says of itself


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kind": "bit_flip", "magnitude": 0.1, "bit": 0}, "bit_flip:0.1,bit=0"),
        ({"kind": "bit_flip", "magnitude": 0.1, "bit": None}, "bit_flip:0.1"),
        ({"kind": "gain", "magnitude": 0}, "gain:0"),
        ({"kind": "gain", "magnitude": 100}, "gain:100"),
        ({"kind": "gain", "magnitude": 1e16}, "gain:1e+16"),
        ({"kind": "gain", "magnitude": 0.1 + 0.2}, "gain:0.30000000000000004"),
        ({"kind": "gain", "magnitude": 1.05}, "gain:1.05"),
        ({"kind": "dead_zone", "magnitude": 1, "block": 16, "scope": "block"}, "dead_zone:1,scope=block,block=16"),
        ({"kind": "spike", "magnitude": 8, "rate": 1e-4, "mode": "scale"}, "spike:8"),
        ({"kind": "spike", "magnitude": 8, "rate": 0.5, "sparsity": 0.25}, "spike:8,sparsity=0.25,rate=0.5"),
        ({"kind": "saturation", "magnitude": 2.5, "scope": "absolute"}, "saturation:2.5,scope=absolute"),
        ({"kind": "nvfp4", "rounding": "stochastic", "sparsity": 0.5}, "nvfp4,sparsity=0.5,rounding=stochastic"),
    ],
)
def test_a_fault_writes_what_differs_from_its_defaults(fields, text):
    assert make_fault(fields).text() == text


def test_faults_are_equal_by_their_fields_and_may_be_keys():
    assert {fault("gain:1"): "a"}[fault("gain:1.0")] == "a"
    assert fault("gain:1") != fault("gain:2") and fault("gain:1") != fault("bias:1") != fault("bias:1", sparsity=0.5)


def test_another_magnitude_is_another_fault_of_the_same_class_and_leaves_the_first():
    one = fault("spike:8", rate=0.5, mode="max", sparsity=0.5)
    other = one.with_magnitude(3)
    assert type(other) is type(one) and (one.magnitude, other.magnitude, other.asked()) == (8, 3, 3.0)
    assert (other.rate, other.mode, other.sparsity) == (0.5, "max", 0.5)
    for bad in (-1, NAN, INF):
        with pytest.raises(ValueError, match="magnitude"):
            one.with_magnitude(bad)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_makes_its_own_class(kind):
    one = fault(kind if "magnitude" not in KINDS[kind].model_fields else f"{kind}:1")
    assert type(one) is KINDS[kind] and one.kind == kind and one.sparsity == 1.0


def test_an_unknown_kind_or_field_is_refused():
    for fields in (
        {"kind": "gian", "magnitude": 1},
        {"magnitude": 1},
        {"kind": "gain", "magnitude": 1, "scope": "token"},
        {"kind": "gain"},
    ):
        with pytest.raises(ValueError, match="validation error"):
            make_fault(fields)


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4", "fp8_e4m3", "fp8_e5m2"])
def test_a_format_has_no_magnitude_to_read_back(kind):
    x = torch.ones(32)
    assert fault(kind).read_back(x, x) is None is fault(kind).asked() and not fault(kind).is_off
    assert fault(kind).magnitude_of(s.sums(x, x)) is None


# Formats


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4", "fp8_e4m3", "fp8_e5m2"])
def test_a_format_takes_single_numbers_nothing_and_float64(kind):
    one = fault(kind)
    assert one.apply(torch.tensor(3.0), Draw(0)).shape == () and float(one.apply(torch.tensor(3.0), Draw(0))) == 3.0
    empty = torch.zeros(0, 3, dtype=torch.bfloat16)
    found = one.apply(empty, Draw(0))
    assert found.shape == (0, 3) and found.dtype == torch.bfloat16 and found is not empty
    x = torch.tensor([[3.0, 1.5, -0.75]], dtype=torch.float64)
    assert one.apply(x, Draw(0)).dtype == torch.float64 and torch.equal(one.apply(x, Draw(0)), x)


def test_the_fp4_grid_by_hand():
    x = [0.2, 0.25, 0.3, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, -2.4, 4.0]
    wanted = [0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -2.0, 4.0]
    assert made("mxfp4", x) == wanted
    assert made("mxfp4", x, dtype=torch.float64) == wanted, "also where no kernel takes the type"


@pytest.mark.parametrize(
    ("scope", "wanted"),
    [
        ("none", [[16.0, 0.5], [448.0, 3.0]]),
        ("tensor", [[16.0, 0.5], [896.0, 3.0]]),
        ("token", [[17.0, 0.5], [896.0, 3.0]]),
    ],
)
def test_what_shares_a_scale_in_fp8(scope, wanted):
    """The first row has its own scale 17 / 448 where the scope is a token, and that of 896, which is 2, with one for all."""
    found = fault("fp8_e4m3", scope=scope).apply(torch.tensor([[17.0, 0.5], [896.0, 3.0]]), Draw(0))
    assert found.tolist() == [pytest.approx(row, rel=0.05 if scope == "token" else 0) for row in wanted]
    assert (
        fault("fp8_e4m3", scope=scope)._sharing() == scope and fault("mxfp4")._sharing() == fault("nvfp4")._sharing() == "block"
    )


@pytest.mark.parametrize("scope", ["tensor", "token", "block"])
@pytest.mark.parametrize(("kind", "largest", "smallest"), [("fp8_e4m3", 448.0, 2.0**-9), ("fp8_e5m2", 57344.0, 2.0**-16)])
def test_a_scale_may_be_too_small_for_a_normal_number(kind, largest, smallest, scope):
    x = torch.tensor([[largest, -smallest, smallest]]) * 2.0**-130
    assert same_bits(fault(kind, scope=scope).apply(x, Draw(0)), x)


@pytest.mark.parametrize(("rounding", "wanted"), [("even", [2.0, 4.0]), ("stochastic", [3.0, 3.0])])
def test_a_remainder_is_rounded_up_with_its_own_chance(rounding, wanted):
    """2.5 lies half way from 2 to 3 and 3.5 from 3 to 4: the first goes up below one half, the other does not at it."""
    x = torch.tensor([2.5, 3.5, 6.0])

    class Numbers(Given):
        def uniform(self, x, stream=0):
            return torch.tensor([0.49, 0.5, 0.0] + [0.0] * (x.numel() - 3)).view(x.shape)

    assert fault("mxfp4", rounding=rounding).apply(x, Numbers()).tolist() == [*wanted, 6.0]


# What is measured


def test_a_device_without_float64_is_measured_on_the_host():
    there = SimpleNamespace(device=SimpleNamespace(type="npu"), cpu=lambda: "host")
    assert s.with_float64(there) == "host"
    there.device.type = "cuda"
    assert s.with_float64(there) is there


def test_sums_do_not_depend_on_layout_or_on_lanes_that_are_all_faulty():
    clean = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    faulty = clean * 1.5
    wanted = pytest.approx(s.plain_sums(clean, faulty).tolist(), rel=1e-12)
    for a, b in ((clean.t().contiguous().t(), faulty), (clean, faulty.t().contiguous().t()), (clean, faulty.double())):
        assert s.sums(a, b).tolist() == wanted
    assert s.sums(clean, faulty, torch.ones(8, dtype=torch.bool)).tolist() == wanted


def test_what_is_usable_is_finite_before_and_after_and_in_a_faulty_lane():
    clean, faulty = torch.tensor([1.0, NAN, 1.0, 1.0]), torch.tensor([1.0, 1.0, INF, 1.0])
    assert s.usable_mask(clean, faulty, None).tolist() == [True, False, False, True]
    assert s.usable_mask(clean, faulty, torch.tensor([True, True, True, False])).tolist() == [True, False, False, False]


def test_a_sample_of_three_dimensions_is_rows_and_its_lanes_are_theirs():
    x = torch.arange(16 * 32 * 128, dtype=torch.float32).view(16, 32, 128)
    mask = torch.rand(1, 32, 1, generator=torch.Generator().manual_seed(0)) < 0.5
    clean, faulty, kept = s.sample(fault("gain:1"), x, x + 1, mask)
    assert clean.shape == (128, 128) and torch.equal(clean, x.view(-1, 128)[::4]) and torch.equal(faulty, clean + 1)
    assert torch.equal(kept, mask.expand(x.shape).reshape(-1, 128)[::4])
    channels = torch.rand(128) < 0.5
    assert s.sample(fault("gain:1"), x, x, channels)[2] is channels


# Random numbers


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_as_many_numbers_as_were_asked_for(n):
    assert normals(n, 5, CPU).shape == plain_normals(n, 5, CPU).shape == uniforms(n, 5, CPU).shape == (n,)
    assert normals(n, 5, CPU).dtype == uniforms(n, 5, CPU).dtype == torch.float32


def test_without_kernels_plain_torch_draws_the_same(monkeypatch):
    before = normals(33, 5, CPU)
    monkeypatch.setattr(native, "_library", lambda: None)
    assert same_bits(normals(33, 5, CPU), before)


@every_dtype
def test_a_draw_has_the_shape_of_the_tensor_and_a_type_of_its_own(dtype):
    x = torch.zeros(3, 5, dtype=dtype)
    draw = Draw(9)
    for drawn in (draw.normal(x), draw.uniform(x), draw.uniform(x, stream=1)):
        assert drawn.shape == x.shape and drawn.dtype == torch.float32
    assert torch.equal(draw.uniform(x), draw.uniform(x, stream=0)) and not torch.equal(
        draw.uniform(x), draw.uniform(x, stream=1)
    )
    assert draw.reference is None and 0 <= draw.number() < 1


@pytest.mark.parametrize(("key", "stream", "mixed"), [(3, 0, 3), (3, 1, 2), (2, 1, 3), (7, 2, 5), (2**64 - 1, 1, 2**64 - 2)])
def test_a_stream_is_keyed_by_the_bits_that_it_turns_over(key, stream, mixed):
    """Pinned: noise must not change between versions."""
    x = torch.zeros(8)
    assert same_bits(Draw(key).uniform(x, stream), uniforms(8, mix64(mixed), CPU))


def test_uniform_numbers_are_multiples_of_two_to_the_minus_24():
    u = uniforms(1000, mix64(3), CPU).double() * 2**24
    assert torch.equal(u, u.round()) and 0 <= float(u.min()) < float(u.max()) < 2**24


@pytest.mark.parametrize(("channels", "sparsity", "count"), [(10, 1.0, 10), (10, 0.1, 1), (10, 0.01, 1), (10, 0.26, 3), (1, 0.5, 1), (4, 0.5, 2)])  # fmt: skip
def test_as_many_lanes_are_faulty_as_their_share_and_at_least_one(channels, sparsity, count):
    mask = lanes(channels, sparsity, 7)
    assert mask.shape == (channels,) and int(mask.sum()) == count


def test_fewer_lanes_are_some_of_those_of_more():
    """The channels with the lowest numbers: what is broken stays broken when more is."""
    few, more = lanes(64, 0.25, 7), lanes(64, 0.5, 7)
    assert (few & more).sum() == few.sum() == 16
    assert set(uniforms(64, 7, CPU).argsort()[:16].tolist()) == set(few.nonzero().flatten().tolist())


# Kernels


@pytest.mark.skipif(not native.available(), reason="no C++ compiler here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_add_noise_to_a_copy(dtype):
    x = torch.linspace(-3, 3, 100).to(dtype)
    kept = x.clone()
    relative, absolute = (native.add_noise(x, 0.5, 1 << 40, relative=r) for r in (True, False))
    assert same_bits(x, kept) and not same_bits(relative, absolute) and relative.dtype == absolute.dtype == dtype
    assert not same_bits(native.add_noise(x, 0.5, 1 << 41, relative=True), relative), "the upper half of a key counts"
    z = plain_normals(100, 1 << 40, CPU)
    assert same_bits(absolute, (x.float() + z * 0.5).to(dtype))


def test_a_compiler_that_fails_leaves_torch_to_make_the_noise(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "compiler", lambda: shutil.which("false"))
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    monkeypatch.delenv("SHAKETABLE_NATIVE", raising=False)
    assert native._built() is None
    assert not any(path.is_file() for path in tmp_path.rglob("*")), "nothing half built is left"
