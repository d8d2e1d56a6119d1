"""The workers of a verl run, as the trainer sees them: by the reports that they leave in the folder of ledgers.

verl's calls into its samplers return nothing, and verl swallows what plugins raise. So after each call the trainer compares
what every worker reports with its instructions; a worker that is missing, deaf or disobedient stops the training.

**Each step is proven by itself**, from what was hit since the last reading (`Span`): every clause that could have acted must
have, and AQN wherever σ is above 0; in every actor, and in some sampler, because a small batch may leave one without work. A
validation is proven both ways: clauses that name `eval` have hit, and nothing else has. At the end the whole run is judged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shaketable.aqn.spec import AQN
from shaketable.errors import InertError, ShaketableError
from shaketable.integrations.common.instructions import Instructions
from shaketable.integrations.common.worker_report import merged, read_reports
from shaketable.integrations.verl.settings import ORDERS
from shaketable.ledger.inert import why_inert
from shaketable.ledger.ledger import Measured
from shaketable.plan import Clause, Plan

BOTH = ("forward", "backward")
WHATS = ("plan", "aqn")
STEPS, LEDGER = "steps.jsonl", "ledger.json"
PATIENCE = 60.0
"""Seconds that a report may take to be seen: a folder that machines share shows it late."""


class VerlWorkers:
    """Samplers and actors, their instructions and their reports."""

    def __init__(self, folder: Path, instructions: Mapping[str, Instructions], size: int, patience: float = PATIENCE) -> None:
        """Args:
        folder: Where all reports are.
        instructions: Of each role that has any.
        size: Workers of each role.
        patience: Seconds to wait for a report.
        """
        self.folder, self.instructions, self.size, self.patience = folder, instructions, size, patience
        self.now: dict[str, list[dict[str, Any]]] = {role: [] for role in instructions}
        """The newest report of each worker, by role."""
        self._before = dict(self.now)
        self._due: set[tuple[str, str]] = set()
        """Role, and plan or aqn, of everything that has been demanded."""
        folder.mkdir(parents=True, exist_ok=True)
        body = {role: found.model_dump() | {"digest": found.digest()} for role, found in instructions.items()}
        (folder / ORDERS).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")

    # ---- is every worker there, and does it what it was told?

    def read(self, mark: int, *roles: str) -> None:
        """Read the reports of roles, of all by default, which have been told to write them with this mark."""
        chosen, end = roles or tuple(self.instructions), time.monotonic() + self.patience
        while True:
            try:
                found = read_reports(self.folder)
            except OSError as error:  # a folder that machines share may lose sight of a file that is being replaced
                problem: str | None = f"cannot read {self.folder}: {error}"
            else:
                self.now |= {role: [report for report in found if report["role"] == role] for role in chosen}
                problem = next(filter(None, (self._missing(role, mark) for role in chosen)), None)
            if problem is None:
                return
            if time.monotonic() >= end:
                raise ShaketableError(problem)
            time.sleep(0.1)

    def _missing(self, role: str, mark: int) -> str | None:
        found = self.now[role]
        if len(found) != self.size:
            return (
                f"{len(found)} of {self.size} {role}s reported in {self.folder}: the others do not have their instructions; "
                "shaketable must be installed for all workers, and all must be able to write to that folder"
            )
        late = next((report for report in found if report["mark"] < mark), None)
        return None if late is None else f"{name(late)} did not report when asked: the call was lost"

    def check_in(self) -> None:
        """Every worker acts on the instructions it was given."""
        for role, instructions in self.instructions.items():
            for report in self.now[role]:
                if report["instructions"] != instructions.digest():
                    why = f"acts on instructions {report['instructions']} and was given {instructions.digest()}"
                    raise ShaketableError(f"{name(report)} {why}; see {ORDERS} in {self.folder}")

    def check_samplers(self, **told: Any) -> None:
        """Every sampler is where it should be: `step=3`, `phase="eval"`."""
        for report in self.now["sampler"]:
            for key, value in told.items():
                if report[key] != value:
                    raise ShaketableError(f"{name(report)} has {key} {report[key]!r} and was told {value!r}: the call was lost")

    def check_clean(self) -> None:
        """Before a validation without faults: no weight of a sampler holds one."""
        for report in self.now["sampler"]:
            if report["written"]:
                raise ShaketableError(f"{name(report)} is to validate, and {report['written']} of its weights hold a fault")

    # ---- what they did since the last reading

    def begin(self) -> None:
        """Count from here."""
        self._before = dict(self.now)

    def after_step(self, trained: Iterable[str] = BOTH) -> dict[str, float]:
        """Check that everything that could act did, and start over; returns numbers for verl's loggers.

        Args:
            trained: Which ways the actors went: `forward` for log probabilities, `backward` too for an update.

        Raises:
            InertError: A worker has something on and fired nowhere in a whole step, or what was hit did not change.
        """
        ways = {"sampler": ("forward",), "actor": tuple(trained)}
        for role in self.instructions:
            self._judge(role, "rollout" if role == "sampler" else "train", ways[role], "a whole step")
            self._check_changes(role)
        if "actor" in self.instructions and "backward" in ways["actor"]:
            self._check_updates()
        found = self._metrics()
        self.begin()
        return found

    def _check_updates(self) -> None:
        """Every actor was updated by the method that we override: log-probabilities fire forward too, and excuse nothing."""
        earlier = {report["pid"]: report.get("updates", 0) for report in self._before["actor"]}
        for report in self.now["actor"]:
            if report.get("updates", 0) <= earlier.get(report["pid"], 0):
                raise InertError(f"{name(report)} was updated in a whole step, and not by train_mini_batch: without faults")

    def _check_changes(self, role: str) -> None:
        """See that what hit also changed something, in some worker since the run began."""
        aqn = self.instructions[role].aqn
        chosen = WHATS if aqn is not None and AQN.load(aqn).is_steady else ("plan",)
        for what in chosen:
            if (ledger := merged(self.now[role], what)) is None:
                continue
            for clause, site in zip(Plan.parse(ledger.plan).clauses, ledger.sites, strict=True):
                if (line := why_inert(site, clause.fault)) is not None:
                    raise InertError(f"{role}s: {line}")

    def after_validation(self, faulty: bool = False) -> int:
        """See that nothing hit but, under faults, what names `eval`, and that this did; returns the fires of all samplers.

        Args:
            faulty: Whether the validation was to be under the plan.

        Raises:
            ShaketableError: Something else hit: the score would be a noisy one that does not say so.
            InertError: A clause that names `eval` fired nowhere.
        """
        if "sampler" not in self.instructions:
            return 0
        span = self._span("sampler")
        strays = {"AQN": span.total("aqn", "eval")}
        for i, clause in enumerate(self._clauses("sampler")):
            if not (faulty and "eval" in clause.site.phase):
                strays[clause.text()] = span.total("plan", "eval", BOTH, i)
        for what, count in strays.items():
            if count:
                raise ShaketableError(f"{what} hit {count} times in a validation that was to be without it")
        if faulty:
            self._judge("sampler", "eval", ("forward",), "a whole validation")
        fires = span.total("plan", "eval")
        self.begin()
        return fires

    def _judge(self, role: str, phase: str, ways: tuple[str, ...], when: str) -> None:
        """Whatever could have acted in a phase has."""
        for i, clause in enumerate(self._clauses(role)):
            if phase in clause.site.phase and not clause.fault.is_off:
                for way in (way for way in clause.site.directions if way in ways):
                    self._demand(role, "plan", i, clause.text(), phase, way, when)
        if phase != "eval" and "forward" in ways and any(_has_noise(report) for report in self.now[role]):
            self._demand(role, "aqn", None, "AQN", phase, "forward", when)

    def _demand(self, role: str, what: str, i: int | None, text: str, phase: str, way: str, when: str) -> None:
        """Fires in every actor, or in some sampler, in one direction: forwards excuse no missing backward."""
        self._due.add((role, what))
        span = self._span(role)
        idle = [report for report in span.now if not span.fires(report, what, phase, (way,), i)]
        if len(idle) == len(span.now) or (idle and role == "actor"):
            raise InertError(f"{name(idle[0])} has {text} on and fired nowhere in {when} ({way})")

    def _metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for role, instructions in self.instructions.items():
            span = self._span(role)
            if instructions.plan is not None:
                found |= {f"shaketable/{role}/{way}": float(span.total("plan", None, (way,))) for way in BOTH}
                if (error := span.error()) is not None:
                    found[f"shaketable/{role}/measured_error"] = error
            if instructions.aqn is not None and role == "sampler":
                found["shaketable/sigma"] = span.now[0]["sigma"]  # all have the same: it follows from step and instructions
        return found

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a line about a step, with σ per layer."""
        sigmas = {name(report): report["sigmas"] for report in self.now.get("sampler", ())}
        with (self.folder / STEPS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "sigmas": sigmas}) + "\n")

    # ---- the whole run

    def finish(self) -> dict[str, Any]:
        """Merge all ledgers into one file; raises when a worker, a clause or AQN did nothing in all steps."""
        body: dict[str, Any] = {"schema": "shaketable.verl/1", "workers": {}, "merged": {}}
        complaints = []
        for role, reports in self.now.items():
            body["workers"][role] = [{"pid": r["pid"], "rank": r["rank"], "fires": _fires(r)} for r in reports]
            due = [what for what in WHATS if (role, what) in self._due]
            complaints += [f"{name(r)} fired nowhere" for r in reports if due and not _fires(r)]
            for what in WHATS:
                if (ledger := merged(reports, what)) is not None:
                    body["merged"][f"{role}.{what}"] = ledger.to_dict()
                    complaints += [f"{role}s: {line}" for line in ledger.inert() if what in due]
        (self.folder / LEDGER).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
        if complaints:
            raise InertError("; ".join(complaints))
        return body

    def _span(self, role: str) -> Span:
        return Span(self._before[role], self.now[role])

    def _clauses(self, role: str) -> tuple[Clause, ...]:
        text = self.instructions[role].plan if role in self.instructions else None
        return () if text is None else Plan.parse(text).clauses


def name(report: Mapping[str, Any]) -> str:
    """The name of a worker in messages."""
    return f"{report['role']} {report['rank']} (pid {report['pid']})"


def _fires(report: Mapping[str, Any]) -> int:
    """Everything that a worker hit."""
    return sum(report[what]["forward"] + report[what]["backward"] for what in WHATS if report.get(what))


def _has_noise(report: Mapping[str, Any]) -> bool:
    """Whether AQN is due: σ is above 0, in some layer where it differs between them."""
    return bool(report.get("aqn")) and report["sigma"] > 0 and max(report["sigmas"].values(), default=1.0) > 0


# ---- two readings


@dataclass(frozen=True)
class Span:
    """The difference between two readings of the reports of one role.

    A ledger only grows, so a step is the difference of two readings: fires by clause and phase for each worker, and the error
    from the sums that were added. A ledger measures the 1st, 2nd, 4th, 8th, … hit of a spot. A step in which nothing was
    measured has no error, which is not an error of 0.
    """

    before: Sequence[dict[str, Any]]
    now: Sequence[dict[str, Any]]

    def fires(
        self,
        report: Mapping[str, Any],
        what: str,
        phase: str | None = None,
        ways: Iterable[str] = BOTH,
        clause: int | None = None,
    ) -> int:
        """Fires of one worker: by plan or aqn, in a phase or all, in some directions, of one clause or all."""
        earlier = [old for old in self.before if _who(old) == _who(report)]
        counts = [_count(found, what, phase, tuple(ways), clause) for found in (report, *earlier)]
        return counts[0] - sum(counts[1:])

    def total(self, what: str, phase: str | None = None, ways: Iterable[str] = BOTH, clause: int | None = None) -> int:
        """Fires of all workers."""
        return sum(self.fires(report, what, phase, tuple(ways), clause) for report in self.now)

    def error(self) -> float | None:
        """The largest relative RMS error of a clause of the plan; None when nothing was measured."""
        ledger, earlier = merged(self.now), merged(self.before)
        if ledger is None:
            return None
        old = [site.measured() for site in earlier.sites] if earlier is not None else [Measured()] * len(ledger.sites)
        errors = []
        for site, sums in zip(ledger.sites, old, strict=True):
            added = {name: value - getattr(sums, name) for name, value in asdict(site.measured()).items()}
            if (error := Measured(**added).error) is not None:
                errors.append(error)
        return max(errors, default=None)


def _who(report: Mapping[str, Any]) -> tuple[Any, ...]:
    return report["pid"], report["rank"], report["started"]


def _count(report: Mapping[str, Any], what: str, phase: str | None, ways: tuple[str, ...], clause: int | None) -> int:
    sites = report[what]["sites"] if report.get(what) else []
    chosen = sites if clause is None else sites[clause : clause + 1]
    rows = [row for site in chosen for name, row in site["phases"].items() if phase in (None, name)]
    return sum(row[way] for row in rows for way in ways)
