"""The command line: one file per verb. `--help` answers without importing torch."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any

import typer
from rich.console import Console

from shaketable import __version__
from shaketable.cli.compare import compare, fingerprint
from shaketable.cli.guide import guide
from shaketable.cli.harden import harden
from shaketable.cli.info import env, faults, studies
from shaketable.cli.inspect import inspect
from shaketable.cli.locate import locate
from shaketable.cli.mismatch import mismatch
from shaketable.cli.run import run
from shaketable.cli.study import study
from shaketable.cli.sweep import sweep
from shaketable.cli.terminal import plain
from shaketable.cli.train import train
from shaketable.cli.verb import as_verb
from shaketable.errors import ShaketableError

app = typer.Typer(
    name="shaketable",
    help="Inject the numerical errors of other hardware into a model, locate them, measure their cost, repair the model.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"shaketable {__version__}")
        raise typer.Exit


INJECTING = ("train", "sweep", "harden", "study")
"""Verbs that inject faults themselves; `run` may start a verl job, which reads the origin's variables itself."""


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand in INJECTING:
        from shaketable.integrations.origin_configs.command_line import variables_answer

        if (line := variables_answer(os.environ)) is not None:
            raise ShaketableError(line)


FILES = ("json_file", "html_file")
RUN = ("device", "out", "resume", "json_file", "html_file")

app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    as_verb(run, ("command", "plan", "seed", "ledger", "json_file"))
)
app.command()(as_verb(inspect, ("model", "plan", "tokens", "json_file")))
app.command()(as_verb(locate, ("model", "plan", "mode", "device", "dtype", "prompts", *FILES)))
app.command()(as_verb(fingerprint, ("model", "out", "device", "dtype", "prompts", "json_file")))
app.command()(as_verb(compare, ("fingerprint", "model", "device", "plan_out", *FILES)))
app.command()(as_verb(guide, ("diagnosis", "out", "base_sigma", "schedule", "target", "json_file")))
app.command()(as_verb(sweep, ("models", "task", "plan", "magnitudes", "n", "seeds", *RUN)))
app.command()(as_verb(train, ("model", "task", "plan", "aqn", "steps", "eval_n", *RUN)))
app.command()(as_verb(harden, ("model", "plans", "task", "prompts", "steps", "eval_n", *RUN)))
app.command()(as_verb(mismatch, ("model", "engine", "engine_args", "task", "n", "tokens", "device", *FILES)))
app.add_typer(study)
app.command()(faults)
app.command()(studies)
app.command()(as_verb(env, ("json_file",)))


USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]  # click's, or that of the click inside typer


def main() -> None:
    """Entry point: errors in what was asked for are one line, exit 2."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except (ShaketableError, USAGE_ERROR) as error:
        if text := _one_line(error):
            Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {plain(text)}")
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    except Exception:
        traceback.print_exc()
        sys.exit(70)  # a bug of ours: a code that no verb uses


def _one_line(error: Any) -> str:
    """The message without advice for Python callers; of a usage error, with where help is. Empty where help was printed."""
    if isinstance(error, ShaketableError):
        return str(error).replace(" (allow_inert=True accepts this)", "")
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message}; see {error.ctx.command_path} --help" if message and error.ctx is not None else message
