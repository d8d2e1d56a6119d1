"""`shaketable guide`: a diagnosis to layer-wise AQN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shaketable.cli.outputs import OutputFiles, write
from shaketable.cli.terminal import console, plain, print_table, say, table_of
from shaketable.cli.verb import ForceOption, JsonOption
from shaketable.errors import ShaketableError

if TYPE_CHECKING:
    from rich.table import Table

    from shaketable.aqn.guidance import Guidance


def guide(
    diagnosis: Annotated[Path, typer.Argument(metavar="DIAGNOSIS", help="Written by `locate --json FILE`.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The AQN file to write, YAML.")],
    base_sigma: Annotated[float, typer.Option(help="σ of a layer to which no rule applies.")] = 0.05,
    schedule: Annotated[
        str, typer.Option(help="How σ decays in training: epoch_aware, global_decay or linear_decay.")
    ] = "epoch_aware",
    target: Annotated[
        str,
        typer.Option(
            help="Layers with noise: all, fault (the located ones), healthy (all others), or high (those labelled HIGH)."
        ),
    ] = "all",
    json_file: JsonOption = None,
    force: ForceOption = False,
) -> None:
    """Turn a diagnosis into layer-wise AQN: more noise where a layer looks fragile, less where it is noisy already.

    shaketable guide diagnosis.json -o aqn.yaml --target fault
    """
    from shaketable.aqn.guidance import Guidance

    outputs = OutputFiles(json_file, others=[out], reads=[diagnosis], force=force)
    found = Guidance.of(_json(diagnosis), name=str(diagnosis), base_sigma=base_sigma, schedule=schedule, target=target)
    write(out, found.to_yaml())
    outputs.save(found.to_dict)
    _print(found, [out, *outputs.files])


def _json(path: Path) -> object:
    try:
        data: object = json.loads(path.read_bytes())
    except OSError as error:
        raise ShaketableError(f"cannot read the diagnosis {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ShaketableError(f"the diagnosis {path} is not JSON: {error}") from None
    return data


def _print(found: Guidance, files: list[Path]) -> None:
    out = console()
    say(out, *_head(found))
    print_table(out, _table(found))
    say(out, f"high-priority layers: {', '.join(map(str, found.high_priority_layers)) or 'none'}")
    say(out, *(f"note: {note}" for note in found.notes), *(f"wrote {file}" for file in files))


def _head(found: Guidance) -> list[str]:
    facts = found.metadata
    where = " and".join(f" at layer {layer} ({kind})" for layer, kind in facts["fault_layers"].items())
    model = f"{facts['model']} on {facts['device']}, {facts['num_layers']} layers, {facts['analysis_date']}"
    return [
        f"{model}: {facts['verdict']}{where}",
        f"base σ {found.base_sigma:g}, schedule {found.schedule}, target {facts['target']}",
    ]


def _table(found: Guidance) -> Table:
    table = table_of((), ("layer", "σ", "ratio"), "Layer-wise AQN")
    table.add_column("label")
    table.add_column("why")
    for row in found.layers:
        why = plain("; ".join(row.why))
        table.add_row(str(row.layer), f"{row.sigma:.4g}", f"{row.ratio:.2f}×", row.label, why)
    return table
