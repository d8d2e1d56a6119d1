"""`shaketable harden`: repair a model against a fault, cheapest repair first, and say how much was recovered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.cli.outputs import OutputFiles
from shaketable.cli.recorded_runs import RecordedRuns, live
from shaketable.cli.terminal import console, plain, print_table, say, table_of
from shaketable.cli.verb import (
    ForceOption,
    HtmlOption,
    JsonOption,
    ResumeOption,
    RunFolderOption,
    given_options,
    options_of,
)
from shaketable.errors import ShaketableError
from shaketable.harden.config import HardenConfig

if TYPE_CHECKING:
    from rich.table import Table

    from shaketable.records.record import RunRecord

STAGES = "calibrate,rescale,distil"


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
    model: Annotated[str, typer.Argument(metavar="MODEL", help=HardenConfig.model_fields["model"].description)] = "",
    *,
    rungs: Annotated[
        str,
        typer.Option(
            "--stages", metavar="NAMES", help="Any of calibrate, rescale, distil, supervise, reinforce, joined by commas."
        ),
    ] = STAGES,
    answers: Annotated[bool, typer.Option("--answers", help="After distil, train on the task's own answers too.")] = False,
    out: RunFolderOption = None,
    resume: ResumeOption = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
    force: ForceOption = False,
    **fields: Any,
) -> None:
    """Make a model robust to a fault, and report the loss, the share recovered and the cost.

    **distil**, the most effective repair, trains the model under the fault towards the clean model's outputs; it needs
    no answers. Two cheaper ones are tried first: **calibrate** folds gains and offsets into the weights, **rescale**
    scales channels by powers of two (the same bits on healthy hardware). On request: **supervise** on the task's answers,
    **reinforce** by a short GRPO. It stops once the target share is recovered. The result, DIR/model, is an ordinary
    model folder.

    Example: `shaketable harden nano --task arithmetic --plan 'dead_zone:0.6,scope=token@layer.3' -o hardened`
    """
    outputs = OutputFiles("harden", model, json_file, html_file, of_run=True, force=force)
    if resume is not None:
        RUNS.resume(context, resume, outputs)
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
    if fields["lora"] and "--stages" not in given_options(context, ()):
        named = tuple(r for r in named if r != "calibrate")  # it would change the weights under the adapters
    fields["rungs"] = (*named, "supervise") if answers else named
    fields["device"] = chosen_device(fields["device"])
    fields["dtype"] = fields["dtype"] or ("float32" if fields["device"] == "cpu" else "bfloat16")
    hush()
    config = HardenConfig.checked(model=model, **fields)
    RUNS.start(config, f"harden-{Path(config.model).name}", out, outputs, lambda: _loaded(config))


def _loaded(config: HardenConfig) -> Any:
    """The model, after a rehearsal without weights."""
    from shaketable.harden.scoring import rehearse
    from shaketable.models import load_model

    rehearse(config)
    return load_model(config.model, device=config.device, dtype="float32")


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
    from shaketable.harden.results import named

    scores = "  ".join(f"{c['name']} {c['accuracy']:.1%}" for c in facts["conditions"])
    recovered = "  ".join(f"{s['share']:.0%} recovered" for s in facts.get("shares", {}).values())
    return f"{named(facts) if 'rung' in facts else 'untreated':>21}: {scores}  {recovered}".rstrip()


def _show(record: RunRecord, outputs: OutputFiles) -> None:
    """Print the outcome, and write it where it is asked for."""
    from shaketable.harden.results import outcome

    found = outcome(record)
    outputs.save(lambda: found, lambda: _page(found))
    print_outcome(found)


def print_outcome(found: dict[str, Any]) -> None:
    """Scores and costs after every stage, and the verdict."""
    screen, table = console(), _table(found)
    table.title = _title(found)
    print_table(screen, table)
    say(screen, *_lines(found))
    screen.print(f"[bold]{plain(found['sentence'])}.[/]{_verdict(found)}", soft_wrap=True)
    say(screen, f"The model: {found['model']}")


def _page(found: dict[str, Any]) -> str:
    from shaketable.report.table_html import page

    config, reached = found["config"], found["reached"]
    tag = "HARDENED" if config["target"] is None else "TARGET REACHED" if reached else "TARGET NOT REACHED"
    facts = {"against": "; ".join(config["plans"]), "learnt from": config["task"] or config["prompts"], "model": found["model"]}
    return page(
        "harden",
        config["model"],
        tag,
        f"{found['sentence']}.{_verdict(found)}",
        [(_title(found), _table(found))],
        status="pass" if reached else "shown",
        facts=facts,
        lines=_lines(found),
    )


def _title(found: dict[str, Any]) -> str:
    return f"{found['measure'].capitalize()} in % with 95 % intervals, after each stage"


def _table(found: dict[str, Any]) -> Table:
    from shaketable.harden.results import named
    from shaketable.report.wording import share_of

    names = [plain(c["name"]) for c in found["before"]]
    table = table_of("after", (*names, "KL under it", "recovered", "seconds", "sequences"))
    table.add_row("untreated", *_scores(found["before"]), _kl(found["before"]), "–", "–", "–")
    for rung in found["rungs"]:
        cost = rung["cost"]
        back = (
            "\n".join(share_of(s["share"], s["interval"]["low"], s["interval"]["high"]) for s in rung["shares"].values()) or "–"
        )
        cells = [_kl(rung["conditions"]), back, f"{cost['seconds']:.1f}", f"{cost['sequences']:,}"]
        table.add_row(named(rung), *_scores(rung["conditions"]), *cells)
    return table


def _lines(found: dict[str, Any]) -> list[str]:
    """What the stages said of themselves, the cost at inference, and the proof."""
    lines = []
    for rung in found["rungs"]:
        said = [rung["facts"][key] for key in ("sentence", "undone") if key in rung["facts"]]
        if said:
            lines.append(f"{rung['rung']}: {'; undone: '.join(s.rstrip('.') for s in said)}")
    added = sum(r["cost"]["flops_added"] for r in found["rungs"])
    lines.append(f"Added at inference: {added:,.0f} FLOPs a token" if added else "Added at inference: nothing")
    return lines + [f"{plan}: fired {one['forward']:,} times while it was repaired" for plan, one in found["ledgers"].items()]


def _verdict(found: dict[str, Any]) -> str:
    target = found["config"]["target"]
    return "" if target is None else f" The target of {target:.0%} is {'reached' if found['reached'] else 'not reached'}."


def _scores(conditions: list[dict[str, Any]]) -> list[str]:
    return [f"{100 * c['accuracy']:.1f} ({100 * c['ci_low']:.0f}–{100 * c['ci_high']:.0f})" for c in conditions]


def _kl(conditions: list[dict[str, Any]]) -> str:
    return " ".join(f"{c['kl']:.3g}" for c in conditions[1:])


RUNS = RecordedRuns("harden", HardenConfig, _run, _show)
