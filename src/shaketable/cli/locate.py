"""`shaketable locate`: does this device compute this model correctly, and if not, where."""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import TYPE_CHECKING, Annotated

import typer

from shaketable.cli.loading import AllowCode, AttentionOption, DtypeOption, LayersOption, ModelArgument, PromptsOption, load
from shaketable.cli.outputs import OutputFiles
from shaketable.cli.terminal import console, plain, progress_bar, say, table_of
from shaketable.cli.verb import DeviceOption, ForceOption, HtmlOption, JsonOption
from shaketable.errors import ShaketableError

if TYPE_CHECKING:
    from rich.table import Table

    from shaketable.locate.diagnosis import Diagnosis, LayerReport

MARKS = {
    "pass": "[green]✓[/]",
    "fail": "[bold red]✗[/]",
    "suspect": "[yellow]▲[/]",
    "inconclusive": "[cyan]?[/]",
    "skipped": "·",
}


def locate(
    model: ModelArgument,
    mode: Annotated[
        str, typer.Option(help="host trusts the host and the weight file; device trusts no host and sees less; all runs both.")
    ] = "all",
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    attention: AttentionOption = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens to run.")] = 256,
    prompts: PromptsOption = None,
    plan: Annotated[str | None, typer.Option(help="First plant this fault, hidden from the probes, as a test.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the probes and of the planted plan.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="At most 64 tokens, no batch and no cached decoding.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="INCONCLUSIVE instead of HEALTHY where hooks or replaced methods were trusted.")
    ] = False,
    layers: LayersOption = None,
    allow_code: AllowCode = False,
    statistics: Annotated[bool, typer.Option("--statistics", help="Print SRDD's six statistics of every layer.")] = False,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
    force: ForceOption = False,
) -> None:
    """Find the layer and the operator that a device computes wrongly.

    Exits 0 healthy, 1 fault, 4 inconclusive.

    shaketable locate smollm2-135m --plan 'dead_zone:0.05,sparsity=0.01@module.*.down_proj,layers=12'
    """
    from shaketable.capture.trace import read_prompts
    from shaketable.locate.diagnosis import MODES
    from shaketable.models import names_code
    from shaketable.plan import Plan

    if mode not in MODES:
        raise ShaketableError(f"unknown mode {mode!r}; valid: {', '.join(MODES)}")
    if statistics and mode == "host":
        raise ShaketableError("--statistics needs --mode device or all: they are read from calls of the device")
    outputs = OutputFiles(json_file, html_file, reads=[prompts], force=force)
    planted = None if plan is None else Plan.load(plan)
    texts = None if prompts is None else read_prompts(prompts)
    loaded, tokenizer = load(model, device, dtype, attention, allow_code)

    from shaketable.cli.loading import token_ids
    from shaketable.locate.locate import locate as find
    from shaketable.report.locate_html import page

    is_own = names_code(model)
    with progress_bar() as (bar, _):
        diagnosis = find(
            loaded,
            None if is_own else tokenizer,
            mode=mode,
            prompts=texts,
            input_ids=token_ids(loaded, tokenizer, texts, tokens) if is_own else None,
            tokens=tokens,
            source=None if is_own else model,
            plan=planted,
            seed=seed,
            quick=quick,
            strict=strict,
            layers=layers,
            progress=bar.layers,
        )
    show(diagnosis, statistics)
    outputs.save(diagnosis.as_dict, lambda: page(diagnosis.as_dict()))
    raise typer.Exit(diagnosis.exit_code)


def show(diagnosis: Diagnosis, statistics: bool = False) -> None:
    """Print the table of layers and probes, SRDD's numbers on request, then the verdict."""
    out = console()
    head = f"{diagnosis.model}  {diagnosis.dtype} on {diagnosis.device}"
    out.print(f"{head}, {diagnosis.attention} attention, {diagnosis.tokens} tokens", markup=False)
    out.print(_table(diagnosis))
    for item in diagnosis.evidence[:3]:
        where = f"layer {item.layer}" if item.layer is not None else "outside of the layers"
        say(out, f"  {item.probe}: {where}, {item.op or 'output'}: {item.text}")
    if statistics:
        out.print(_statistics(diagnosis))
    for note in diagnosis.notes:
        out.print(f"  note: {note}", style="dim", markup=False)
    color = {"HEALTHY": "green", "FAULT": "red", "INCONCLUSIVE": "yellow"}[diagnosis.verdict]
    say(out, diagnosis.sentence, style=f"bold {color}")
    say(out, f"This holds if {diagnosis.assumption}. Cost: {diagnosis.cost_forwards:.1f} forwards.")
    if diagnosis.mode == "device":
        out.print("Device mode cannot see:", *(f"\n  - {line}" for line in diagnosis.not_covered), markup=False)


def _table(diagnosis: Diagnosis) -> Table:
    """A row per layer."""
    from shaketable.locate.diagnosis import PROBES

    names = [p for p in PROBES if any(p in r.results for r in diagnosis.probes)]
    table = table_of("layer")
    table.columns[0].min_width = 7
    for name in names:
        table.add_column(name, justify="center", no_wrap=True, min_width=len(name))
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for report in diagnosis.probes:
        label = "outside" if report.layer is None else str(report.layer)
        cells = [MARKS[report.results[n].status] if n in report.results else "" for n in names]
        table.add_row(label, *cells, _remark(report))
    return table


def _statistics(diagnosis: Diagnosis) -> Table:
    from shaketable.locate.diagnosis import LayerStatistics

    table = table_of(("layer", *(f.name for f in fields(LayerStatistics))))
    for report in diagnosis.probes:
        if report.statistics is not None:
            table.add_row(str(report.layer), *(f"{value:.4g}" for value in astuple(report.statistics)))
    return table


def _remark(report: LayerReport) -> str:
    """The operator of a layer's first result that is not a pass, or the reason."""
    for status in ("fail", "suspect", "inconclusive"):
        for result in report.results.values():
            if result.status == status:
                return plain(result.op or ("output" if status == "fail" else result.reason))
    return ""
