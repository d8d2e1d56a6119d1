"""Studies on the screen: the verdict with its tables, how far one is, and what lies in a store."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shaketable.cli.text import plain
from shaketable.io.yaml_file import read_yaml
from shaketable.report.wording import amount
from shaketable.study.analysis.results import ArmScore, Findings

STYLES = {
    "done": "green",
    "failed": "bold red",
    "damaged": "bold red",
    "running": "cyan",
    "partial": "yellow",
    "missing": "dim",
}
VERDICTS = {"shown": "bold green", "not shown": "bold yellow", "nothing": "bold yellow"}


def show(found: Findings, files: list[Path]) -> None:
    """The verdict first, then scores, differences, proof, and what went wrong."""
    console = Console(highlight=False)
    console.print()
    console.print(found.verdict.headline, style=VERDICTS[found.verdict.kind], markup=False, soft_wrap=True)
    for endpoint in dict.fromkeys(s.endpoint for arm in found.arms for s in arm.scores) or ("accuracy",):
        console.print(_scores(found, endpoint))
    for comparison in found.comparisons:
        mark = "[bold]primary[/]  " if comparison.primary else ""
        console.print(f"  {mark}{plain(comparison.sentence)}", soft_wrap=True)
    for row in found.recovered:
        console.print(f"  {plain(row.arm)}, {plain(row.condition)}: {row.sentence}", soft_wrap=True)
    console.print(_proof(found))
    for run in found.runs:
        if run.error:
            console.print(f"[bold red]{run.status}[/] {plain(run.name)}: {plain(run.error)}", soft_wrap=True)
    for note in found.notes:
        console.print(f"[bold yellow]note:[/] {plain(note)}", soft_wrap=True)
    for file in files:
        console.print(f"wrote {file.resolve() if file.suffix == '.html' else file}", markup=False, soft_wrap=True)


def _scores(found: Findings, endpoint: str) -> Table:
    conditions = [c.name for c in found.study.conditions]
    what = {"accuracy": "Accuracy in %", "loss": "Loss in nats per token"}[endpoint]
    table = Table(title=f"{what}, mean over seeds with 95 % interval", title_justify="left")
    table.add_column("arm")
    table.add_column("seeds", justify="right")
    for name in conditions:
        table.add_column(plain(name), justify="right")
    for arm in found.arms:
        known = {s.condition: s for s in arm.scores if s.endpoint == endpoint}
        cells = [_score(known[c]) if c in known else "–" for c in conditions]
        table.add_row(plain(arm.name), str(len(arm.seeds)), *cells)
    return table


def _score(score: ArmScore) -> str:
    mean, low, high = (amount(value, score.unit) for value in (score.mean, score.ci_low, score.ci_high))
    return f"{mean} ({low}–{high})"


def _proof(found: Findings) -> str:
    rows = [row for arm in found.arms for row in arm.proof]
    fires = sum((row.forward or 0) + (row.backward or 0) for row in rows)
    agree = sum(row.verdict in ("agrees", "proven") for row in rows)
    if not rows:
        ended = any(arm.seeds for arm in found.arms)
        return "no faults were asked for, and none were injected" if ended else "no run has ended, so nothing is proven yet"
    off = "" if agree == len(rows) else f"; [bold yellow]{len(rows) - agree} differ, see the report[/]"
    return f"proof: {fires:,} injections; {agree} of {len(rows)} ledgers measure what was asked for{off}"


def show_status(found: dict[str, Any]) -> None:
    """One line per run."""
    console = Console(highlight=False)
    table = Table(title=f"{found['study']}  {_counts(found['counts'])}", title_justify="left")
    for head in ("run", "status", "step", "attempts", ""):
        table.add_column(head, justify="right" if head in ("step", "attempts") else "left", overflow="fold")
    for row in found["runs"]:
        step = "" if row["step"] is None else f"{row['step']}/{row['steps'] or '?'}" if row["steps"] else str(row["step"])
        status = f"[{STYLES[row['status']]}]{row['status']}[/]"
        table.add_row(plain(row["title"]), status, step, str(row["attempts"] or ""), plain(row["error"] or ""))
    console.print(table)
    if found["others"]:
        count = len(found["others"])
        those = "1 run of another version" if count == 1 else f"{count} runs of other versions"
        console.print(f"{those} of this study in {found['folder']}", markup=False)


def show_list(found: dict[str, Any], shipped: dict[str, Path], runs: bool) -> None:
    """One line per study; per run when asked for. Where nothing was run, the studies that ship."""
    console = Console(highlight=False)
    if not found["studies"] and not found["runs"]:
        console.print(f"nothing was run in {found['store']}; these studies ship:", markup=False)
        for name, file in shipped.items():
            console.print(f"  {name:24} {read_yaml(file, 'the study').get('question', '')}", markup=False, soft_wrap=True)
        console.print("shaketable study run NAME", markup=False)
        return
    table = Table(
        title=f"{found['store']}: {_many(found['studies'], 'study', 'studies')}, {_many(found['runs'], 'run', 'runs')}",
        title_justify="left",
    )
    for head in ("study", "runs", "last written"):
        table.add_column(head)
    for study in found["studies"]:
        table.add_row(plain(study["name"]), _counts(study["counts"]), _time(study["updated"]))
    for run in found["runs"]:
        alone = "/" not in run["path"]
        if runs or alone:
            status = f"[{STYLES[run['status']]}]{run['status']}[/]"
            table.add_row(plain(run["path"]), status, _time(run["updated"]))
    console.print(table)


def _many(things: list[Any], one: str, more: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else more}"


def _counts(counts: dict[str, int]) -> str:
    order = [s for s in STYLES if counts.get(s)]
    return ", ".join(f"[{STYLES[s]}]{counts[s]} {s}[/]" for s in order) or "none yet"


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
