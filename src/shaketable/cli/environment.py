"""`shaketable env`: what this machine has, for bug reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shaketable.io.output_files import write


def env(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Show versions, devices and which noise kernels this machine can use."""
    from shaketable.records.environment import gather

    facts = gather()
    if json_file is not None:
        write(json_file, json.dumps(facts, indent=2) + "\n")
    width = max(len(k) for k in facts)
    for key, value in facts.items():
        typer.echo(f"{key:<{width}}  {value}")
