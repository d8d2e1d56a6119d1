"""`shaketable run`: any program under a plan."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from shaketable.cli.outputs import OutputFiles
from shaketable.cli.verb import ForceOption, JsonOption
from shaketable.errors import PlanError
from shaketable.plan import Plan


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD …", help="The program, as you would call it.")],
    plan: Annotated[str | None, typer.Option(help="A line of the plan language, or a YAML file.")] = None,
    seed: Annotated[int | None, typer.Option(help="Keys all noise; overrides the plan file's own.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="Folder for the ledgers; a new one under ledgers/ by default.")] = None,
    json_file: JsonOption = None,
    force: ForceOption = False,
    allow_inert: Annotated[bool, typer.Option(help="Accept a plan that does nothing.")] = False,
) -> None:
    """Run any program under a plan, unchanged.

    The plan travels by environment into children, DataLoader workers and torchrun ranks, and by `ray.init` into Ray
    workers, also those of a cluster that runs already. Each process writes its own ledger; at the end they are merged
    and printed.

    A clause that does nothing is reported on stderr as soon as that is known; the program goes on. Exits with the program's
    own code, or with **3** when a clause of the plan did nothing anywhere, or when a process that computed with a model
    ran without the plan while others ran under it.

        shaketable run --plan relative_gaussian:0.05@op.matmul --seed 0 -- python train.py --epochs 3

    A job of verl has its plan among its own arguments, and verl does not mind when nobody reads it. `run` without a plan minds:
    such a job is stopped before it trains.

        shaketable run -- python -m verl.trainer.main_ppo … +shaketable.plan=relative_gaussian:0.05@op.matmul
    """
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        raise PlanError("no program to run; write: shaketable run --plan PLAN -- python train.py")
    if plan is None:
        raise typer.Exit(_run_with_keys(command, (seed, ledger, json_file)))
    resolved = Plan.load(plan, seed=seed)
    _refuse_two_plans(command)
    outputs = OutputFiles("run", shlex.join(command), json_file, force=force)
    from shaketable.launch.run import default_folder, run_program

    result = run_program(resolved, command, ledger or default_folder(), allow_inert=allow_inert)
    _print(result)
    outputs.save(result.to_dict)
    raise typer.Exit(result.exit_code)


def _run_with_keys(command: list[str], options: tuple[object, ...]) -> int:
    from shaketable.integrations.job_keys import keys_of, run_with_keys

    keys = keys_of(command, os.environ)
    if not keys:
        raise PlanError(_without_plan(command))
    if any(option is not None for option in options):
        raise PlanError(f"--seed, --ledger and --json go with --plan; here {keys[0]} says what is done: use +shaketable.seed=…")
    return run_with_keys(command, keys)


def _refuse_two_plans(command: list[str]) -> None:
    from shaketable.integrations.job_keys import keys_of

    if keys := keys_of(command, os.environ):
        raise PlanError(f"--plan and {keys[0]} both ask for faults; leave one out")


def _without_plan(command: list[str]) -> str:
    """What to do about a command without a plan: the origin's own commands have an answer."""
    from shaketable.integrations.origin_configs.command_line import answer

    usual = "no plan; write: shaketable run --plan PLAN -- python train.py, or give verl +shaketable.plan=PLAN"
    return answer(command, os.environ) or usual


def _print(result: object) -> None:
    from rich.console import Console
    from rich.table import Table

    from shaketable.launch.run import RunResult
    from shaketable.ledger.table import build_table, remarks

    assert isinstance(result, RunResult)
    console = Console(stderr=True, highlight=False)
    console = console if console.is_terminal else Console(stderr=True, highlight=False, width=110)
    if result.ledger is not None:
        console.print(build_table(result.ledger))
        for line in remarks(result.ledger):
            console.print(f"  ! {line}", style="yellow", markup=False)
    if len(result.processes) > 1:
        table = Table("process", "rank", "what", "models", "forward", "backward", title="Processes", title_justify="left")
        for p in result.processes:
            cells = [p.pid, p.rank, p.title[:60], _counted(p.models), p.ledger.forward, p.ledger.backward]
            table.add_row(*(str(c) for c in cells))
        console.print(table)
    shown, errors = set(remarks(result.ledger)) if result.ledger else set(), set(result.without_plan.values())
    for line in result.warnings:
        if line not in shown:
            word, style = ("error", "red") if line in errors else ("warning", "yellow")
            console.print(f"{word}: {line}", style=style, markup=False)
    console.print(f"ledger: {result.folder / 'ledger.json'}", style="dim", markup=False)
    for line in result.refused:
        console.print(f"error: {line}", style="red", markup=False)


def _counted(names: list[str]) -> str:
    """Each name once, with how often it comes."""
    return ", ".join(name if n == 1 else f"{n} × {name}" for name, n in Counter(names).items())
