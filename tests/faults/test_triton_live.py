"""Kernels inside captured graphs, without a graph: what they read from a board's rows, and what they tell."""

from __future__ import annotations

import pytest
import torch
from kernel_route import DEVICE, ON_CARD, fused, kernels, same

from shaketable.faults import gpu
from shaketable.faults.generator import mix64, plain_normals

pytestmark = kernels
TAPS, REPEATS, TOLD = 5, 4, 8
KEYS = [11, 2**63 + 22, 33, 44, 55, 2**64 - 1, 2**64 - 2, 2**64 - 3, 7, 8]


def signed(word, bits):
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >= 1 << (bits - 1) else word


@pytest.fixture
def board():
    """Keys, a clock, what is live (taps 1 to 4 on, in phase 2), empty rows, and what was told, twice."""
    live = torch.tensor([[0.1 * tap, 0.0 if tap == 0 else 2.0] for tap in range(TAPS)], device=DEVICE)
    keys = torch.tensor([signed(key, 64) for key in KEYS], dtype=torch.int64, device=DEVICE)
    rows = torch.zeros(2 * TAPS * REPEATS, 4, dtype=torch.int32, device=DEVICE)
    proof, mirror = (torch.zeros(2 * TAPS, 10, dtype=torch.float64, device=DEVICE) for _ in range(2))
    return keys, torch.zeros(2, dtype=torch.int64, device=DEVICE), live, rows, proof, mirror


def tick(board, moment=None):
    gpu.tick(board, moment)
    return board[3]


def wanted_key(place, n, moment):
    return mix64(mix64(KEYS[place] ^ mix64(moment + n)) ^ 0xD1CE)


@pytest.mark.parametrize("given", [False, True])
def test_a_tick_writes_the_key_of_every_strike(board, given):
    for moment in (2**63 + 5, 2**64 - 9) if given else (1, 2):
        rows = tick(board, moment if given else None).cpu()
        assert board[1][0].item() == (0 if given else moment)
        for place in range(2 * TAPS):
            for n in range(REPEATS):
                key, row = wanted_key(place, n, moment), rows[place * REPEATS + n]
                assert row[:2].tolist() == [signed(key, 32), signed(key >> 32, 32)]
                assert row[2:3].view(torch.float32).item() == board[2][place % TAPS, 0].item()
                assert row[3].item() == (0 if place % TAPS == 0 else TOLD + 2)


def test_a_tick_mirrors_what_was_told_so_far(board):
    board[4].copy_(torch.arange(2.0 * TAPS * 10).view(2 * TAPS, 10))
    tick(board)
    assert torch.equal(board[5], board[4])


def test_the_first_passes_and_every_32nd_are_told(board):
    told = [int(tick(board)[-1, 3]) >= TOLD for _ in range(70)]
    assert [i for i, tells in enumerate(told) if tells] == [*range(8), 32, 64]
    assert board[1][1].item() == 70


def test_a_fire_that_is_not_told_is_counted(board):
    for _ in range(9):
        rows = tick(board)
    x, proof = torch.ones(3000, device=DEVICE), torch.zeros(2 * TAPS, 10, dtype=torch.float64, device=DEVICE)
    with fused():
        assert not same(gpu.noise(x, 0.0, 0, relative=True, live=gpu.Live(rows, proof, 3 * REPEATS, 3)), x)
    assert proof[3].tolist() == [0.0] * 8 + [1.0, 0.0]


@pytest.mark.parametrize("n", [100, 2048, 5000])
@pytest.mark.parametrize("relative", [True, False])
def test_a_live_kernel_strikes_with_its_row_and_tells(board, relative, n):
    rows, proof = tick(board), torch.zeros(2 * TAPS, 10, dtype=torch.float64, device=DEVICE)
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DEVICE)
    place, number = TAPS + 3, 2
    with fused():
        y = gpu.noise(x, 0.0, 0, relative=relative, live=gpu.Live(rows, proof, place * REPEATS + number, place))
    z = plain_normals(n, wanted_key(place, number, 1), torch.device("cpu")).to(DEVICE)
    scale = board[2][3, 0]
    wanted = x + x * (z * scale) if relative else x + z * scale
    assert torch.allclose(y, wanted, rtol=0, atol=1e-3) if ON_CARD else same(y, wanted)
    told = proof[place].tolist()
    assert 0 < told[0] <= n
    assert told[1] == told[2] == told[0]
    assert told[7:] == [0.0, 1.0, 0.0]
    assert proof.count_nonzero() == (proof[place] != 0).sum()
    assert (told[6] / told[2] if relative else told[4] / told[0]) ** 0.5 == pytest.approx(0.3, rel=0.25)


def test_a_live_kernel_that_is_off_changes_and_tells_nothing(board):
    rows, proof = tick(board), torch.zeros(2 * TAPS, 10, dtype=torch.float64, device=DEVICE)
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[:2] = torch.tensor([-0.0, float("nan")])
    with fused():
        assert same(gpu.noise(x, 9.0, 1, relative=True, live=gpu.Live(rows, proof, 0, 0)), x)
        assert same(gpu.shift(x, 9.0, gpu.GAIN, live=gpu.Live(rows, proof, 0, 0)), x)
    assert proof.count_nonzero() == 0


@pytest.mark.parametrize("kind", ["GAIN", "SYSTEMATIC"])
def test_a_live_shift_takes_its_scale_from_its_row(board, kind):
    rows, proof = tick(board), torch.zeros(2 * TAPS, 10, dtype=torch.float64, device=DEVICE)
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scale = board[2][2, 0]
    with fused():
        y = gpu.shift(x, 0.0, getattr(gpu, kind), live=gpu.Live(rows, proof, 2 * REPEATS, 2))
    assert same(y, x * scale if kind == "GAIN" else x + x.sign() * scale)
    assert proof[2, 8] == 1
