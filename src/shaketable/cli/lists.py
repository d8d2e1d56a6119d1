"""`shaketable faults` and `shaketable studies`: what a plan and `study run` can name."""

from __future__ import annotations

import typer

from shaketable.cli.text import print_rows
from shaketable.cli.verb import JsonOption


def faults(json_file: JsonOption = None) -> None:
    """List the faults that a plan can name."""
    from shaketable.cli.outputs import OutputFiles
    from shaketable.faults import KINDS, MagnitudeFault

    out = OutputFiles("faults", "all", json_file)
    rows = []
    for name, fault in KINDS.items():
        keys = [key for key in fault.model_fields if key not in ("kind", "magnitude")]
        has = issubclass(fault, MagnitudeFault)
        rows.append({"fault": name, "magnitude": has, "parameters": keys, "what": (fault.__doc__ or "").partition("\n")[0]})
    print_rows((f"{r['fault']}:MAGNITUDE" if r["magnitude"] else str(r["fault"]), str(r["what"])) for r in rows)
    typer.echo("\nA plan is FAULT@SITE, e.g. relative_gaussian:0.05@op.matmul; docs/plans.md has one example for each level.")
    out.save(lambda: {"faults": rows})


def studies(json_file: JsonOption = None) -> None:
    """List the studies that ship: `shaketable study run NAME`."""
    from shaketable.cli.outputs import OutputFiles

    out = OutputFiles("studies", "all", json_file)
    rows = shipped_studies()
    print_rows(rows)
    typer.echo("\nshaketable study run NAME --dry-run says how long one takes.")
    out.save(lambda: {"studies": [{"study": name, "what": what} for name, what in rows]})


def shipped_studies() -> list[tuple[str, str]]:
    """Name and first line of every study that ships."""
    from shaketable.study.file import shipped

    found = []
    for name, file in shipped().items():
        with file.open(encoding="utf-8") as text:
            found.append((name, text.readline().lstrip("# ").strip()))
    return found
