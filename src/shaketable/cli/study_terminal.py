"""A study on the screen: what would run, the runs under way, the verdict, the status of runs, and a store's contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from shaketable.cli.terminal import console, plain, print_table, say, table_of, warn
from shaketable.io.yaml_file import read_yaml
from shaketable.report.wording import amount
from shaketable.study.analysis.results import ArmScore, Findings

if TYPE_CHECKING:
    from shaketable.study.cells import Cell
    from shaketable.study.config import StudyConfig
    from shaketable.study.execute import Watch

MARKS = {"done": "[green]✓[/]", "failed": "[bold red]✗[/]", "again": "[yellow]↻[/]", "elsewhere": "[cyan]…[/]"}
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
    """The verdict first, then scores, differences, proof, and failures."""
    out = console()
    say(out, "", found.verdict.headline, style=VERDICTS[found.verdict.kind])
    for endpoint in dict.fromkeys(s.endpoint for arm in found.arms for s in arm.scores) or ("accuracy",):
        print_table(out, _scores(found, endpoint))
    for comparison in found.comparisons:
        mark = "[bold]primary[/]  " if comparison.primary else ""
        out.print(f"  {mark}{plain(comparison.sentence)}", soft_wrap=True)
    say(out, *(f"  {row.arm}, {row.condition}: {row.sentence}" for row in found.recovered))
    out.print(_proof(found))
    for run in found.runs:
        if run.error:
            out.print(f"[bold red]{run.status}[/] {plain(run.name)}: {plain(run.error)}", soft_wrap=True)
    for note in found.notes:
        warn(out, note, "note")
    say(out, *(f"wrote {file.resolve() if file.suffix == '.html' else file}" for file in files))


def _scores(found: Findings, endpoint: str) -> Table:
    conditions = [c.name for c in found.study.conditions]
    what = {"accuracy": "Accuracy in %", "loss": "Loss in nats per token"}[endpoint]
    table = table_of("arm", ("seeds", *map(plain, conditions)), f"{what}, mean over seeds with 95 % interval")
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
    table = table_of(("run", "status"), ("step", "attempts"), f"{found['study']}  {_counts(found['counts'])}")
    table.add_column("", overflow="fold")
    for row in found["runs"]:
        step = "" if row["step"] is None else f"{row['step']}/{row['steps'] or '?'}" if row["steps"] else str(row["step"])
        status = f"[{STYLES[row['status']]}]{row['status']}[/]"
        table.add_row(plain(row["title"]), status, step, str(row["attempts"] or ""), plain(row["error"] or ""))
    out = console()
    print_table(out, table)
    if found["others"]:
        count = len(found["others"])
        those = "1 run of another version" if count == 1 else f"{count} runs of other versions"
        say(out, f"{those} of this study in {found['folder']}")


def show_list(found: dict[str, Any], shipped: dict[str, Path], runs: bool) -> None:
    """One line per study, and per run on request; the studies that ship where nothing was run."""
    out = console()
    if not found["studies"] and not found["runs"]:
        say(out, f"no study was run in {found['store']}; these ship with the package:")
        for name, file in shipped.items():
            say(out, f"  {name:24} {read_yaml(file, 'the study').get('question', '')}")
        say(out, "Run one with: shaketable study run NAME")
        return
    counted = f"{_many(found['studies'], 'study', 'studies')}, {_many(found['runs'], 'run', 'runs')}"
    table = table_of(("study", "runs", "last written"), title=plain(f"{found['store']}: {counted}"))
    for study in found["studies"]:
        table.add_row(plain(study["name"]), _counts(study["counts"]), _time(study["updated"]))
    for run in found["runs"]:
        if runs or "/" not in run["path"]:
            status = f"[{STYLES[run['status']]}]{run['status']}[/]"
            table.add_row(plain(run["path"]), status, _time(run["updated"]))
    print_table(out, table)


def _many(things: list[Any], one: str, more: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else more}"


def _counts(counts: dict[str, int]) -> str:
    order = [s for s in STYLES if counts.get(s)]
    return ", ".join(f"[{STYLES[s]}]{counts[s]} {s}[/]" for s in order) or "none yet"


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


@contextmanager
def live(study: StudyConfig, store: Path) -> Iterator[Watch]:
    """A bar for the study and one for each run under way; finished runs stay on the screen above them."""
    screen = Console(stderr=True, highlight=False)
    say(screen, f"recording in {store / study.study}; if it is interrupted, give the same command again")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(18),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[shown]}"),
    )
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bars:
        yield _View(study, screen, bars)


class _View:
    """Turns events of the executor into bars and lines."""

    def __init__(self, study: StudyConfig, console: Console, bars: Progress) -> None:
        from shaketable.study.cells import own_cells

        self.console, self.bars = console, bars
        self.rows: dict[str, TaskID] = {}
        self.scores: dict[str, str] = {}
        self.left = len(own_cells(study))
        self.whole = bars.add_task(f"[bold]{study.study}[/]", total=self.left, shown="")

    def __call__(self, what: str, cell: Cell, facts: dict[str, Any]) -> None:
        if what == "start":
            total = cell.config.get("steps")
            self.rows[cell.name] = self.bars.add_task(plain(cell.title), total=total, shown="starting")
        elif what == "stage":
            self._row(cell, shown=facts["text"])
        elif what == "step":
            self._row(cell, completed=facts["step"], shown=_numbers(facts))
        elif what == "evaluation":
            self.scores[cell.name] = "  ".join(f"{c['name']} {c['accuracy']:.1%}" for c in facts["conditions"])
        elif what == "warning":
            self.console.print(f"[yellow]![/] {plain(cell.title)}: {plain(facts['text'])}", soft_wrap=True)
        else:
            self._ended(what, cell, facts)

    def _row(self, cell: Cell, **shown: Any) -> None:
        if cell.name in self.rows:
            self.bars.update(self.rows[cell.name], **shown)

    def _ended(self, what: str, cell: Cell, facts: dict[str, Any]) -> None:
        if cell.name in self.rows:
            self.bars.remove_task(self.rows.pop(cell.name))
        words = {"again": "trying again", "elsewhere": "running in another process"}.get(what, "")
        text = facts.get("error") or words or self.scores.get(cell.name, "")
        self.console.print(f"{MARKS[what]} {plain(cell.title)}  [dim]{plain(text)}[/]", soft_wrap=True)
        if what in ("done", "failed"):
            self.bars.advance(self.whole)


def _numbers(facts: dict[str, Any]) -> str:
    shown = f"reward {facts['reward']:.2f}" if "reward" in facts else ""
    return shown + (f"  σ {facts['sigma']:.2g}" if facts.get("sigma") else "")


def show_forecast(study: StudyConfig, store: Path) -> dict[str, Any]:
    """Print what would run, how long it would take and what it can show; return the same as data."""
    from shaketable.models import quieten
    from shaketable.study.config import OWN
    from shaketable.study.forecast import check, forecast

    quieten()
    check(study)
    with Console(stderr=True).status("checking") as shown:
        found = forecast(study, store / study.study, shown.update)
    out = console()
    print_table(out, _arms(study, found.left))
    for name, plan in study.conditions.items():
        what = "the plan and noise of each untrained arm" if name == OWN else plan or "no faults"
        say(out, f"scored {name}: {what}, {study.evaluate.n} problems")
    diagnoses = sum(cell.kind == "locate" for cell in found.left)
    todo = f"{len(found.left)} of {len(found.cells)} runs to do" + (f", {diagnoses} of them a diagnosis" if diagnoses else "")
    if found.seconds is None:
        todo += "; how long they take is known once a run is finished"
    elif found.left:
        todo += (
            f"; about {_duration(found.seconds)}, {found.workers} at a time (a rough guess until each arm has a finished run)"
        )
    say(out, todo, found.can_show)
    return found.to_dict()


def _arms(study: StudyConfig, left: list[Cell]) -> Table:
    table = table_of((), title=plain(f"{study.study}: {study.question}".rstrip(": ")))
    for head in ("arm", "seeds", "trained under", "AQN", "to do"):
        table.add_column(head, justify="right" if head == "to do" else "left", overflow="fold")
    for name, arm in study.arms.items():
        todo = sum(cell.arm == name for cell in left)
        noise = arm.aqn if isinstance(arm.aqn, str) or arm.aqn is None else f"guided: {arm.aqn.guide}"
        trained = {"train": "", "harden": "hardened: ", "evaluate": "not trained; own: ", "added": "elsewhere: "}[arm.kind]
        bare = arm.kind == "evaluate" and not arm.has_own
        under = "not trained" if bare else trained + (study.plan_of(arm) or "no faults")
        table.add_row(plain(name), str(len(study.seeds)), plain(under), noise or "–", str(todo))
    return table


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
