"""One line on stderr, while a program runs, about a clause of its plan that does nothing.

The exit code says so too, at the end, which may be tomorrow. Each line is written once for all processes of the program, by the
one that is first to leave a mark in the folder of ledgers. The program goes on.

A clause that matches nothing is told when the model is called for the first time. What clauses did is looked at whenever the
ledger of the process is written, a twentieth of a second after it has changed. Rejected: to look when a pass ends, because
compiled models and replayed graphs do not tell when that is.

A clause that acts backward only needs a backward pass to be judged. There the first step of an optimizer tells: the models have
gradients then. That hook is set for such plans alone, and taken off when it has been of use.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from shaketable.launch.process import ProcessInjection
    from shaketable.ledger.ledger import SiteLedger

PASSES = 2
"""Passes in which a clause was on before it is said to never fire."""


class Notices:
    """What is told about the plan of this process while it runs."""

    def __init__(self, injection: ProcessInjection, folder: Path) -> None:
        self.injection = injection
        self.folder = folder
        self.trained = False
        """Whether a model has been trained; known only where a clause needs it."""
        self._told: set[object] = set()
        self._matched: set[int] = set()
        if any(clause.site.directions == ("backward",) for clause in injection.plan.clauses):
            self._hook = register_optimizer_step_pre_hook(self._on_optimizer)

    def on_model(self, model: nn.Module, lost: dict[int, str]) -> None:
        """A model is called for the first time, and these clauses match nothing in it, for these reasons.

        Nothing is said of a clause that has matched in another model, nor of a model that is a single layer: a program may be
        made of those.
        """
        self._matched |= set(range(len(self.injection.plan.clauses))) - lost.keys()
        name = type(model).__name__
        for i, why in lost.items():
            if i not in self._matched and any(model.children()):
                self._tell((i, name), f"{self.injection.plan.clauses[i].text()} does nothing in {name}: {why}")

    def on_hidden(self, model: nn.Module, hidden: Sequence[Sequence[str]]) -> None:
        """The same of what a model hides from each clause: it may do less than its words say."""
        for clause, lines in zip(self.injection.plan.clauses, hidden, strict=True):
            for line in lines:
                self._tell((clause.text(), line), f"{clause.text()} in {type(model).__name__}: {line}")

    def look(self, sites: Sequence[SiteLedger]) -> None:
        """The ledger of the process is about to be written: see what each clause has done so far."""
        for i, line in self.injection.inert_check.inert(trained=self.trained, passes=PASSES, sites=sites).items():
            self._tell(i, line)

    def after_fork(self) -> None:
        """A forked child has trained nothing yet."""
        self.trained = False

    def _on_optimizer(self, *_: Any) -> None:
        """An optimizer is about to step."""
        if any(p.grad is not None for model in self.injection.roots for p in model.parameters()):
            self.trained = True
            self._hook.remove()

    def _tell(self, what: object, line: str) -> None:
        if what not in self._told:
            self._told.add(what)
            if self._is_first(repr(what)):
                sys.stderr.write(f"shaketable: {line} (process {os.getpid()}; the program goes on)\n")
                sys.stderr.flush()

    def _is_first(self, what: str) -> bool:
        """Whether no process of this program has said it yet."""
        mark = self.folder / f"told-{hashlib.blake2b(what.encode(), digest_size=8).hexdigest()}.mark"
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True
        return True
