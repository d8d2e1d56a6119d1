"""A plan made active on a model: matching, hooks, the switch, and bit-clean removal.

`inject` matches at once (a plan that hits nothing raises before anything is hooked), hooks when it is enabled, and
checks its ledger when it is closed: a clause that never fired or changed nothing raises.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from pydantic import ValidationError
from torch import nn

from shaketable.errors import PlanError, first_problem, nearest
from shaketable.faults import FaultBase, MagnitudeFault
from shaketable.faults.cpu import native
from shaketable.inject import op, operators, passes
from shaketable.inject.attach import Attached
from shaketable.inject.counters import HostTable, capturing
from shaketable.inject.cuda_graphs import DeviceTables
from shaketable.inject.inert import InertCheck
from shaketable.inject.op import Tap
from shaketable.inject.operators import OperatorTaps
from shaketable.inject.passes import Calls, Entry, Frame, Pass
from shaketable.inject.weights import HeldTap, Rollouts
from shaketable.ledger.ledger import Ledger, LiveLedger, Spot
from shaketable.plan import PHASES, Plan
from shaketable.sites.phases import current_phase


def inject(
    model: nn.Module,
    plan: str | Path | Plan,
    *,
    seed: int | None = None,
    step: int = 0,
    rank: int | None = None,
    allow_inert: bool = False,
) -> Injection:
    """Make a plan active on a model.

        with st.inject(model, "relative_gaussian:0.05@op.matmul", seed=0) as ledger:
            model(**batch).loss.backward()
        print(ledger)

    Without `with`, use `enable()`, `disable()` and, at the end, `close()`.

    Args:
        model: Any PyTorch module.
        plan: A line of the plan language, a YAML file, or a `Plan`.
        seed: Keys all noise; overrides the plan's own.
        step: Where a resumed run continues; see `Injection.step`.
        rank: Keys the noise of this process; by default the distributed rank, as it is when a pass begins.
        allow_inert: Accept a plan that never fires or changes nothing.

    Raises:
        PlanError: The plan cannot be read, or does not fit this model (`NoMatchError`).
    """
    injection = Injection(Plan.load(plan, seed=seed), step=step, rank=rank, allow_inert=allow_inert)
    if (other := open_injection(model)) is not None:
        line = f"this model already has an open injection ({other.plan.text()}), and its faults stay on"
        warnings.warn(f"{line}: {other.how_to_end} if this plan is to take its place", RuntimeWarning, stacklevel=2)
    injection.attach(model)
    for clause, hidden in zip(injection.plan.clauses, injection.models[0].hidden, strict=True):
        if "softmax" in clause.site.names and hidden:
            warnings.warn(f"{clause.text()}: {'; '.join(hidden)}", RuntimeWarning, stacklevel=2)
    return injection


def open_injection(model: nn.Module) -> Injection | None:
    """An injection of this very model that `enable` switched on and that was not closed: no `with` and no AQN will end it."""
    on = (injection for injection in list(_alive) if injection.enabled and not injection.hold and not injection.depth)
    return next((injection for injection in on if any(attached.model is model for attached in injection.models)), None)


_alive: weakref.WeakSet[Injection] = weakref.WeakSet()
"""Every injection of this process."""


def this_rank() -> int:
    """The distributed rank of this process; else what its launcher says; else that of the Ray actor it belongs to; else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return rank_of_launcher()


def rank_of_launcher() -> int:
    """The rank that a launcher has put into the environment: `RANK`; else that of the Ray actor; else the first that is not 0.

    All actors of a node inherit the `SLURM_PROCID` of the task that started Ray there, and all workers of one SLURM task have
    that task's.
    """
    if rank := os.environ.get("RANK"):
        return int(rank)
    actor = os.environ.get("SHAKETABLE_PLACE", "").partition(":")[0]
    ranks = (int(value or 0) for value in (actor, *map(os.environ.get, _RANKS)))
    return next((rank for rank in ranks if rank), 0)


_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK")
"""Where launchers write a rank that knows nothing of torch."""


class Injection:
    """A plan on one or several models. Make it with `inject`."""

    how_to_end = "close() it first"

    def __init__(
        self,
        plan: Plan,
        *,
        step: int = 0,
        rank: int | Callable[[], int] | None = None,
        allow_inert: bool = False,
        hold: bool = False,
        sampler: bool = False,
    ) -> None:
        """Args:
        rank: Keys the noise of this process; a function is called whenever a pass begins, `this_rank` by default.
        hold: Draw the noise of weights once per rollout instead of once per call.
        sampler: The models live in a sampling engine: a forward is a rollout unless `phase` says otherwise, and faults of
            weights are written into them (`weights_in_place.py`), once per step.
        """
        self.hold = hold or sampler
        self.sampler = sampler
        self.rollouts = Rollouts()
        self._ask_rank = None if isinstance(rank, int) else rank or this_rank
        self.rank = rank if isinstance(rank, int) else (rank or this_rank)()
        self.allow_inert = allow_inert
        self.taps: list[Tap] = []
        self.plan = plan
        self.faults: list[FaultBase] = [c.fault for c in plan.clauses]
        self.ledger: Ledger = LiveLedger.for_plan(plan, native.name())
        self.sites = self.ledger.sites
        """The same, to be written to: reading the ledger waits for every GPU."""
        self.ledger.settle, self.ledger.forget = self.settle, self.forget
        self.counters = HostTable()
        self.references: dict[str, float] = {}
        """Statistics that faults of another process of this run took at their first use, by tap."""
        self.compiled_pass: Pass | None = None
        """The pass that compiled code ran last."""
        self.inert_check = InertCheck(self)
        self.tables = DeviceTables(self)
        self.handle = op.know(self)
        _alive.add(self)
        self.calls = Calls(self, step)
        self.calls.phase = "rollout" if sampler else None
        self.enabled = False
        self.skip_pass: Callable[[], bool] | None = None
        """Asked when a pass begins: True leaves it alone although the plan is on (a reference with the policy's weights)."""
        self.closed = False
        self.fires = 0
        """Grows with every fire, so that a copy of the ledger can be seen to be out of date."""
        self._models: list[Callable[[], Attached | None]] = []
        self.has_operators = any(c.site.level == "op" for c in plan.clauses)
        self.operators = OperatorTaps(self)
        self._mode = operators.Operators(self) if self.has_operators else None
        self.depth = 0
        """How many `with` blocks are open; the last one closes it."""
        self._changing = 0
        self._announce()

    # ---- the switch

    def attach(self, model: nn.Module) -> None:
        """Match the plan on a model, and hook it if the injection is enabled."""
        attached = Attached(self, model, len(self.models))
        self.add(attached)
        if self.enabled:
            attached.hook()

    @property
    def models(self) -> list[Attached]:
        """The models that it is on, in the order in which it met them."""
        return [attached for known in self._models if (attached := known()) is not None]

    def add(self, attached: Attached, *, weakly: bool = False) -> None:
        """Count a model among its own. `weakly` does not keep the model alive, which then has to hold `attached` itself."""
        alive = [known for known in self._models if known() is not None]
        self._models = [*alive, weakref.ref(attached) if weakly else lambda: attached]

    def enable(self) -> Self:
        """Switch on. Hooks are set the first time and stay until `close`."""
        if self.closed:
            raise PlanError("this injection is closed; make a new one with inject()")
        for model in self.models:
            model.hook()
        self.tables.make()
        if not self.enabled:
            self.calls.stack.clear()
        self.enabled = True
        self.push_mode()
        self.rewrite()
        return self

    def disable(self) -> Self:
        """Switch off, bit for bit. Hooks and mode stay, so that compiled graphs stay valid: there are two of each then."""
        self.enabled = False
        self.rewrite()
        return self

    def close(self, *, check: bool = True) -> None:
        """Take every hook off. Raises `InertError` when a clause did nothing, unless `allow_inert`.

        In another thread that enabled it the operator mode stays, without effect, until another plan is switched off there.
        """
        if self.closed:
            return
        self.enabled = False
        self.closed = True
        self.rewrite()
        self.settle()
        self.tables.close()
        self.ledger.settle = self.ledger.forget = None
        self.drop_mode()
        for model in self.models:
            model.unhook()
        passes.unwatch(self)
        if check and not self.allow_inert:
            self.ledger.check()

    def __repr__(self) -> str:
        fires = self.ledger.forward + self.ledger.backward
        state = "closed" if self.closed else "on" if self.enabled else "off"
        return f"<{type(self).__name__} {self.plan.text()}, {state}, {fires:,} {'fire' if fires == 1 else 'fires'}>"

    def __enter__(self) -> Ledger:
        self.depth += 1
        self.enable()
        return self.ledger

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.close(check=kind is None)

    # ---- what can change while it is active

    @property
    def step(self) -> int:
        """The training step that keys the noise. Setting it makes a resumed run draw what an uninterrupted one drew.

        Setting another step raises `InertError` when a clause was on in the step before and did nothing (`inert.py`).
        """
        return self.calls.step

    @step.setter
    def step(self, step: int) -> None:
        self.inert_check.end_step(step)
        self.calls.set_step(step)
        self.rollouts.begin_step()
        self.rewrite()

    @property
    def phase(self) -> str | None:
        """What the sampling engine is doing: rollout or eval. None, and not to be set, outside of engines."""
        return self.calls.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        if not self.sampler:
            raise PlanError("only a sampling engine sets the phase of its models; elsewhere write `with st.phase(...)`")
        if phase not in PHASES:
            raise PlanError(f"unknown phase {phase!r}; {nearest(phase, PHASES)}")
        self.calls.phase = phase
        self.rewrite()

    def phase_now(self) -> str:
        """The phase of a forward that would begin now."""
        return current_phase(self.is_training, self.phase)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Several changes at once: weights are written once, at the end, and the caller settles the ledger before."""
        self._changing += 1
        try:
            yield
        finally:
            self._changing -= 1
        self.rewrite()

    def rewrite(self) -> None:
        """Bring the weights that faults are written into up to date; also when new weights have come from outside."""
        if self._changing:
            return
        self._announce()
        for model in self.models:
            if model.written is not None:
                model.written.update()
        for table in self.tables.all:
            table.update()

    def _announce(self) -> None:
        """Tell those who trace whether the plan is there at all."""
        on = self.enabled and not all(fault.is_off for fault in self.faults)
        op.present[self.handle] = on or self.sampler

    def settle(self) -> None:
        """Write what happened to the ledger. No other code writes there."""
        self.counters.settle(self.taps)
        for table in self.tables.all:
            table.settle()
        for model in self.models:
            model.note_heads(self.inert_check.phases)

    def counted(self) -> dict[str, Any]:
        """The counts so far, for a process that resumes this run: which fires are measured follows from the fires before.

        Also the statistics that faults took at their first use and keep (`FaultBase.reference`).
        """
        self.settle()
        references = dict(reference for tap in self.taps for reference in tap.references())
        return {"host": self.counters.saved(), "gpus": [table.saved() for table in self.tables.all], "references": references}

    def go_on(self, counted: dict[str, Any]) -> None:
        """Resume from what `counted` returned in another process, with the same plan on the same model, once enabled."""
        self.counters.go_on(counted["host"])
        for table, rows in zip(self.tables.all, counted["gpus"], strict=False):
            table.go_on(rows)
        self.references = counted.get("references", {})

    def forget(self) -> None:
        """Count from zero again."""
        self.counters.forget()
        self.tables.forget()

    def set_magnitude(self, magnitude: float, clause: int | None = None) -> None:
        """Change the magnitude of one clause, or of all; takes effect at the next call, compiled or not.

        Compiled graphs stay as they are, but for 0 everywhere: that is another graph, the clean one.
        """
        chosen = {i: f for i, f in enumerate(self.faults) if clause in (None, i) and isinstance(f, MagnitudeFault)}
        if not chosen:
            which = "no clause" if clause is None else f"no clause {clause}"
            raise PlanError(f"{which} with a magnitude in {self.plan.text()}")
        try:
            changed = {i: fault.with_magnitude(magnitude) for i, fault in chosen.items()}
        except ValidationError as error:
            raise PlanError(f"magnitude {magnitude}: {first_problem(error)}") from None
        if not self._changing:
            self.settle()
        for i, fault in changed.items():
            self.faults[i] = fault
            self.sites[i].asked = fault.asked()
        self.rewrite()

    @property
    def is_training(self) -> bool:
        """Whether any of the models is in training mode; a whole process that has no models is."""
        models = self.models
        return any(attached.model.training for attached in models) or (not models and self.operators.loose is not None)

    # ---- what hooks and the operator mode ask for

    def make_tap(self, clause: int, name: str, point: str, layer: int | None, shown: str | None = None) -> Tap:
        spots = self.sites[clause].spots
        label = shown or (name if point == "output" else f"{name}:{point}")
        kind = HeldTap if self.hold and point == "weight" else Tap
        tap = kind(self, clause, spots.setdefault(label, Spot(label, layer)), name, point)
        op.register(tap)
        self.taps.append(tap)
        self.counters.add_tap()
        return tap

    def operator_frame(self) -> Frame | None:
        """The frame an operator belongs to; None when the injection is off, and where no model of it is called.

        Under `shaketable run` operators outside of all modules are hit too, each in a pass of its own.
        """
        if not self.enabled:
            return None
        frame, loose = self.calls.top(), self.operators.loose
        if frame is None and loose is not None:
            current = self.begin_pass(loose, current_phase(training=torch.is_grad_enabled()))
            frame = Frame(loose, current, None, None, recomputing=False)
        return frame

    def frame_between_graphs(self) -> Frame | None:
        """The frame of code that runs between the graphs of a compiled pass, where hooks are in graphs of their own."""
        tracing = op.traces[self.handle]
        if not tracing.entries:
            return None
        first, entry = tracing.entries[0], tracing.entries[-1]
        if tracing.frame is None:
            known = tracing.known
            current = self.begin_compiled_pass(first.index) if known is None else op.unpack(self, known)[0]
            tracing.frame = Frame(first, current, first.layer, first.excluded, recomputing=False)
        if entry is first:
            return tracing.frame
        return Frame(entry, tracing.frame.current, entry.layer, entry.excluded, recomputing=False, outer=tracing.frame)

    def frame(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame | None:
        """The frame a tap of this module belongs to; None when the injection is off."""
        return (self.calls.top() or self.calls.open(entry, args, kwargs)) if self.enabled else None

    # ---- what is decided, once per pass

    def begin_pass(self, entry: Entry, phase: str) -> Pass:
        """Decide what acts in the pass that begins, with which faults, and what keys its noise.

        Nothing else asks for the switch, the phase, the magnitude, the reference pass, the step or the rank (which is in the
        keys of taps).
        """
        captured = capturing()
        if not captured:
            if self._ask_rank is not None and (rank := self._ask_rank()) != self.rank:  # the process has joined a group since
                self.rank = rank
                for tap in self.taps:
                    tap.make_keys()
                for table in self.tables.all:
                    table.make_keys()
            self.tables.make(entry.module)
        self.rollouts.number()
        self.operators.weights.refresh()
        skipped = self.skip_pass is not None and self.skip_pass()
        acts = (False,) * len(self.faults) if skipped else self.acting(phase, captured)
        key = self.calls.new_key(entry.index, phase)
        current = Pass(self, phase, key, acts, tuple(self.faults), captured, torch.is_grad_enabled())
        if captured:
            self.tables.begin(current)
        return current

    def acting(self, phase: str, captured: bool = False) -> tuple[bool, ...]:
        """Per clause, whether it acts in a phase. What is captured now may be given a magnitude later."""
        on = [self.enabled and (captured or not fault.is_off) for fault in self.faults]
        sites = (clause.site for clause in self.plan.clauses)
        return tuple(acts and (not site.phase or phase in site.phase) for acts, site in zip(on, sites, strict=True))

    def begin_compiled_pass(self, index: int) -> Pass:
        """The pass of a compiled graph that no frame is open around; the index is that of its outermost module."""
        known = (entry for model in self.models for entry in model.entries.values() if entry.index == index)
        entry = next(known, None) or Entry(index, _NO_MODULE, None)
        phase = self.phase_now() if entry.module is _NO_MODULE else current_phase(entry.module.training, self.calls.phase)
        self.compiled_pass = self.begin_pass(entry, phase)
        return self.compiled_pass

    # ---- the operator mode, per thread

    def push_mode(self) -> bool:
        """Put our mode on in this thread, unless it is on; whether it was not."""
        return self._mode is not None and self._mode.put_on()

    def drop_mode(self) -> None:
        if self._mode is not None:
            self._mode.take_off()

    def enter(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tracing = op.traces[self.handle]
        if entry.is_root and tracing.entries and tracing.entries[0] is entry:
            tracing.entries.clear()  # a compiled pass of several graphs has raised between them, where nobody closes it
            tracing.begin()
        if torch.compiler.is_compiling():
            if not tracing.entries:
                tracing.begin()
                tracing.with_gradients = torch.is_grad_enabled()
            tracing.entries.append(entry)
            return
        if not self.enabled:
            return
        frame = self.calls.open(entry, args, kwargs)
        outermost = not self.calls.stack
        self.calls.push(frame)
        if outermost and self.push_mode():
            frame.counts["mode"] = 1

    def leave(self, entry: Entry) -> None:
        """A module returns, or raises. Its frame is open unless the injection was off when it was called."""
        if torch.compiler.is_compiling():
            tracing = op.traces[self.handle]
            tracing.entries.pop()
            if not tracing.entries:
                tracing.begin()
            return
        frame = self.calls.stack[-1] if self.calls.stack else None
        if frame is None or frame.entry is not entry:
            return
        if "mode" in frame.counts:
            self.drop_mode()
        self.calls.stack.pop()
        if not self.calls.stack:
            self.inert_check.end(frame)


_NO_MODULE = nn.Identity()
"""Stands for the module of a compiled graph that is no module of a model."""
