"""Draws of held noise for many weights at once, and what they changed.

A draw the ordinary way is five launches and a measurement that asks the card eight times: on 61 norms, a thirtieth of a
rollout. Here one kernel draws all of them and sums up what it changed; the sums stay on the card until somebody reads the
ledger, or until the next draw. What is measured is the draw itself.

A draw is counted when its weight is first read. One that nobody reads is forgotten with the next.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from shaketable.faults import FaultBase
from shaketable.faults.gpu import many
from shaketable.inject.board import capturing
from shaketable.inject.held import HeldTap
from shaketable.inject.taps import Tap

if TYPE_CHECKING:
    from shaketable.inject.short.ready import Ready
    from shaketable.inject.spots import Measured


@dataclass(frozen=True, slots=True)
class _Draw:
    """One draw for one weight: with what it was made, and where the kernel wrote down what it changed."""

    key: int
    fault: FaultBase
    sums: Tensor
    row: int


class Drawn:
    """The newest draws of some weights of one clause, type and device."""

    def __init__(self) -> None:
        self._new: dict[HeldTap, _Draw] = {}
        """Draws that nobody has read yet."""
        self._read: list[tuple[HeldTap, _Draw]] = []
        """Draws that are counted and not yet measured."""
        self._thread = 0
        self._lock = threading.Lock()

    def renew(self, entries: Sequence[Ready], fault: FaultBase) -> None:
        """Make weights ready: what was drawn for this rollout already stays, what one kernel can draw is drawn."""
        new: list[tuple[Ready, HeldTap, int]] = []
        for entry in entries:
            tap = entry.tap
            assert isinstance(tap, HeldTap)
            key = tap.key()
            entry.value, entry.version = tap.kept_for(entry.parameter, key), entry.parameter._version
            entry.unread = entry.unread and entry.value is not None and not tap.is_counted("rollout", key, fault)
            if entry.value is None and many.draws(fault, entry.parameter):
                new.append((entry, tap, key))
        if new:
            self._draw(new, fault)

    def _draw(self, new: list[tuple[Ready, HeldTap, int]], fault: FaultBase) -> None:
        self.settle()
        homes = [tap.home(entry.parameter) for entry, tap, _ in new]
        pairs = [(entry.parameter.detach(), home) for (entry, _, _), home in zip(new, homes, strict=True)]
        sums = many.draw(fault, pairs, [key for _, _, key in new])
        self._thread = threading.get_ident()
        for row, ((entry, tap, key), home) in enumerate(zip(new, homes, strict=True)):
            tap.keep(key, entry.parameter, home)
            self._new[tap] = _Draw(key, fault, sums, row)
            entry.value, entry.unread = home, not tap.is_counted("rollout", key, fault)

    def count(self, tap: Tap) -> None:
        """A draw is seen for the first time."""
        assert isinstance(tap, HeldTap)
        draw = self._new.pop(tap)
        tap.count("rollout", draw.key, draw.fault)
        self._read.append((tap, draw))

    def settle(self) -> None:
        """Tell the ledger what draws that were read have changed.

        The thread that drew waits for the card, and so may the main one; others must not ask, for a graph may be being
        captured.
        """
        may = threading.get_ident() == self._thread or threading.current_thread() is threading.main_thread()
        if not self._read or not may or capturing():
            return
        with self._lock:
            read, self._read = self._read, []
            told = {at: sums.tolist() for at, sums in {id(draw.sums): draw.sums for _, draw in read}.items()}
            for tap, draw in read:
                with tap.spot.lock:
                    _measure(tap.spot.forward, draw.fault, told[id(draw.sums)][draw.row])


def _measure(measured: Measured, fault: FaultBase, sums: list[float]) -> None:
    values, changed, alive, survived, error, square, _ = sums
    measured.fires += 1
    measured.values += round(values)
    measured.changed += round(changed)
    measured.alive += round(alive)
    measured.survived += round(survived)
    measured.square += error / square if square > 0 else 0.0
    measured.tell(many.magnitude(fault, sums))
