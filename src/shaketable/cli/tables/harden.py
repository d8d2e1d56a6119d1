"""What a hardening run came to, as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shaketable.harden.results import named
from shaketable.report.wording import share_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_outcome(found: dict[str, Any], console: Console) -> None:
    """Scores and costs after every stage, and the verdict."""
    table = _table(found)
    table.title, table.title_justify = _title(found), "left"
    console.print(table)
    for line in _lines(found):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"[bold]{found['sentence'].replace('[', chr(92) + '[')}.[/]{_verdict(found)}", soft_wrap=True)
    console.print(f"The model: {found['model']}", markup=False, soft_wrap=True)


def page_of(found: dict[str, Any]) -> str:
    """The same as one HTML page."""
    from shaketable.report.table_html import page

    config, reached = found["config"], found["reached"]
    tag = "HARDENED" if config["target"] is None else "TARGET REACHED" if reached else "TARGET NOT REACHED"
    facts = {"against": "; ".join(config["plans"]), "learnt from": config["task"] or config["prompts"], "model": found["model"]}
    return page(
        "harden",
        config["model"],
        tag,
        f"{found['sentence']}.{_verdict(found)}",
        [(_title(found), _table(found))],
        status="pass" if reached else "shown",
        facts=facts,
        lines=_lines(found),
    )


def _title(found: dict[str, Any]) -> str:
    return f"{found['measure'].capitalize()} in % with 95 % intervals, after each stage"


def _table(found: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    names = [c["name"] for c in found["before"]]
    for head in ("after", *(n.replace("[", "\\[") for n in names), "KL under it", "recovered", "seconds", "sequences"):
        table.add_column(head, justify="left" if head == "after" else "right")
    table.add_row("untreated", *_scores(found["before"]), _kl(found["before"]), "–", "–", "–")
    for rung in found["rungs"]:
        cost = rung["cost"]
        back = (
            "\n".join(share_of(s["share"], s["interval"]["low"], s["interval"]["high"]) for s in rung["shares"].values()) or "–"
        )
        cells = [_kl(rung["conditions"]), back, f"{cost['seconds']:.1f}", f"{cost['sequences']:,}"]
        table.add_row(named(rung), *_scores(rung["conditions"]), *cells)
    return table


def _lines(found: dict[str, Any]) -> list[str]:
    """What the stages said of themselves, the cost at inference, and the proof."""
    lines = []
    for rung in found["rungs"]:
        said = [rung["facts"][key] for key in ("sentence", "undone") if key in rung["facts"]]
        if said:
            lines.append(f"{rung['rung']}: {'; undone: '.join(s.rstrip('.') for s in said)}")
    added = sum(r["cost"]["flops_added"] for r in found["rungs"])
    lines.append(f"Added at inference: {added:,.0f} FLOPs a token" if added else "Added at inference: nothing")
    return lines + [f"{plan}: fired {one['forward']:,} times while it was repaired" for plan, one in found["ledgers"].items()]


def _verdict(found: dict[str, Any]) -> str:
    target = found["config"]["target"]
    return "" if target is None else f" The target of {target:.0%} is {'reached' if found['reached'] else 'not reached'}."


def _scores(conditions: list[dict[str, Any]]) -> list[str]:
    return [f"{100 * c['accuracy']:.1f} ({100 * c['ci_low']:.0f}–{100 * c['ci_high']:.0f})" for c in conditions]


def _kl(conditions: list[dict[str, Any]]) -> str:
    return " ".join(f"{c['kl']:.3g}" for c in conditions[1:])
