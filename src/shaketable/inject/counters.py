"""What is counted and measured of a tap: one row of numbers per direction, on the device where it happens.

Every fire is counted. **Which fires are measured is decided by one rule**, `is_due`: the 1st, 2nd, 4th, 8th, …, and every one
as long as none has changed anything. So the cost of measuring vanishes in a long run, and "this changed nothing" is a fact.
Noise that is held for a rollout is measured at every draw: there are few, and its magnitude follows a schedule. In a captured
graph the kernel at the head of a pass applies the rule (`faults/gpu/kernels/begin_pass.py`).

`settle` alone brings the rows to the ledger, as differences to what it brought before.
"""

from __future__ import annotations

import math
import threading
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shaketable.faults import sums as s
from shaketable.faults.base import FaultBase
from shaketable.faults.gpu import dispatch as gpu
from shaketable.io.replacing import WRITER
from shaketable.plan import PHASES

if TYPE_CHECKING:
    from shaketable.inject.op import Tap
    from shaketable.ledger.ledger import Spot

RECOMPUTED = len(PHASES)
"""Columns of a row: fires in each phase, those repeated by activation checkpointing, then what `Measured` holds."""
MEASURED = 4
ERROR, VALUES, CHANGED, ALIVE, SURVIVED, MAGNITUDES, MAGNITUDE, MAGNITUDE_SQUARE, MARK, SECONDS, SEEN = range(5, 16)
WIDTH = 16
_PATIENCE = 7
"""Fires before a device is asked whether anything has changed."""


def capturing() -> bool:
    """Whether this thread's stream is being captured into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def may_wait() -> bool:
    """Whether this thread may wait for a device. The writer never may: another thread may be capturing a graph."""
    return threading.current_thread().name != WRITER and not capturing()


def is_due(fires: float, changed: float, mark: float) -> bool:
    """Whether the next fire of a row is measured."""
    return changed == 0 or fires >= mark


class Measurement(NamedTuple):
    """The result of one measured fire, still on the device of its tensor."""

    fault: FaultBase
    sums: Tensor
    magnitude: Tensor | None
    """Where the sums alone do not tell it."""

    @classmethod
    def all_columns(cls, found: list[Measurement]) -> list[list[float]]:
        """The columns of many on one device, which is waited for once."""
        sums = torch.stack([one.sums for one in found]).cpu()
        read_back = [one.magnitude.double() for one in found if one.magnitude is not None]
        magnitudes = iter(torch.stack(read_back).tolist() if read_back else ())
        return [
            one.columns(own, None if one.magnitude is None else next(magnitudes)) for one, own in zip(found, sums, strict=True)
        ]

    def columns(self, sums: Tensor, magnitude: float | None) -> list[float]:
        """What it adds to a row, from `MEASURED` on, given its numbers on the host."""
        found = self.fault.magnitude_of(sums) if magnitude is None else magnitude
        size = math.nan if found is None else float(found)
        numbers = sums.tolist()
        error = numbers[s.ERROR] / numbers[s.SIZE] if numbers[s.SIZE] > 0 else 0.0
        magnitudes = [1.0, size, size * size] if math.isfinite(size) else [0.0, 0.0, 0.0]
        return [1.0, error, *numbers[s.VALUES : s.SURVIVED + 1], *magnitudes]


def measure(fault: FaultBase, clean: Tensor, faulty: Tensor, lanes: Tensor | None) -> Measurement:
    """Compare a tensor before and after. Nothing here waits for a device, except for one that has no float64."""
    by_kernel = clean.is_cuda and lanes is None and fault.tells == "values"
    known = gpu.sample_sums(clean, faulty) if by_kernel else None
    if known is not None and (fault.asked() is None or fault.magnitude_of(known) is not None):
        return Measurement(fault, known, None)
    a, b, mask = s.sample(fault, clean, faulty, lanes)
    part = s.with_float64(a), s.with_float64(b), None if mask is None else s.with_float64(mask)
    found = s.sums(*part)
    if part[0] is not clean and clean.device.type == "cpu" and found[s.CHANGED] == 0:
        part, found = (clean, faulty, lanes), s.sums(clean, faulty, lanes)
    has_magnitude = fault.asked() is not None and fault.magnitude_of(found) is None and clean.numel() > 0
    return Measurement(fault, found, fault.read_back(*part) if has_magnitude else None)


class HostTable:
    """The rows of an injection's taps in the memory of the host.

    What was measured on another device stays there until the ledger is read, or until the eighth fire. Until then it is not
    known whether anything has changed, and the row is measured by its mark alone.
    """

    def __init__(self) -> None:
        self._rows: list[list[float]] = []
        self._told: list[list[float]] = []
        self._pending: dict[int, list[Measurement]] = {}
        self._unchanged: set[int] = set()
        """Rows of other devices that were asked, and had not changed anything."""
        self._lock = RLock()

    def add_tap(self) -> None:
        for rows in (self._rows, self._told):
            rows.extend([0.0] * WIDTH for _ in range(2))

    def count(self, tap: Tap, backward: bool, phase: str) -> bool:
        """Count a fire; whether it is to be measured."""
        at = 2 * tap.index + backward
        row = self._rows[at]
        with self._lock:
            fires = row[0] + row[1] + row[2]
            row[PHASES.index(phase)] += 1
            if at in self._pending and (at in self._unchanged or fires >= max(_PATIENCE, row[MARK])):
                self._fold()
            due = tap.is_held or is_due(fires, row[CHANGED] or at in self._pending, row[MARK])
            if due:
                row[MARK] = 2 * fires + 1
        return due

    def count_recomputed(self, tap: Tap) -> None:
        with self._lock:
            self._rows[2 * tap.index][RECOMPUTED] += 1

    def spend(self, tap: Tap, backward: bool, seconds: float) -> None:
        self._rows[2 * tap.index + backward][SECONDS] += seconds

    def add(self, tap: Tap, backward: bool, found: Measurement) -> None:
        at = 2 * tap.index + backward
        with self._lock:
            if found.sums.device.type == "cpu":
                self._add(at, found.columns(found.sums, None if found.magnitude is None else float(found.magnitude)))
            else:
                self._pending.setdefault(at, []).append(found)

    def _add(self, at: int, numbers: list[float]) -> None:
        row = self._rows[at]
        for column, number in enumerate(numbers, MEASURED):
            row[column] += number

    def _fold(self) -> None:
        """Add what other devices have measured, waiting for each of them once."""
        pending, self._pending = self._pending, {}
        devices: dict[torch.device, list[tuple[int, Measurement]]] = {}
        for at, measured in pending.items():
            for one in measured:
                devices.setdefault(one.sums.device, []).append((at, one))
        for found in devices.values():
            for (at, _), numbers in zip(found, Measurement.all_columns([one for _, one in found]), strict=True):
                self._add(at, numbers)
        for at in pending:
            (self._unchanged.discard if self._rows[at][CHANGED] else self._unchanged.add)(at)

    def settle(self, taps: list[Tap]) -> None:
        """Tell the ledger what is new."""
        with self._lock:
            if self._pending and may_wait():
                self._fold()
            for tap in taps:
                for backward in (False, True):
                    at = 2 * tap.index + backward
                    if self._rows[at] != self._told[at]:
                        tell(tap.spot, backward, self._rows[at], self._told[at])
                        self._told[at] = list(self._rows[at])

    def saved(self) -> list[list[float]]:
        """The rows, for a process that resumes this run."""
        with self._lock:
            return [list(row) for row in self._rows]

    def go_on(self, rows: list[list[float]]) -> None:
        """Count on from rows that `saved` gave, so that the same fires are measured; only what is new goes to the ledger."""
        with self._lock:
            for at, row in enumerate(rows):
                self._rows[at], self._told[at] = list(row), list(row)

    def forget(self) -> None:
        """Begin at zero: a forked child."""
        self._lock = RLock()
        self._pending, self._unchanged = {}, set()
        for rows in (self._rows, self._told):
            rows[:] = [[0.0] * WIDTH for _ in rows]


def tell(spot: Spot, backward: bool, now: list[float], before: list[float]) -> None:
    new = [a - b for a, b in zip(now, before, strict=True)]
    with spot.lock:
        for phase, n in zip(PHASES, new, strict=False):
            if n:
                spot.counts.setdefault(phase, [0, 0])[backward] += round(n)
        spot.recomputed += round(new[RECOMPUTED])
        spot.seconds += new[SECONDS]
        if new[SEEN] and not now[CHANGED]:  # a GPU saw a change beside what it measured: one value, of one more
            new[VALUES], new[CHANGED] = new[VALUES] + 1, 1.0
        if new[MEASURED]:
            (spot.backward if backward else spot.forward).take(new[MEASURED : MAGNITUDE_SQUARE + 1])
