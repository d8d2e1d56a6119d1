"""`shaketable compare`: a fingerprint replayed on this device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.cli.locate import AllowCode, LayersOption
from shaketable.cli.outputs import OutputFiles
from shaketable.cli.text import say
from shaketable.cli.verb import DeviceOption, ForceOption, HtmlOption, JsonOption
from shaketable.io.output_files import write

if TYPE_CHECKING:
    from rich.table import Table

    from shaketable.compare.compare import ComparisonRow, DeviceComparison, LayerRow
    from shaketable.compare.fingerprint import Fingerprint

SHOWN = 20
SIDES = {"here": "here", "stored": "in the file", "both": "both", "": ""}


def compare(
    fingerprint: Annotated[Path, typer.Argument(help="What `shaketable fingerprint` wrote on a good device.")],
    model: Annotated[str, typer.Argument(help="The same model: a folder, an id, smollm2-135m, or my_model.py:load.")],
    device: DeviceOption = "auto",
    dtype: Annotated[str | None, typer.Option(help="Another dtype than the file's; its tensors are cast.")] = None,
    attention: Annotated[str | None, typer.Option(help="eager or sdpa; what the file was made with by default.")] = None,
    plan: Annotated[str | None, typer.Option(help="Plant this plan on the model first, to see it measured.")] = None,
    plan_out: Annotated[
        Path | None, typer.Option("--plan-out", metavar="FILE", help="Write the measured errors as a plan, YAML.")
    ] = None,
    layers: LayersOption = None,
    allow_code: AllowCode = False,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
    force: ForceOption = False,
) -> None:
    """Replay another device's fingerprint here, operator by operator. Exits 0 within what the dtype explains, 1 beyond.

    shaketable compare good.safetensors smollm2-135m --device cuda --plan-out measured.yaml
    """
    from shaketable.plan import Plan

    outputs = OutputFiles("compare", model, json_file, html_file, others=[plan_out], reads=[fingerprint], force=force)
    planted = None if plan is None else Plan.load(plan)

    from shaketable.compare.fingerprint import read_fingerprint

    file = read_fingerprint(fingerprint)
    loaded = _load(file, model, device, dtype, attention, layers, allow_code)
    found = _compare(file, loaded, planted, layers)
    text = found.plan_text()
    if plan_out is not None and text is not None:
        write(plan_out, text)
    outputs.save(found.to_dict, lambda: _page(found))
    show(found, plan_out, text is not None)
    raise typer.Exit(found.exit_code)


def _load(
    file: Fingerprint,
    model: str,
    device: str,
    dtype: str | None,
    attention: str | None,
    layers: str | None,
    allow_code: bool,
) -> Any:
    """The model as the file's, checked; then in the dtype that was asked for."""
    from shaketable.cli.locate import load
    from shaketable.compare.fingerprint import check_same_model

    about = file.about
    loaded, _ = load(model, device, about.dtype, attention or about.attention, allow_code)
    if dtype is None or dtype == about.dtype:
        return loaded
    check_same_model(about, loaded, layers)
    return load(model, device, dtype, attention or about.attention, allow_code)[0]


def _compare(file: Fingerprint, model: Any, planted: Any, layers: str | None) -> DeviceComparison:
    from contextlib import nullcontext

    from shaketable.cli.locate import progress_bar
    from shaketable.compare.compare import compare as replay
    from shaketable.inject import inject

    with progress_bar() as tell, nullcontext() if planted is None else inject(model, planted):
        return replay(file, model, layers=layers, progress=tell)


def show(found: DeviceComparison, plan_out: Path | None, has_plan: bool) -> None:
    """The table of layers, the operators that are furthest off, and the result."""
    from rich.console import Console

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=128)
    console.print(_layers(found))
    rows = _furthest(found)
    if rows:
        console.print(_operators(rows[:SHOWN]))
    if len(rows) > SHOWN:
        say(console, f"… and {len(rows) - SHOWN} more operators that differ; --json holds them all")
    for note in found.notes:
        say(console, f"note: {note}")
    if not has_plan:
        say(
            console,
            "no plan: no operator differs beyond rounding"
            if plan_out is None
            else f"{plan_out} was not written: nothing to inject",
        )
    elif plan_out is not None:
        say(console, f"wrote {plan_out}")
    say(console, found.sentence)


def _page(found: DeviceComparison) -> str:
    from shaketable.report.table_html import page

    tables = [("Layers", _layers(found))]
    if rows := _furthest(found):
        tables.append(("Operators, teacher-forced", _operators(rows)))
    tag, status = ("BEYOND THE DTYPE", "fail") if found.exit_code else ("WITHIN THE DTYPE", "pass")
    facts = {"in the file": _side(found.stored), "here": _side(found.here)}
    return page(
        "compare", str(found.stored["model"]), tag, found.sentence, tables, status=status, facts=facts, lines=found.notes
    )


def _side(facts: dict[str, Any]) -> str:
    return f"{facts['dtype']} on {facts['device']}, {facts['attention']} attention"


def _furthest(found: DeviceComparison) -> list[ComparisonRow]:
    """Rows beyond the dtype in the order of computation, then the others by size."""
    differing = [r for r in found.rows if r.difference.differing]
    rest = sorted((r for r in differing if not r.beyond), key=lambda r: -r.difference.relative)
    return [*(r for r in differing if r.beyond), *rest]


def _layers(found: DeviceComparison) -> Table:
    from rich.table import Table

    stored, here = (f"{d['dtype']} on {d['device']}, {d['attention']}" for d in (found.stored, found.here))
    table = Table(
        "layer", title=f"{found.stored['model']}: {stored} (file) against {here} (here)", title_justify="left", box=None
    )
    for head in ("relative error", "max |d|", "values differing", "ops differing"):
        table.add_column(head, justify="right")
    table.add_column("beyond the dtype")
    for layer in found.layers:
        table.add_row(*_layer_cells(layer))
    return table


def _layer_cells(layer: LayerRow) -> list[str]:
    whole, first = layer.whole, layer.beyond
    ops = sum(1 for r in layer.rows if r.difference.differing)
    beyond = "" if first is None else f"{first.place} ({SIDES[first.beyond]})"
    return [
        str(layer.layer),
        f"{whole.relative:.2e}",
        f"{whole.max_abs:.2e}",
        f"{whole.share:.1%}",
        f"{ops}/{len(layer.rows)}",
        beyond,
    ]


def _operators(rows: list[ComparisonRow]) -> Table:
    from rich.table import Table

    table = Table("layer", title="Operators, teacher-forced", title_justify="left", box=None)
    table.add_column("operator", no_wrap=True)
    for head in ("relative error", "max |d|", "differing", "outside here", "in the file"):
        table.add_column(head, justify="right")
    table.add_column("error model")
    for row in rows:
        d, counts = row.difference, ["?" if n is None else str(n) for n in (row.here, row.stored)]
        label = "-" if row.layer is None else str(row.layer)
        table.add_row(label, row.place, f"{d.relative:.2e}", f"{d.max_abs:.2e}", f"{d.share:.1%}", *counts, _model(row))
    return table


def _model(row: ComparisonRow) -> str:
    fit = row.fit
    if fit is None:
        return ""
    head = fit.kind if fit.kind == "rounding" else f"{fit.kind}:{fit.magnitude:.3g}"
    return head if fit.is_good else f"{head} (poor fit)"
