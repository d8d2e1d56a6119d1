"""The results of a training run, read from its record alone.

Clean and faulty scores stay apart, each with its interval. Two questions are answered with paired comparisons on the same
problems: what training changed (last step against step 0, per condition), and what the fault costs the trained model (each
condition against clean, at the last step). They are one family, corrected by Holm. They speak of this one run; what a recipe
does needs several seeds.
"""

from __future__ import annotations

from typing import Any

from shaketable.evaluate.statistics import Comparison, corrected, paired
from shaketable.records.record import RunRecord

SCHEMA = 1


def outcome(record: RunRecord) -> dict[str, Any]:
    """Steps, evaluations, final scores and comparisons of a finished run."""
    ledgers, events = record.finished()["ledgers"], record.events()
    evaluations = [e for e in events if e["event"] == "evaluation"]
    first, last = evaluations[0], evaluations[-1]
    return {
        "schema": SCHEMA,
        "kind": "training",
        "id": record.head["id"],
        "config": [e for e in events if e["event"] == "resolved"][-1]["config"],
        "environment": record.head["environment"],
        "steps": [without(e, "event", "time") for e in events if e["event"] == "step"],
        "evaluations": [{"step": e["step"], "conditions": [short(c) for c in e["conditions"]]} for e in evaluations],
        "final": {c["name"]: short(c) for c in last["conditions"]},
        "comparisons": _comparisons(first, last),
        "warnings": [e["text"] for e in events if e["event"] == "warning"],
        "ledgers": ledgers,
        "resumed": sum(e["event"] == "resumed" for e in events),
        "model": str(record.folder / "model"),
    }


def _comparisons(first: dict[str, Any], last: dict[str, Any]) -> list[dict[str, Any]]:
    asked: list[tuple[str, Comparison]] = []
    for before, after in zip(first["conditions"], last["conditions"], strict=True):
        asked.append((f"training, {after['name']}", paired(_scores(before), _scores(after))))
    clean, *faulty = last["conditions"]
    asked += [(f"{c['name']} against clean, after training", paired(_scores(clean), _scores(c))) for c in faulty]
    done = corrected([comparison for _, comparison in asked])
    return [{"of": name, **c.to_dict()} for (name, _), c in zip(asked, done, strict=True)]


def _scores(condition: dict[str, Any]) -> list[float]:
    return [float(a["correct"]) for a in condition["answers"]]


def short(condition: dict[str, Any]) -> dict[str, Any]:
    """A condition's scores without its answers and ledger."""
    return without(condition, "answers", "ledger")


def without(event: dict[str, Any], *names: str) -> dict[str, Any]:
    """An event without some of its keys."""
    return {k: v for k, v in event.items() if k not in names}
