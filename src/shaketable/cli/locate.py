"""`shaketable locate`: does this device compute this model correctly, and if not, where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.cli.outputs import OutputFiles
from shaketable.cli.verb import DeviceOption, ForceOption, HtmlOption, JsonOption
from shaketable.errors import ShaketableError

if TYPE_CHECKING:
    from rich.table import Table

    from shaketable.locate.diagnosis import Diagnosis, LayerReport
    from shaketable.locate.locate import Progress

MARKS = {
    "pass": "[green]✓[/]",
    "fail": "[bold red]✗[/]",
    "suspect": "[yellow]▲[/]",
    "inconclusive": "[cyan]?[/]",
    "skipped": "·",
}
DTYPES = ("float32", "bfloat16", "float16")
ModelArgument = Annotated[
    str, typer.Argument(help="A folder, a Hugging Face id, smollm2-135m, or my_model.py:load, which returns a model.")
]
LayersOption = Annotated[
    str | None, typer.Option(metavar="PATH", help="The module that holds the decoder layers, if they are not found.")
]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Run the Python file that MODEL names.")]


def locate(
    model: ModelArgument,
    mode: Annotated[
        str, typer.Option(help="device: no host arithmetic. host: trusts the host and the file. all: both.")
    ] = "all",
    device: DeviceOption = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's own by default.")] = None,
    attention: Annotated[str | None, typer.Option(help="eager or sdpa; the model's own choice by default.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens to run.")] = 256,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to run, one prompt per line.")] = None,
    plan: Annotated[str | None, typer.Option(help="Plant this plan first, hidden from the probes.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="For gauges and the planted plan.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="On the host, replay only the products whose checksum fires.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Hooks and replaced methods of the model make it inconclusive instead of healthy.")
    ] = False,
    layers: LayersOption = None,
    allow_code: AllowCode = False,
    statistics: Annotated[bool, typer.Option("--statistics", help="Print SRDD's six numbers of every layer.")] = False,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
    force: ForceOption = False,
) -> None:
    """Find the layer and the operator that a device computes wrongly. Exits 0 healthy, 1 fault, 4 inconclusive.

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
    outputs = OutputFiles("locate", model, json_file, html_file, force=force)
    planted = None if plan is None else Plan.load(plan)
    texts = None if prompts is None else read_prompts(prompts)
    loaded, tokenizer = load(model, device, dtype, attention, allow_code)

    from shaketable.locate.locate import locate as find

    is_own = names_code(model)
    with progress_bar() as tell:
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
            progress=tell,
        )
    show(diagnosis, statistics)
    outputs.save(diagnosis.as_dict, lambda: _page(diagnosis))
    raise typer.Exit(diagnosis.exit_code)


def _page(diagnosis: Diagnosis) -> str:
    from shaketable.report.locate_html import page

    return page(diagnosis.as_dict())


def load(model: str, device: str, dtype: str | None, attention: str | None, allow_code: bool = False) -> tuple[Any, Any]:
    """A model on a device, and its tokenizer; refuses in one line what torch would refuse in many."""
    if dtype is not None and dtype not in DTYPES:
        raise ShaketableError(f"unknown dtype {dtype!r}; valid: {', '.join(DTYPES)}")
    from shaketable.models import load_own, names_code

    if names_code(model) and not allow_code:
        raise ShaketableError(f"{model} runs Python code; read it, and allow it with --allow-code")
    import torch

    from shaketable.models import chosen_device, load_model, quieten

    device = chosen_device(device)
    if names_code(model):
        return load_own(model, device=device, dtype=None if dtype is None else getattr(torch, dtype))
    quieten()
    try:
        loaded, tokenizer = load_model(model, device=device, dtype=None if dtype is None else getattr(torch, dtype))
        if attention is not None:
            loaded.set_attn_implementation(attention)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ShaketableError(f"{model} does not fit into the memory of {device}") from error
    except ShaketableError:
        raise
    except (ValueError, ImportError) as error:
        raise ShaketableError(f"attention {attention!r}: {str(error).splitlines()[0]}") from error
    return loaded, tokenizer


def token_ids(model: Any, tokenizer: Any, prompts: list[str] | None, tokens: int) -> Any:
    """Token ids to run: of the prompts, the ones that the model came with, or, without a tokenizer, random ones."""
    import torch

    from shaketable.capture.reference import input_embedding
    from shaketable.capture.trace import token_batch

    if isinstance(tokenizer, torch.Tensor):
        return tokenizer[:, :tokens]
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tokens = min(tokens, limit) if isinstance(limit, int) and limit > 1 else tokens
    if tokenizer is not None or prompts is not None:
        return token_batch(tokenizer, prompts, tokens)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, input_embedding(model).num_embeddings, (1, tokens), generator=generator)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar over the layers, on standard error, gone when done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:20}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)

        def tell(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        yield tell


def show(diagnosis: Diagnosis, statistics: bool = False) -> None:
    """The table of layers and probes, then the verdict; SRDD's numbers when asked for, its blame also beside a fault."""
    from rich.console import Console

    console = Console(highlight=False)
    head, table = _table(diagnosis)
    fits = console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width
    head, table = (head, table) if fits else _table(diagnosis, failing=True)
    console.print(head, markup=False)
    console.print(table)
    for item in diagnosis.evidence[:3]:
        where = f"layer {item.layer}" if item.layer is not None else "outside of the layers"
        console.print(f"  {item.probe}: {where}, {item.op or 'output'}: {item.text}", markup=False, soft_wrap=True)
    if statistics:
        console.print(_statistics(diagnosis))
    told = statistics or diagnosis.verdict == "FAULT"
    if told and diagnosis.srdd is not None and diagnosis.srdd.blames is not None:
        console.print(f"  SRDD statistics alone would blame layer {diagnosis.srdd.blames}; they never decide.", style="dim")
    for note in diagnosis.notes:
        console.print(f"  note: {note}", style="dim", markup=False)
    color = {"HEALTHY": "green", "FAULT": "red", "INCONCLUSIVE": "yellow"}[diagnosis.verdict]
    console.print(diagnosis.sentence, style=f"bold {color}", markup=False, soft_wrap=True)
    cost = f"{diagnosis.cost_forwards:.1f} forwards, {diagnosis.device_forwards} of them on the device"
    console.print(f"This holds if {diagnosis.assumption}. Cost: {cost}.", soft_wrap=True)
    if diagnosis.mode == "device":
        console.print("Device mode cannot see:", *(f"\n  - {line}" for line in diagnosis.not_covered), markup=False)


def _table(diagnosis: Diagnosis, failing: bool = False) -> tuple[str, Table]:
    """A heading, and a row per layer; on a narrow screen only with the probes that did not pass everywhere."""
    from rich.table import Table

    from shaketable.locate.diagnosis import PROBES

    names = [p for p in PROBES if any(p in r.results for r in diagnosis.probes)]
    passed = [p for p in names if all(r.results[p].status in ("pass", "skipped") for r in diagnosis.probes if p in r.results)]
    head = f"{diagnosis.model}  {diagnosis.dtype} on {diagnosis.device}"
    head += f", {diagnosis.attention} attention, {diagnosis.tokens} tokens"
    if failing:
        names = [p for p in names if p not in passed]
        head += f"\npassed everywhere: {', '.join(passed)}" if passed else ""
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", no_wrap=True, min_width=7)
    for name in names:
        table.add_column(name, justify="center", no_wrap=True, min_width=len(name))
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for report in diagnosis.probes:
        label = "outside" if report.layer is None else str(report.layer)
        cells = [MARKS[report.results[n].status] if n in report.results else "" for n in names]
        table.add_row(label, *cells, _remark(report))
    return head, table


def _statistics(diagnosis: Diagnosis) -> Table:
    from rich.table import Table

    from shaketable.locate.diagnosis import LayerStatistics

    table = Table("layer", *(f.name for f in fields(LayerStatistics)), box=None, pad_edge=False)
    for report in diagnosis.probes:
        if report.statistics is not None:
            table.add_row(str(report.layer), *(f"{value:.4g}" for value in astuple(report.statistics)))
    return table


def _remark(report: LayerReport) -> str:
    """Where the first thing is that is not in order."""
    for status in ("fail", "suspect", "inconclusive"):
        for result in report.results.values():
            if result.status == status:
                return (result.op or ("output" if status == "fail" else result.reason)).replace("[", "\\[")
    return ""
