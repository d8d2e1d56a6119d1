"""CUDA graphs: what captured kernels read of their taps, and where they count.

A replay runs no Python. So an injection has a table in the memory of each GPU: per tap and use a row of key, scale and flags,
and per tap and direction a row of counters (`counters.py`). One small kernel at the head of a pass
(`faults/gpu/kernels/begin_pass.py`) writes the rows of the whole pass; it is replayed too, and takes the next key of a clock in
the GPU's memory. The switch and the magnitudes are copied to the table when they change.

The rows of a pass belong to the pass, because a backward pass may come after other forward passes. They come in pages: some
uses of every tap, in one direction and for one argument. Tables are made before a capture, during which nothing can be
allocated for good, and never move. Noise that is held for a rollout needs no table: a replay reads the noisy weight. A fault
without noise that takes several operators is captured with its present magnitude.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shaketable.errors import PlanError
from shaketable.faults.gpu import dispatch as gpu
from shaketable.faults.gpu.dispatch import recipe
from shaketable.faults.rng import mix64, signed
from shaketable.inject.counters import MEASURED, WIDTH, capturing, may_wait, tell
from shaketable.plan import PHASES

if TYPE_CHECKING:
    from torch import nn

    from shaketable.faults import FaultBase
    from shaketable.inject.injection import Injection
    from shaketable.inject.op import Application, Tap
    from shaketable.inject.passes import Pass


USES, USES_OF_OPERATORS = 4, 16
"""Uses of a tap on one page: a module is called once in a pass, a layer has a dozen products."""
_CLOCK, _OWN = 1, 2


class DeviceTable:
    """The table of one injection on one GPU."""

    def __init__(self, injection: Injection, device: torch.device, taps: list[Tap]) -> None:
        self.injection = injection
        self.device = device
        self.taps = {tap: i for i, tap in enumerate(taps)}
        self.uses = USES_OF_OPERATORS if injection.has_operators else USES
        self.is_used = False
        self._frozen: list[tuple[Tap, FaultBase]] = []
        """What was captured with its magnitude in it."""
        self._step: int | None = None
        self._written: object = None
        """What `live` was last written from."""
        self._lock = threading.Lock()
        n = len(taps)
        self.keys = torch.zeros(2, n, dtype=torch.int64, device=device)
        self.make_keys()
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        """The moment of the last pass that a graph began."""
        self.live = torch.zeros(len(PHASES), n, 2, device=device)
        self.sums = torch.zeros(2 * n + 1, WIDTH, dtype=torch.float64, device=device)
        """Forward rows, backward rows, and one for what is not counted."""
        self._told = [[0.0] * WIDTH for _ in range(2 * n)]
        rows = torch.zeros(n * self.uses, 4, dtype=torch.int32, device=device)
        for moment in (_CLOCK, _OWN):  # nothing can be loaded during a capture
            self._begin(rows, PHASES[0], False, moment, self.clock.clone(), on=False)
        self.update()

    def make_keys(self) -> None:
        """The keys of the taps, as they are now."""
        self.keys.copy_(torch.tensor([[signed(tap.keys[direction], 64) for tap in self.taps] for direction in (0, 1)]))

    def update(self) -> None:
        """The switch, the magnitudes and the step as they are now; what is there already is not written again."""
        if capturing():
            raise PlanError("a plan cannot be changed while a graph is being captured")
        for tap, fault in self._frozen:
            if tap.fault is not fault:
                raise PlanError(f"{tap.site.label}: {fault.text()} is part of a captured CUDA graph; capture the graph again")
        if self._step != self.injection.step:
            self._step = self.injection.step
            self.clock.fill_(signed(mix64(self._step), 64))
        state = self.injection.enabled, *self.injection.faults
        if self._written != state:
            self._written = state
            clauses = torch.tensor([self._state(phase) for phase in PHASES])
            self.live.copy_(clauses[:, [tap.clause for tap in self.taps]])

    def _state(self, phase: str) -> list[tuple[float, float]]:
        """Per clause, the scale, and the number of the phase from one on when it acts there."""
        scales = [0.0 if (how := recipe(fault)) is None else how.scale for fault in self.injection.faults]
        number = float(PHASES.index(phase) + 1)
        return [(scale, number * on) for scale, on in zip(scales, self.injection.acting(phase), strict=True)]

    # ---- the rows of a pass

    def page(self, current: Pass, backward: bool = False, argument: int = 0, number: int = 0) -> Tensor:
        """The page of a pass that has these uses; made when it is first asked for."""
        which = self, backward, argument, number
        found = current.pages.get(which)
        if found is None:
            self.is_used = True
            found = torch.empty(len(self.taps) * self.uses, 4, dtype=torch.int32, device=self.device)
            moment, known = _OWN, current.pages.get((self, "moment"))
            if known is None:
                moment, known = _CLOCK, current.pages.setdefault((self, "moment"), torch.empty_like(self.clock))
            base = (argument << 32) + number * self.uses
            self._begin(found, current.phase, backward, moment, known, base=base, on=any(current.acts))
            current.pages[which] = found
        return found

    def _begin(self, rows: Tensor, phase: str, backward: bool, kind: int, own: Tensor, *, base: int = 0, on: bool) -> None:
        from shaketable.faults.gpu.kernels.begin_pass import begin_pass

        n = len(self.taps)
        live, sums = self.live[PHASES.index(phase)], self.sums[n:] if backward else self.sums
        values = self.keys[int(backward)], self.clock, own, live, rows, sums
        words = 0, 0, *gpu.words(base), int(on)
        shape = {"MOMENT": kind, "TAPS": n, "USES": self.uses, "BLOCK": 1024}
        gpu.launch(begin_pass, 1, (*values, *words), shape)

    def row(self, what: Application, *, counted: bool = True) -> gpu.TableRow:
        """Where the kernel of one application reads, and counts."""
        page = self.page(what.current, what.backward, what.argument, what.number // self.uses)
        n, tap = len(self.taps), self.taps[what.tap]
        place = what.backward * n + tap if counted else 2 * n
        return gpu.TableRow(page, self.sums, tap * self.uses + what.number % self.uses, place)

    # ---- the operator, here

    def apply(self, x: Tensor, what: Application) -> Tensor:
        """The faulty tensor, computed and counted by the GPU at every replay."""
        tap, mask = what.tap, what.tap.mask(x, what.fault)
        how = recipe(what.fault)
        again = what.recomputing and not what.backward
        if how is not None and not tap.transposed and gpu.fits(x):
            y = how.apply(x, self.row(what, counted=mask is None and not again))
            if again:
                self.injection.counters.count_recomputed(tap)
            if y is not None:
                return y if mask is None else self._switched(x, y.where(mask, x), what)
        if not what.fault.is_steady:
            raise PlanError(
                f"{tap.site.label}: {what.fault.kind} on {x.dtype} cannot be captured into a CUDA graph: its replays would "
                "repeat one noise; run this model without graphs"
            )
        self._frozen.append((tap, what.fault))
        return self._switched(x, tap.compute(x, what), what)

    def _switched(self, x: Tensor, y: Tensor, what: Application) -> Tensor:
        """What other operators than one kernel did, switched on or off at every replay, and counted there."""
        row = self.row(what)
        y = torch.where(row.rows[row.row, 3] != 0, y, x)
        kind = recipe(what.fault)
        sparse = what.fault.sparsity < 1
        gpu.tell(x.detach(), y.detach(), row, gpu.OTHER if kind is None else kind.kind, sparse=sparse)
        return y

    def pull_back(self, g: Tensor, x: Tensor | None, what: Application) -> Tensor:
        """The gradient of an application that was captured, captured too."""
        row, tap = self.row(what, counted=False), what.tap
        if what.fault.kind in ("relative_gaussian", "gain") and not tap.transposed:
            how, mask = recipe(what.fault), tap.mask(g, what.fault)
            y = None if how is None else how.apply(g, row)
            if y is not None:
                return y if mask is None else y.where(mask, g)
        return torch.where(row.rows[row.row, 3] != 0, tap.pull_back(g, x, what), g)

    # ---- the ledger

    def forget(self) -> None:
        """Count from zero again."""
        self.sums.zero_()
        self._told = [[0.0] * WIDTH for _ in self._told]

    def saved(self) -> list[list[float]]:
        """As `HostTable.saved`."""
        rows: list[list[float]] = self.sums.tolist()
        return rows

    def go_on(self, rows: list[list[float]]) -> None:
        """As `HostTable.go_on`."""
        self.sums.copy_(torch.tensor(rows, dtype=torch.float64))
        self._told = [list(row) for row in rows[: len(self._told)]]

    def settle(self) -> None:
        """Tell the ledger what happened since it was last told; waits for the GPU."""
        if not self.is_used or not may_wait():
            return
        with self._lock:
            now = self.sums.tolist()
            for tap, i in self.taps.items():
                for backward, at in ((False, i), (True, len(self.taps) + i)):
                    before = self._told[at]
                    if now[at][:MEASURED] != before[:MEASURED] and sum(now[at]) > sum(before):
                        tell(tap.spot, backward, now[at], before)
                        self._told[at] = now[at]


class DeviceTables:
    """The tables of one injection: at most one per tap and GPU; taps of a model that comes later get a table of their own."""

    def __init__(self, injection: Injection) -> None:
        self.injection = injection
        self.all: list[DeviceTable] = []
        self._known: set[object] = set()
        """Numbers of taps and devices of models for which there are tables."""

    def make(self, called: nn.Module | None = None) -> None:
        """A table on every GPU that a model is on, for the taps that have none there. Not during a capture.

        Other accelerators have no kernels of ours: plain torch computes there, and the ledger says so.

        Args:
            called: The module of the pass that begins; only its own device is looked at, to see whether a model has moved.
        """
        if capturing():
            return
        first = None if called is None else next(called.parameters(), None)
        known = len(self.injection.taps), None if first is None else first.device
        if called is not None and known in self._known:
            return
        self._known.add(known)
        for device in _accelerators(self.injection):
            kernel = gpu.name(device.type)
            self.injection.ledger.kernel = kernel or "torch"
            taps = [tap for tap in self.injection.taps if tap.reads_tables and device not in tap.tables]
            if taps and kernel is not None:
                self.all.append(DeviceTable(self.injection, device, taps))
                for tap in taps:
                    tap.tables[device] = self.all[-1]

    def begin(self, current: Pass) -> None:
        """A pass begins that is captured: the kernels at its head are captured with it."""
        device = torch.device("cuda", torch.cuda.current_device())
        for table in self.all:
            if table.device == device:
                table.page(current)

    def apply(self, x: Tensor, what: Application) -> Tensor | None:
        """The faulty tensor of a pass that is being captured; None where nothing is."""
        if not what.current.captured or not capturing():
            return None
        table = what.tap.tables.get(x.device)
        if table is not None:
            return table.apply(x, what)
        if not what.tap.reads_tables:
            raise PlanError(
                f"{what.tap.site.label}: noise that is held for a rollout cannot be captured together with gradients"
            )
        raise PlanError(f"call the model once on {x.device} before capturing it into a graph: the plan is not there yet")

    def pull_back(self, g: Tensor, x: Tensor | None, what: Application) -> Tensor:
        """The gradient of an application that was captured."""
        table = what.tap.tables.get(g.device)
        if table is None or not capturing():
            raise PlanError(f"{what.tap.site.label}: capture the forward pass together with its backward pass")
        return table.pull_back(g, x, what)

    def forget(self) -> None:
        """Count from zero again; a forked child has no GPU to do so on."""
        if not torch.cuda._is_in_bad_fork():
            for table in self.all:
                table.forget()

    def close(self) -> None:
        """Free the tables, now: the garbage collector might do so during a capture.

        Replays of a graph that was captured with a table keep reading and writing there, so that table stays for the rest of
        the process: a few hundred kilobytes.
        """
        _outliving.extend(table for table in self.all if table.is_used)
        self.all = []
        for tap in self.injection.taps:
            tap.tables = {}


def _accelerators(injection: Injection) -> set[torch.device]:
    """The devices other than the CPU that weights of its models are on."""
    return {p.device for m in injection.models for p in m.model.parameters() if p.device.type not in ("cpu", "meta")}


_outliving: list[DeviceTable] = []
