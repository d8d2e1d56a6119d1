"""Kernels that read their row in a table: what the head of a pass writes there, what they count, and when they measure."""

from __future__ import annotations

import pytest
import torch

from shaketable.faults.gpu import dispatch
from shaketable.faults.gpu import dispatch as gpu
from shaketable.faults.rng import mix64, plain_normals
from shaketable.faults.sums import plain_sums
from shaketable.inject import counters as c
from tests.faults.gpu.kernel_route import DEVICE, ON_GPU, fused, kernels
from tests.tensors import same_numbers as same

pytestmark = kernels
TAPS, USES, DUE, ALL = 5, 4, 8, 16
KEYS = [11, 2**63 + 22, 33, 44, 2**64 - 1]
GIVEN, CLOCK, OWN = 0, 1, 2


def signed(word, bits):
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >= 1 << (bits - 1) else word


class Table:
    """Keys, a clock, what is live (taps 1 to 4 on, in phase 2), empty rows, and counters."""

    def __init__(self):
        self.live = torch.tensor([[0.1 * tap, 0.0 if tap == 0 else 2.0] for tap in range(TAPS)], device=DEVICE)
        self.keys = torch.tensor([signed(key, 64) for key in KEYS], dtype=torch.int64, device=DEVICE)
        self.rows = torch.zeros(TAPS * USES, 4, dtype=torch.int32, device=DEVICE)
        self.sums = torch.zeros(2 * TAPS, c.WIDTH, dtype=torch.float64, device=DEVICE)
        self.clock, self.own = (torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2))

    def begin(self, kind=CLOCK, moment=0, base=0, on=True):
        from shaketable.faults.gpu.kernels.begin_pass import begin_pass

        values = self.keys, self.clock, self.own, self.live, self.rows, self.sums
        words = *dispatch.words(moment), *dispatch.words(base), int(on)
        shape = {"MOMENT": kind, "TAPS": TAPS, "USES": USES, "BLOCK": 16}
        dispatch.launch(begin_pass, 1, (*values, *words), shape)
        return self.rows.cpu()

    def row(self, tap, use=0):
        return gpu.TableRow(self.rows, self.sums, tap * USES + use, tap)


@pytest.fixture
def table():
    return Table()


def wanted_key(tap, use, moment):
    return mix64(mix64(KEYS[tap] ^ mix64(moment + use)) ^ 0xD1CE)


@pytest.mark.parametrize("kind", [GIVEN, CLOCK, OWN])
@pytest.mark.parametrize("base", [0, 8, 3 << 32])
def test_the_head_of_a_pass_writes_the_key_of_every_use(table, kind, base):
    moments = {GIVEN: (2**63 + 5, 2**64 - 9), CLOCK: (1, 2), OWN: (7, 7)}[kind]
    table.own.fill_(7)
    for moment in moments:
        rows = table.begin(kind, moment, base)
        assert table.clock.item() == (moment if kind == CLOCK else 0)
        for tap in range(TAPS):
            for use in range(USES):
                key, row = wanted_key(tap, base + use, moment), rows[tap * USES + use]
                assert row[:2].tolist() == [signed(key, 32), signed(key >> 32, 32)]
                assert row[2:3].view(torch.float32).item() == table.live[tap, 0].item()
                assert row[3].item() == (0 if tap == 0 else DUE + ALL + 2)


def test_a_pass_that_is_to_be_left_alone_is_off(table):
    assert table.begin(on=False)[:, 3].count_nonzero() == 0


def test_which_passes_are_measured_is_the_rule_of_the_host(table):
    """The 1st, 2nd, 4th, 8th, … time; and always as long as nothing has changed."""
    host, row = [], [0.0, 0.0, 1.0]
    found = []
    for number in range(40):
        flags = int(table.begin()[2 * USES, 3])
        found.append(bool(flags & DUE))
        assert bool(flags & ALL) == (number < 3)
        host.append(c.is_due(row[0], row[1], row[2]))
        row[2] = 2 * row[0] + 1 if row[0] >= row[2] or number == 0 else row[2]
        row[0] += 1
        table.sums[2, 1] += 1
        if number == 2:
            table.sums[2, c.CHANGED] = row[1] = 1.0
    assert [i + 1 for i, due in enumerate(found) if due] == [1, 2, 3, 4, 8, 16, 32]
    assert found == host


@pytest.mark.parametrize("n", [100, 2048, 5000])
@pytest.mark.parametrize("relative", [True, False])
def test_a_kernel_acts_by_its_row_counts_and_measures(table, relative, n):
    table.begin()
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DEVICE)
    with fused():
        y = gpu.noise(x, 0.0, 0, relative=relative, live=table.row(3, 2))
    z = plain_normals(n, wanted_key(3, 2, 1), torch.device("cpu")).to(DEVICE)
    scale = table.live[3, 0]
    wanted = x + x * (z * scale) if relative else x + z * scale
    assert torch.allclose(y, wanted, rtol=0, atol=1e-3) if ON_GPU else same(y, wanted)
    row = table.sums[3].tolist()
    assert row[:4] == [0.0, 1.0, 0.0, 0.0]
    assert row[c.VALUES] == row[c.CHANGED] == min(n, 2048)
    assert row[c.SEEN] == (n > 2048), "as long as nothing has changed, others look too"
    assert row[c.ALIVE] == row[c.SURVIVED] == min(n, 2048)
    assert row[c.MAGNITUDE] == pytest.approx(0.3, rel=0.25)
    assert row[c.MAGNITUDE_SQUARE] == pytest.approx(row[c.MAGNITUDE] ** 2)
    part, error = x[:2048].double(), (y - x)[:2048].double()
    assert row[c.ERROR] == pytest.approx(float(error.square().sum() / part.square().sum()), rel=1e-3)
    others = [i for i in range(2 * TAPS) if i != 3]
    assert table.sums[others][:, : c.MARK].count_nonzero() == 0


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_values_whose_squares_leave_float32_are_measured(table, size):
    table.begin()
    x = size * torch.randn(2048, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with fused():
        gpu.noise(x, 0.0, 0, relative=True, live=table.row(3))
    row = table.sums[3].tolist()
    assert row[c.MAGNITUDE] == pytest.approx(0.3, rel=0.1) and row[c.ERROR] == pytest.approx(0.09, rel=0.2)


def test_a_kernel_that_is_off_changes_and_counts_nothing(table):
    table.begin()
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[:2] = torch.tensor([-0.0, float("nan")])
    with fused():
        assert same(gpu.noise(x, 9.0, 1, relative=True, live=table.row(0)), x)
        assert same(gpu.shift(x, 9.0, gpu.GAIN, live=table.row(0)), x)
        gpu.tell(x, x + 1, table.row(0))
    assert table.sums[0].count_nonzero() == 0


@pytest.mark.parametrize("kind", ["GAIN", "SYSTEMATIC"])
def test_a_shift_takes_its_scale_from_its_row_and_measures_it(table, kind):
    table.begin()
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scale = table.live[2, 0]
    with fused():
        y = gpu.shift(x, 0.0, getattr(gpu, kind), live=table.row(2))
    assert same(y, x * scale if kind == "GAIN" else x + x.sign() * scale)
    assert table.sums[2, 1] == 1
    assert table.sums[2, c.MAGNITUDE].item() == pytest.approx(-0.8 if kind == "GAIN" else 0.2, rel=1e-3)


@pytest.mark.parametrize("shape", [(700,), (5, 7), (300, 96), (3, 30000)])
def test_what_other_operators_did_is_counted_and_measured_by_a_sample(table, shape):
    table.begin()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with fused():
        gpu.tell(x, x * 1.5, table.row(2))
    row = table.sums[2].tolist()
    assert row[1] == row[c.MEASURED] == 1
    assert row[c.VALUES] == row[c.CHANGED] == dispatch._spread(x)[0]
    assert row[c.ERROR] == pytest.approx(0.25, rel=1e-4)
    assert row[c.MAGNITUDES] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 7), (300, 96), (3, 30000)])
def test_the_sums_of_a_sample_are_those_of_plain_torch(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    y = (x * 1.25).where(torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.5, x)
    x[0, :3], y[0, :3] = torch.tensor([0.0, float("nan"), float("inf")]), torch.tensor([1.0, float("nan"), 2.0])
    with fused():
        found = gpu.sample_sums(x, y)
    n, width, stride = dispatch._spread(x)
    at = (torch.arange(n) // width * stride + torch.arange(n) % width).to(DEVICE)
    torch.testing.assert_close(found, plain_sums(x.flatten()[at], y.flatten()[at]), rtol=1e-6, atol=0)
