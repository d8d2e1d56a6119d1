"""`shaketable run`: any program under a plan."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shaketable.cli.outputs import OutputFiles
from shaketable.cli.terminal import console, print_table, say, table_of
from shaketable.cli.verb import ForceOption, JsonOption
from shaketable.errors import PlanError
from shaketable.plan import Plan

if TYPE_CHECKING:
    from shaketable.launch.run import RunResult


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD …", help="The program and its arguments.")],
    plan: Annotated[str | None, typer.Option(help="A line of the plan language, or a YAML file.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all noise; overrides the plan file's own.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="Folder for the ledgers; a new one under ledgers/ by default.")] = None,
    json_file: JsonOption = None,
    force: ForceOption = False,
    allow_inert: Annotated[bool, typer.Option("--allow-inert", help="Accept a plan that does nothing.")] = False,
) -> None:
    """Run any program under a plan, unchanged.

    Child processes, DataLoader workers, torchrun ranks and Ray workers get the plan too. Each process writes its own
    ledger; at the end they are merged and printed.

    A clause that does nothing is reported on stderr as soon as that is known, and the program continues. Exits with the
    program's own code, or with **3** when a clause did nothing anywhere, or when a process used a model without the plan
    while others ran under it.

        shaketable run --plan relative_gaussian:0.05@op.matmul --seed 0 -- python train.py --epochs 3

    A verl job carries its plan among its own arguments. Put `run` without a plan in front of it, and the job stops before
    training if nothing reads them.

        shaketable run -- python -m verl.trainer.main_ppo … +shaketable.plan=relative_gaussian:0.05@op.matmul
    """
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        raise PlanError("no program to run; write: shaketable run --plan PLAN -- python train.py")
    if plan is None:
        raise typer.Exit(_run_with_keys(command, (seed, ledger, json_file)))
    resolved = Plan.load(plan, seed=seed)
    _refuse_two_plans(command)
    outputs = OutputFiles(json_file, force=force)
    from shaketable.launch.run import default_folder, run_program

    result = run_program(resolved, command, ledger or default_folder(), allow_inert=allow_inert)
    _print(result)
    outputs.save(result.to_dict)
    raise typer.Exit(result.exit_code)


def _run_with_keys(command: list[str], options: tuple[object, ...]) -> int:
    from shaketable.integrations.job_keys import keys_of, run_with_keys
    from shaketable.integrations.origin_configs.command_line import answer

    keys = keys_of(command, os.environ)
    if not keys:
        if (instead := answer(command, os.environ)) is not None:
            typer.echo(f"error: {instead}", err=True)  # several commands, one to a line
            return 2
        raise PlanError("no plan; write: shaketable run --plan PLAN -- python train.py, or give verl +shaketable.plan=PLAN")
    if any(option is not None for option in options):
        raise PlanError(f"--seed, --ledger and --json go with --plan; the job has its own {keys[0]}: use +shaketable.seed=…")
    return run_with_keys(command, keys)


def _refuse_two_plans(command: list[str]) -> None:
    from shaketable.integrations.job_keys import keys_of

    if keys := keys_of(command, os.environ):
        raise PlanError(f"--plan and {keys[0]} both ask for faults; leave one out")


def _print(result: RunResult) -> None:
    from shaketable.ledger.table import build_table, remarks

    out = console(stderr=True)
    shown = [] if result.ledger is None else remarks(result.ledger)
    if result.ledger is not None:
        out.print(build_table(result.ledger))
        say(out, *(f"  ! {line}" for line in shown), style="yellow")
    if len(result.processes) > 1:
        table = table_of(("process", "rank", "program", "models"), ("forward", "backward"), "Processes")
        for p in result.processes:
            cells = [p.pid, p.rank, p.title[:60], _counted(p.models), p.ledger.forward, p.ledger.backward]
            table.add_row(*(str(c) for c in cells))
        print_table(out, table)
    for line in result.warnings:
        if line not in shown:
            word, style = ("error", "red") if line in result.without_plan.values() else ("warning", "yellow")
            say(out, f"{word}: {line}", style=style)
    say(out, f"ledger: {result.folder / 'ledger.json'}", style="dim")
    say(out, *(f"error: {line}" for line in result.refused), style="red")


def _counted(names: list[str]) -> str:
    """Each name once, with how often it occurs."""
    return ", ".join(name if n == 1 else f"{n} × {name}" for name, n in Counter(names).items())
