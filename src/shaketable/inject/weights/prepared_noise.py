"""Draws of held noise for many weights at once, and what they changed.

A draw by the general path is five launches and a measurement that asks the GPU eight times: on 61 norms, a thirtieth of a
rollout. Here one kernel draws all of them and sums up what it changed; the sums stay on the GPU until somebody reads the
ledger, or until the next draw. What is measured is the draw itself.

Where the weights and their noisy twins lie is told to the GPU once. Rollouts come and go and norms stay where they are; so a
draw is a launch with a moment and a scale, and what is left to do for each weight in Python is to note that it is drawn.

A draw is counted when its weight is first read. One that nobody reads is forgotten with the next.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from shaketable.faults import FaultBase
from shaketable.faults.gpu import batched
from shaketable.inject.device.table import capturing
from shaketable.inject.tap import Tap
from shaketable.inject.weights.held_noise import HeldTap, Origin

if TYPE_CHECKING:
    from shaketable.inject.weights.prepared import Ready


@dataclass(frozen=True, slots=True, eq=False)
class _NoiseDraw:
    """One draw: with what it was made, and where the kernel wrote down what it changed, a row per weight."""

    moment: int
    fault: FaultBase
    sums: Tensor


class _Layout:
    """The launch that draws the noise of some weights, for as long as they are as they were."""

    def __init__(self, entries: list[Ready], fault: FaultBase) -> None:
        self._known = entries, self._looks(entries, fault)
        self.rows = [i for i, entry in enumerate(entries) if batched.draws(fault, entry.parameter)]
        """Which of them one kernel can draw."""
        mine = [(entries[i], _held(entries[i])) for i in self.rows]
        self.homes = [tap.home(entry.parameter) for entry, tap in mine]
        pairs = [(entry.parameter.detach(), home) for (entry, _), home in zip(mine, self.homes, strict=True)]
        self.launch = batched.NoiseBatch(fault, pairs, [tap.place for _, tap in mine]) if mine else None

    def fits(self, entries: list[Ready], fault: FaultBase) -> bool:
        """Whether it is the one for these weights. That each is at its address has been seen already."""
        return self._known[0] == entries and self._known[1] == self._looks(entries, fault)

    @staticmethod
    def _looks(entries: list[Ready], fault: FaultBase) -> list[object]:
        """All that the choice of a kernel and the shape of a noisy weight depend on."""
        weights = [entry.parameter for entry in entries]
        return [fault.kind, fault.sparsity, *((x.dtype, x.numel(), x.stride()) for x in weights)]


class DrawnWeights:
    """The newest draws of some weights of one clause, type and device."""

    def __init__(self) -> None:
        self._new: dict[Tap, tuple[_NoiseDraw, int]] = {}
        """Draws that nobody has read yet, and which row of their sums is whose."""
        self._read: list[tuple[HeldTap, _NoiseDraw, int]] = []
        """Draws that are counted and not yet measured."""
        self._layout: _Layout | None = None
        self._thread = 0
        self._lock = threading.Lock()

    def renew(self, entries: Sequence[Ready], origins: Sequence[Origin], fault: FaultBase) -> None:
        """Make weights ready: what was drawn for this rollout already stays, what one kernel can draw is drawn."""
        moment = _held(entries[0]).moment()
        new: list[tuple[Ready, Origin]] = []
        for entry, origin in zip(entries, origins, strict=True):
            tap = _held(entry)
            value = entry.value = tap.kept_for(origin, moment)
            entry.version = origin[1]
            if value is None:
                entry.unread = False
                new.append((entry, origin))
            elif entry.unread:
                entry.unread = not tap.is_counted("rollout", tap.key_at(moment), fault)
        if new:
            self._draw(new, fault, moment)

    def _draw(self, new: list[tuple[Ready, Origin]], fault: FaultBase, moment: int) -> None:
        entries = [entry for entry, _ in new]
        layout = self._layout
        if layout is None or not layout.fits(entries, fault):
            layout = self._layout = _Layout(entries, fault)
        magnitude = fault.asked()
        if layout.launch is None or magnitude is None:
            return
        self.settle()
        draw = _NoiseDraw(moment, fault, layout.launch(moment, magnitude))
        self._thread = threading.get_ident()
        for row, (i, home) in enumerate(zip(layout.rows, layout.homes, strict=True)):
            entry, origin = new[i]
            tap = _held(entry)
            tap.keep(moment, origin, home)
            self._new[tap] = draw, row
            entry.value, entry.unread = home, True

    def count(self, tap: Tap) -> None:
        """A draw is seen for the first time. One that is made anew, because its weight has changed, does not count again."""
        assert isinstance(tap, HeldTap)
        draw, row = self._new.pop(tap)
        key = tap.key_at(draw.moment)
        if not tap.is_counted("rollout", key, draw.fault):
            if tap.count("rollout", key, draw.fault):
                self._read.append((tap, draw, row))
            tap.injection.fires += 1

    def settle(self) -> None:
        """Tell the ledger what draws that were read have changed.

        The thread that drew waits for the GPU, and so may the main one; others must not ask, for a graph may be being
        captured.
        """
        may = threading.get_ident() == self._thread or threading.current_thread() is threading.main_thread()
        if not self._read or not may or capturing():
            return
        with self._lock:
            read, self._read = self._read, []
            told = {draw: draw.sums.tolist() for draw in {draw for _, draw, _ in read}}
            for tap, draw, row in read:
                tap.injection.counters.add_columns(tap, False, _columns(draw.fault, told[draw][row]))


def _held(entry: Ready) -> HeldTap:
    tap = entry.tap
    assert isinstance(tap, HeldTap)
    return tap


def _columns(fault: FaultBase, sums: list[float]) -> list[float]:
    """What a draw adds to the counters of its tap: see `counters.Measurement.columns`."""
    values, changed, alive, survived, error, square, _ = sums
    found = batched.magnitude(fault, sums)
    told = [0.0, 0.0, 0.0] if found is None else [1.0, found, found * found]
    return [1.0, error / square if square > 0 else 0.0, values, changed, alive, survived, *told]
