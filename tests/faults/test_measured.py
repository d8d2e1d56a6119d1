"""What is measured of a fault: sums against numpy, and when nothing changed."""

import numpy as np
import pytest
import torch

from shaketable.faults import make_fault
from shaketable.faults import sums as s
from shaketable.ledger.inert import changes_nothing

NAN, INF = float("nan"), float("inf")


# ---- sums


def numpy_sums(clean, faulty, lanes=None):
    a, b = clean.double().numpy(), faulty.double().numpy()
    finite = np.isfinite(a) & np.isfinite(b)
    usable = finite & (np.ones_like(finite) if lanes is None else np.broadcast_to(lanes.numpy(), finite.shape))
    nonzero = usable & (a != 0)
    e = np.where(finite, b, 0) - np.where(finite, a, 0)
    changed = (a != b) & ~(np.isnan(a) & np.isnan(b))
    return [
        a.size, changed.sum(), (a != 0).sum(), ((a != 0) & (b != 0)).sum(), usable.sum(), nonzero.sum(), (e[finite] ** 2).sum(),
        (a[finite] ** 2).sum(), (a[usable] ** 2).sum(), ((e[nonzero] / a[nonzero]) ** 2).sum(), np.abs(e[nonzero]).sum(),
        (e[usable] * a[usable]).sum(),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lanes", [None, torch.arange(9) % 3 == 0])
def test_all_twelve_sums_are_those_of_numpy(dtype, lanes):
    torch.manual_seed(0)
    clean = torch.randn(5, 9).to(dtype)
    faulty = torch.where(torch.rand(5, 9) < 0.5, clean * 1.5, clean)
    clean[0, :6] = torch.tensor([0.0, NAN, INF, 1.0, NAN, 2.0])
    faulty[0, :6] = torch.tensor([1.0, NAN, 2.0, 0.0, 3.0, INF])
    assert s.sums(clean, faulty, lanes).tolist() == pytest.approx(numpy_sums(clean, faulty, lanes), rel=1e-6)
    assert s.plain_sums(clean, faulty, lanes).tolist() == pytest.approx(numpy_sums(clean, faulty, lanes), rel=1e-12)


# ---- when nothing changed


@pytest.mark.parametrize(
    ("fields", "values", "nothing"),
    [
        ({"kind": "gain", "magnitude": 0.1}, 256, True), ({"kind": "gain", "magnitude": 0.1}, 255, False),
        ({"kind": "gain", "magnitude": 0.1, "sparsity": 0.5}, 511, False), ({"kind": "bit_flip", "magnitude": 0.25}, 1023, False),
        ({"kind": "bit_flip", "magnitude": 1e-9}, 100, True), ({"kind": "bit_flip", "magnitude": 1e-7}, 100, False),
        ({"kind": "saturation", "magnitude": 0.5, "scope": "absolute"}, 10**9, False),
    ],
)  # fmt: skip
def test_a_fault_is_said_to_change_nothing_when_enough_was_seen(fields, values, nothing):
    assert changes_nothing(make_fault(fields), values) is nothing
