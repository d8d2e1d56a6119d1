"""`shaketable harden`: train a model to tolerate a fault, and say how much was recovered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.cli.outputs import OutputFiles
from shaketable.cli.recorded_runs import RecordedRuns, live, load_rehearsed, settled
from shaketable.cli.terminal import console, plain, print_table, say, table_of
from shaketable.cli.verb import ForceOption, HtmlOption, JsonOption, ResumeOption, RunFolderOption, options_of
from shaketable.errors import ShaketableError
from shaketable.harden.config import HardenConfig

if TYPE_CHECKING:
    from rich.table import Table

    from shaketable.records.record import RunRecord


@options_of(
    HardenConfig,
    "plans", "task", "prompts", "steps", "batch", "micro_batch", "lr", "clean_every", "temperature",
    "lora", "checkpointing", "max_new_tokens", "warm_start", "eval_n", "eval_plans",
    "seed", "save_every", "device", "dtype",
    metavar={"plans": "P", "prompts": "FILE", "lora": "RANK", "warm_start": "N", "eval_plans": "P"},
    default={"device": "auto", "dtype": None},
    flag={"plans": "--plan", "eval_plans": "--eval-plan", "eval_n": ("-n", "--limit")},
)  # fmt: skip
def harden(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=HardenConfig.model_fields["model"].description)] = "",
    *,
    out: RunFolderOption = None,
    resume: ResumeOption = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
    force: ForceOption = False,
    **fields: Any,
) -> None:
    """Make a model robust to a fault, and report the loss, the share recovered and the cost.

    The model is trained under the fault towards its own clean outputs, which needs no answers. The result, DIR/model, is
    an ordinary model folder.

    Example: `shaketable harden nano --task arithmetic --plan 'dead_zone:0.6,scope=token@layer.3' -o hardened`
    """
    outputs = OutputFiles(json_file, html_file, force=force)
    if resume is not None:
        RUNS.resume(context, resume, outputs)
        return
    if not model or not fields["plans"]:
        example = "shaketable harden nano --task arithmetic --plan 'relative_gaussian:0.2@module.linear'"
        raise ShaketableError(f"name a model and a --plan, e.g. {example}; or --resume DIR")
    from shaketable.models import hush

    config = HardenConfig.checked(model=model, **settled(fields, "plans", "eval_plans"))
    hush()
    from shaketable.harden.scoring import rehearse

    RUNS.start(config, f"harden-{Path(config.model).name}", out, outputs, lambda: load_rehearsed(config, rehearse))


def _run(config: HardenConfig, record: RunRecord, *, resume: bool, loaded: Any = None) -> None:
    from shaketable.harden.run import Hardening

    with live(_step, _line, config.steps) as tell:
        Hardening(config, record, tell, loaded=loaded).run(resume=resume)


def _step(facts: dict[str, Any]) -> dict[str, Any]:
    shown = f"loss {facts['loss']:.3g}" + ("" if facts["plan"] is not None else " (clean step)")
    return {"description": "training", "completed": facts["step"], "shown": shown}


def _line(facts: dict[str, Any]) -> str:
    scores = "  ".join(f"{c['name']} {c['accuracy']:.1%}" for c in facts["conditions"])
    recovered = "  ".join(f"{s['share']:.0%} recovered" for s in facts.get("shares", {}).values())
    return f"{facts.get('rung', 'untreated'):>9}: {scores}  {recovered}".rstrip()


def _show(record: RunRecord, outputs: OutputFiles) -> None:
    """Print scores, costs and verdict, and write them where it is asked for."""
    from shaketable.harden.results import outcome

    found = outcome(record)
    outputs.save(lambda: found, lambda: _page(found))
    screen = console()
    print_table(screen, _table(found))
    say(screen, *_proof(found))
    screen.print(f"[bold]{plain(found['sentence'])}.[/]", soft_wrap=True)
    say(screen, f"The model: {found['model']}")


def _page(found: dict[str, Any]) -> str:
    from shaketable.report.table_html import page

    config, sentence, table = found["config"], f"{found['sentence']}.", _table(found)
    facts = {"against": "; ".join(config["plans"]), "learnt from": config["task"] or config["prompts"], "model": found["model"]}
    tables, lines = [(str(table.title), table)], _proof(found)
    return page("harden", config["model"], "HARDENED", sentence, tables, status="shown", facts=facts, lines=lines)


def _proof(found: dict[str, Any]) -> list[str]:
    return [f"{plan}: fired {one['forward']:,} times while it was repaired" for plan, one in found["ledgers"].items()]


def _table(found: dict[str, Any]) -> Table:
    from shaketable.report.wording import share_of

    names = [plain(c["name"]) for c in found["before"]]
    title = f"{found['measure'].capitalize()} in % with 95 % intervals, before and after"
    table = table_of("after", (*names, "KL under it", "recovered", "seconds", "sequences"), title)
    table.add_row("untreated", *_scores(found["before"]), _kl(found["before"]), "–", "–", "–")
    for rung in found["rungs"]:
        cost = rung["cost"]
        back = (
            "\n".join(share_of(s["share"], s["interval"]["low"], s["interval"]["high"]) for s in rung["shares"].values()) or "–"
        )
        cells = [_kl(rung["conditions"]), back, f"{cost['seconds']:.1f}", f"{cost['sequences']:,}"]
        table.add_row(rung["rung"], *_scores(rung["conditions"]), *cells)
    return table


def _scores(conditions: list[dict[str, Any]]) -> list[str]:
    return [f"{100 * c['accuracy']:.1f} ({100 * c['ci_low']:.0f}–{100 * c['ci_high']:.0f})" for c in conditions]


def _kl(conditions: list[dict[str, Any]]) -> str:
    return " ".join(f"{c['kl']:.3g}" for c in conditions[1:])


RUNS = RecordedRuns("harden", HardenConfig, _run, _show)
