"""Processes that should have been shaken and were not, from what they left behind.

A program has launchers, servers and workers that import torch and compute nothing, and it is right that nothing happens there.
Where a model was called it is wrong, if the plan did something in other processes:

*   The process called a model with parameters, in a phase that a clause acts in, and no clause changed anything. The model may
    be one in which nothing matches: the score of a program whose ranks do not all run the same model is not what it seems.
*   Or it is a rank of a process group, other ranks were shaken, and no pass of a model was seen in it. Workers of a sampling
    engine are left out: they wait for requests, and there may be few.

A process in which clauses fired and changed nothing is one of these if enough values were seen (`ledger/inert.py`). One whose
passes were all of other phases is not, nor is one whose ledger was written before all this was noted in it.
"""

from __future__ import annotations

from typing import Any

from shaketable.ledger.inert import why_inert
from shaketable.ledger.ledger import Ledger
from shaketable.plan import Clause, Plan


def unshaken(processes: list[dict[str, Any]]) -> dict[int, str]:
    """One line for each process that should have been shaken and was not, by its place in the list."""
    did = [_did_something(process) for process in processes]
    shaken = [process for process, something in zip(processes, did, strict=True) if something]
    lines = {}
    for i, process in enumerate(processes):
        if shaken and not did[i] and "phases" in process and (why := _why(process, shaken)) is not None:
            lines[i] = f"{_named(process)} was not shaken, and others were: {why}"
    return lines


def called(process: dict[str, Any]) -> str:
    """How a process is called for people: its place in a program of many, else its command."""
    if not process["place"]:
        return str(process["command"])
    again = f", life {process['life']}" if (process.get("life") or 1) > 1 else ""
    return f"{process['place']}{again}"


def _named(process: dict[str, Any]) -> str:
    if process["distributed"]:
        return f"rank {process['distributed'][0]} (process {process['pid']}, {called(process)})"
    return f"process {process['pid']} ({called(process)})"


def _clauses(process: dict[str, Any]) -> tuple[Clause, ...]:
    return Plan.parse(process["ledger"]["plan"]).clauses


def _did_something(process: dict[str, Any]) -> bool:
    """Whether a clause changed a value, or fired too rarely to say that it did not."""
    fired = [site["forward"] + site["backward"] for site in process["ledger"]["sites"]]
    if not any(fired):
        return False
    rows = zip(_clauses(process), Ledger.from_dict(process["ledger"]).sites, fired, strict=True)
    return any(fires and why_inert(site, clause.fault) is None for clause, site, fires in rows)


def _why(process: dict[str, Any], shaken: list[dict[str, Any]]) -> str | None:
    others = process["unmatched_models"]
    phases = {*process["phases"], *(phase for _, phase in others)}
    if not phases:
        is_missed = process["distributed"] and not process["engine"] and any(p.get("distributed") for p in shaken)
        return "no pass of a model was seen there" if is_missed else None
    if not any(_is_expected(clause, phases, process["trained"]) for clause in _clauses(process)):
        return None
    models = ", ".join(dict.fromkeys([*process["models"], *(name for name, _ in others)]))
    return f"{models} ran there, and {'; '.join(process['unmatched'][:1]) or 'no clause changed a value'}"


def _is_expected(clause: Clause, phases: set[str], trained: bool) -> bool:
    """Whether a clause should have acted in a process with passes of these phases."""
    forward = "forward" in clause.site.directions
    return (
        not clause.fault.is_off
        and (forward or trained)
        and any(not clause.site.phase or phase in clause.site.phase for phase in phases)
    )
