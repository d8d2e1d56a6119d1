"""What `train` and `harden` do around a run: a new folder with its record, or a resumed one; progress; then the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import typer

from shaketable.errors import ShaketableError

if TYPE_CHECKING:
    from shaketable.cli.outputs import OutputFiles
    from shaketable.io.config_model import ConfigModel
    from shaketable.records.record import RunRecord
    from shaketable.train.warm_start import Tell

Facts = dict[str, Any]
RESUME_TAKES = ("resume", "json_file", "html_file", "force")


class RunFunction(Protocol):
    """Do a run, or go on with it."""

    def __call__(self, config: Any, record: RunRecord, *, resume: bool, loaded: Any = None) -> None: ...


class RecordedRuns(NamedTuple):
    """The runs of one verb."""

    verb: str
    config: type[ConfigModel]
    run: RunFunction
    show: Callable[[RunRecord, OutputFiles], None]

    def start(self, config: Any, rehearse: Callable[[Any], object], name: str, out: Path | None, outputs: OutputFiles) -> None:
        """A new run, in `out` or in a new folder of that name, after it was rehearsed without weights."""
        from shaketable.models import load_model, quieten
        from shaketable.records.environment import gather
        from shaketable.records.record import RunRecord, check_new, unique_folder

        if out is not None:
            check_new(out)
        quieten()
        rehearse(config)
        folder = out or unique_folder(Path("runs"), name)
        loaded = load_model(config.model, device=config.device, dtype="float32")  # before a folder is made: it may be broken
        record = RunRecord.create(folder, self.verb, config.model_dump(mode="json"), gather())
        self._do(config, record, outputs, resume=False, loaded=loaded)

    def resume(self, context: typer.Context, folder: Path, outputs: OutputFiles) -> None:
        """The run in a folder; one that is finished is only shown. Refuses options that would configure it."""
        from shaketable.records.record import RunRecord

        given = [p.opts[0] for p in context.command.params if is_given(context, p.name) and p.name not in RESUME_TAKES]
        if given:
            raise ShaketableError(f"--resume goes on as the run was configured: drop {', '.join(given)}")
        record = RunRecord.open(folder, self.verb)
        outputs.subject = str(record.config["model"])
        if record.events("finished"):
            self.show(record, outputs)
            return
        self._do(self.config.checked(**record.config), record, outputs, resume=True)

    def _do(self, config: Any, record: RunRecord, outputs: OutputFiles, *, resume: bool, loaded: Any = None) -> None:
        from shaketable.models import quieten

        quieten()
        again = f"shaketable {self.verb} --resume {record.folder}"
        typer.echo(f"recording in {record.folder}; after an interruption: {again}", err=True)
        try:
            with record.alone():
                self.run(config, record, resume=resume, loaded=loaded)
        except KeyboardInterrupt:
            typer.echo(f"stopped; go on with: {again}", err=True)
            raise typer.Exit(130) from None
        self.show(record, outputs)


def is_given(context: typer.Context, name: str | None) -> bool:
    """Whether an option stands on the command line, or in the file of --config."""
    source = context.get_parameter_source(name or "")
    return source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")


@contextmanager
def live(step: Callable[[Facts], Facts], scores: Callable[[Facts], str | None], total: int | None = None) -> Iterator[Tell]:
    """A bar with the numbers that matter; scores and warnings stay on the screen above it.

    Args:
        step: What the bar shows of a step.
        scores: The line for an evaluation; None to leave it out.
        total: Steps in all, where this is known before the first stage.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    text, numbers = TextColumn("{task.description}"), TextColumn("{task.fields[shown]}")
    columns = (text, BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), numbers)
    with Progress(*columns, console=console, transient=True) as bar:
        row = bar.add_task("starting", total=total, shown="")

        def tell(kind: str, facts: Facts) -> None:
            if kind == "stage":
                counted = {"completed": facts["done"], "total": facts["total"]} if "total" in facts else {}
                bar.update(row, description=facts["text"], shown="", **counted)
            elif kind == "step":
                bar.update(row, **step(facts))
            elif kind == "warning":
                console.print(f"[bold yellow]warning:[/] {facts['text']}")
            elif (line := scores(facts)) is not None:
                console.print(line, markup=False)

        yield tell
