"""`shaketable study add`: a run that was made elsewhere, as one arm and seed of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shaketable.errors import ShaketableError


def add(
    what: Annotated[Path, typer.Argument(metavar="STUDY", help="The study's YAML, or its folder in a store.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run record's folder, or the folder of ledgers of a verl run.")],
    arm: Annotated[str, typer.Option(help="Which arm it is of; one with `elsewhere: true`.")],
    seed: Annotated[int, typer.Option(min=0, help="Which seed it is.")],
    scores: Annotated[
        list[str] | None,
        typer.Option(metavar="[CONDITION=]FILE", help="Scores, a line of JSON a problem (verl's validation dump)."),
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(metavar="FILE", help="verl's metrics by step, as its file logger writes them.")
    ] = None,
    store: Annotated[Path, typer.Option("--store", metavar="DIR", help="Where records lie.")] = Path("shaketable-runs"),
) -> None:
    """Bring a run that was made elsewhere into a study; `study report` then compares it like all others.

    shaketable study add verl.yaml checkpoints/shaketable/20261118-0200 --arm noise --seed 0 --scores clean=validation/116.jsonl
    """
    from shaketable.cli.study import which_study
    from shaketable.study.add_run import add_run

    asked, folder = which_study(what, [], store)
    cell = add_run(asked, folder.parent, run, arm=arm, seed=seed, scores=_files(scores or []), metrics=metrics)
    typer.echo(f"added {cell.title}: {folder / 'runs' / cell.name}")


def _files(scores: list[str]) -> dict[str, Path]:
    from shaketable.study.config import CLEAN

    found: dict[str, Path] = {}
    for text in scores:
        name, equals, file = text.partition("=")
        name, file = (name, file) if equals else (CLEAN, text)
        if name in found:
            raise ShaketableError(f"--scores {name}=… is given twice")
        found[name] = Path(file)
    return found
