"""Run a program with a plan in its environment, then collect what its processes wrote."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shaketable.errors import PlanError
from shaketable.launch.unshaken_processes import called, unshaken
from shaketable.ledger.ledger import Ledger
from shaketable.plan import Plan
from shaketable.records.record import put_in_place

STARTUP = Path(__file__).with_name("startup")
NOTHING_INJECTED = 3


@dataclass
class RunResult:
    """What a run left behind."""

    command: list[str]
    program_exit: int
    folder: Path
    ledger: Ledger | None
    """All processes merged; None when no process imported torch."""
    processes: list[dict[str, Any]] = field(default_factory=list)
    allow_inert: bool = False

    @property
    def warnings(self) -> list[str]:
        """One line for each thing a reader must know."""
        if self.ledger is None:
            return ["nothing was injected: no process of this command imported torch"]
        idle = [p for i, p in enumerate(self.processes) if i not in self.unshaken]
        lines = [_idle(p) for p in idle if not p["ledger"]["forward"] + p["ledger"]["backward"]]
        late = [f"process {p['pid']}: {line}" for p in self.processes for line in p["late"]]
        return [*self.unshaken.values(), *lines, *late, *self.ledger.inert()]

    @property
    def refused(self) -> list[str]:
        """Why engines of the program could not do what the plan says."""
        return list(dict.fromkeys(why for p in self.processes if (why := p.get("refused"))))

    @cached_property
    def unshaken(self) -> dict[int, str]:
        """By its place in the list: one line for each process that should have been shaken and was not."""
        return unshaken(self.processes)

    @property
    def exit_code(self) -> int:
        """The program's own, or 3 when it succeeded and a clause did nothing anywhere, or a process was not shaken."""
        inert = self.ledger is None or bool(self.ledger.inert() or self.unshaken)
        if self.program_exit == 0 and inert and not self.allow_inert:
            return NOTHING_INJECTED
        return self.program_exit if self.program_exit >= 0 else 128 - self.program_exit

    def to_dict(self) -> dict[str, Any]:
        """The merged ledger, with the command and its processes."""
        body = {"schema": None} if self.ledger is None else self.ledger.to_dict()
        shown = ("pid", "parent", "rank", "place", "actor", "forked", "command", "models")
        people = [{k: p[k] for k in shown} | {"life": p.get("life")} for p in self.processes]
        for row, p in zip(people, self.processes, strict=True):
            row |= {"forward": p["ledger"]["forward"], "backward": p["ledger"]["backward"]}
        extra = {"command": self.command, "program_exit": self.program_exit, "exit": self.exit_code}
        return body | extra | {"workers": people, "refused": self.refused, "warnings": self.warnings}


def _idle(process: dict[str, Any]) -> str:
    """A launcher, a server or a worker that had nothing to do, or a process of which its old ledger does not say more."""
    is_at_rest = "phases" in process and not (process["phases"] or process["unmatched_models"])
    why = "it called no model" if is_at_rest else "; ".join(process["unmatched"][:1])
    return f"process {process['pid']} ({called(process)}) imported torch but injected nothing" + (f" ({why})" if why else "")


def run_program(plan: Plan, command: list[str], folder: Path, *, allow_inert: bool = False) -> RunResult:
    """Run `command` under `plan`, its processes writing their ledgers into `folder`.

    Raises:
        PlanError: The folder holds another run, or the command cannot be started.
    """
    new_folder(folder)
    code = run_command(command, environment(plan, folder.resolve()))
    return collect(folder, command, code, allow_inert=allow_inert)


def default_folder() -> Path:
    """A folder for the ledgers of a program that was given none."""
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
    processes = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("process-*.json"))]
    processes.sort(key=lambda p: p["started"])
    lives: Counter[str] = Counter()
    for process in processes:
        if process["actor"]:
            lives[process["actor"]] += 1
            process["life"] = lives[process["actor"]]
    ledgers = [Ledger.from_dict(p["ledger"]) for p in processes]
    merged = Ledger.merge(ledgers) if ledgers else None
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
