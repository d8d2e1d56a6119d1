"""What `train` and `harden` do around a run: a new folder with its record, or one that is gone on with; then the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import typer

if TYPE_CHECKING:
    from shaketable.io.config_model import ConfigModel
    from shaketable.records.record import RunRecord


class RunFunction(Protocol):
    """Do a run, or go on with it."""

    def __call__(self, config: Any, record: RunRecord, *, resume: bool, loaded: Any = None) -> None: ...


class ShowFunction(Protocol):
    """Print what a run came to, and write it."""

    def __call__(self, record: RunRecord, json_file: Path | None) -> None: ...


class RecordedRuns(NamedTuple):
    """The runs of one verb."""

    verb: str
    config: type[ConfigModel]
    run: RunFunction
    show: ShowFunction

    def start(
        self, config: Any, rehearse: Callable[[Any], object], name: str, out: Path | None, json_file: Path | None
    ) -> None:
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
        self._do(config, record, json_file, resume=False, loaded=loaded)

    def go_on(self, folder: Path, json_file: Path | None) -> None:
        """The run in a folder; one that is finished is only shown."""
        from shaketable.records.record import RunRecord

        record = RunRecord.open(folder, self.verb)
        if record.events("finished"):
            self.show(record, json_file)
            return
        self._do(self.config.checked(**record.config), record, json_file, resume=True)

    def _do(self, config: Any, record: RunRecord, json_file: Path | None, *, resume: bool, loaded: Any = None) -> None:
        from shaketable.models import quieten

        quieten()
        again = f"shaketable {self.verb} --resume {record.folder}"
        typer.echo(f"recording in {record.folder}; after an interruption: {again}", err=True)
        with record.alone():
            self.run(config, record, resume=resume, loaded=loaded)
        self.show(record, json_file)
