"""`shaketable faults`, `studies` and `env`: what a plan and `study run` can name, and what this machine has."""

from __future__ import annotations

import typer

from shaketable.cli.outputs import OutputFiles
from shaketable.cli.terminal import print_rows
from shaketable.cli.verb import ForceOption, JsonOption


def faults() -> None:
    """List the faults that a plan can name."""
    from shaketable.faults import KINDS, MagnitudeFault

    rows = []
    for name, fault in KINDS.items():
        written = f"{name}:MAGNITUDE" if issubclass(fault, MagnitudeFault) else name
        rows.append((written, (fault.__doc__ or "").partition("\n")[0]))
    print_rows(rows)
    typer.echo("\nA plan is FAULT@SITE, e.g. relative_gaussian:0.05@op.matmul; docs/plans.md has one example for each level.")


def studies() -> None:
    """List the studies that ship: `shaketable study run NAME`."""
    from shaketable.study.file import shipped

    rows = []
    for name, file in shipped().items():
        with file.open(encoding="utf-8") as text:
            rows.append((name, text.readline().lstrip("# ").strip()))
    print_rows(rows)
    typer.echo("\nshaketable study run NAME --dry-run says how long one takes.")


def env(json_file: JsonOption = None, force: ForceOption = False) -> None:
    """Show versions, devices and which noise kernels this machine can use."""
    from shaketable.records.environment import gather

    outputs = OutputFiles(json_file, force=force)
    facts = gather()
    outputs.save(lambda: facts)
    width = max(len(k) for k in facts)
    for key, value in facts.items():
        typer.echo(f"{key:<{width}}  {value}")
