"""`shaketable study`: run arms × seeds from one file, look at their records, and report them."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shaketable.cli.outputs import OutputFiles, write
from shaketable.cli.verb import ForceOption, JsonOption, as_verb
from shaketable.errors import ShaketableError

if TYPE_CHECKING:
    from shaketable.study.analysis.results import Findings
    from shaketable.study.config import StudyConfig

DEFAULT = Path("shaketable-runs")

StoreOption = Annotated[Path, typer.Option("--store", metavar="DIR", help="Folder of all records.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Replace a value of the file, e.g. train.steps=200; can be repeated."),
]
StudyArgument = Annotated[Path, typer.Argument(metavar="STUDY", help="The study's YAML, or its folder in a store.")]

study = typer.Typer(
    name="study",
    help="Compare recipes with statistics: arms × seeds from one YAML file, run, resumed and reported.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The study's YAML file, or the name of one that ships.")],
    replaced: SetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run, how long it takes, and what it can show.")
    ] = False,
    workers: Annotated[
        str | None, typer.Option(metavar="local|ray|N", help="Where runs execute, or how many at a time; ray:8 says both.")
    ] = None,
    store: StoreOption = DEFAULT,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Also write the report: .html, .md or .json.")
    ] = None,
    json_file: JsonOption = None,
    force: ForceOption = False,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run the Python code that the file names as its task, my_tasks.py:Class.")
    ] = False,
) -> None:
    """Run a study, or the runs that are missing. After an interruption, give the same command again.

    Finished runs are kept, a killed one resumes from its last checkpoint, and two processes that run the same study share
    its runs. Exits 1 when a run failed.

    shaketable study run guided-aqn --set seeds=5 --report guided.html
    """
    from shaketable.study.file import load_study

    asked = load_study(file, [*(replaced or ()), *_workers(workers)])
    outputs = OutputFiles(json_file, report_file, reads=[file], force=force)
    _check_code(asked, file, allow_code)
    if dry_run:
        from shaketable.cli.study_terminal import show_forecast
        from shaketable.study.store import asked_digest

        forecast = show_forecast(asked, store)
        outputs.save(lambda: forecast)
        typer.echo(f"asked   sha256:{asked_digest(asked)}")
        return
    again = _command(file, replaced or [], store)
    failed = _do(asked, store, again)
    found = _findings(asked, store, again)
    if json_file is not None:
        write(json_file, rendered(found, ".json", store / asked.study, json_file))
    if report_file is not None:
        text = rendered(found, report_file.suffix, store / asked.study, report_file)
        write(report_file, text)
    from shaketable.cli.study_terminal import show

    show(found, outputs.files)
    typer.echo(f"records sha256:{found.study.digest}")
    raise typer.Exit(1 if failed else 0)


def _workers(text: str | None) -> list[str]:
    """What `local`, `ray`, `4` or `ray:4` sets in a study."""
    if text is None:
        return []
    found = re.fullmatch(r"(local|ray)?:?([1-9]\d*)?", text)
    if not text or found is None:
        raise ShaketableError(f"--workers {text}: write local, ray, the number of runs at a time, or both: ray:8")
    return [f"engine.{key}={value}" for key, value in zip(("kind", "workers"), found.groups(), strict=True) if value]


def _check_code(asked: StudyConfig, file: Path, allowed: bool) -> None:
    """A task that is a Python class is a program; a study file may run one only with --allow-code."""
    if (code := _code_of(asked)) is not None and not allowed:
        raise ShaketableError(f"{file} names the task {code}, which runs Python code; read it, and allow it with --allow-code")


def _code_of(asked: StudyConfig) -> str | None:
    from shaketable.evaluate.tasks import code_in

    tasks = [asked.task, *(arm.task for arm in asked.arms.values() if arm.task is not None)]
    return next((code for task in tasks if (code := code_in(task)) is not None), None)


def _do(asked: StudyConfig, store: Path, again: str) -> int:
    """Run it with a live view; the number of runs that failed."""
    from shaketable.cli.study_terminal import live
    from shaketable.models import quieten
    from shaketable.study.execute import run_study
    from shaketable.study.forecast import check, check_scores

    quieten()
    check(asked)
    check_scores(asked, store / asked.study)
    try:
        with live(asked, store) as watch:
            states = run_study(asked, store, watch)
    except KeyboardInterrupt:
        typer.echo(f"stopped; finished runs are kept. Resume with: {again}", err=True)
        raise typer.Exit(130) from None
    return sum(state == "failed" for state in states.values())


def _findings(asked: StudyConfig, store: Path, command: str) -> Findings:
    from shaketable.study.analysis.findings import findings

    found = findings(asked, store / asked.study)
    again = f"{command} --allow-code" if command and _code_of(asked) else command
    return found.model_copy(update={"study": found.study.model_copy(update={"command": again})})


def status(
    what: StudyArgument,
    replaced: SetOption = None,
    store: StoreOption = DEFAULT,
    json_file: JsonOption = None,
    force: ForceOption = False,
) -> None:
    """Show which runs of a study are done, running, partial, failed, damaged or missing."""
    from shaketable.cli.study_terminal import show_status
    from shaketable.study.store import progress

    asked, folder = which_study(what, replaced or [], store)
    outputs = OutputFiles(json_file, reads=[what], force=force)
    found = progress(asked, folder)
    outputs.save(lambda: found)
    show_status(found)


def list_studies(
    store: StoreOption = DEFAULT,
    json_file: JsonOption = None,
    force: ForceOption = False,
) -> None:
    """List the studies of a store, or those that ship if none was run."""
    from shaketable.cli.study_terminal import show_list
    from shaketable.study.file import shipped
    from shaketable.study.store import listed

    outputs = OutputFiles(json_file, force=force)
    found = listed(store) | {"shipped": list(shipped())}
    outputs.save(lambda: found)
    show_list(found, shipped())


def verify(
    store: Annotated[Path, typer.Argument(metavar="[STORE]", help="A store, or a study's folder.")] = DEFAULT,
    json_file: JsonOption = None,
    force: ForceOption = False,
) -> None:
    """Read every line of every record, and name those that were changed. Exits 1 if there are any.

    An edited record whose whole chain was recomputed is accepted: compare the digest with a published or signed one.

    shaketable study verify shaketable-runs
    """
    from shaketable.study.store import verify as verified

    outputs = OutputFiles(json_file, force=force)
    found = verified(store)
    outputs.save(lambda: found)
    for record in found["records"]:
        if record["problem"] is not None:
            typer.echo(f"bad: {record['path']}: {record['problem']}")
    for one in found["studies"]:
        typer.echo(f"{one['study']}: records sha256:{one['digest']}")
        if one["asked"] is not None:
            typer.echo(f"{one['study']}: asked   sha256:{one['asked']}")
    many = f"{len(found['records'])} record{'' if len(found['records']) == 1 else 's'}"
    unchanged = f"{many}, unchanged as far as their chains can tell"
    typer.echo(f"{found['bad']} of {many} cannot be trusted" if found["bad"] else unchanged)
    raise typer.Exit(1 if found["bad"] else 0)


def report(
    what: StudyArgument,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="File to write: .html, .md or .json.")] = None,
    replaced: SetOption = None,
    store: StoreOption = DEFAULT,
    force: ForceOption = False,
) -> None:
    """Write the report of a study from its records: one self-contained HTML page, Markdown or JSON; without -o, Markdown.

    shaketable study report guided-aqn -o report.html
    """
    asked, folder = which_study(what, replaced or [], store)
    found = _findings(asked, folder.parent, _command(what, replaced or [], store) if what.is_file() else "")
    OutputFiles(html_file=out, force=force)
    text = rendered(found, ".md" if out is None else out.suffix, folder, out)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write(out, text)
        typer.echo(f"wrote {out}", err=True)


def add(
    what: StudyArgument,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or the ledger folder of a verl run.")],
    arm: Annotated[str, typer.Option(help="The arm it belongs to; one with `elsewhere: true`.")],
    seed: Annotated[int, typer.Option(min=0, help="The seed it was run with.")],
    scores: Annotated[
        list[str] | None,
        typer.Option(metavar="[CONDITION=]FILE", help="Scores, one line of JSON per problem, such as verl's validation dump."),
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Metrics per step, as verl's file logger writes them.")
    ] = None,
    store: StoreOption = DEFAULT,
) -> None:
    """Add a run that was made elsewhere to a study, so that `study report` compares it with the others.

    shaketable study add verl.yaml checkpoints/shaketable/20261118-0200 --arm noise --seed 0 --scores clean=validation/116.jsonl
    """
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


def _command(file: Path, replaced: list[str], store: Path) -> str:
    """What does the study again."""
    kept = [] if store == DEFAULT else ["--store", str(store)]
    return shlex.join(["shaketable", "study", "run", str(file), *(w for r in replaced for w in ("--set", r)), *kept])


def which_study(what: Path, replaced: list[str], store: Path) -> tuple[StudyConfig, Path]:
    """The study that is meant, and its folder."""
    from shaketable.study.file import load_study
    from shaketable.study.store import last_defined

    if what.is_dir():
        if replaced:
            raise ShaketableError("--set goes with a study's file; a folder is shown as it was run")
        return last_defined(what), what
    if not what.exists() and (store / what).is_dir():
        return last_defined(store / what), store / what
    asked = load_study(what, replaced)
    return asked, store / asked.study


def rendered(found: Findings, ending: str, folder: Path, output: Path | None) -> str:
    """Findings as JSON, Markdown or a page; records are linked as seen from where the report lies."""
    here = os.path.relpath(folder.resolve(), Path.cwd() if output is None else output.resolve().parent)
    runs, diagnoses = (
        tuple(part.model_copy(update={"folder": Path(here, part.folder).as_posix()}) for part in parts)
        for parts in (found.runs, found.diagnoses)
    )
    found = found.model_copy(update={"runs": runs, "diagnoses": diagnoses})
    if ending == ".json":
        return found.to_json() + "\n"
    if ending == ".md":
        from shaketable.report.study_markdown import markdown

        return markdown(found)
    from shaketable.report.study_html import page

    return page(found)


study.command()(as_verb(run, ("file", "replaced", "dry_run", "workers", "store", "report_file", "json_file")))
study.command()(as_verb(status, ("what", "replaced", "store", "json_file")))
study.command(name="list")(as_verb(list_studies, ("store", "json_file")))
study.command()(as_verb(report, ("what", "out", "replaced", "store")))
study.command()(as_verb(verify, ("store", "json_file")))
study.command()(as_verb(add, ("what", "run", "arm", "seed", "scores", "metrics", "store")))
