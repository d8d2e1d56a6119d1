"""A run as its record tells it: which run it is, how far it got, and what it measured. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.io.locks import is_held
from shaketable.records.record import FILE, SCHEMA, SEAL, RunRecord
from shaketable.study.analysis.results import RunFacts
from shaketable.study.cells import Cell

Event = dict[str, Any]
PER_ANSWER = {"accuracy": "correct", "formatted": "formatted", "loss": "loss"}
LAST = 0.1
"""The end of a run that its final reward is averaged over, as a part of its steps."""
TURNS = ("attempt", "resumed", "failed", "finished")


@dataclass(frozen=True)
class Run:
    """One run: its record, as far as there is one."""

    name: str
    kind: str
    arm: str | None
    seed: int | None
    status: str
    """`done`, `running`, `partial` (begun, and no process works on it), `failed`, `damaged` or `missing`."""
    head: Event
    events: list[Event]
    error: str | None = None
    """Why it failed, or what is damaged."""
    sha: str | None = None
    """The last link of the record's chain, from its seal."""
    updated: float = 0.0
    """When the record was last written, in seconds."""

    @classmethod
    def read(cls, folder: Path) -> Run:
        """The run in a folder. A record that was changed by hand is `damaged`, and none of it is believed."""
        record = RunRecord(folder, {})
        try:
            updated = next(file.stat().st_mtime for file in (folder / FILE, folder / SEAL) if file.exists())
        except (OSError, StopIteration):
            updated = 0.0
        damaged = cls(folder.name, "", None, None, "damaged", {}, [], updated=updated)
        try:
            events, seal = record.events(), record.sealed() or {}
        except ShaketableError as damage:
            return replace(damaged, error=str(damage))
        if events and not _says_what_it_is(events[0]):
            return replace(damaged, error="its first line does not say what it is")
        status, error = _status(events)
        if status in ("partial", "failed") and (record.busy() or is_held(folder.parent, folder.name)):
            status, error = "running", None
        head = events[0] if events else {}
        about = _part(head, "about")
        place = (folder.name, head.get("verb") or "", about.get("arm"), about.get("seed"))
        return cls(*place, status, head, events, error, seal.get("sha"), updated)

    @classmethod
    def of(cls, cell: Cell, runs: Path) -> Run:
        """The run of a cell; `damaged` when the record in its place is of another run."""
        folder, missing = runs / cell.name, cls(cell.name, cell.kind, cell.arm, cell.seed, "missing", {}, [])
        if not (folder / FILE).is_file() and not (folder / SEAL).is_file():
            return replace(missing, status="running") if is_held(runs, cell.name) else missing
        found = cls.read(folder)
        if found.head and found.about.get("key") != cell.key:
            why = f"{folder} holds another run than its name says"
            return replace(missing, status="damaged", error=why, updated=found.updated)
        return replace(found, name=cell.name, kind=cell.kind, arm=cell.arm, seed=cell.seed)

    @property
    def is_done(self) -> bool:
        return self.status == "done"

    @property
    def about(self) -> Event:
        return _part(self.head, "about")

    @property
    def step(self) -> int | None:
        found = next((e["step"] for e in reversed(self.events) if isinstance(e.get("step"), int)), -1)
        return found if found >= 0 else None

    @property
    def steps(self) -> int | None:
        return _part(self.head, "config").get("steps")

    def facts(self, folder: str) -> RunFacts:
        """The run as tables have it; `folder` is its place as a reader sees it."""
        times = [e["time"] for e in self.events if isinstance(e.get("time"), int | float)]
        added = [f"made elsewhere: {e.get('how')}, {e.get('path')}" for e in self.of_kind("added")]
        return RunFacts(
            name=self.name,
            kind=self.kind,
            study=self.about.get("study"),
            arm=self.arm,
            seed=self.seed,
            key=self.about.get("key"),
            status=self.status,
            id=self.head.get("id"),
            sha=self.sha,
            folder=folder,
            started=self.head.get("started"),
            updated=self.updated or None,
            step=self.step,
            steps=self.steps,
            attempts=len(self.of_kind("attempt")),
            resumed=len(self.of_kind("resumed")),
            seconds=times[-1] - times[0] if len(times) > 1 and times == sorted(times) else None,  # no clock that was set back
            error=self.error,
            warnings=(*added, *(str(e.get("text")) for e in self.of_kind("warning"))),
        )

    def of_kind(self, kind: str) -> list[Event]:
        return [e for e in self.events if e["event"] == kind]

    def last(self, kind: str) -> Event | None:
        return next((e for e in reversed(self.events) if e["event"] == kind), None)

    @property
    def config(self) -> Event:
        """Its configuration, resolved as far as it was."""
        resolved = self.last("resolved")
        return dict(resolved["config"] if resolved is not None else self.head.get("config", {}))

    def condition(self, name: str, step: int | None = None) -> Event | None:
        """The scores under a condition, after the last step or another one."""
        evaluation = next((e for e in reversed(self.of_kind("evaluation")) if step is None or e["step"] == step), None)
        return None if evaluation is None else next((c for c in evaluation["conditions"] if c["name"] == name), None)

    def scores(self, condition: str, endpoint: str, step: int | None = None) -> list[float]:
        """One number for every problem, as `condition` finds them; none where one was not read, or is no number."""
        found = self.condition(condition, step)
        values = [] if found is None else [a.get(PER_ANSWER[endpoint]) for a in found["answers"]]
        return [] if None in values else [float(value) for value in values]

    def value(self, endpoint: str) -> float | None:
        """One number for the whole run; medians of times, because the first step is slow and machines have other work."""
        needed = {"reward": "reward", "aqn_share": "aqn_seconds"}.get(endpoint, "seconds")
        steps = [s for s in self.of_kind("step") if needed in s]  # steps of runs made elsewhere may lack it
        if not steps:
            return None
        if endpoint == "reward":
            tail = steps[-max(1, round(LAST * len(steps))) :]
            return float(sum(s["reward"] for s in tail) / len(tail))
        times = [s["seconds"] for s in steps]
        if endpoint == "seconds_per_step":
            return float(median(times))
        return float(sum(s["aqn_seconds"] for s in steps) / sum(times))

    def at_step(self, field: str, step: int) -> float | None:
        return next((s.get(field) for s in self.of_kind("step") if s["step"] == step), None)


def _status(events: list[Event]) -> tuple[str, str | None]:
    """What the last of a run's turns says, and the error of one that failed."""
    if not events:
        return "partial", "it ended before its first line was written"
    turn = next((e for e in reversed(events) if e["event"] in TURNS), events[-1])
    if turn["event"] == "failed":
        return "failed", str(turn.get("error"))
    return "done" if turn["event"] == "finished" else "partial", None


def _part(head: Event, name: str) -> Event:
    found = head.get(name)
    return found if isinstance(found, dict) else {}


def _says_what_it_is(head: Event) -> bool:
    """Whether the first line of a record is one that we write."""
    about = _part(head, "about")
    texts = [head.get("id"), head.get("verb"), head.get("started"), about.get("study"), about.get("arm"), about.get("key")]
    numbers = [about.get("seed"), _part(head, "config").get("steps")]
    typed = all(isinstance(x, str | None) for x in texts) and all(isinstance(x, int | None) for x in numbers)
    return typed and head.get("schema") == SCHEMA
