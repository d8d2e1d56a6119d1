"""What was decided when: the versions of a study, held against the time when its first results were there.

A comparison that decides must have been fixed before anybody could know how it would come out: which arms and seeds, how they
are trained, how they are scored. Whoever changes one of these later may do so, but the report says it, and no longer
calls the comparison named before the run. That other arms or comparisons came later is said too; it changes nothing for the
primary one. Wording, engine and what is kept are no decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.records.record import FILE, RunRecord
from shaketable.study.analysis.runs import Run
from shaketable.study.config import StudyConfig
from shaketable.study.run_study import definitions, described
from shaketable.study.store import DEFINITION

DECIDES = ("model", "task", "seeds", "train", "harden", "evaluate", "diagnose", "device", "dtype")


@dataclass(frozen=True)
class Changes:
    """What was changed after the first run had ended."""

    named_before: bool
    """Whether all that the primary comparison depends on was fixed by then."""
    notes: list[str]


def changes(study: StudyConfig, folder: Path, runs: Sequence[Run]) -> Changes:
    """The study as it is reported, against the version that was in force when the first run of its folder ended."""
    if not (folder / DEFINITION / FILE).is_file():
        return Changes(False, ["the study was never run from its file: nothing says when its comparison was named"])
    try:
        versions = definitions(folder)
    except ShaketableError as error:
        return Changes(False, [f"when the comparison was named cannot be told: {error}"])
    ended = _first_end(folder, runs)
    if ended is None:
        return Changes(True, [])
    if any(e["ended"] < versions[0]["time"] for run in runs for e in run.of_kind("added")):
        when = "runs that were made elsewhere had ended before the study was written down"
        return Changes(False, [f"{when}: nothing says when its comparison was named"])
    if versions[0].get("after_results"):
        return Changes(False, ["the study was written down after a run had ended: nothing says when its comparison was named"])
    before = [v for v in versions if _is_before(v, ended)] or versions[:1]
    now, then = described(study), before[-1]["config"]
    decisive, others = _decisive(now, then), _others(now, then)
    late = f"changed {_when(now, versions)}, after the first run had ended"
    notes = [f"{late}: {', '.join(decisive)}; read the primary comparison as exploratory"] if decisive else []
    notes += [f"{late}, beside the primary comparison: {', '.join(others)}"] if others else []
    return Changes(not decisive, notes)


def _is_before(version: Mapping[str, Any], ended: float) -> bool:
    """Whether a version came before the first results. Old ones do not say; there the clock has to."""
    late: bool = version["after_results"] if "after_results" in version else version["time"] > ended
    return not late


def _first_end(folder: Path, runs: Sequence[Run]) -> float | None:
    """When the first run ended, of this version of the study or another."""
    ends = [e["time"] for r in runs if (e := r.last("finished")) is not None]
    known = {run.name for run in runs}
    for other in (folder / "runs").glob(f"[!.]*/{FILE}"):
        if other.parent.name not in known:
            try:
                ends += [e["time"] for e in RunRecord.open(other.parent).events("finished")]
            except ShaketableError:
                continue  # damaged, and not of this study: it says nothing
    return min(ends, default=None)


def _decisive(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """What the primary comparison depends on and is not what it was."""
    found = [name for name in DECIDES if now.get(name) != then.get(name)]
    primary = now["compare"]["primary"]
    if primary != then["compare"]["primary"]:
        found.append(f"the primary comparison (it was {_told(then['compare']['primary'])})")
    if primary is not None:
        found += [f"the arm {x!r}" for x in (primary["a"], primary["b"]) if _arm(now, x) != _arm(then, x)]
    return found


def _others(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """What else is not what it was."""
    primary = now["compare"]["primary"] or {"a": None, "b": None}
    names = [n for n in {**then["arms"], **now["arms"]} if n not in (primary["a"], primary["b"])]
    found = [f"the arm {name!r}" for name in names if _arm(now, name) != _arm(then, name)]
    return found + [f"compare.{k}" for k in ("secondary", "against") if now["compare"][k] != then["compare"][k]]


def _arm(config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    arm = config["arms"].get(name)
    return None if arm is None else {k: v for k, v in arm.items() if k != "description"}


def _told(primary: Mapping[str, Any] | None) -> str:
    if primary is None:
        return "not named"
    return f"{primary['a']} − {primary['b']}, {primary['condition'] or ''} {primary['endpoint']}".replace("  ", " ")


def _when(now: Mapping[str, Any], versions: Sequence[Mapping[str, Any]]) -> str:
    same = [v["time"] for v in versions if v["config"] == now]
    if not same:
        return "in this report only"
    return datetime.fromtimestamp(same[0], UTC).strftime("on %Y-%m-%d at %H:%M UTC")
