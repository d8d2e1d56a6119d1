"""`shaketable env`: what this machine has, for bug reports."""

from __future__ import annotations

import typer

from shaketable.cli.outputs import OutputFiles
from shaketable.cli.verb import ForceOption, JsonOption


def env(
    json_file: JsonOption = None,
    force: ForceOption = False,
) -> None:
    """Show versions, devices and which noise kernels this machine can use."""
    from shaketable.records.environment import gather

    outputs = OutputFiles("env", "here", json_file, force=force)
    facts = gather()
    outputs.save(lambda: facts)
    width = max(len(k) for k in facts)
    for key, value in facts.items():
        typer.echo(f"{key:<{width}}  {value}")
