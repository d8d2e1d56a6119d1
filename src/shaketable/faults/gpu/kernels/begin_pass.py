"""Triton: the head of a pass on a GPU. One program writes, for every tap and use, what its kernels will read."""

from __future__ import annotations

import triton
import triton.language as tl

from shaketable.faults.gpu.kernels.measure import ALL, CHANGED, DUE, MARK, SEEN, WIDTH
from shaketable.faults.gpu.kernels.noise import joined, mix64

GIVEN, CLOCK, OWN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Where the moment of a pass comes from: an argument; the next one of the clock, which replays advance; the pass, kept."""


@triton.jit(do_not_specialize=["low", "high", "base_low", "base_high", "on"])
def begin_pass(
    keys, clock, own, live, rows, sums, low, high, base_low, base_high, on,
    MOMENT: tl.constexpr, TAPS: tl.constexpr, USES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys, scales and flags of the uses from `base` on, for the taps of one direction.

    `sums` are the rows of that direction: which taps are measured in this pass is decided here, by the rule of
    `inject/counters.py`.
    """
    if MOMENT == GIVEN:
        now = joined(low, high)
    elif MOMENT == CLOCK:
        now = (tl.load(clock) + 1).to(tl.uint64, bitcast=True)
    else:
        now = tl.load(own).to(tl.uint64, bitcast=True)
    first = now + joined(base_low, base_high)
    for start in range(0, TAPS * USES, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < TAPS * USES
        tap = i // USES
        moment = mix64(first + (i % USES).to(tl.uint64))
        key = mix64(tl.load(keys + tap, mask=inside, other=0).to(tl.uint64, bitcast=True) ^ moment)
        key = mix64(key ^ 0xD1CE)
        tl.store(rows + 4 * i, key.to(tl.uint32).to(tl.int32, bitcast=True), mask=inside)
        tl.store(rows + 4 * i + 1, (key >> 32).to(tl.uint32).to(tl.int32, bitcast=True), mask=inside)
        scale = tl.load(live + 2 * tap, mask=inside, other=0.0)
        tl.store(rows + 4 * i + 2, scale.to(tl.int32, bitcast=True), mask=inside)
        phase = tl.load(live + 2 * tap + 1, mask=inside, other=0.0).to(tl.int32) * on
        row = sums + WIDTH * tap
        fires = tl.load(row, mask=inside, other=0.0) + tl.load(row + 1, mask=inside, other=0.0)
        fires += tl.load(row + 2, mask=inside, other=0.0)
        none = tl.load(row + CHANGED, mask=inside, other=0.0) + tl.load(row + SEEN, mask=inside, other=0.0) == 0
        due = none | (fires >= tl.load(row + MARK, mask=inside, other=0.0))
        flags = phase + tl.where(due, DUE, 0) + tl.where(none, ALL, 0)
        tl.store(rows + 4 * i + 3, tl.where(phase != 0, flags, 0), mask=inside)
    tl.debug_barrier()
    for start in range(0, TAPS, BLOCK):
        tap = start + tl.arange(0, BLOCK)
        inside = tap < TAPS
        row = sums + WIDTH * tap
        fires = tl.load(row, mask=inside, other=0.0) + tl.load(row + 1, mask=inside, other=0.0)
        fires += tl.load(row + 2, mask=inside, other=0.0)
        mark = tl.load(row + MARK, mask=inside, other=0.0)
        acts = tl.load(live + 2 * tap + 1, mask=inside, other=0.0) * on != 0
        tl.store(row + MARK, 2 * fires + 1, mask=inside & acts & (fires >= mark))
    if MOMENT == CLOCK:
        tl.store(clock, now.to(tl.int64, bitcast=True))
        tl.store(own, now.to(tl.int64, bitcast=True))
