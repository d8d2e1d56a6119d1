"""Counts passes for the judge of "this clause did nothing" (`ledger/inert.py`), so that it can be asked during a run.

A pass of a whole model counts for a clause that was **on** in it: its phase is that of the pass, its magnitude is not 0, and it
matches a site of the model. A pass that raised or was recomputed does not count. A clause that acts backward only is judged
where the caller knows that a backward pass has run. A clause that fired is left alone when its magnitude has been set, because
it may follow a schedule.

Passes of a model that is compiled as a whole, or replayed from a CUDA graph, run no Python and are not counted here; an engine
that knows of them calls `saw_pass`.
"""

from __future__ import annotations

import sys
from collections import Counter
from threading import Lock
from typing import TYPE_CHECKING

import torch

from shaketable.errors import InertError
from shaketable.ledger.inert import why_inert
from shaketable.plan import PHASES

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection
    from shaketable.inject.passes import Frame
    from shaketable.ledger.ledger import Ledger


_EVERY_MODEL = -1


class InertCheck:
    """Counts the passes of one injection, and judges its clauses by them."""

    def __init__(self, injection: Injection) -> None:
        self.injection = injection
        self.matched: dict[int, set[int]] = {}
        """By the number of a model: the clauses that match there. All of them do in a model that is not in here."""
        self.clear()

    def clear(self) -> None:
        """Start over (a forked child has done nothing yet)."""
        self.phases = Counter(dict.fromkeys(PHASES, 0))
        """Passes of whole models. Others may be reading: no key is ever added."""
        self.waiting = set(range(len(self.injection.faults)))
        """The clauses that have not changed a value yet."""
        self.passes: Counter[int] = Counter()
        """By clause: passes in which it was on."""
        self.graded: Counter[int] = Counter()
        """Those of them that were computed for a backward pass."""
        self.moved: set[int] = set()
        """Clauses whose magnitude has been set: it may be small on purpose, and grow."""
        self._lock = Lock()
        """Others may judge while passes end."""

    # ---- counting

    def end(self, frame: Frame) -> None:
        if not frame.entry.is_root or frame.recomputing or sys.exc_info()[0] is not None:
            return
        current = frame.current
        self.phases[current.phase] += 1
        if not self.waiting or not any(current.acts) or current.captured:  # what is captured may be without noise for now
            return
        self._count(frame.entry.owner, current.acts, torch.is_grad_enabled())

    def saw_pass(self, acts: tuple[bool, ...]) -> None:
        """A pass of every model has ended in which no Python may have run; `acts` says which clauses were on in it."""
        self._count(_EVERY_MODEL, acts, graded=False)

    def _count(self, owner: int, acts: tuple[bool, ...], graded: bool) -> None:
        with self._lock:
            for i in self.waiting:
                if acts[i] and i in self.matched.get(owner, self.waiting):
                    self.passes[i] += 1
                    self.graded[i] += graded

    # ---- judging

    def end_step(self, step: int) -> None:
        """Another step is about to begin.

        Raises:
            InertError: A clause was on in the step that has ended, and has not done anything since the plan was attached.
        """
        injection = self.injection
        if injection.allow_inert or step == injection.step or not self.waiting:
            return
        if lines := list(self.inert().values()):
            raise InertError(f"{'; '.join(lines)} by the end of step {injection.step} (allow_inert=True accepts this)")

    def inert(self, *, trained: bool = False, passes: int = 1, ledger: Ledger | None = None) -> dict[int, str]:
        """One line for each clause that should have acted by now and did nothing, by its number.

        Args:
            trained: A backward pass is known to have run.
            passes: How many passes a clause must have been on in before it is said to never fire.
            ledger: Where more is known than what this injection did.
        """
        with self._lock:  # before the ledger is read: what fires meanwhile must not be missed in passes that were counted
            waiting, counted, graded = sorted(self.waiting), self.passes.copy(), self.graded.copy()
        if not waiting:
            return {}
        sites = (self.injection.ledger if ledger is None else ledger).sites
        lines = {}
        for i in waiting:
            planned, fault, site = self.injection.plan.clauses[i], self.injection.faults[i], sites[i]
            if fault != planned.fault:
                self.moved.add(i)
            if site.measured().changed:
                with self._lock:
                    self.waiting.discard(i)
            elif i not in self.moved or not site.forward + site.backward:
                on = counted[i] if "forward" in planned.site.directions else graded[i] if trained else 0
                if (line := why_inert(site, fault, on, passes)) is not None:
                    lines[i] = line
        return lines
