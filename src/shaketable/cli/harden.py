"""`shaketable harden`: give back what a fault takes, the cheapest repair first, and say how much came back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.cli.config_options import options_of
from shaketable.cli.outputs import OutputFiles
from shaketable.cli.recorded_runs import RecordedRuns, is_given, live
from shaketable.cli.verb import ForceOption, HtmlOption, JsonOption
from shaketable.errors import ShaketableError
from shaketable.harden.config import HardenConfig

if TYPE_CHECKING:
    from shaketable.records.record import RunRecord


@options_of(
    HardenConfig,
    "plans", "task", "prompts", "target", "steps", "batch", "micro_batch", "lr", "clean_every", "clean_loss", "temperature",
    "lora", "checkpointing", "max_new_tokens", "reinforce_steps", "warm_start", "score", "eval_n", "eval_seed", "eval_plans",
    "seed", "save_every", "device", "dtype",
    metavar={"plans": "P", "prompts": "FILE", "lora": "RANK", "warm_start": "N", "eval_plans": "P"},
    default={"device": "auto", "dtype": None},
    flag={"plans": "--plan", "eval_plans": "--eval-plan", "eval_n": ("-n", "--limit")},
)  # fmt: skip
def harden(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=HardenConfig.model_fields["model"].description)] = "",
    *,
    rungs: Annotated[
        str,
        typer.Option(
            "--stages", metavar="NAMES", help="Of calibrate, rescale, distil, supervise and reinforce, joined by commas."
        ),
    ] = "calibrate,rescale,distil",
    answers: Annotated[bool, typer.Option("--answers", help="After distil, train on the task's own answers too.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Run folder; the model is in DIR/model.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with this run; nothing else needed.")
    ] = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
    force: ForceOption = False,
    **fields: Any,
) -> None:
    """Repair a model so that it is robust to a fault: how much the fault takes, how much comes back, and at what cost.

    **distil**, the repair that gives most back, trains the model under the fault towards its own clean self (no answers
    needed). Two cheaper ones are tried first: **calibrate** folds gains and offsets into the weights, **rescale** scales
    channels by powers of two (the same bits on healthy hardware). On request: **supervise** on the task's answers,
    **reinforce** by a short GRPO. It stops when the target share is back. The result is an ordinary model folder.

    Example: `shaketable harden nano --task arithmetic --plan 'dead_zone:0.6,scope=token@layer.3' -o hardened`
    """
    outputs = OutputFiles("harden", model, json_file, html_file, of_run=True, force=force)
    runs = RecordedRuns("harden", HardenConfig, _run, _show)
    if resume is not None:
        runs.resume(context, resume, outputs)
        return
    if not model or not fields["plans"]:
        example = "shaketable harden nano --task arithmetic --plan 'relative_gaussian:0.2@module.linear'"
        raise ShaketableError(f"name a model and a --plan, e.g. {example}; or --resume DIR")
    from shaketable.models import chosen_device, hush
    from shaketable.plan import Plan

    for name in ("plans", "eval_plans"):
        fields[name] = tuple(dict.fromkeys(Plan.load(p).text() for p in fields[name]))
    named = tuple(r.strip() for r in rungs.split(",") if r.strip())
    if "regauge" in named:
        raise ShaketableError("regauge is called rescale now: --stages calibrate,rescale,distil")
    fields["rungs"] = (*named, "supervise") if answers else _fitting(named, fields["lora"], is_given(context, "rungs"))
    fields["device"] = chosen_device(fields["device"])
    fields["dtype"] = fields["dtype"] or ("float32" if fields["device"] == "cpu" else "bfloat16")
    hush()
    from shaketable.harden.scoring import rehearse

    runs.start(HardenConfig.checked(model=model, **fields), rehearse, f"harden-{Path(model).name}", out, outputs)


def _fitting(rungs: tuple[str, ...], lora: int, asked: bool) -> tuple[str, ...]:
    """The default stages; without calibrate where adapters are trained, since it changes the weights that they lie on."""
    return tuple(r for r in rungs if r != "calibrate") if lora and not asked else rungs


def _run(config: HardenConfig, record: RunRecord, *, resume: bool, loaded: Any = None) -> None:
    from shaketable.harden.run import Hardening

    with live(_step, _line) as tell:
        Hardening(config, record, tell, loaded=loaded).run(resume=resume)


def _step(facts: dict[str, Any]) -> dict[str, Any]:
    if "done" not in facts:  # a step of the stage reinforce, which is a run of `train`
        return {}
    shown = f"loss {facts['loss']:.3g}" + ("" if facts["plan"] is not None else " (clean step)")
    return {"description": facts["rung"], "completed": facts["done"], "total": facts["total"], "shown": shown}


def _line(facts: dict[str, Any]) -> str | None:
    if "measure" not in facts["conditions"][0]:  # scores of the stage reinforce
        return None
    scores = "  ".join(f"{c['name']} {c['accuracy']:.1%}" for c in facts["conditions"])
    back = "  ".join(f"{s['share']:.0%} back" for s in facts.get("shares", {}).values())
    from shaketable.harden.results import named

    what = named(facts) if "rung" in facts else "before"
    return f"{what:>21}: {scores}  {back}"


def _show(record: RunRecord, outputs: OutputFiles) -> None:
    """Print the outcome, and write it where it is asked for."""
    from rich.console import Console

    from shaketable.cli.tables.harden import page_of, print_outcome
    from shaketable.harden.results import outcome

    found = outcome(record)
    outputs.save(lambda: found, lambda: page_of(found))
    print_outcome(found, Console(highlight=False))
