"""`shaketable mismatch`: which operator makes sampler and trainer disagree."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.cli.outputs import OutputFiles
from shaketable.cli.verb import DeviceOption, ForceOption, HtmlOption, JsonOption
from shaketable.errors import ShaketableError, nearest
from shaketable.io.output_files import write

if TYPE_CHECKING:
    from shaketable.mismatch.engine import RolloutEngine, Sampling
    from shaketable.mismatch.results import Mismatch
    from shaketable.mismatch.trainer import Trainer

MODES = ("raw", "processed")
ENGINES = ("hf", "vllm")
Progress = Callable[..., None]
"""Called with the current step, and the share of the work that is done."""


def _refuse_trainer(model: str | None) -> None:
    if model is not None:
        raise ShaketableError(f"the model comes first, without --trainer: shaketable mismatch {model} …")


def mismatch(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="What is trained: a folder, a Hugging Face id, nano, smollm2-135m.")
    ],
    engine: Annotated[str | None, typer.Option(help="What samples: vllm, or hf (a second Hugging Face model).")] = None,
    engine_args: Annotated[
        str, typer.Option("--engine-args", metavar="JSON", help='For the engine, such as \'{"dtype": "bfloat16"}\'.')
    ] = "{}",
    task: Annotated[str | None, typer.Option(help="Prompts: arithmetic, gsm8k, a .jsonl of your own, …")] = None,
    n: Annotated[int, typer.Option("-n", "--limit", min=1, help="How many prompts, or rollouts of the file.")] = 16,
    tokens: Annotated[
        Path | None,
        typer.Option("--rollouts", metavar="FILE", help="Recorded rollouts instead of --task: ids, log-probabilities."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="The longest completion; the task's own by default.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the sampling.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: all.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(min=0.01)] = 1.0,
    logprobs: Annotated[
        str, typer.Option(help="What the engine is to return: raw, or processed by temperature, top-p and the rest.")
    ] = "raw",
    dtype: Annotated[str | None, typer.Option(help="The trainer's: float32, bfloat16, float16.")] = None,
    attention: Annotated[str | None, typer.Option(help="The trainer's: eager or sdpa.")] = None,
    device: DeviceOption = "auto",
    earlier: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="An earlier checkpoint, to say which one a stale weight is of.")
    ] = None,
    recorded: Annotated[int, typer.Option(min=1, help="Rollouts whose operators are recorded.")] = 8,
    exact: Annotated[
        bool, typer.Option("--exact", help="Also compare each operator bit by bit, and say why the first one differs.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Draws prompts and tokens.")] = 0,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
    plan_out: Annotated[
        Path | None, typer.Option("--plan-out", metavar="FILE", help="Write the measured differences as a plan, YAML.")
    ] = None,
    tokens_out: Annotated[
        Path | None, typer.Option("--rollouts-out", metavar="FILE", help="Write the sampled rollouts, for --rollouts.")
    ] = None,
    force: ForceOption = False,
    _old: Annotated[str | None, typer.Option("--trainer", hidden=True, callback=_refuse_trainer, is_eager=True)] = None,
) -> None:
    """Find out why sampler and trainer give the same tokens different probabilities.

    Stages, each with its numbers: the gap, the returned numbers against the engine's own logits, the floor (each side against
    itself), semantics (temperature, top-p, BOS, …), weights bit for bit, routing, operators against their rounding intervals,
    and the share of the KL that each family causes. Exits 0 legal: every link was checked, and only rounding is left;
    1 a defect was named; 4 inconclusive: a link could not be checked, and is named.

    shaketable mismatch smollm2-135m --engine hf --engine-args '{"dtype": "bfloat16"}' --task arithmetic -n 8
    """
    others = [plan_out, tokens_out]
    outputs = OutputFiles("mismatch", model, json_file, html_file, others=others, reads=[tokens], force=force)
    if logprobs not in MODES:
        raise ShaketableError(f"unknown --logprobs {logprobs!r}; {nearest(logprobs, MODES)}")
    arguments = _arguments(engine_args)
    if (task is None) == (tokens is None):
        raise ShaketableError("give either --task, to sample, or --rollouts FILE, with rollouts that were recorded")
    if engine is None and (task is not None or exact):
        why = "--task samples with an engine" if task is not None else "--exact compares the operators of two programs"
        raise ShaketableError(f"{why}: add --engine vllm or --engine hf")
    from shaketable.cli.locate import load
    from shaketable.mismatch.engine import Sampling
    from shaketable.mismatch.exact import compare_bits
    from shaketable.mismatch.rollout_file import read_rollouts, write_rollouts
    from shaketable.mismatch.stages import Question, run_stages
    from shaketable.mismatch.trainer import Trainer
    from shaketable.models import load_model, quieten

    quieten()
    own = Trainer(*load(model, device, dtype, attention), model)
    sampling = Sampling(
        max_new_tokens or 1,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        logprobs_mode=logprobs,  # type: ignore[arg-type]
        repetition_penalty=repetition_penalty,
    )
    older = {name: dict(load_model(name)[0].named_parameters(remove_duplicate=False)) for name in earlier or []}
    with _progress() as progress:
        rollouts = [] if tokens is None else read_rollouts(tokens, n)
        prompts: list[list[int]] = []
        if task is not None:
            prompts, sampling = _prompts(own, task, n, max_new_tokens, sampling)
        with _started(engine, model, arguments, progress) as opened:
            if opened is not None and task is not None:
                progress(f"sampling {len(prompts)} completions")
                rollouts = opened.sample(prompts, sampling)
            if tokens_out is not None:
                write(tokens_out, write_rollouts(rollouts))
            found = run_stages(Question(own, opened, rollouts, sampling, older, recorded), progress)
            if exact and opened is not None and found.died is None:
                progress("bits of every operator", 0.95)
                found.exact = compare_bits(own, opened, [r for r in rollouts if r.completion], recorded)
    _sign(found, model)
    _write(found, outputs, plan_out)
    raise typer.Exit(found.exit_code)


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ShaketableError(f'--engine-args is not JSON: {error}; write it as \'{{"dtype": "bfloat16"}}\'') from None
    if not isinstance(found, dict):
        raise ShaketableError('--engine-args is a JSON object, such as \'{"dtype": "bfloat16"}\'')
    return found


def _prompts(own: Trainer, name: str, n: int, limit: int | None, sampling: Sampling) -> tuple[list[list[int]], Sampling]:
    """The prompts of a task, and the sampling with its limit and its stop tokens."""
    from shaketable.evaluate.decoding import Decoder
    from shaketable.evaluate.score import prompt_tokens
    from shaketable.evaluate.tasks import load_task, sample

    task = load_task(name)
    prompts = [prompt_tokens(own.tokenizer, task, problem) for problem in sample(task, "test", n, sampling.seed)]
    limit = limit or task.max_new_tokens
    longest = max(len(p) for p in prompts) + limit
    if own.context is not None and longest >= own.context:
        raise ShaketableError(f"{longest} tokens of prompt and completion do not fit into the context of {own.context}")
    return prompts, replace(sampling, max_new_tokens=limit, stop=Decoder.of(own.model, own.tokenizer, limit).ends)


def open_engine(name: str, model: str, arguments: Mapping[str, Any]) -> RolloutEngine:
    """Start an engine; `arguments` are those of `--engine-args`, and each engine refuses unknown ones in one line."""
    if name == "hf":
        from shaketable.mismatch.hf import HFEngine

        return HFEngine.open(model, arguments)
    if name == "vllm":
        from shaketable.integrations.vllm.engine import VLLMEngine

        return VLLMEngine.open(model, arguments)
    raise ShaketableError(f"unknown engine {name!r}; {nearest(name, ENGINES)}")


@contextmanager
def _started(name: str | None, model: str, arguments: dict[str, Any], progress: Progress) -> Iterator[RolloutEngine | None]:
    if name is None:
        yield None
        return
    progress(f"starting {name}")
    opened = open_engine(name, model, arguments)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on standard error: the step, how far the work is, and the time left, gone when done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task("loading", total=1.0)

        def update(text: str, done: float | None = None) -> None:
            bar.update(row, description=text, completed=done)

        yield update


def _sign(found: Mismatch, model: str) -> None:
    """Note the command, the date and the version, and complete the next command with the options of this one."""
    from shaketable import __version__

    found.command = shlex.join(["shaketable", *sys.argv[1:]])
    found.date, found.version = datetime.now(UTC).isoformat(timespec="seconds"), __version__
    if (next_command := found.conclusion.next) is not None:
        whole = next_command.replace(f"shaketable mismatch {model} …", found.command)
        found.conclusion = replace(found.conclusion, next=whole)


def _page(found: Mismatch) -> str:
    from shaketable.report.mismatch_html import page

    return page(found)


def _write(found: Mismatch, outputs: OutputFiles, plan_file: Path | None) -> None:
    from rich.console import Console

    from shaketable.cli.tables.mismatch import print_stages

    print_stages(found, Console(highlight=False))
    outputs.save(found.to_dict, lambda: _page(found))
    if plan_file is not None:
        from shaketable.mismatch.shares import plan_text

        text = plan_text(found)
        if text is None:
            typer.echo(f"{plan_file} is not written: there is no difference that a plan could inject", err=True)
        else:
            write(plan_file, text)
