"""One launch for many tensors: the same bits as one by one, and sums that are those of a measurement."""

from __future__ import annotations

import pytest
import torch

from shaketable.faults import Draw, make_fault
from shaketable.faults.gpu import batched
from shaketable.faults.rng import mix64
from shaketable.inject.counters import measure
from tests.faults.gpu.kernel_route import DEVICE, HARD, fused, kernels, same

pytestmark = kernels
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def pairs(shapes, dtype):
    generator = torch.Generator().manual_seed(len(shapes))
    found = [(torch.randn(shape, generator=generator) ** 3).to(dtype).to(DEVICE) for shape in shapes]
    found[0].view(-1)[: len(HARD)] = torch.tensor(HARD).to(dtype)
    return [(x, torch.full_like(x, 7.0)) for x in found]


@every_dtype
@pytest.mark.parametrize("fault", ["mxfp4", "fp8_e4m3", "fp8_e5m2"])
def test_a_format_on_many_is_the_same_bits_as_on_each(fault, dtype):
    length = 32 if fault == "mxfp4" else 128
    fault = make_fault({"kind": fault} | ({} if fault == "mxfp4" else {"scope": "block"}))
    both = pairs([(3, length), (70, 2 * length), (16, 128), (1, length), (2, 3, length)], dtype)
    with fused():
        assert all(batched.codes(fault, x) for x, _ in both)
        codes = batched.Coded(fault, both)
        for _ in range(2):
            codes()
            assert all(same(y, fault.apply(x, Draw(0))) for x, y in both)
            both[1][0].mul_(-1.7)


@pytest.mark.parametrize(
    ("fault", "shape"),
    [
        ({"kind": "mxfp4"}, (4, 48)),
        ({"kind": "mxfp4", "rounding": "stochastic"}, (4, 64)),
        ({"kind": "mxfp4", "sparsity": 0.5}, (4, 64)),
        ({"kind": "nvfp4"}, (4, 64)),
        ({"kind": "fp8_e4m3"}, (4, 128)),
        ({"kind": "fp8_e4m3", "scope": "token"}, (4, 128)),
        ({"kind": "gain", "magnitude": 1.0}, (4, 64)),
    ],
)
def test_what_one_launch_cannot_do_is_refused(fault, shape):
    with fused():
        assert not batched.codes(make_fault(fault), torch.zeros(shape, device=DEVICE))
        assert not batched.codes(make_fault({"kind": "mxfp4"}), torch.zeros(64, 64, device=DEVICE).t()[:, 1:33])
        assert not batched.draws(make_fault(fault), torch.zeros(shape, device=DEVICE))
        assert not batched.draws(make_fault({"kind": "rms_gaussian", "magnitude": 1.0}), torch.zeros(2**15, device=DEVICE))


@every_dtype
@pytest.mark.parametrize("moment", [0, 2**64 - 1, 2**63 + 12345])
@pytest.mark.parametrize("kind", ["rms_gaussian", "absolute_gaussian", "relative_gaussian"])
def test_noise_on_many_is_the_noise_on_each_and_is_measured(kind, dtype, moment):
    fault = make_fault({"kind": kind, "magnitude": 0.25})
    both, places = pairs([(40,), (576,), (2048,), (5000,)], dtype), [3, 2**64 - 1, 2**63, 12345]
    both = both[1:] if kind == "relative_gaussian" and dtype == torch.float16 else both
    places = places[-len(both) :]
    with fused():
        assert all(batched.draws(fault, x) for x, _ in both)
        draws = batched.Drawn(fault, both, places)
        draws(5, 2.0)
        sums = draws(moment, 0.25).tolist()
        keys = [mix64(place ^ moment) for place in places]
        for (x, y), key, row in zip(both, keys, sums, strict=True):
            wanted = fault.apply(x, Draw(key))
            torch.testing.assert_close(y, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-6, equal_nan=True)
            assert (y != wanted).sum() <= y.isnan().sum() + 3, "but for the last bit of the unit, the same bits"
            measured = measure(fault, x, y, None).columns()
            assert [round(v) for v in row[:4]] == measured[2:6]
            assert row[4] / row[5] == pytest.approx(measured[1], rel=1e-6)
            if x.isfinite().all():
                assert batched.magnitude(fault, row) == pytest.approx(measured[7], rel=1e-5)
