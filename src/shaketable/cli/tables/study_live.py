"""What one sees while a study runs, and before it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaketable.cli.text import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

    from shaketable.study.cells import Cell
    from shaketable.study.config import StudyConfig
    from shaketable.study.execute import Watch

MARKS = {"done": "[green]✓[/]", "failed": "[bold red]✗[/]", "again": "[yellow]↻[/]", "elsewhere": "[cyan]…[/]"}


@contextmanager
def live(study: StudyConfig, store: Path) -> Iterator[Watch]:
    """A bar for the study and one for each run under way; what ended stays on the screen above them."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    console.print(f"records in {store / study.study}; after an interruption, the same command goes on", markup=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(18),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[shown]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield _View(study, console, bars)


class _View:
    """Turns what the engine tells into bars and lines."""

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
        words = {"again": "tries again", "elsewhere": "another process is at it"}.get(what, "")
        text = facts.get("error") or words or self.scores.get(cell.name, "")
        self.console.print(f"{MARKS[what]} {plain(cell.title)}  [dim]{plain(text)}[/]", soft_wrap=True)
        if what in ("done", "failed"):
            self.bars.advance(self.whole)


def _numbers(facts: dict[str, Any]) -> str:
    shown = f"reward {facts['reward']:.2f}" if "reward" in facts else ""
    return shown + (f"  σ {facts['sigma']:.2g}" if facts.get("sigma") else "")


def show_forecast(study: StudyConfig, store: Path) -> dict[str, Any]:
    """What would run, how long it would take, and what it can show; the same as data."""
    from rich.console import Console

    from shaketable.models import quieten
    from shaketable.study.config import OWN
    from shaketable.study.forecast import forecast
    from shaketable.study.run_study import check

    console = Console(highlight=False)
    quieten()
    check(study)
    with Console(stderr=True).status("probing") as shown:
        found = forecast(study, store / study.study, shown.update)
    console.print(_arms(study, found.left))
    for name, plan in study.conditions.items():
        what = "the plan and noise of each untrained arm" if name == OWN else plan or "no faults"
        console.print(f"scored {name}: {what}, {study.evaluate.n} problems", markup=False)
    diagnoses = sum(cell.kind == "locate" for cell in found.left)
    what = f"{len(found.left)} of {len(found.cells)} runs to do" + (f", {diagnoses} of them a diagnosis" if diagnoses else "")
    if found.left:
        what += f"; about {_duration(found.seconds)} with {found.workers} at a time, by a probe of {found.probed} arms"
    console.print(what, markup=False, soft_wrap=True)
    console.print(found.can_show, markup=False, soft_wrap=True)
    return found.to_dict()


def _arms(study: StudyConfig, left: list[Cell]) -> Table:
    from rich.table import Table

    table = Table(title=f"{study.study}: {study.question}".rstrip(": "), title_justify="left")
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
