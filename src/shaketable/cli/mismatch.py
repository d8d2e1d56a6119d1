"""`shaketable mismatch`: which operator makes sampler and trainer disagree."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.errors import ShaketableError, nearest
from shaketable.io.output_files import check_free, write

if TYPE_CHECKING:
    from shaketable.mismatch.engine import Rollout, RolloutEngine, Sampling
    from shaketable.mismatch.results import MadeBy, Mismatch
    from shaketable.mismatch.trainer import Trainer

MODES = ("raw", "processed")
ENGINES = ("hf", "vllm")
Progress = Callable[..., None]
"""Called with the current step, and the share of the work that is done."""


@dataclass(frozen=True)
class Inputs:
    """The rollouts to sample or to read."""

    engine: str | None
    engine_args: dict[str, Any]
    task: str | None
    tokens: Path | None
    n: int
    seed: int
    max_new_tokens: int | None
    exact: bool

    def check(self) -> None:
        """One line for a combination that has no meaning."""
        if (self.task is None) == (self.tokens is None):
            raise ShaketableError("give either --task, to sample, or --tokens FILE, with rollouts that were recorded")
        if self.engine is None and self.task is not None:
            raise ShaketableError("--task samples with an engine: add --engine vllm or --engine hf")
        if self.engine is None and self.exact:
            raise ShaketableError("--exact compares the operators of two programs: add --engine vllm or --engine hf")


@dataclass(frozen=True)
class Outputs:
    """The files to write."""

    json: Path | None
    html: Path | None
    plan: Path | None
    tokens: Path | None

    def check(self, reads: Path | None, force: bool) -> None:
        """One line for a file that exists or is read."""
        written = [f for f in (self.json, self.html, self.plan, self.tokens) if f is not None]
        check_free(written, [] if reads is None else [reads], force)


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
    exact: Annotated[
        bool, typer.Option("--exact", help="Also compare each operator bit by bit, and say why the first one differs.")
    ] = False,
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
    outputs = Outputs(json_file, html_file, plan_out, tokens_out)
    outputs.check(tokens, force)
    if logprobs not in MODES:
        raise ShaketableError(f"unknown --logprobs {logprobs!r}; {nearest(logprobs, MODES)}")
    inputs = Inputs(engine, _arguments(engine_args), task, tokens, n, seed, max_new_tokens, exact)
    inputs.check()
    from shaketable.cli.locate import load
    from shaketable.mismatch.engine import Sampling
    from shaketable.mismatch.trainer import Trainer
    from shaketable.models import load_model, quieten

    quieten()
    own = Trainer(*load(trainer, device, dtype, attention), trainer)
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
    found = _compared(own, inputs, sampling, older, recorded, outputs.tokens)
    _write(found, outputs)
    raise typer.Exit(found.exit_code)


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ShaketableError(f'--engine-args is not JSON: {error}; write it as \'{{"dtype": "bfloat16"}}\'') from None
    if not isinstance(found, dict):
        raise ShaketableError('--engine-args is a JSON object, such as \'{"dtype": "bfloat16"}\'')
    return found


def _compared(
    own: Trainer, inputs: Inputs, sampling: Sampling, earlier: dict[str, Any], recorded: int, tokens_out: Path | None
) -> Mismatch:
    """Sample or read the rollouts, and run the stages."""
    from shaketable.mismatch.exact import compare_bits
    from shaketable.mismatch.rollout_file import read_rollouts, write_rollouts
    from shaketable.mismatch.stages import Question, run_stages

    with _progress() as progress:
        prompts: list[list[int]] = []
        rollouts: list[Rollout] = []
        if inputs.tokens is not None:
            rollouts = read_rollouts(inputs.tokens, inputs.n)
        else:
            prompts, sampling = _prompts(own, inputs, sampling)
        with _started(inputs, own.name, progress) as engine:
            if engine is not None and inputs.tokens is None:
                progress(f"sampling {len(prompts)} completions")
                rollouts = engine.sample(prompts, sampling)
            if tokens_out is not None:
                write(tokens_out, write_rollouts(rollouts))
            found = run_stages(Question(own, engine, rollouts, sampling, earlier, recorded), progress)
            if inputs.exact and engine is not None and found.died is None:
                progress("bits of every operator", 0.95)
                found.exact = compare_bits(own, engine, [r for r in rollouts if r.completion], recorded)
    found.made_by = _made_by()
    return found


def _prompts(own: Trainer, inputs: Inputs, sampling: Sampling) -> tuple[list[list[int]], Sampling]:
    """The prompts of a task, and the sampling with its limit and its stop tokens."""
    from dataclasses import replace

    from shaketable.evaluate.decoding import Decoder
    from shaketable.evaluate.score import prompt_tokens
    from shaketable.evaluate.tasks import load_task, sample

    assert inputs.task is not None
    task = load_task(inputs.task)
    prompts = [prompt_tokens(own.tokenizer, task, problem) for problem in sample(task, "test", inputs.n, inputs.seed)]
    limit = inputs.max_new_tokens or task.max_new_tokens
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
def _started(inputs: Inputs, model: str, progress: Progress) -> Iterator[RolloutEngine | None]:
    if inputs.engine is None:
        yield None
        return
    progress(f"starting {inputs.engine}")
    opened = open_engine(inputs.engine, model, inputs.engine_args)
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


def _made_by() -> MadeBy:
    from shaketable import __version__
    from shaketable.mismatch.results import MadeBy

    now = datetime.now(UTC).isoformat(timespec="seconds")
    return MadeBy(command=shlex.join(["shaketable", *sys.argv[1:]]), date=now, version=__version__)


def _write(found: Mismatch, outputs: Outputs) -> None:
    from rich.console import Console

    from shaketable.cli.tables.mismatch import print_stages

    print_stages(found, Console(highlight=False))
    if outputs.json is not None:
        write(outputs.json, json.dumps(found.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if outputs.html is not None:
        from shaketable.report.mismatch_html import page

        write(outputs.html, page(found))
    if outputs.plan is not None:
        from shaketable.mismatch.shares import plan_text

        text = plan_text(found)
        if text is None:
            typer.echo(f"{outputs.plan} is not written: there is no difference that a plan could inject", err=True)
        else:
            write(outputs.plan, text)
