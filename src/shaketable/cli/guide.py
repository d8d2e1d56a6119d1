"""`shaketable guide`: a diagnosis to layer-wise AQN."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shaketable.errors import ShaketableError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shaketable.harden.guidance import Guidance

STYLES = {"HIGH": "bold yellow", "LOW": "cyan", "BASE": ""}


def guide(
    diagnosis: Annotated[Path, typer.Argument(help="What `shaketable locate --json FILE` wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The AQN file to write, YAML.")],
    base_sigma: Annotated[float, typer.Option(help="σ of a layer that meets no rule.")] = 0.05,
    schedule: Annotated[str, typer.Option(help="How σ decays in training: epoch_aware or global_decay.")] = "epoch_aware",
    target: Annotated[
        str, typer.Option(help="all layers, the located fault layer alone (fault), or all but it (healthy).")
    ] = "all",
    mapping: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rules from this file in place of the origin study's.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the same as JSON, with reasons and mapping.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Turn a diagnosis into layer-wise AQN: more noise where a layer looks fragile, less where it is noisy already.

    shaketable guide diagnosis.json -o aqn.yaml --target fault
    """
    from shaketable.harden.guidance import Guidance
    from shaketable.harden.mapping import SigmaMapping

    files = [f for f in (output, json_file) if f is not None]
    _check_free(files, [f for f in (diagnosis, mapping) if f is not None], force)
    rules = SigmaMapping.load(mapping) if mapping is not None else None
    found = Guidance.of(_read(diagnosis), base_sigma=base_sigma, schedule=schedule, target=target, mapping=rules)
    _write(output, found.to_yaml())
    if json_file is not None:
        _write(json_file, json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n")
    _print(found, files)


def _read(path: Path) -> object:
    try:
        data: object = json.loads(path.read_bytes())
    except OSError as error:
        raise ShaketableError(f"cannot read the diagnosis {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ShaketableError(f"the diagnosis {path} is not JSON: {error}") from None
    return data


def _check_free(files: list[Path], inputs: list[Path], force: bool) -> None:
    """Every file can be written and takes nothing away; before any of them is written."""
    taken = list(inputs)
    for file in files:
        try:
            problem = _problem(file, taken, force)
        except (OSError, RuntimeError) as error:  # a folder that may not be read, a name too long, a circle of links
            problem = str(error)
        if problem:
            raise ShaketableError(f"cannot write {file}: {problem}")
        taken.append(file)


def _problem(file: Path, taken: list[Path], force: bool) -> str:
    if file.resolve() in [t.resolve() for t in taken]:
        return "this command reads or writes it already"
    if file.exists() and not file.is_file():
        return "it is not a plain file"
    if file.exists() and not force:
        return "it exists and is not overwritten; choose another name, or add --force"
    return "" if file.resolve().parent.is_dir() else "its folder does not exist"


def _write(path: Path, text: str) -> None:
    """All of the file or nothing: written beside its place, then moved there."""
    place = path.resolve()
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(place)
    except OSError as error:
        raise ShaketableError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _print(found: Guidance, files: list[Path]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=128)
    for line in _head(found):
        _say(console, line)
    console.print(_table(found))
    _say(console, f"high-priority layers: {', '.join(map(str, found.high_priority_layers)) or 'none'}")
    for note in found.notes:
        _say(console, f"note: {note}")
    for file in files:
        _say(console, f"wrote {file}")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def _head(found: Guidance) -> list[str]:
    facts = found.metadata
    where = f" at layer {facts['fault_layer']} ({facts['fault_class']})" if facts["fault_layer"] is not None else ""
    return [
        f"{facts['model']} on {facts['device']}, {facts['layers']} layers, {facts['date']}: {facts['verdict']}{where}",
        f"base σ {found.base_sigma:g}, schedule {found.schedule}, target {facts['target']}, mapping {facts['mapping']}",
    ]


def _table(found: Guidance) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Layer-wise AQN", title_justify="left")
    for head in ("layer", "σ", "ratio"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("why")
    for row in found.layers:
        label = Text(row.label, style=STYLES[row.label])
        table.add_row(str(row.layer), f"{row.sigma:.4g}", f"{row.ratio:.2f}×", label, Text("; ".join(row.why)))
    return table
