"""`shaketable mismatch`: which operator makes sampler and trainer disagree."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.cli.loading import load
from shaketable.cli.outputs import OutputFiles, write
from shaketable.cli.terminal import console, progress_bar, say, table_of
from shaketable.cli.verb import DeviceOption, ForceOption, HtmlOption, JsonOption
from shaketable.errors import ShaketableError, nearest

if TYPE_CHECKING:
    from rich.console import Console
    from rich.padding import Padding

    from shaketable.mismatch.engine import RolloutEngine, Sampling
    from shaketable.mismatch.results import Exact, Mismatch
    from shaketable.mismatch.trainer import Trainer

MODES = ("raw", "processed")
ENGINES = ("hf", "vllm")
COLOR = {"LEGAL": "green", "DEFECT": "red", "INCONCLUSIVE": "yellow"}
SHOWN = 6
INDENT = 13


def mismatch(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The trainer's model: a folder, a Hugging Face id, nano or smollm2-135m.")
    ],
    engine: Annotated[str | None, typer.Option(help="The sampler: vllm, or hf (a second Hugging Face model).")] = None,
    engine_args: Annotated[
        str, typer.Option("--engine-args", metavar="JSON", help='Arguments of the engine, e.g. \'{"dtype": "bfloat16"}\'.')
    ] = "{}",
    task: Annotated[
        str | None, typer.Option(help="Sample completions for this task: arithmetic, gsm8k, a .jsonl file of your own, …")
    ] = None,
    n: Annotated[int, typer.Option("-n", "--limit", min=1, help="How many prompts of the task, or rollouts of the file.")] = 16,
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--rollouts", metavar="FILE", help="Instead of --task: recorded rollouts, with token ids and log-probabilities."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest completion; the task's own limit by default.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus of the sampling; 1 takes all tokens.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Most likely tokens that are sampled from; 0 takes all.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(min=0.01, help="1 turns it off.")] = 1.0,
    logprobs: Annotated[
        str, typer.Option(help="Log-probabilities that the engine returns: raw, or processed by temperature, top-p etc.")
    ] = "raw",
    dtype: Annotated[str | None, typer.Option(help="The trainer's dtype: float32, bfloat16 or float16.")] = None,
    attention: Annotated[str | None, typer.Option(help="The trainer's attention: eager or sdpa.")] = None,
    device: DeviceOption = "auto",
    earlier: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="An earlier checkpoint, to identify stale weights; can be repeated."),
    ] = None,
    recorded: Annotated[int, typer.Option(min=1, help="How many rollouts have their operators recorded.")] = 8,
    exact: Annotated[
        bool, typer.Option("--exact", help="Also compare every operator bit by bit, and explain the first difference.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and sampling.")] = 0,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
    tokens_out: Annotated[
        Path | None, typer.Option("--rollouts-out", metavar="FILE", help="Write the sampled rollouts, for --rollouts.")
    ] = None,
    force: ForceOption = False,
) -> None:
    """Find out why sampler and trainer give the same tokens different probabilities.

    Eight stages, each with its numbers: the gap; the returned numbers against the engine's own logits; the floor (each side
    against itself); semantics (temperature, top-p, BOS, …); weights, bit for bit; routing; operators against their rounding
    intervals; and the share of the KL that each family of operators causes.

    Exits 0 LEGAL (every link was checked, and only rounding is left), 1 DEFECT (named), or 4 INCONCLUSIVE (a link could not
    be checked; it is named).

    shaketable mismatch smollm2-135m --engine hf --engine-args '{"dtype": "bfloat16"}' --task arithmetic -n 8
    """
    outputs = OutputFiles(json_file, html_file, others=[tokens_out], reads=[tokens], force=force)
    if logprobs not in MODES:
        raise ShaketableError(f"unknown --logprobs {logprobs!r}; {nearest(logprobs, MODES)}")
    arguments = _arguments(engine_args)
    if (task is None) == (tokens is None):
        raise ShaketableError("give either --task, to sample, or --rollouts FILE, with rollouts that were recorded")
    if engine is None and (task is not None or exact):
        why = "--task samples with an engine" if task is not None else "--exact compares the operators of two programs"
        raise ShaketableError(f"{why}: add --engine vllm or --engine hf")
    from shaketable import __version__
    from shaketable.mismatch.engine import Sampling
    from shaketable.mismatch.exact import compare_bits
    from shaketable.mismatch.rollout_file import read_rollouts, write_rollouts
    from shaketable.mismatch.stages import Question, run_stages
    from shaketable.mismatch.trainer import Trainer
    from shaketable.models import load_model, quieten
    from shaketable.report.mismatch_html import page

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
    with progress_bar(total=100) as (bar, _), ExitStack() as stack:

        def progress(text: str, done: float | None = None) -> None:
            bar(description=text, completed=None if done is None else 100 * done)

        rollouts = [] if tokens is None else read_rollouts(tokens, n)
        prompts: list[list[int]] = []
        if task is not None:
            prompts, sampling = _prompts(own, task, n, max_new_tokens, sampling)
        opened: RolloutEngine | None = None
        if engine is not None:
            progress(f"starting {engine}")
            opened = stack.enter_context(closing(open_engine(engine, model, arguments)))
            if task is not None:
                progress(f"sampling {len(prompts)} completions")
                rollouts = opened.sample(prompts, sampling)
        if tokens_out is not None:
            write(tokens_out, write_rollouts(rollouts))
        found = run_stages(Question(own, opened, rollouts, sampling, older, recorded), progress)
        if exact and opened is not None and found.died is None:
            progress("bits of every operator", 0.95)
            found.exact = compare_bits(own, opened, [r for r in rollouts if r.completion], recorded)
    found.command = shlex.join(["shaketable", *sys.argv[1:]])
    found.date, found.version = datetime.now(UTC).isoformat(timespec="seconds"), __version__
    if (advice := found.conclusion.next) is not None:
        whole = advice.replace(f"shaketable mismatch {model} …", found.command)
        found.conclusion = replace(found.conclusion, next=whole)
    print_stages(found, console())
    outputs.save(found.to_dict, lambda: page(found))
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


def print_stages(found: Mismatch, out: Console) -> None:
    """All stages and the verdict."""
    from shaketable.report.mismatch_lines import stage_lines

    engine, trainer = found.engine, found.trainer
    other = "recorded log-probabilities" if engine is None else f"{engine.engine} {engine.version}, {engine.dtype}"
    head = f"{trainer.model}, {trainer.dtype}, {trainer.attention} attention, against {other}"
    say(out, head)
    for number, (stage, _, text) in enumerate(stage_lines(found), 1):
        say(out, f"{f'{number} {stage}':{INDENT}}{text}")
        for line in _details(found, stage):
            say(out, f"{'':{INDENT}}{line}", style="dim" if stage == "gap" else None)
        if stage == "floor":
            rows = ((r.side, r.variant, f"{r.mean_abs:.2e}", f"{r.largest:.2e}") for r in found.floor.rows)
            out.print(_table(("side", "variant", "mean |Δ log p|", "largest"), rows))
        if stage == "shares" and found.shares is not None and found.shares.families:
            families = found.shares.families
            shares = ((r.family, f"{r.share:.1%}", f"{r.low:.0%} to {r.high:.0%}", f"{r.kl:.2e}") for r in families)
            out.print(_table(("family", "share", "95 %", "KL alone"), shares))
    if found.exact is not None:
        _print_exact(found.exact, out)
    conclusion = found.conclusion
    out.print("Not looked at:", *(f"\n  - {line}" for line in conclusion.not_looked_at), markup=False, style="dim")
    if conclusion.next is not None:
        say(out, f"Next: {conclusion.next}")
    say(out, conclusion.sentence, style=f"bold {COLOR[conclusion.verdict]}")


def _details(found: Mismatch, stage: str) -> Iterator[str]:
    """The lines below a stage's own: the worst tokens, the first weights and operators that are wrong."""
    if stage == "gap":
        for w in found.gap.worst[:3]:
            text = "" if w.text is None else f" {w.text!r}"
            trainer = "none" if w.trainer is None else f"{w.trainer:.4g}"
            yield f"token {w.token}{text} at {w.position} of rollout {w.rollout}: {w.engine:.4g} and {trainer}"
    if stage == "weights" and found.weights is not None:
        yield from (f"{d.name} {d.says}" for d in found.weights.differing[:SHOWN])
        if (more := len(found.weights.differing) - SHOWN) > 0:
            yield f"… and {more} more"
    if stage == "operators" and found.operators is not None:
        yield from (f"{w.name} ({w.phase}): {w.text}, looks like {w.looks_like}" for w in found.operators.wrong[:SHOWN])


def _print_exact(exact: Exact, out: Console) -> None:
    """The first operator that differs, the share of bit-equal values by kind and phase, and the reasons."""
    say(out, f"{'exact':{INDENT}}{exact.says}")
    shares: dict[str, dict[str, str]] = {}
    reasons: dict[str, list[str]] = {}
    for k in exact.kinds:
        shares.setdefault(k.kind, {"operators": str(k.operators)})[k.phase] = f"{k.share:.1%}"
        for why in k.why:
            reasons.setdefault(why, []).append(f"{k.kind} in {k.phase}")
    heads = ("operators", "prefill", "decode")
    out.print(_table(("kind", *heads), ((kind, *(row.get(h, "–") for h in heads)) for kind, row in shares.items())))
    for line in [f"{', '.join(where)}: {why}" for why, where in reasons.items()] + exact.unavailable:
        say(out, f"{'':{INDENT}}{line}")


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Padding:
    from rich.padding import Padding

    left = 2 if heads[1] == "variant" else 1
    table = table_of(heads[:left], heads[left:])
    for row in rows:
        table.add_row(*row)
    return Padding(table, (0, 0, 0, INDENT))
