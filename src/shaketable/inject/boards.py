"""The boards of one injection: on which cards they are, and what happens to them when a pass begins.

A plan has a board where kernels ask one. Noise that is held for a rollout asks none: it is drawn before a graph is captured or
replayed, and what a replay reads is the noisy weight itself. So AQN on weights has no board, and pays for none: neither a tick
in every replayed step nor a table to write and sums to wait for at every step of a training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shaketable.errors import PlanError
from shaketable.faults import gpu
from shaketable.inject.board import Board, Pass, capturing
from shaketable.inject.traced import compiled, fused

if TYPE_CHECKING:
    from shaketable.inject.calls import Entry, Frame
    from shaketable.inject.injection import Injection
    from shaketable.inject.taps import Tap


class Boards:
    """A tap has at most one board per card; taps of a model that comes later get a board of their own."""

    def __init__(self, injection: Injection) -> None:
        self.injection = injection
        self.all: list[Board] = []
        self.rows: torch.Tensor | None = None
        """Those of the first board, which graphs that are compiled are traced with."""
        self._known: object = None

    def make(self) -> None:
        """A board on every card that a model is on, for the taps that have none there. Not during a capture."""
        if not torch.cuda.is_initialized() or capturing():
            return
        first = [next(m.model.parameters(), None) for m in self.injection.models]
        known = len(self.injection.taps), tuple(p.device for p in first if p is not None)
        if known == self._known:
            return
        self._known = known
        if (kernel := gpu.name("cuda")) is None:
            return
        for device in _cards(self.injection):
            self.injection.ledger.kernel = kernel
            taps = [tap for tap in self.injection.taps if tap.asks_board and device not in tap.boards]
            if taps:
                self._add(Board(self.injection, device, taps))

    def _add(self, board: Board) -> None:
        self.all.append(board)
        for tap in board.taps:
            tap.boards[board.device] = board
        if self.rows is None:
            self.rows = board.rows
            compiled.place_on(board)

    def on(self, device: torch.device) -> list[Board]:
        """The boards of one card."""
        return [board for board in self.all if board.device == device]

    def of(self, tap: Tap, x: torch.Tensor) -> Board:
        """Where a tap finds its row when it is captured."""
        if not tap.asks_board:
            raise PlanError(f"{tap.site.label}: noise that is held for a rollout cannot be captured together with gradients")
        if x.device not in tap.boards:
            raise PlanError(f"call the model once on {x.device} before capturing it into a graph: the plan is not there yet")
        return tap.boards[x.device]

    def meet(self, entry: Entry, frame: Frame) -> None:
        """A pass begins: new keys on the boards of the card, if it is captured or its linears take the short way."""
        if not torch.cuda.is_initialized():
            return
        captured = torch.cuda.is_current_stream_capturing()
        if not captured:
            self.make()
        here = self.on(torch.device("cuda", torch.cuda.current_device())) if self.all else []
        if captured and here:
            for board in here:
                board.begin(frame.phase)
            frame.captured, frame.on_board = Pass(frame.phase), True
        elif here and self._swiftly(entry) and not torch.is_grad_enabled() and all(board.is_mine() for board in here):
            for board in here:
                board.tick(frame.phase, frame.moment)
            frame.on_board = True
            self.injection.fires += 1

    def _swiftly(self, entry: Entry) -> bool:
        """Whether linears of this model take the short way in this pass."""
        spares = self.injection.spares
        return any(m.swifts for m in self.injection.models if m.owner == entry.owner) and (spares is None or not spares())

    def update(self) -> None:
        """Copy the switch, the magnitudes and the step to every card."""
        for board in self.all:
            board.update()

    def settle(self) -> None:
        """Tell the ledger what kernels did."""
        for board in self.all:
            board.settle()

    def close(self) -> None:
        """Let the boards go, at once: what is freed by chance, by the garbage collector, may be freed during a capture.

        A graph that was captured with a board may outlive the plan. Its replays go on reading and writing there, so such a
        board stays for the rest of the process: a few hundred kilobytes, clean.
        """
        self.settle()
        _outliving.extend(board for board in self.all if board.is_captured)
        self.all = []
        fused.passes.pop(self.injection.handle, None)
        for tap in self.injection.taps:
            tap.boards = {}


def _cards(injection: Injection) -> set[torch.device]:
    """The cards that weights of its models are on."""
    return {p.device for m in injection.models for p in m.model.parameters() if p.is_cuda}


_outliving: list[Board] = []
