"""The ledger as a table for people."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from shaketable.ledger.ledger import Ledger


def _percent(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2%}" if value == 0 or value >= 1e-4 else f"{value:.1e}"


def build_table(ledger: Ledger) -> Table:
    """One row per clause of the plan."""
    title = f"Ledger · seed {ledger.seed} · noise by {ledger.kernel}"
    if ledger.processes > 1:
        title += f" · {ledger.processes} processes"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("plan", overflow="fold", min_width=20)
    zones = any(s.fault.startswith("dead_zone") for s in ledger.sites)
    for head in ("sites", "forward", "backward", "error", "changed", *(["kept"] if zones else []), "time"):
        table.add_column(head, justify="right", no_wrap=True)
    for site in ledger.sites:
        row = site.to_dict()
        kept = [_percent(row["survival_rate"]) if site.fault.startswith("dead_zone") else ""] if zones else []
        counts = [f"{n:,}" for n in (site.matched, site.forward, site.backward)]
        shares = [_percent(row["measured_error"]), _percent(row["changed_fraction"])]
        table.add_row(f"{site.named}\n  @{site.site}", *counts, *shares, *kept, f"{row['seconds']:.2f} s")
    return table


def remarks(ledger: Ledger) -> list[str]:
    """Lines below the table: magnitudes that are off, parts that are not covered, clauses that did nothing."""
    lines = [f"{s.site}: {remark}" for s in ledger.sites if (remark := s.remark())]
    lines += [
        f"{s.site}: {s.fused} fused attention calls; their inner products are not exposed" for s in ledger.sites if s.fused
    ]
    lines += [f"{s.site}: {note}" for s in ledger.sites for note in s.notes]
    for site in ledger.sites:
        silent = [name for name, spot in site.spots.items() if site.static and not spot.counts]
        if silent and len(silent) < len(site.spots):
            lines.append(f"{site.site}: {len(silent)} of {site.matched} sites never fired: {', '.join(silent[:3])}, …")
    return lines + ledger.inert()


def ledger_table(ledger: Ledger) -> str:
    """The table and its remarks as plain text."""
    console = Console(width=110, file=StringIO())
    with console.capture() as capture:
        console.print(build_table(ledger))
    text = capture.get().rstrip()
    return "\n".join([text, *(f"  ! {line}" for line in remarks(ledger))])
