"""`shaketable fingerprint` and `shaketable compare`: record a model on one device, and replay it on another."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.cli.loading import AllowCode, AttentionOption, DtypeOption, LayersOption, ModelArgument, PromptsOption
from shaketable.cli.outputs import OutputFiles, write
from shaketable.cli.terminal import console, plain, print_table, progress_bar, say, table_of
from shaketable.cli.verb import DeviceOption, ForceOption, HtmlOption, JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from shaketable.compare.compare import ComparisonRow, DeviceComparison, LayerRow

SHOWN = 20
SIDES = {"here": "here", "stored": "in the file", "both": "both", "": ""}


def fingerprint(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The fingerprint to write, safetensors.")],
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    attention: AttentionOption = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens to run.")] = 64,
    prompts: PromptsOption = None,
    layers: LayersOption = None,
    allow_code: AllowCode = False,
    json_file: JsonOption = None,
    force: ForceOption = False,
) -> None:
    """Record the inputs and outputs of every layer and operator on this device, for `shaketable compare`.

    shaketable fingerprint smollm2-135m -o good.safetensors
    """
    outputs = OutputFiles(json_file, others=[out], reads=[prompts], force=force)

    from shaketable.capture.trace import read_prompts
    from shaketable.cli.loading import load, token_ids

    texts = None if prompts is None else read_prompts(prompts)
    loaded, tokenizer = load(model, device, dtype, attention, allow_code)
    ids = token_ids(loaded, tokenizer, texts, tokens)

    from shaketable.compare.fingerprint import fingerprint as take

    with progress_bar() as (bar, _):
        made = take(loaded, input_ids=ids, name=model, prompts=texts, layers=layers, progress=bar.layers)
    made.save(out)
    outputs.save(lambda: made.about.model_dump(mode="json", by_alias=True))
    about = made.about
    ops = sum(len(labels) for labels in (*about.layers, about.before, about.after))
    typer.echo(
        f"{about.model}, {about.dtype} on {about.device}, {about.attention} attention, {about.tokens} tokens: "
        f"{about.num_layers} layers and {ops} operators, {made.bytes / 1e6:.1f} MB in {out}"
    )


def compare(
    fingerprint: Annotated[
        Path, typer.Argument(metavar="FINGERPRINT", help="The file that `shaketable fingerprint` wrote on a good device.")
    ],
    model: ModelArgument,
    device: DeviceOption = "auto",
    attention: Annotated[str | None, typer.Option(help="eager or sdpa; the file's own by default.")] = None,
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
    """Replay another device's fingerprint here, operator by operator.

    Exits 0 when the dtype explains every difference, 1 when it does not.

    shaketable compare good.safetensors smollm2-135m --device cuda --plan-out measured.yaml
    """
    from shaketable.plan import Plan

    outputs = OutputFiles(json_file, html_file, others=[plan_out], reads=[fingerprint], force=force)
    planted = None if plan is None else Plan.load(plan)

    from shaketable.cli.loading import load
    from shaketable.compare.compare import compare as replay
    from shaketable.compare.fingerprint import read_fingerprint
    from shaketable.inject import inject

    file = read_fingerprint(fingerprint)
    about = file.about
    loaded, _ = load(model, device, about.dtype, attention or about.attention, allow_code)
    with progress_bar() as (bar, _), nullcontext() if planted is None else inject(loaded, planted):
        found = replay(file, loaded, layers=layers, progress=bar.layers)
    text = found.plan_text()
    if plan_out is not None and text is not None:
        write(plan_out, text)
    outputs.save(found.to_dict, lambda: _page(found))
    _show(found, plan_out, text is not None)
    raise typer.Exit(found.exit_code)


def _show(found: DeviceComparison, plan_out: Path | None, has_plan: bool) -> None:
    """The table of layers, the operators that differ most, and the result."""
    out = console()
    print_table(out, _layers(found))
    rows = _differing(found)
    if rows:
        print_table(out, _operators(rows[:SHOWN]))
    if len(rows) > SHOWN:
        say(out, f"… and {len(rows) - SHOWN} more operators that differ; --json holds them all")
    say(out, *(f"note: {note}" for note in found.notes))
    if plan_out is not None:
        say(out, f"wrote {plan_out}" if has_plan else f"{plan_out} was not written: nothing to inject")
    elif not has_plan:
        say(out, "no plan: no operator differs beyond rounding")
    say(out, found.sentence)


def _page(found: DeviceComparison) -> str:
    from shaketable.report.table_html import page

    tables = [("Layers", _layers(found))]
    if rows := _differing(found):
        tables.append(("Operators, teacher-forced", _operators(rows)))
    tag, status = ("BEYOND THE DTYPE", "fail") if found.exit_code else ("WITHIN THE DTYPE", "pass")
    facts = {"in the file": _side(found.stored), "here": _side(found.here)}
    return page(
        "compare", str(found.stored["model"]), tag, found.sentence, tables, status=status, facts=facts, lines=found.notes
    )


def _side(facts: dict[str, Any]) -> str:
    return f"{facts['dtype']} on {facts['device']}, {facts['attention']} attention"


def _differing(found: DeviceComparison) -> list[ComparisonRow]:
    """Rows beyond the dtype in the order of computation, then the others by size."""
    differing = [r for r in found.rows if r.difference.differing]
    rest = sorted((r for r in differing if not r.beyond), key=lambda r: -r.difference.relative)
    return [*(r for r in differing if r.beyond), *rest]


def _layers(found: DeviceComparison) -> Table:
    title = f"{found.stored['model']}: {_side(found.stored)} (file) against {_side(found.here)} (here)"
    table = table_of("layer", ("relative error", "max |d|", "values differing", "ops differing"), plain(title))
    table.add_column("beyond the dtype")
    for layer in found.layers:
        table.add_row(*_layer_cells(layer))
    return table


def _layer_cells(layer: LayerRow) -> list[str]:
    whole, first = layer.whole, layer.beyond
    ops = sum(1 for r in layer.rows if r.difference.differing)
    beyond = "" if first is None else f"{first.place} ({SIDES[first.beyond]})"
    sizes = [f"{whole.relative:.2e}", f"{whole.max_abs:.2e}", f"{whole.share:.1%}"]
    return [str(layer.layer), *sizes, f"{ops}/{len(layer.rows)}", beyond]


def _operators(rows: list[ComparisonRow]) -> Table:
    heads = ("error", "max |d|", "differ", "here", "in file")
    title = "Operators, teacher-forced; here, in file: values that no correct device returns"
    table = table_of(("layer", "operator"), heads, title)
    for column in table.columns[2:]:
        column.no_wrap = True
    table.add_column("error model", overflow="fold")
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
