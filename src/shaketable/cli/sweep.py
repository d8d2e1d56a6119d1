"""`shaketable sweep`: a robustness curve with intervals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.cli.config_options import options_of
from shaketable.cli.outputs import OutputFiles
from shaketable.cli.verb import ForceOption, HtmlOption, JsonOption
from shaketable.errors import ShaketableError
from shaketable.evaluate.sweep.config import SweepConfig

if TYPE_CHECKING:
    from shaketable.records.record import RunRecord


OPTIONS = ("task", "plan", "magnitudes", "n", "seeds", "seed", "batch_size", "device", "dtype", "engine", "engine_args")


@options_of(
    SweepConfig,
    *OPTIONS,
    metavar={"magnitudes": "NUMBERS", "engine_args": "JSON"},
    default=dict.fromkeys(OPTIONS) | {"device": "auto"},
    flag={"n": ("-n", "--limit")},
    text=("magnitudes", "engine_args"),
)
def sweep(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL…", help=SweepConfig.model_fields["models"].description)
    ] = None,
    *,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Run folder; a new one under runs/ by default.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the sweep recorded there, as it was configured.")
    ] = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
    png_file: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the curve.")] = None,
    force: ForceOption = False,
    **fields: Any,
) -> None:
    """Measure how a model's accuracy falls as a fault grows: intervals, paired differences, KL, and proof of the fault.

    shaketable sweep nano --task arithmetic,level=3 --plan relative_gaussian@op.matmul --magnitudes 0,0.05,0.1
    """
    asked = {"models": tuple(models or ()), **fields}
    given = {key: value for key, value in asked.items() if value not in (None, (), "auto")}
    outputs = OutputFiles("sweep", " ".join(models or ()), json_file, html_file, others=[png_file], of_run=True, force=force)
    config, record = _new(given, out) if resume is None else _old(given, out, resume)
    _run(config, record)
    _finish(record, outputs, png_file)


def _new(given: dict[str, Any], out: Path | None) -> tuple[SweepConfig, RunRecord]:
    """A sweep that begins: all that can be known to be wrong with it is said before a folder is made."""
    from shaketable.cli.locate import load
    from shaketable.evaluate.sweep.config import parse_magnitudes, resolve_plan
    from shaketable.models import chosen_device
    from shaketable.records.environment import gather

    needed = {"models": "MODEL", "task": "--task", "plan": "--plan"}
    if missing := [name for key, name in needed.items() if key not in given]:
        raise ShaketableError(f"a sweep needs {' and '.join(missing)} (or --resume DIR)")
    scale = parse_magnitudes(given.pop("magnitudes")) if "magnitudes" in given else None
    plan = resolve_plan(given.pop("plan"), scale)
    if given.get("engine") != "vllm":
        given["device"] = chosen_device(given.get("device"))
    config = SweepConfig.checked(**{"n": 1} | given, plan=plan, magnitudes=scale)

    from shaketable.evaluate.sweep.run import check
    from shaketable.evaluate.tasks import default_n, load_task

    config = config.model_copy(update={"n": given.get("n") or default_n(load_task(config.task))})
    check(config)
    if config.engine == "vllm" and "device" in given:
        raise ShaketableError("vLLM computes on the device it was built for: drop --device")
    load("nano", config.device, config.dtype, None)  # the smallest model there is, for the device and the dtype
    return config, _record(config, out, gather())


def _record(config: SweepConfig, out: Path | None, environment: dict[str, Any]) -> RunRecord:
    from shaketable.evaluate.sweep.results import short_names
    from shaketable.records.record import RunRecord, unique_folder

    folder = out or unique_folder(Path("runs"), f"sweep-{short_names([config.models[0]])[0]}")
    return RunRecord.create(folder, "sweep", config.model_dump(mode="json"), environment)


def _old(given: dict[str, Any], out: Path | None, folder: Path) -> tuple[SweepConfig, RunRecord]:
    """A sweep that goes on, with what it began with."""
    from shaketable.records.environment import gather
    from shaketable.records.record import RunRecord

    if given or out is not None:
        named = ", ".join(["MODEL" if k == "models" else f"--{k.replace('_', '-')}" for k in given] + ["--out"] * bool(out))
        raise ShaketableError(f"--resume goes on as the sweep was configured: drop {named}")
    record = RunRecord.open(folder, "sweep")
    if not record.events("finished"):
        record.append("resumed", step=0, environment=gather())
    return SweepConfig.checked(**record.config), record


def _run(config: SweepConfig, record: RunRecord) -> None:
    from rich.console import Console

    from shaketable.cli.locate import load, progress_bar
    from shaketable.evaluate.sweep.run import Sweep

    if record.events("finished"):
        return
    words = f"recording in {record.folder}; after an interruption: shaketable sweep --resume {record.folder}"
    Console(stderr=True, highlight=False).print(words, markup=False, soft_wrap=True)
    try:
        with record.alone(), progress_bar() as tell:
            Sweep(config, record, lambda name: load(name, config.device, config.dtype, None), tell).run()
    except KeyboardInterrupt:
        typer.echo(f"stopped; go on with: shaketable sweep --resume {record.folder}", err=True)
        raise typer.Exit(130) from None


def _finish(record: RunRecord, outputs: OutputFiles, png_file: Path | None) -> None:
    from shaketable.cli.tables.sweep import page_of, show
    from shaketable.evaluate.sweep.results import results

    found = results(record)
    outputs.subject = " ".join(found["config"]["models"])
    outputs.save(lambda: found, lambda: page_of(found))
    if png_file is not None:
        from shaketable.evaluate.sweep.results import plot

        try:
            plot(found, png_file)
        except OSError as error:
            raise ShaketableError(f"cannot write {png_file}: {error.strerror or error}") from None
    show(found, [*outputs.files, *([png_file] if png_file is not None else [])])
