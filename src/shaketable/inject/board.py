"""What kernels read when Python cannot be asked: inside captured CUDA graphs, and in compiled code.

A replay runs no Python. A key that was an argument when the graph was captured would give the same noise at every replay, and
a magnitude would be frozen. So an injection on a card has a *board* in that card's memory: rows per tap with its key, its
scale and whether it is on. Captured kernels read their row. A small kernel at the head of every captured pass (`tick`)
advances the board's clock and writes new keys, so that it is replayed too; what changes from Python (the switch, the magnitude)
is copied to the board when it changes.

The short way of linears (`swift.py`) uses the board too, although Python runs there: a tick with the moment of the pass makes
the keys of all its strikes at once, the same that Python would have made one by one.

And no Python means no counting. So every kernel that reads its row also counts itself, and in the first eight passes and every
32nd adds what its first block changed to the sums of its tap. The ledger asks for both when it is read: what it says of
replays was seen in replays.

Boards are made when hooks are set or when a model is first called on a card, because nothing may be allocated during a
capture, and they never move. Passes of one board that run on several streams at once share its clock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shaketable.errors import PlanError
from shaketable.faults import gpu
from shaketable.faults.generator import mix64
from shaketable.faults.gpu.live import Recipe, recipe
from shaketable.plan import PHASES

if TYPE_CHECKING:
    from shaketable.faults import FaultBase
    from shaketable.inject.injection import Injection
    from shaketable.inject.spots import Measured, Spot
    from shaketable.inject.taps import Blow, Tap

REPEATS, REPEATS_OF_OPERATORS = 4, 32
"""How often one tap can strike in one captured pass: a module is called once, a layer has a dozen products."""
PROOF = 10
"""Values, changed, alive, survived; sums of squared errors, values, relative errors; fires in each of the three phases."""


def capturing() -> bool:
    """Whether this thread's stream is being captured into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@dataclass(eq=False)
class Pass:
    """A pass that is being captured: how often each tap has struck in it."""

    phase: str
    strikes: dict[tuple[Tap, bool], int] = field(default_factory=dict)

    def count(self, tap: Tap, backward: bool) -> int:
        """Which strike of this tap in the pass this is."""
        n = self.strikes.get((tap, backward), 0)
        self.strikes[tap, backward] = n + 1
        return n


class Board:
    """The board of one injection on one card."""

    def __init__(self, injection: Injection, device: torch.device, taps: list[Tap]) -> None:
        self.injection = injection
        self.device = device
        self.taps = {tap: i for i, tap in enumerate(taps)}
        self.is_used = self.is_captured = False
        self._frozen: list[tuple[Tap, FaultBase]] = []
        """What was captured with its magnitude in it."""
        self._step: int | None = None
        self._written: tuple[object, ...] | None = None
        """What `live` was last written from."""
        self._lock = threading.Lock()
        self._rows_of: WeakKeyDictionary[Blow, int] = WeakKeyDictionary()
        """Which row a captured strike reads: its gradient reads the same."""
        self.repeats = REPEATS_OF_OPERATORS if injection.has_operators else REPEATS
        n = len(taps)
        keys = [_signed(tap.keys[direction]) for direction in (0, 1) for tap in taps]
        self.keys = torch.tensor(keys, dtype=torch.int64, device=device)
        self.clock = torch.zeros(2, dtype=torch.int64, device=device)
        """The moment of the last captured pass, and how many passes there were."""
        self.live = torch.zeros(len(PHASES), n, 2, device=device)
        self.rows = torch.zeros(2 * n * self.repeats, 4, dtype=torch.int32, device=device)
        self.proof = torch.zeros(2 * n + 1, PROOF, dtype=torch.float64, device=device)
        """Per tap and direction; the last row is for what is not counted."""
        self.mirror = torch.zeros(2 * n + 1, PROOF, dtype=torch.float64, pin_memory=device.type == "cuda")
        """The sums as they were at the last tick, in the host's memory."""
        self._owner: tuple[int, int] | None = None
        self._told = [[0.0] * PROOF for _ in range(2 * n)]
        self._loaded: set[tuple[object, ...]] = set()
        for moment in (0, None):
            self.tick(PHASES[0], moment)
        self.is_used = False
        self.update()

    def update(self) -> None:
        """The switch, the magnitudes and the step as they are now; what is on the card already is not written again."""
        if capturing():
            raise PlanError("a plan cannot be changed while a graph is being captured")
        for tap, fault in self._frozen:
            if tap.fault is not fault:
                raise PlanError(f"{tap.site.label}: {fault.text()} was captured into a CUDA graph as it was; capture it anew")
        if self._step != self.injection.step:
            self._step = self.injection.step
            self.clock[:1].fill_(_signed(mix64(self._step)))
        state = self.injection.enabled, *self.injection.faults
        if self._written != state:
            self._written = state
            self.live.copy_(torch.tensor([[_state(tap, phase) for tap in self.taps] for phase in PHASES]))

    def begin(self, phase: str) -> Pass:
        """The head of a pass that is being captured."""
        self.is_captured = True
        self.tick(phase)
        return Pass(phase)

    def tick(self, phase: str, moment: int | None = None) -> None:
        """A new moment, given or the clock's next one: new keys in all rows."""
        self.is_used = True
        live = self.live[PHASES.index(phase)]
        gpu.tick((self.keys, self.clock, live, self.rows, self.proof, self.mirror), moment)

    def load(self, tap: Tap, x: Tensor) -> None:
        """See that the kernel of a strike like this one is on the card: nothing can be loaded during a capture."""
        how = recipe(tap.fault, lanes=True)
        if how is None or (how.is_noise, how.kind, x.dtype, x.numel() % gpu.BLOCK == 0) in self._loaded:
            return
        self._loaded.add((how.is_noise, how.kind, x.dtype, x.numel() % gpu.BLOCK == 0))
        scratch = torch.zeros(gpu.BLOCK if x.numel() % gpu.BLOCK == 0 else 1, dtype=x.dtype, device=x.device)
        how.strike(scratch, gpu.Live(torch.zeros_like(self.rows[:1]), self.proof, 0, 2 * len(self.taps)))

    def is_mine(self) -> bool:
        """Whether rows of an ordinary pass belong to this thread and stream: those that came first. Others do without."""
        me = threading.get_ident(), torch._C._cuda_getCurrentRawStream(self.device.index)
        if self._owner is None:
            self._owner = me
        return self._owner == me

    def strike(self, tap: Tap, x: Tensor, blow: Blow, backward: bool) -> Tensor:
        """The faulty tensor, by kernels that are being captured."""
        found = blow.captured or self.begin(blow.phase)
        live = self.row(tap, backward, found.count(tap, backward))
        self._rows_of[blow] = live.row
        how, mask = recipe(tap.fault, lanes=True), tap.mask_of(x)
        if how is not None and not tap.transposed:
            y = how.strike(x, live if mask is None else self._untold(live.row))
            if y is not None:
                return y if mask is None else _told(x, y.where(mask, x), live)
        if not tap.fault.is_steady:
            raise PlanError(
                f"{tap.site.label}: {tap.fault.kind} on {x.dtype} cannot be captured into a CUDA graph: its replays would "
                "repeat one noise; run this model without graphs"
            )
        self._frozen.append((tap, tap.fault))
        return _told(x, tap.strike_as_ever(x, blow), live)

    def pull_back(self, tap: Tap, g: Tensor, x: Tensor | None, blow: Blow) -> Tensor:
        """The gradient of a captured strike, by kernels that are being captured too."""
        if blow not in self._rows_of:
            raise PlanError(f"{tap.site.label}: capture the forward pass together with its backward pass")
        live = self._untold(self._rows_of[blow])
        if blow.fault.kind in ("relative_gaussian", "gain") and not tap.transposed:
            how, mask = recipe(blow.fault, lanes=True), tap.mask_of(g)
            y = None if how is None else how.strike(g, live)
            if y is not None:
                return y if mask is None else y.where(mask, g)
        return torch.where(self.rows[live.row, 3] != 0, tap.pull_back_as_ever(g, x, blow), g)

    def row(self, tap: Tap, backward: bool, n: int) -> gpu.Live:
        """Where the kernel of one strike reads, and tells."""
        if n >= self.repeats:
            raise PlanError(f"{tap.site.label}: {tap.name} is called more than {self.repeats} times in one captured pass")
        i = backward * len(self.taps) + self.taps[tap]
        return gpu.Live(self.rows, self.proof, i * self.repeats + n, i)

    def _untold(self, row: int) -> gpu.Live:
        """The same row, for what is not a fire."""
        return gpu.Live(self.rows, self.proof, row, 2 * len(self.taps))

    def settle(self) -> None:
        """Tell the ledger what happened since it was last told.

        The main thread waits for the card. Others, which only look on, must not ask it, for a graph may be being captured:
        they see what was so at the beginning of the last pass.
        """
        if not self.is_used or capturing():
            return
        with self._lock:
            sums = (self.proof if threading.current_thread() is threading.main_thread() else self.mirror).tolist()
            for tap, i in self.taps.items():
                for backward, at in ((False, i), (True, len(self.taps) + i)):
                    new = [now - before for now, before in zip(sums[at], self._told[at], strict=True)]
                    if sum(new[7:]) <= 0:
                        continue
                    self._told[at] = sums[at]
                    _count(tap.spot, backward, new[7:])
                    if new[0]:
                        _measure(tap.spot.backward if backward else tap.spot.forward, recipe(tap.fault), new)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _state(tap: Tap, phase: str) -> list[float]:
    """The scale, and the number of the phase from one on when it acts there."""
    how = recipe(tap.fault, lanes=True)
    on = tap.injection.enabled and not tap.fault.is_off and tap.acts_in(phase)
    return [how.scale if how is not None else 0.0, float(PHASES.index(phase) + 1 if on else 0)]


def _told(x: Tensor, y: Tensor, live: gpu.Live) -> Tensor:
    """What other operators than one kernel did: switched, and told, by a few more of them."""
    on = live.rows[live.row, 3]
    y = torch.where(on != 0, y, x)
    clean, faulty = x.detach().flatten()[:1024].double(), y.detach().flatten()[:1024].double()
    alive, error, one = clean != 0, faulty - clean, torch.ones_like(clean)
    sums = [one, clean != faulty, alive, alive & (faulty != 0), error.square(), clean.square(), 0 * one]
    phases = torch.arange(1, len(PHASES) + 1, device=x.device) == on % 8
    live.proof[live.place] += torch.cat([torch.stack([s.double().sum() for s in sums]), phases.double()]) * (on != 0)
    return y


def _count(spot: Spot, backward: bool, fires: list[float]) -> None:
    with spot.lock:
        for phase, n in zip(PHASES, fires, strict=True):
            if n:
                spot.counts.setdefault(phase, [0, 0])[backward] += round(n)


def _measure(sums: Measured, how: Recipe | None, new: list[float]) -> None:
    """What kernels saw, as one more measured fire; of noise, also the magnitude."""
    values, changed, alive, survived, error, size, ratio = new[:7]
    sums.fires += 1
    sums.values += round(values)
    sums.changed += round(changed)
    sums.alive += round(alive)
    sums.survived += round(survived)
    sums.square += error / size if size else 0.0
    if how is not None and how.is_noise and alive:
        found = (ratio / alive if how.kind == gpu.RELATIVE else error / values) ** 0.5
        sums.magnitudes += 1
        sums.magnitude += found
        sums.magnitude_square += found * found
