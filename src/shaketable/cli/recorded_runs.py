"""What `train` and `harden` do around a run: a new folder with its record, or one that is gone on with; then the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import typer

if TYPE_CHECKING:
    from shaketable.cli.outputs import OutputFiles
    from shaketable.io.config_model import ConfigModel
    from shaketable.records.record import RunRecord


class RunFunction(Protocol):
    """Do a run, or go on with it."""

    def __call__(self, config: Any, record: RunRecord, *, resume: bool, loaded: Any = None) -> None: ...


class ShowFunction(Protocol):
    """Print what a run came to, and write it."""

    def __call__(self, record: RunRecord, outputs: OutputFiles) -> None: ...


class RecordedRuns(NamedTuple):
    """The runs of one verb."""

    verb: str
    config: type[ConfigModel]
    run: RunFunction
    show: ShowFunction

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

    def go_on(self, folder: Path, outputs: OutputFiles) -> None:
        """The run in a folder; one that is finished is only shown."""
        from shaketable.records.record import RunRecord

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
