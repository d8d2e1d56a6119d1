"""`shaketable sweep`: a robustness curve with intervals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from shaketable.cli.outputs import OutputFiles
from shaketable.cli.recorded_runs import RecordedRuns
from shaketable.cli.terminal import console, plain, print_table, progress_bar, say, table_of
from shaketable.cli.verb import ForceOption, HtmlOption, JsonOption, ResumeOption, RunFolderOption, options_of
from shaketable.errors import ShaketableError
from shaketable.evaluate.sweep.config import SweepConfig

if TYPE_CHECKING:
    from shaketable.records.record import RunRecord

OPTIONS = ("task", "plan", "magnitudes", "n", "seeds", "seed", "batch_size", "device", "dtype", "engine", "engine_args")
Facts = dict[str, Any]


@options_of(
    SweepConfig,
    *OPTIONS,
    metavar={"magnitudes": "NUMBERS", "engine_args": "JSON"},
    default=dict.fromkeys(OPTIONS) | {"plan": (), "device": "auto"},
    flag={"n": ("-n", "--limit")},
    text=("magnitudes", "engine_args"),
)
def sweep(
    context: typer.Context,
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL…", help=SweepConfig.model_fields["models"].description)
    ] = None,
    *,
    out: RunFolderOption = None,
    resume: ResumeOption = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
    png_file: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the curve.")] = None,
    force: ForceOption = False,
    **fields: Any,
) -> None:
    """Measure how a model's accuracy falls as a fault grows: intervals, paired differences, KL, and proof of the fault.

    shaketable sweep nano --task arithmetic,level=3 --plan relative_gaussian@op.matmul --magnitudes 0,0.05,0.1

    Repeat --plan to compare formats: shaketable sweep nano --task text --plan mxfp4@module.linear --plan nvfp4@module.linear
    """
    asked = {"models": tuple(models or ()), **fields}
    given = {key: value for key, value in asked.items() if value not in (None, (), [], "auto")}
    outputs = OutputFiles(json_file, html_file, others=[png_file], force=force)
    runs = RecordedRuns("sweep", SweepConfig, _run, lambda record, outputs: _show(record, outputs, png_file))
    if resume is not None:
        runs.resume(context, resume, outputs)
        return
    config = _config(given)

    from shaketable.cli.loading import load
    from shaketable.evaluate.sweep.results import short_names

    # the smallest model there is shows whether device and dtype work
    runs.start(
        config,
        f"sweep-{short_names([config.models[0]])[0]}",
        out,
        outputs,
        lambda: load("nano", config.device, config.dtype, None),
    )


def _config(given: Facts) -> SweepConfig:
    """The sweep that was asked for, checked as far as it can be before anything is loaded."""
    from shaketable.evaluate.sweep.config import parse_magnitudes, resolve_plans
    from shaketable.models import chosen_device

    needed = {"models": "MODEL", "task": "--task", "plan": "--plan"}
    if missing := [name for key, name in needed.items() if key not in given]:
        raise ShaketableError(f"a sweep needs {' and '.join(missing)} (or --resume DIR)")
    scale = parse_magnitudes(given.pop("magnitudes")) if "magnitudes" in given else None
    plan = resolve_plans(given.pop("plan"), scale)
    if given.get("engine") != "vllm":
        given["device"] = chosen_device(given.get("device"))
    config = SweepConfig.checked(**{"n": 1} | given, plan=plan, magnitudes=scale)

    from shaketable.evaluate.sweep.run import check
    from shaketable.evaluate.tasks import default_n, load_task

    config = config.model_copy(update={"n": given.get("n") or default_n(load_task(config.task))})
    check(config)
    if config.engine == "vllm" and "device" in given:
        raise ShaketableError("vLLM computes on the device it was built for: drop --device")
    return config


def _run(config: SweepConfig, record: RunRecord, *, resume: bool, loaded: Any = None) -> None:
    from shaketable.cli.loading import load
    from shaketable.evaluate.sweep.run import Sweep
    from shaketable.records.environment import gather

    if resume:
        record.append("resumed", step=0, environment=gather())
    with progress_bar() as (bar, _):
        Sweep(config, record, lambda name: load(name, config.device, config.dtype, None), bar.layers).run()


def _show(record: RunRecord, outputs: OutputFiles, png_file: Path | None) -> None:
    from shaketable.evaluate.sweep.results import plot, results

    found = results(record)
    outputs.save(lambda: found, lambda: _page(found))
    if png_file is not None:
        try:
            plot(found, png_file)
        except OSError as error:
            raise ShaketableError(f"cannot write {png_file}: {error.strerror or error}") from None
    _print(found, [*outputs.files, *([png_file] if png_file is not None else [])])


def _print(found: Facts, files: list[Path]) -> None:
    """The table, the sentences, the notes, and which files were written."""
    out = console()
    table = _table(found)
    if out.measure(table, options=out.options.update(max_width=1000)).maximum <= out.width:
        print_table(out, table)
    else:
        for model in found["config"]["models"]:
            print_table(out, _table(found, model))
    say(out, *(_sentence(found, point) for point in found["points"] if point["magnitude"] != 0))
    say(out, *(f"note: {n}" for n in found["notes"]), *(f"wrote {f}" for f in files), f"recorded in {found['folder']}")


def _page(found: Facts) -> str:
    from shaketable.report.table_html import page

    config, faulty = found["config"], [p for p in found["points"] if p["magnitude"] != 0]
    shown = [p for p in faulty if p["distinguishable"]]
    sentence = f"{len(shown)} of {len(faulty)} faulty points can be told from clean."
    facts = {"plan": _plans(config), "task": config["task"], "problems": str(config["n"]), "engine": config["engine"]}
    lines = [*(_sentence(found, p) for p in faulty), *found["notes"]]
    return page("sweep", ", ".join(config["models"]), "CURVE", sentence, [("Points", _table(found))], facts=facts, lines=lines)


def _plans(config: Facts) -> str:
    return config["plan"] if isinstance(config["plan"], str) else f"{len(config['plan'])} plans"


def _sentence(found: Facts, point: Facts) -> str:
    where = f"{point['model']} at {point['name']}" if len(found["config"]["models"]) > 1 else point["name"]
    return f"{where}: {point['sentence']}{_loss(point)}"


def _table(found: Facts, model: str | None = None) -> Table:
    """One row per point; on a narrow screen those of one model, with intervals and sites on lines of their own."""
    config, points = found["config"], [p for p in found["points"] if model in (None, p["model"])]
    left_out = {"loss"} if "loss" not in points[0] else set()
    left_out |= {"top-1"} if model is not None else set()
    columns = {name: cell for name, cell in COLUMNS.items() if name not in left_out}
    title = f"{_plans(config)}; {config['task']}, n = {config['n']}, {max(len(p['seeds']) for p in points)} noise seeds"
    if model is None:
        table = table_of("model", list(columns), plain(title))
    else:
        table = table_of("point", [NARROW.get(name, name) for name in columns if name != "point"], plain(f"{model}; {title}"))
    for point in points:
        cells = [plain(cell(point)) for cell in columns.values()]
        if model is None:
            cells.insert(0, plain(point["model"]))
        else:
            cells = [cell.replace(" (", "\n(").replace("@", "\n@") for cell in cells]
        table.add_row(*cells, style="bold" if point["distinguishable"] else "")
    return table


def _loss(point: Facts) -> str:
    """In a text task, what the fault costs in nats per token."""
    if point.get("loss_difference") is None:
        return ""
    low, high = point["loss_difference_low"], point["loss_difference_high"]
    return f"; loss {point['loss_difference']:+.3f} ({low:+.3f} to {high:+.3f}) nats a token, mean over texts".replace("-", "−")


def _accuracy(point: Facts) -> str:
    return f"{100 * point['accuracy']:.1f} % ({100 * point['ci_low']:.1f} to {100 * point['ci_high']:.1f})"


def _difference(point: Facts) -> str:
    from shaketable.evaluate.statistics import points

    low, high = points(point["difference_low"]), points(point["difference_high"])
    return f"{points(point['difference'])} ({low} to {high})"


def _p(point: Facts) -> str:
    p = point["p_adjusted"]
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.2g}"


def _number(value: float | None, form: str) -> str:
    return "no number" if value is None else format(value, form)


COLUMNS: dict[str, Callable[[Facts], str]] = {
    "point": lambda p: str(p["name"]),
    "accuracy (95 %)": _accuracy,
    "loss": lambda p: _number(p["loss"], ".3f"),
    "difference (95 %)": lambda p: "" if p["magnitude"] == 0 else _difference(p),
    "p (Holm)": _p,
    "KL": lambda p: "" if p["magnitude"] == 0 else _number(p["kl"], ".3g"),
    "top-1": lambda p: "" if p["magnitude"] == 0 else f"{100 * p['agreement']:.1f} %",
    "measured error": lambda p: "" if p["magnitude"] == 0 else f"{p['measured_error']:.3g}",
    "injections": lambda p: "" if p["magnitude"] == 0 else f"{p['injections']:,}",
}
NARROW = {"accuracy (95 %)": "accuracy", "difference (95 %)": "difference", "p (Holm)": "p", "measured error": "error"}
NARROW |= {"injections": "fired"}
"""Heads on a narrow screen."""
