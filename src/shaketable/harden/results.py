"""The results of a hardening run, from its record alone, and the README of the hardened model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shaketable.harden.config import HardenConfig
from shaketable.records.record import RunRecord
from shaketable.train.summary import short, without

SCHEMA = 1


def outcome(record: RunRecord) -> dict[str, Any]:
    """Scores before and after, shares, costs and ledgers of a finished run."""
    return {**so_far(record), "ledgers": record.finished()["ledgers"], "model": str(record.folder / "model")}


def so_far(record: RunRecord) -> dict[str, Any]:
    """The same for a run that may not be finished."""
    events = record.events()
    config = [e for e in events if e["event"] == "resolved"][-1]["config"]
    evaluations = {e["rung"]: [short(c) for c in e["conditions"]] for e in events if e["event"] == "evaluation"}
    rungs = list({e["rung"]: e for e in events if e["event"] == "rung"}.values())
    first = next(iter(evaluations.values()), [])
    return {
        "schema": SCHEMA,
        "kind": "hardening",
        "id": record.head["id"],
        "config": config,
        "environment": record.head["environment"],
        "measure": first[0]["measure"] if first else None,
        "before": first,
        "rungs": [{**without(e, "event", "time"), "conditions": evaluations[e["rung"]]} for e in rungs],
        "resumed": sum(e["event"] == "resumed" for e in events),
        "sentence": sentence(first, rungs, evaluations),
    }


def sentence(first: list[Any], rungs: list[Any], evaluations: dict[Any, list[Any]]) -> str:
    """The verdict, in one sentence."""
    last = rungs[-1] if rungs else {}
    if not last.get("shares"):
        return "nothing was repaired"
    parts = [f"{name}: {share['sentence']}" for name, share in last["shares"].items()]
    now = evaluations[last["rung"]][0]
    clean = f"clean {first[0]['accuracy']:.1%} → {now['accuracy']:.1%}"
    seconds = sum(r["cost"]["seconds"] for r in rungs)
    return f"{'; '.join(parts)}; {clean}; {seconds:.0f} s"


def write_card(folder: Path, record: RunRecord, config: HardenConfig) -> None:
    """Put README.md beside the weights."""
    found, base = so_far(record), Path(config.model).name
    plans = "\n".join(f"- `{plan}`" for plan in config.plans) or "- nothing (a control)"
    tests = f"problems of `{config.task}`" if config.task else "prompts that were kept apart"
    text = f"""---
library_name: transformers
tags: [shaketable, hardened]
---

# {base}, hardened

Made by `shaketable harden` from `{base}`, to stand

{plans}

{found["sentence"]}.

Scores are {found["measure"]}, on {found["before"][0]["n"]} {tests}. The weights are ordinary: nothing of Shaketable is needed
to load them. Run {found["id"]}, seed {config.seed}.
"""
    (folder / "README.md").write_text(text, encoding="utf-8")
