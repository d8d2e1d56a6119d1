"""Of the loss that a fault causes, the share that each hardened arm returned, over seeds and problems.

Every hardened run was scored before its first step and after its last, on the same problems and with the same noise: each
run is its own baseline. Arms that are trained are left out: a model that learns its task gets better with and without a
fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from shaketable.evaluate.statistics import share_recovered
from shaketable.study.analysis.results import RecoveredResult
from shaketable.study.analysis.runs import Run
from shaketable.study.config import CLEAN, Comparing


def recovered(conditions: Iterable[str], done: Mapping[str, Sequence[Run]]) -> list[RecoveredResult]:
    """One row for every arm and faulty condition under which something was lost."""
    found = []
    faulty = [name for name in conditions if name != CLEAN]
    for arm, runs in done.items():
        hardened = [run for run in runs if run.kind == "harden" and _scored_twice(run)]
        for condition in faulty:
            scored = [run for run in hardened if run.scores(condition, "accuracy") and run.scores(condition, "accuracy", 0)]
            if not scored:
                continue
            before, clean = (np.array([r.scores(c, "accuracy", 0) for r in scored]) for c in (condition, CLEAN))
            after, clean_after = (np.array([r.scores(c, "accuracy") for r in scored]) for c in (condition, CLEAN))
            if (clean - before).mean() > 0:
                means = {"before": before, "after": after, "clean": clean, "clean_after": clean_after}
                facts = share_recovered(before, after, clean).to_dict() | {name: float(m.mean()) for name, m in means.items()}
                found.append(RecoveredResult(arm=arm, condition=condition, **facts, seconds=_seconds(runs)))
    return found


def _scored_twice(run: Run) -> bool:
    evaluations = run.of_kind("evaluation")
    return len(evaluations) > 1 and evaluations[0]["step"] == 0


def _seconds(runs: Sequence[Run]) -> float:
    """What the repair took, a run, on average."""
    spent = [sum(e["cost"]["seconds"] for e in stages) for run in runs if (stages := run.of_kind("rung"))]
    return float(sum(spent) / len(spent)) if spent else 0.0


def told(rows: Sequence[RecoveredResult], primary: Comparing | None) -> str:
    """What came back in the arm that the study is about, where it was hardened, for the verdict."""
    row = next((r for r in rows if primary is not None and (r.arm, r.condition) == (primary.a, primary.condition)), None)
    if row is None or row.clean is None or row.clean_after is None:
        return ""
    clean = f"without the fault {100 * row.clean:.1f} → {100 * row.clean_after:.1f}"
    return f"{row.sentence[:1].upper()}{row.sentence[1:]}; {clean}; {row.seconds:.0f} s a run."
