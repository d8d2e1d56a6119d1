"""The README of a hardened model: what it was hardened against, and what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shaketable.harden.config import HardenConfig
from shaketable.harden.summary import interval_end, named, so_far
from shaketable.records.record import RunRecord


def write_card(folder: Path, record: RunRecord, config: HardenConfig) -> None:
    """Put README.md beside the weights."""
    (folder / "README.md").write_text(card(so_far(record), config), encoding="utf-8")


def card(found: dict[str, Any], config: HardenConfig) -> str:
    """The text."""
    plans = "\n".join(f"- `{plan}`" for plan in config.plans) or "- nothing (a control)"
    base = Path(config.model).name
    return f"""---
library_name: transformers
tags: [shaketable, hardened]
---

# {base}, hardened

Made by `shaketable harden` from `{base}`, to stand

{plans}

{found["sentence"]}.

{_table(found)}

Scores are {found["measure"]}, on {found["before"][0]["n"]} {_scored_on(config)}; KL is KL(clean‖this), in nats a token, on
completions of the clean model. Recovered is the share of what the fault takes, with its 95 % interval. The weights are
ordinary: nothing of Shaketable is needed to load them. Run {found["id"]}, seed {config.seed}.
"""


def _scored_on(config: HardenConfig) -> str:
    return f"problems of `{config.task}`" if config.task else "prompts that were kept apart"


def _table(found: dict[str, Any]) -> str:
    names = [c["name"] for c in found["before"]]
    lines = ["| after | " + " | ".join(f"{n} | KL" for n in names) + " | recovered |", "|---" * (2 * len(names) + 2) + "|"]
    lines.append(_row("nothing", found["before"], "–"))
    for rung in found["rungs"]:
        ends = [f"{s['share']:.0%} ({interval_end(s, 'low')} to {interval_end(s, 'high')})" for s in rung["shares"].values()]
        what = named(rung)
        lines.append(_row(what, rung["conditions"], "; ".join(ends) or "–"))
    return "\n".join(lines)


def _row(what: str, conditions: list[dict[str, Any]], recovered: str) -> str:
    return f"| {what} | " + " | ".join(f"{c['accuracy']:.1%} | {c['kl']:.3g}" for c in conditions) + f" | {recovered} |"
