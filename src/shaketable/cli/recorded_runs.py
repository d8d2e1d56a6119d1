"""What `train`, `harden` and `sweep` do around a run: make its folder and record, or resume one; then show the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from shaketable.cli.terminal import progress_bar, say, warn
from shaketable.cli.verb import given_options
from shaketable.errors import ShaketableError

if TYPE_CHECKING:
    from shaketable.cli.outputs import OutputFiles
    from shaketable.io.config_model import ConfigModel
    from shaketable.records.record import RunRecord
    from shaketable.train.config import RunConfig
    from shaketable.train.warm_start import Tell

Facts = dict[str, Any]
WITH_RESUME = ("resume", "json_file", "html_file", "png_file", "force")
"""Options that may be given beside --resume."""


class RecordedRuns(NamedTuple):
    """The runs of one verb."""

    verb: str
    config: type[ConfigModel]
    run: Callable[..., None]
    """Do a run, or the rest of it: takes the configuration, the record, `resume` and `loaded`."""
    show: Callable[[RunRecord, OutputFiles], None]

    def start(self, config: Any, name: str, out: Path | None, outputs: OutputFiles, prepare: Callable[[], Any]) -> None:
        """A new run, in `out` or in a new folder of that name.

        `prepare` comes before the folder is made: it refuses what cannot work, and returns what `run` gets as `loaded`.
        """
        from shaketable.models import quieten
        from shaketable.records.environment import gather
        from shaketable.records.record import RunRecord, check_new, unique_folder

        if out is not None:
            check_new(out)
        quieten()
        loaded = prepare()
        folder = out or unique_folder(Path("runs"), name)
        record = RunRecord.create(folder, self.verb, config.model_dump(mode="json"), gather())
        self._do(config, record, outputs, resume=False, loaded=loaded)

    def resume(self, context: typer.Context, folder: Path, outputs: OutputFiles) -> None:
        """The run in a folder; one that is finished is only shown."""
        from shaketable.records.record import RunRecord

        if given := given_options(context, WITH_RESUME):
            raise ShaketableError(f"--resume takes the configuration from the run: drop {', '.join(given)}")
        record = RunRecord.open(folder, self.verb)
        if record.events("finished"):
            self.show(record, outputs)
            return
        self._do(self.config.checked(**record.config), record, outputs, resume=True)

    def _do(self, config: Any, record: RunRecord, outputs: OutputFiles, *, resume: bool, loaded: Any = None) -> None:
        from shaketable.models import quieten

        quieten()
        again = f"shaketable {self.verb} --resume {record.folder}"
        typer.echo(f"recording in {record.folder}; if it is interrupted, resume it with: {again}", err=True)
        try:
            with record.alone():
                self.run(config, record, resume=resume, loaded=loaded)
        except KeyboardInterrupt:
            typer.echo(f"stopped; resume with: {again}", err=True)
            raise typer.Exit(130) from None
        self.show(record, outputs)


def settled(fields: Facts, *plans: str) -> Facts:
    """The options of a verb that trains: plans as lines, each once; the device and the dtype of this machine."""
    from shaketable.models import chosen_device
    from shaketable.plan import Plan

    lines = {name: tuple(dict.fromkeys(Plan.load(plan).text() for plan in fields[name])) for name in plans}
    device = chosen_device(fields["device"])
    dtype = fields["dtype"] or ("float32" if device == "cpu" else "bfloat16")
    return {**fields, **lines, "device": device, "dtype": dtype}


def load_rehearsed(config: RunConfig, rehearse: Callable[[Any], object]) -> Any:
    """The model, after a rehearsal without weights."""
    from shaketable.models import load_model

    rehearse(config)
    return load_model(config.model, device=config.device, dtype="float32")


@contextmanager
def live(step: Callable[[Facts], Facts], scores: Callable[[Facts], str], total: int | None = None) -> Iterator[Tell]:
    """A bar with the numbers that matter; scores and warnings stay on the screen above it.

    Args:
        step: What the bar shows of a step.
        scores: The line for an evaluation.
        total: Steps in all, where this is known before the first stage.
    """
    with progress_bar("starting", total) as (bar, screen):

        def tell(kind: str, facts: Facts) -> None:
            if kind == "stage":
                counted = {"completed": facts["done"], "total": facts["total"]} if "total" in facts else {}
                bar(description=facts["text"], shown="", **counted)
            elif kind == "step":
                bar(**step(facts))
            elif kind == "warning":
                warn(screen, facts["text"])
            else:
                say(screen, scores(facts))

        yield tell
