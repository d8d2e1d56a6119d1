"""Clauses that should have acted by now and did nothing.

`close` judges a plan when it ends, which may be hours after the mistake was made. Most mistakes show in the first pass, so this
file counts passes while clauses have not changed a value yet, and says which of them are inert already:

*   A clause that was **on** in a pass of the whole model and never fired. It is on when its phase is that of the pass, its
    magnitude is not 0, and the model has a place that it matches. A pass that raised does not count, nor does one that was
    recomputed, nor one of a part of the model. A clause that acts backward only counts where a backward pass has run.
*   A clause that **fired and changed no value**, if enough values were seen. A bit flip of one in a billion may well leave a
    first step as it was, and an output that is all zeros (adapters, projections that start at 0) has nothing that a gain could
    change. Such a clause is left to the end. So is clipping at an absolute ceiling, because an overflow may come late, and a
    clause whose magnitude has been set, because it may follow a schedule.

What was seen to change a value once is not looked at again, so a plan that works pays for a few integers in each pass.

Not seen here: passes of a model that is compiled as a whole, or replayed from a CUDA graph, in which no Python runs. What fires
there is counted by the ledger, so `changed no value` is known, and `never fired` is left to the end.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import torch

from shaketable.errors import InertError
from shaketable.faults.inert import changes_nothing
from shaketable.plan import PHASES

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection
    from shaketable.inject.passes import Frame
    from shaketable.ledger.ledger import SiteLedger


@dataclass
class _Clause:
    """What is known of a clause that has not changed a value yet."""

    passes: int = 0
    """Passes in which it was on."""
    graded: int = 0
    """Those of them that were computed for a backward pass."""
    is_moved: bool = False
    """Whether its magnitude has been set: it may be small on purpose, and grow."""


class InertCheck:
    """Counts the passes of one injection, and judges its clauses by them."""

    def __init__(self, injection: Injection) -> None:
        self.injection = injection
        self.matched: dict[int, set[int]] = {}
        """By the number of a model: the clauses that match there. All of them do in a model that is not in here."""
        self.clear()

    def clear(self) -> None:
        """Begin anew (a forked child has done nothing yet)."""
        self.phases = Counter(dict.fromkeys(PHASES, 0))
        """Passes of whole models. Others may be reading: no key is ever added."""
        self.waiting = {i: _Clause() for i in range(len(self.injection.faults))}
        """The clauses that have not changed a value yet."""
        self._new: Counter[tuple[int, tuple[bool, ...], bool]] = Counter()
        """Passes: by model, by what acted in them, and whether gradients were wanted."""
        self._without_gradients: bool | None = None
        """Whether no parameter had a gradient after the first pass that was computed for a backward one."""
        self._lock = Lock()
        """Others may judge while passes end."""

    # ---- counting

    def end(self, frame: Frame) -> None:
        """A pass has ended."""
        if not frame.entry.is_root or frame.recomputing or sys.exc_info()[0] is not None:
            return
        current = frame.current
        self.phases[current.phase] += 1
        if not self.waiting or not any(current.acts) or current.captured:  # what is captured may be without noise for now
            return
        graded = torch.is_grad_enabled()
        if graded and self._without_gradients is None:
            self._without_gradients = not self._has_gradients()
        with self._lock:
            self._new[frame.entry.owner, current.acts, graded] += 1

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for model in self.injection.models for p in model.model.parameters())

    def _sum_up(self) -> None:
        """Add the passes since the last time to the clauses that were on in them."""
        with self._lock:
            for i, clause in self.waiting.items():
                for (owner, acts, graded), passes in self._new.items():
                    if acts[i] and i in self.matched.get(owner, self.waiting):
                        clause.passes += passes
                        clause.graded += passes * graded
                clause.is_moved |= self.injection.faults[i] != self.injection.plan.clauses[i].fault
            self._new.clear()

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

    def inert(self, *, trained: bool = False, passes: int = 1, sites: Sequence[SiteLedger] | None = None) -> dict[int, str]:
        """One line for each clause that should have acted by now and did nothing, by its number.

        Args:
            trained: A backward pass is known to have run.
            passes: How many passes a clause must have been on in before it is said to never fire.
            sites: What happened, if more is known than what this injection did.
        """
        self._sum_up()
        found = self.injection.ledger.sites if sites is None else sites
        trained = trained or (self._without_gradients is True and self._has_gradients())
        lines = {}
        for i in list(self.waiting):
            if found[i].measured().changed:
                del self.waiting[i]
            elif (why := self._why(i, found[i], trained, passes)) is not None:
                lines[i] = f"{found[i].fault}@{found[i].site} {why}"
        return lines

    def _why(self, i: int, site: SiteLedger, trained: bool, least: int) -> str | None:
        clause, fires = self.waiting[i], site.forward + site.backward
        if fires:
            is_inert = not clause.is_moved and changes_nothing(self.injection.faults[i], site.measured().alive)
            return f"fired {fires} times and changed no value" if is_inert else None
        is_forward = "forward" in self.injection.plan.clauses[i].site.directions
        passes = clause.passes if is_forward else clause.graded if trained else 0
        return f"was on in {passes} {'pass' if passes == 1 else 'passes'} and never fired" if passes >= least else None
