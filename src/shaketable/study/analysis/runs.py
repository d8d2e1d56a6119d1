"""The runs of a study as their records tell them. Nothing here looks at anything but records, and imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.io.locks import is_held
from shaketable.records.record import FILE, SEAL, RunRecord
from shaketable.study.cells import Cell
from shaketable.study.run_cell import opened

Event = dict[str, Any]
PER_ANSWER = {"accuracy": "correct", "formatted": "formatted", "loss": "loss"}
LAST = 0.1
"""The end of a run that its final reward is averaged over, as a part of its steps."""


@dataclass(frozen=True)
class Run:
    """One run: its record, as far as there is one."""

    name: str
    kind: str
    arm: str | None
    seed: int | None
    status: str
    """done, partial, running, failed, damaged or missing."""
    head: Event
    events: list[Event]
    error: str | None = None
    sha: str | None = None
    """The last link of the record's chain, from its seal."""

    @classmethod
    def of(cls, cell: Cell, runs: Path) -> Run:
        """The run of a cell; a record that was changed by hand is `damaged`, and none of it is believed."""
        place = (cell.name, cell.kind, cell.arm, cell.seed)
        if not (runs / cell.name / FILE).is_file() and not (runs / cell.name / SEAL).is_file():
            return cls(*place, "running" if is_held(runs, cell.name) else "missing", {}, [])
        try:
            record = opened(cell, runs / cell.name)
            events = record.events()
        except ShaketableError as damage:
            return cls(*place, "damaged", {}, [], str(damage))
        status, error = _status(events, is_held(runs, cell.name))
        return cls(*place, status, record.head, events, error, (record.sealed() or {}).get("sha"))

    @classmethod
    def alone(cls, folder: Path) -> Run:
        """A training run by its folder, of a study or not."""
        record = RunRecord.open(folder, "train")
        about, events = record.head.get("about", {}), record.events()
        status, error = _status(events, record.busy())
        place = (folder.name, "train", about.get("arm"), record.config["seed"])
        return cls(*place, status, record.head, events, error, (record.sealed() or {}).get("sha"))

    @property
    def is_done(self) -> bool:
        """Whether its numbers may be used."""
        return self.status == "done"

    def of_kind(self, kind: str) -> list[Event]:
        """Its events of one kind."""
        return [e for e in self.events if e["event"] == kind]

    def last(self, kind: str) -> Event | None:
        """The last event of a kind."""
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
        steps = [s for s in self.of_kind("step") if _NEEDS.get(endpoint, "seconds") in s]
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
        """What was measured at one step."""
        return next((s.get(field) for s in self.of_kind("step") if s["step"] == step), None)


_NEEDS = {"reward": "reward", "aqn_share": "aqn_seconds"}
"""What of a step an endpoint is made from; steps of runs made elsewhere may lack it."""


def _status(events: list[Event], working: bool) -> tuple[str, str | None]:
    kinds = [e for e in events if e["event"] in ("attempt", "failed", "finished")]
    last = kinds[-1] if kinds else None
    if last is not None and last["event"] == "finished":
        return "done", None
    if working:
        return "running", None
    if last is not None and last["event"] == "failed":
        return "failed", str(last["error"])
    return "partial", None
