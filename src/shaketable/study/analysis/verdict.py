"""The first thing a report says: what the study shows about the question it was made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shaketable.study.analysis.runs import Run


def verdict(compared: Sequence[dict[str, Any]], runs: Sequence[Run], unlike: Sequence[str]) -> dict[str, Any]:
    """Kind, headline, and the sentence of the primary comparison; `unlike` says why runs cannot be compared."""
    primary = next((c for c in compared if c["primary"]), None)
    if primary is None:
        return {"kind": "nothing", "headline": "No comparison was named", "sentence": "There is nothing to decide."}
    if unlike:
        return {"kind": "nothing", "headline": f"Nothing can be concluded: {unlike[0]}", "sentence": primary["sentence"]}
    missing = sum(not run.is_done for run in runs)
    so_far = f"So far ({missing} of {len(runs)} runs are missing): " if missing else ""
    headline = so_far + _headline(primary)
    return {"kind": primary["verdict"], "headline": headline[:1].upper() + headline[1:], "sentence": primary["sentence"]}


def _headline(primary: dict[str, Any]) -> str:
    a, b, where = primary["a"], primary["b"], _where(primary)
    if primary["verdict"] == "nothing":
        why = {0: "no seed is finished in both arms", 1: "there is one seed"}.get(primary["seeds"], "")
        return f"nothing can be concluded: {why}"
    if primary["verdict"] == "not shown":
        return f"not shown: no difference between {a} and {b}{where} could be told from chance"
    size = abs(primary["scale"] * primary["difference"])
    unit = f" {primary['unit']}" if primary["unit"] else ""
    side = "above" if primary["difference"] > 0 else "below"
    return f"shown: {a} is {size:.3g}{unit} {side} {b}{where}"


def _where(primary: dict[str, Any]) -> str:
    endpoint = str(primary["endpoint"]).replace("_", " ")
    return f" in {primary['condition']} {endpoint}" if primary["condition"] else f" in {endpoint}"
