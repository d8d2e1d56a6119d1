"""What came back: of the loss that a fault causes, the share that each arm returned, over seeds and problems.

Every hardened run was scored before its first step and after its last, on the same problems and with the same noise. So each
run is its own baseline: clean and faulty before, faulty after. Arms that are trained are left out: a model that learns its task
gets better with and without the fault, and what came back of a loss is no longer the question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shaketable.evaluate.statistics import share_recovered
from shaketable.study.analysis.runs import PER_ANSWER, Run
from shaketable.study.config import Comparing

CLEAN = "clean"


def recovered(conditions: Iterable[str], done: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """One row for every arm and faulty condition under which something was lost."""
    found = []
    for arm, runs in done.items():
        for condition in conditions:
            hardened = [run for run in runs if run.kind == "harden" and condition != CLEAN]
            tables = [t for run in hardened if (t := _scores(run, condition)) is not None]
            if not tables:
                continue
            before, after, clean, clean_after = (np.array(rows) for rows in zip(*tables, strict=True))
            if (clean - before).mean() > 0:
                share = share_recovered(before, after, clean)
                means = {
                    "before": before.mean(),
                    "after": after.mean(),
                    "clean": clean.mean(),
                    "clean_after": clean_after.mean(),
                }
                facts = {"arm": arm, "condition": condition, **share.to_dict(), "seconds": _seconds(runs)}
                found.append(facts | {name: float(mean) for name, mean in means.items()})
    return found


def _seconds(runs: Sequence[Run]) -> float:
    """What the repair took, a run, on average."""
    spent = [sum(e["cost"]["seconds"] for e in rungs) for run in runs if (rungs := run.of_kind("rung"))]
    return float(sum(spent) / len(spent))


def told(rows: Sequence[dict[str, Any]], primary: Comparing | None) -> str:
    """What came back in the arm that the study is about, where it was hardened, for the verdict."""
    found = [r for r in rows if primary is not None and (r["arm"], r["condition"]) == (primary.a, primary.condition)]
    if not found:
        return ""
    clean = f"without the fault {100 * found[0]['clean']:.1f} → {100 * found[0]['clean_after']:.1f}"
    sentence = found[0]["sentence"]
    return f"{sentence[:1].upper()}{sentence[1:]}; {clean}; {found[0]['seconds']:.0f} s a run."


def _scores(run: Run, condition: str) -> tuple[list[float], list[float], list[float], list[float]] | None:
    """Faulty before, faulty after, clean before, clean after; None where a run has no two scores."""
    evaluations = run.of_kind("evaluation")
    if len(evaluations) < 2 or evaluations[0]["step"] != 0:
        return None
    first, last = evaluations[0]["conditions"], evaluations[-1]["conditions"]
    pairs = ((first, condition), (last, condition), (first, CLEAN), (last, CLEAN))
    rows = [_row(conditions, name) for conditions, name in pairs]
    return None if any(row is None for row in rows) else tuple(rows)  # type: ignore[return-value]


def _row(conditions: list[dict[str, Any]], name: str) -> list[float] | None:
    found = next((c for c in conditions if c["name"] == name), None)
    return None if found is None else [float(a[PER_ANSWER["accuracy"]]) for a in found["answers"]]
