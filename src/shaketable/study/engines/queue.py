"""Which runs are to do, being done, done. Both engines take runs from a board and tell it how they ended.

A run waits for the diagnosis that it needs. One that crashed is tried again, as often as the study says; one that cannot be
done as it was asked for is not, since it would end the same way. A run that another process works on is looked at again
until it is done, or free. Nothing that happens to one run touches the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shaketable.io.locks import is_held
from shaketable.study.cells import Cell

State = Literal["waiting", "running", "elsewhere", "done", "failed"]
Watch = Callable[[str, Cell, dict[str, Any]], None]
"""Called with what happened (`start`, `stage`, `step`, `evaluation`, `warning`, `done`, `failed`, `again`, `elsewhere`)."""
PATIENCE = 0.5
"""Seconds between two looks at what others do."""


@dataclass
class Board:
    """The runs of one study, in their order. Safe to use from several threads."""

    cells: Sequence[Cell]
    runs: Path
    retries: int
    watch: Watch
    done: set[str] = field(default_factory=set)
    """Names of runs that were finished before."""

    def __post_init__(self) -> None:
        self.states: dict[str, State] = {c.name: "done" if c.name in self.done else "waiting" for c in self.cells}
        self.errors: dict[str, str] = {}
        self._crashes: dict[str, int] = {}
        self._changed = threading.Condition()
        self._stopped = False

    def take(self) -> Cell | None:
        """The next run to do; waits until there is one. None when all have ended, or after `stop`."""
        with self._changed:
            while not (self._stopped or self._over()):
                if (cell := self._ready()) is not None:
                    return cell
                self._changed.wait(PATIENCE)
        return None

    def take_now(self) -> Cell | None:
        """The next run that can be done at once."""
        with self._changed:
            return self._ready()

    @property
    def is_over(self) -> bool:
        """Whether every run has ended, well or not."""
        with self._changed:
            return self._over()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def stop(self) -> None:
        """No more runs are given out."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def ended(self, cell: Cell, ending: str) -> None:
        """A run is `done`, or `busy`: another process has it."""
        self._enter(cell, "done" if ending == "done" else "elsewhere")
        self.watch("done" if ending == "done" else "elsewhere", cell, {})

    def failed(self, cell: Cell, error: str, *, final: bool) -> None:
        """A run failed; `final` when it would fail again."""
        crashes = self._crashes[cell.name] = self._crashes.get(cell.name, 0) + 1
        again = not final and crashes <= self.retries
        if not again:
            self.errors[cell.name] = error
        self._enter(cell, "waiting" if again else "failed")
        self.watch("again" if again else "failed", cell, {"error": error})

    def _enter(self, cell: Cell, state: State) -> None:
        with self._changed:
            self.states[cell.name] = state
            self._changed.notify_all()

    def _over(self) -> bool:
        return all(state in ("done", "failed") for state in self.states.values())

    def _ready(self) -> Cell | None:
        for cell in self.cells:
            if self.states[cell.name] == "elsewhere" and not is_held(self.runs, cell.name):
                self.states[cell.name] = "waiting"  # done, or killed: whoever takes it will see
            if self.states[cell.name] == "waiting" and self._may_start(cell):
                self.states[cell.name] = "running"
                return cell
        return None

    def _may_start(self, cell: Cell) -> bool:
        before = "done" if cell.needs is None else self.states[cell.needs]
        if before == "failed":
            self.states[cell.name], self.errors[cell.name] = "failed", f"it needs {cell.needs}, which failed"
            self.watch("failed", cell, {"error": self.errors[cell.name]})
        return before == "done"
