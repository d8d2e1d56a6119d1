"""What a hardening run came to, as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shaketable.harden.results import named
from shaketable.report.wording import share_of

if TYPE_CHECKING:
    from rich.console import Console


def print_outcome(found: dict[str, Any], console: Console) -> None:
    """Scores and costs after every rung, and the verdict."""
    from rich.table import Table

    title = f"{found['measure'].capitalize()} in % with 95 % intervals, after each rung"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    names = [c["name"] for c in found["before"]]
    for head in ("after", *(n.replace("[", "\\[") for n in names), "KL under it", "recovered", "seconds", "sequences"):
        table.add_column(head, justify="left" if head == "after" else "right")
    table.add_row("nothing", *_scores(found["before"]), _kl(found["before"]), "–", "–", "–")
    for rung in found["rungs"]:
        cost = rung["cost"]
        back = (
            "\n".join(share_of(s["share"], s["interval"]["low"], s["interval"]["high"]) for s in rung["shares"].values()) or "–"
        )
        cells = [_kl(rung["conditions"]), back, f"{cost['seconds']:.1f}", f"{cost['sequences']:,}"]
        table.add_row(named(rung), *_scores(rung["conditions"]), *cells)
    console.print(table)
    for rung in found["rungs"]:
        said = [rung["facts"][key] for key in ("sentence", "undone") if key in rung["facts"]]
        if said:
            console.print(f"{rung['rung']}: {'; undone: '.join(s.rstrip('.') for s in said)}", markup=False, soft_wrap=True)
    added = sum(r["cost"]["flops_added"] for r in found["rungs"])
    console.print(f"Added at inference: {added:,.0f} FLOPs a token" if added else "Added at inference: nothing", markup=False)
    for plan, ledger in found["ledgers"].items():
        console.print(f"{plan}: fired {ledger['forward']:,} times while it was repaired", markup=False, soft_wrap=True)
    target = found["config"]["target"]
    verdict = "" if target is None else f" The target of {target:.0%} is {'reached' if found['reached'] else 'not reached'}."
    console.print(f"[bold]{found['sentence'].replace('[', chr(92) + '[')}.[/]{verdict}", soft_wrap=True)
    console.print(f"The model: {found['model']}", markup=False, soft_wrap=True)


def _scores(conditions: list[dict[str, Any]]) -> list[str]:
    return [f"{100 * c['accuracy']:.1f} ({100 * c['ci_low']:.0f}–{100 * c['ci_high']:.0f})" for c in conditions]


def _kl(conditions: list[dict[str, Any]]) -> str:
    return " ".join(f"{c['kl']:.3g}" for c in conditions[1:])
