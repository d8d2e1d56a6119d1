"""A study on the screen: what would run, the runs under way, the verdict, the status of runs, and a store's contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from shaketable.cli.terminal import console, plain, print_table, progress_bar, say, table_of, warn
from shaketable.io.yaml_file import read_yaml
from shaketable.report.study_tables import score_tables
from shaketable.report.wording import counted, duration, proof_summary
from shaketable.study.analysis.results import Findings

if TYPE_CHECKING:
    from shaketable.study.cells import Cell
    from shaketable.study.config import StudyConfig
    from shaketable.study.execute import Happening, Watch

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
    for scores in score_tables(found):
        shown = table_of("arm", [plain(name) for name in list(scores.columns)[1:]], f"{scores.title}, with 95 % intervals")
        for row in scores.rows:
            shown.add_row(*(plain(f"{cell.text} ({cell.note})" if cell.note else cell.text) for cell in row))
        print_table(out, shown)
    for comparison in found.comparisons:
        mark = "[bold]primary[/]  " if comparison.primary else ""
        out.print(f"  {mark}{plain(comparison.sentence)}", soft_wrap=True)
    say(out, *(f"  {row.arm}, {row.condition}: {row.sentence}" for row in found.recovered))
    say(out, f"proof of injection: {proof_summary(found.arms).words}")
    for run in found.runs:
        if run.error:
            out.print(f"[bold red]{run.status}[/] {plain(run.name)}: {plain(run.error)}", soft_wrap=True)
    for note in found.notes:
        warn(out, note, "note")
    say(out, *(f"wrote {file.resolve() if file.suffix == '.html' else file}" for file in files))


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
        say(out, f"{counted(len(found['others']), 'run')} of other versions of this study in {found['folder']}")


def show_list(found: dict[str, Any], shipped: dict[str, Path]) -> None:
    """One line per study; the studies that ship where none was run."""
    out = console()
    if not found["studies"]:
        say(out, f"no study was run in {found['store']}; these ship with the package:")
        for name, file in shipped.items():
            say(out, f"  {name:24} {read_yaml(file, 'the study').get('question', '')}")
        say(out, "Run one with: shaketable study run NAME")
        return
    table = table_of(("study", "runs", "last written"), title=plain(found["store"]))
    for study in found["studies"]:
        written = datetime.fromtimestamp(study["updated"]).strftime("%Y-%m-%d %H:%M")
        table.add_row(plain(study["name"]), _counts(study["counts"]), written)
    print_table(out, table)


def _counts(counts: dict[str, int]) -> str:
    order = [s for s in STYLES if counts.get(s)]
    return ", ".join(f"[{STYLES[s]}]{counts[s]} {s}[/]" for s in order) or "none yet"


@contextmanager
def live(study: StudyConfig, store: Path) -> Iterator[Watch]:
    """A bar with the runs under way; finished runs stay on the screen above it, with their scores and warnings."""
    from shaketable.study.cells import own_cells
    from shaketable.study.runs import Run

    runs, under_way = store / study.study / "runs", list[str]()
    with progress_bar(study.study, len(own_cells(study))) as (bar, screen):
        say(screen, f"recording in {store / study.study}; if it is interrupted, give the same command again")
        ended = 0

        def watch(what: Happening, cell: Cell, error: str) -> None:
            nonlocal ended
            if what == "start":
                under_way.append(cell.title)
            else:
                words = error or {"again": "trying again", "elsewhere": "running in another process"}.get(what, "")
                if what == "done":
                    run = Run.of(cell, runs)
                    scores = (run.last("evaluation") or {}).get("conditions", ())
                    words = "  ".join(f"{c['name']} {c['accuracy']:.1%}" for c in scores)
                    for event in run.of_kind("warning"):
                        warn(screen, f"{cell.title}: {event['text']}")
                under_way[:] = [title for title in under_way if title != cell.title]
                ended += what in ("done", "failed")
                screen.print(f"{MARKS[what]} {plain(cell.title)}  [dim]{plain(words)}[/]", soft_wrap=True)
            bar(completed=ended, shown=plain("; ".join(under_way)))

        yield watch


def show_forecast(study: StudyConfig, store: Path) -> dict[str, Any]:
    """Print what would run, how long it would take and what it can show; return the same as data."""
    from shaketable.models import quieten
    from shaketable.study.config import OWN
    from shaketable.study.forecast import check, forecast

    quieten()
    check(study)
    with Console(stderr=True).status("scoring a few problems without a fault"):
        found = forecast(study, store / study.study)
    out = console()
    print_table(out, _arms(study, found.left))
    for name, plan in study.conditions.items():
        what = "the plan and noise of each untrained arm" if name == OWN else plan or "no faults"
        say(out, f"scored {name}: {what}, {study.evaluate.n} problems")
    todo = f"{len(found.left)} of {len(found.cells)} runs to do"
    if found.seconds is not None and found.left:
        todo += f"; very roughly {duration(found.seconds)}, {found.workers} at a time"
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
