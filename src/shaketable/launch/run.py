"""Run a program with a plan in its environment, then collect the ledgers that its processes wrote.

Launchers, servers and workers that import torch and compute nothing are fine. A process that ran **without the plan** while
others ran under it is an error (exit code 3):

*   It called a model with parameters, in a phase that a clause acts in, and no clause changed anything.
*   Or it is a rank of a process group, the plan acted in other ranks, and no pass of a model was seen in it. Workers of a
    sampling engine are left out: they wait for requests, and there may be few.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from shaketable.errors import PlanError
from shaketable.ledger.inert import why_inert
from shaketable.ledger.ledger import Ledger
from shaketable.plan import Clause, Plan
from shaketable.records.record import put_in_place

STARTUP = Path(__file__).with_name("startup")
NOTHING_INJECTED = 3


@dataclass(kw_only=True)
class ProcessRecord:
    """One process of a program, as its file (`ledger_file.py`) describes it."""

    pid: int
    parent: int
    rank: int
    place: str
    """Its name in a framework of actors and tasks; empty elsewhere."""
    actor: str
    """The framework's id of the actor that it is."""
    forked: bool
    command: str
    started: float
    models: list[str]
    """Classes of the models in which a clause matched."""
    late: list[str]
    """Modules that were added too late."""
    unmatched: list[str]
    """Why clauses matched nothing."""
    ledger: Ledger
    refused: str | None = None
    """Why an engine could not do what the plan says."""
    unmatched_models: Sequence[Sequence[str]] = ()
    """Class and phase of each model in which nothing matched."""
    phases: list[str] = field(default_factory=list)
    """Phases of its passes."""
    trained: bool = False
    distributed: Sequence[int] | None = None
    """Rank and number of ranks of its process group."""
    engine: bool = False
    life: int | None = None
    """How often its actor has been started."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ProcessRecord:
        """Read the JSON of a process; keys that it does not know are left out."""
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        return cls(**known | {"ledger": Ledger.from_dict(data["ledger"])})

    @property
    def fires(self) -> int:
        return self.ledger.forward + self.ledger.backward

    @property
    def title(self) -> str:
        """How it is called for people: its place in a program of many, else its command."""
        again = f", life {self.life}" if (self.life or 1) > 1 else ""
        return f"{self.place}{again}" if self.place else self.command

    def to_dict(self) -> dict[str, Any]:
        shown = ("pid", "parent", "rank", "place", "actor", "forked", "command", "models", "life")
        row = {key: getattr(self, key) for key in shown}
        return row | {"forward": self.ledger.forward, "backward": self.ledger.backward}

    def why_idle(self) -> str:
        """Why nothing was injected into it; empty where that is not known."""
        is_at_rest = not (self.phases or self.unmatched_models)
        return "it called no model" if is_at_rest else "; ".join(self.unmatched[:1])

    def did_something(self) -> bool:
        """Whether a clause changed a value, or fired too rarely to say that it did not."""
        rows = zip(self.clauses, self.ledger.sites, strict=True) if self.fires else ()
        return any(s.forward + s.backward and why_inert(s, clause.fault) is None for clause, s in rows)

    @cached_property
    def clauses(self) -> tuple[Clause, ...]:
        return Plan.parse(self.ledger.plan).clauses


def idle_lines(processes: Sequence[ProcessRecord]) -> list[str]:
    """A line for each process that injected nothing; one for all that are alike, such as the workers of a DataLoader."""
    alike: dict[tuple[str, str], list[int]] = {}
    for process in processes:
        alike.setdefault((process.title, process.why_idle()), []).append(process.pid)
    lines = []
    for (title, why), pids in alike.items():
        who = f"process {pids[0]} ({title})" if len(pids) == 1 else f"{len(pids)} processes ({title})"
        lines.append(f"{who} imported torch but injected nothing" + (f" ({why})" if why else ""))
    return lines


def without_plan(processes: Sequence[ProcessRecord]) -> dict[int, str]:
    """By its place in the list, one line for each process that ran without the plan while others ran under it."""
    acted = [process.did_something() for process in processes]
    others = [process for process, did in zip(processes, acted, strict=True) if did]
    lines = {}
    for i, process in enumerate(processes):
        if others and not acted[i] and (why := _why_wrong(process, others)) is not None:
            named = f"process {process.pid} ({process.title})"
            if process.distributed:
                named = f"rank {process.distributed[0]} (process {process.pid}, {process.title})"
            lines[i] = f"{named} ran without the plan, and others under it: {why}"
    return lines


def _why_wrong(process: ProcessRecord, others: Sequence[ProcessRecord]) -> str | None:
    """Why the plan should have acted in a process; None where it need not have."""
    phases = {*process.phases, *(phase for _, phase in process.unmatched_models)}
    if not phases:
        is_missed = process.distributed and not process.engine and any(other.distributed for other in others)
        return "no pass of a model was seen there" if is_missed else None
    for clause in process.clauses:
        is_in_phase = not clause.site.phase or not phases.isdisjoint(clause.site.phase)
        if is_in_phase and not clause.fault.is_off and ("forward" in clause.site.directions or process.trained):
            break
    else:
        return None
    models = ", ".join(dict.fromkeys([*process.models, *(name for name, _ in process.unmatched_models)]))
    return f"{models} ran there, and {'; '.join(process.unmatched[:1]) or 'no clause changed a value'}"


@dataclass
class RunResult:
    """The outcome of a run."""

    command: list[str]
    program_exit: int
    folder: Path
    ledger: Ledger | None
    """All processes merged; None when no process imported torch."""
    processes: list[ProcessRecord] = field(default_factory=list)
    allow_inert: bool = False

    @property
    def warnings(self) -> list[str]:
        """One line for each thing a reader must know."""
        if self.ledger is None:
            return ["nothing was injected: no process of this command imported torch"]
        idle = idle_lines([p for i, p in enumerate(self.processes) if not p.fires and i not in self.without_plan])
        late = [f"process {p.pid}: {line}" for p in self.processes for line in p.late]
        return [*self.without_plan.values(), *idle, *late, *self.ledger.inert()]

    @property
    def refused(self) -> list[str]:
        return list(dict.fromkeys(p.refused for p in self.processes if p.refused))

    @cached_property
    def without_plan(self) -> dict[int, str]:
        """By its place in the list, one line for each process that ran without the plan while others ran under it."""
        return without_plan(self.processes)

    @property
    def exit_code(self) -> int:
        """The program's own, 2 when it failed because an engine refused the plan, or 3 when it succeeded and a clause did
        nothing anywhere, or a process ran without the plan."""
        if self.program_exit > 0 and self.refused:
            return 2
        inert = self.ledger is None or bool(self.ledger.inert() or self.without_plan)
        if self.program_exit == 0 and inert and not self.allow_inert:
            return NOTHING_INJECTED
        return self.program_exit if self.program_exit >= 0 else 128 - self.program_exit

    def to_dict(self) -> dict[str, Any]:
        body = {"schema": None} if self.ledger is None else self.ledger.to_dict()
        extra = {"command": self.command, "program_exit": self.program_exit, "exit": self.exit_code}
        workers = [process.to_dict() for process in self.processes]
        return body | extra | {"workers": workers, "refused": self.refused, "warnings": self.warnings}


def run_program(plan: Plan, command: list[str], folder: Path, *, allow_inert: bool = False) -> RunResult:
    """Run `command` under `plan`, its processes writing their ledgers into `folder`.

    Raises:
        PlanError: The folder holds another run, or the command cannot be started.
    """
    new_folder(folder)
    code = run_command(command, environment(plan, folder.resolve()))
    return collect(folder, command, code, allow_inert=allow_inert)


def default_folder() -> Path:
    return Path("ledgers") / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def new_folder(folder: Path) -> None:
    """Make a folder for ledgers; raises `PlanError` when it cannot be used or holds another run."""
    if (folder / "ledger.json").exists() or any(folder.glob("process-*.json")):
        raise PlanError(f"{folder} holds the ledger of another run; name another folder, nothing is overwritten")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"cannot use {folder} for ledgers: {error.strerror}") from None


def collect(folder: Path, command: list[str], code: int, *, allow_inert: bool = False) -> RunResult:
    """Merge what the processes of a program left in `folder`, and write it there."""
    files = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("process-*.json"))]
    processes = sorted(map(ProcessRecord.from_dict, files), key=lambda process: process.started)
    lives: Counter[str] = Counter()
    for process in processes:
        if process.actor:
            lives[process.actor] += 1
            process.life = lives[process.actor]
    merged = Ledger.merge(process.ledger for process in processes) if processes else None
    result = RunResult(command, code, folder, merged, processes, allow_inert)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        put_in_place(folder / "ledger.json", json.dumps(result.to_dict(), indent=2) + "\n")
    except OSError as error:
        line = f"cannot write {folder / 'ledger.json'}: {error.strerror or error}; the program ended with {code}"
        raise PlanError(f"{line}, and what its processes wrote is in the folder") from None
    return result


def environment(plan: Plan, folder: Path) -> dict[str, str]:
    """The variables by which a plan travels into every child."""
    path = os.environ.get("PYTHONPATH")
    return os.environ | {
        "SHAKETABLE_PLAN": plan.text(),
        "SHAKETABLE_SEED": str(plan.seed),
        "SHAKETABLE_LEDGER": str(folder),
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *([path] if path else [])]),
    }


def run_command(command: list[str], env: dict[str, str]) -> int:
    """The program's exit code; signals meant for it are passed on."""
    try:
        program = subprocess.Popen(command, env=env)
    except OSError as error:
        raise PlanError(f"cannot run {command[0]!r}: {error.strerror}") from None
    before = {s: signal.signal(s, lambda n, _: program.send_signal(n)) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        while True:
            try:
                return program.wait()
            except KeyboardInterrupt:
                continue
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
