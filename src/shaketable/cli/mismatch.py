"""`shaketable mismatch`: which operator makes sampler and trainer disagree."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.errors import ShaketableError, nearest
from shaketable.io.output_files import check_free, write

if TYPE_CHECKING:
    from shaketable.mismatch.engines.engine import Rollout, RolloutEngine, Sampling
    from shaketable.mismatch.trainer import Trainer

MODES = ("raw", "processed")
Tell = Callable[..., None]
"""What is being done, and the share of the work that is behind."""


def mismatch(
    trainer: Annotated[
        str, typer.Option(metavar="MODEL", help="What is trained: a folder, a Hugging Face id, nano, smollm2-135m.")
    ],
    engine: Annotated[str | None, typer.Option(help="What samples: vllm, or hf (a second Hugging Face model).")] = None,
    engine_args: Annotated[
        str, typer.Option("--engine-args", metavar="JSON", help='For the engine, such as \'{"dtype": "bfloat16"}\'.')
    ] = "{}",
    task: Annotated[str | None, typer.Option(help="Prompts: arithmetic, gsm8k, a .jsonl of your own, …")] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="How many prompts, or rollouts of the file.")] = 16,
    tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Recorded rollouts instead: token ids and log-probabilities, .jsonl.")
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
    device: Annotated[str, typer.Option(help="The trainer's: cpu, cuda, …")] = "cpu",
    earlier: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="An earlier checkpoint, to say which one a stale weight is of.")
    ] = None,
    recorded: Annotated[int, typer.Option(min=1, help="Rollouts whose operators are recorded.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Draws prompts and tokens.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every stage as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write every stage as one page.")] = None,
    plan_out: Annotated[
        Path | None, typer.Option("--plan-out", metavar="FILE", help="Write the measured differences as a plan, YAML.")
    ] = None,
    tokens_out: Annotated[
        Path | None, typer.Option("--tokens-out", metavar="FILE", help="Write the sampled rollouts, for --tokens.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Find out why sampler and trainer give the same tokens different probabilities.

    Stages, each with its numbers: the gap, the returned numbers against the engine's own logits, the floor (each side against
    itself), semantics (temperature, top-p, BOS, …), weights bit for bit, routing, operators against their rounding intervals,
    and the share of the KL that each family causes. Exits 0 legal: every link was checked, and only rounding is left;
    1 a defect was named; 4 inconclusive: a link could not be checked, and is named.

    shaketable mismatch --trainer smollm2-135m --engine hf --engine-args '{"dtype": "bfloat16"}' --task arithmetic -n 8
    """
    outputs = [f for f in (json_file, html_file, plan_out, tokens_out) if f is not None]
    check_free(outputs, [tokens] if tokens is not None else [], force)
    _check(engine, task, tokens, logprobs)
    arguments = _arguments(engine_args)
    from shaketable.cli.locate import load
    from shaketable.mismatch.stages import Question, run_stages
    from shaketable.mismatch.trainer import Trainer
    from shaketable.models import quieten

    quieten()
    own = Trainer(*load(trainer, device, dtype, attention), trainer)
    with _live() as tell:
        sampling, given = _asked(
            own,
            task,
            tokens,
            n,
            seed,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            logprobs_mode=logprobs,
        )
        older = {name: _parameters(name) for name in earlier or []}
        with _started(engine, trainer, arguments, tell) as other:
            rollouts = given if tokens is not None else _sampled(other, given, sampling, tell)
            if tokens_out is not None:
                from shaketable.mismatch.rollout_file import write_rollouts

                write(tokens_out, write_rollouts(rollouts))
            found = run_stages(Question(own, other, rollouts, sampling, older, recorded), tell)
    found |= _made_by()
    _show(found, json_file, html_file, plan_out)
    raise typer.Exit(found["exit_code"])


def _check(engine: str | None, task: str | None, tokens: Path | None, logprobs: str) -> None:
    if (task is None) == (tokens is None):
        raise ShaketableError("give either --task, to sample, or --tokens FILE, with rollouts that were recorded")
    if engine is None and task is not None:
        raise ShaketableError("--task samples with an engine: add --engine vllm or --engine hf")
    if logprobs not in MODES:
        raise ShaketableError(f"unknown --logprobs {logprobs!r}; {nearest(logprobs, MODES)}")


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ShaketableError(f'--engine-args is not JSON: {error}; write it as \'{{"dtype": "bfloat16"}}\'') from None
    if not isinstance(found, dict):
        raise ShaketableError('--engine-args is a JSON object, such as \'{"dtype": "bfloat16"}\'')
    return found


def _asked(
    own: Trainer, task: str | None, tokens: Path | None, n: int, seed: int, *, max_new_tokens: int | None, **how: Any
) -> tuple[Sampling, list[Any]]:
    """How to sample, and the prompts or the rollouts of a file."""
    from shaketable.measure.decoding.dynamic import Decoder
    from shaketable.mismatch.engines.engine import Sampling

    if tokens is not None:
        from shaketable.mismatch.rollout_file import read_rollouts

        return Sampling(max_new_tokens or 1, seed=seed, **how), list(read_rollouts(tokens, n))
    from shaketable.measure.evaluation import prompt_tokens
    from shaketable.measure.tasks.load import load_task
    from shaketable.measure.tasks.task import sample

    assert task is not None
    loaded = load_task(task)
    prompts = [prompt_tokens(own.tokenizer, loaded, problem) for problem in sample(loaded, "test", n, seed)]
    limit = max_new_tokens or loaded.max_new_tokens
    longest = max(len(p) for p in prompts) + limit
    if own.context is not None and longest >= own.context:
        raise ShaketableError(f"{longest} tokens of prompt and completion do not fit into the context of {own.context}")
    stop = Decoder.of(own.model, own.tokenizer, limit).ends
    return Sampling(limit, seed=seed, stop=stop, **how), prompts


def _parameters(name: str) -> dict[str, Any]:
    from shaketable.models import load_model

    return dict(load_model(name)[0].named_parameters(remove_duplicate=False))


@contextmanager
def _started(
    engine: str | None, model: str, arguments: dict[str, Any], tell: Callable[[str], None]
) -> Iterator[RolloutEngine | None]:
    if engine is None:
        yield None
        return
    from shaketable.mismatch.engines import open_engine

    tell(f"starting {engine}")
    opened = open_engine(engine, model, arguments)
    try:
        yield opened
    finally:
        opened.close()


def _sampled(
    engine: RolloutEngine | None, prompts: list[list[int]], sampling: Sampling, tell: Callable[[str], None]
) -> list[Rollout]:
    assert engine is not None
    tell(f"sampling {len(prompts)} completions")
    return engine.sample(prompts, sampling)


@contextmanager
def _live() -> Iterator[Tell]:
    """A bar on standard error: the stage, how far the work is, and the time left, gone when done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task("loading", total=1.0)

        def tell(text: str, done: float | None = None) -> None:
            bar.update(row, description=text, completed=done)

        yield tell


def _made_by() -> dict[str, str]:
    """What a page and its JSON are of."""
    from shaketable import __version__

    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": shlex.join(["shaketable", *sys.argv[1:]]), "date": now, "version": __version__}


def _show(found: dict[str, Any], json_file: Path | None, html_file: Path | None, plan_out: Path | None) -> None:
    from rich.console import Console

    from shaketable.cli.tables.mismatch import print_stages

    print_stages(found, Console(highlight=False))
    if json_file is not None:
        write(json_file, json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if html_file is not None:
        from shaketable.report.mismatch_html import page

        write(html_file, page(found))
    if plan_out is not None:
        from shaketable.mismatch.fitted_plan import plan_text

        text = plan_text(found)
        if text is None:
            typer.echo(f"{plan_out} is not written: there is no difference that a plan could inject", err=True)
        else:
            write(plan_out, text)
