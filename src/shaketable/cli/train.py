"""`shaketable train`: GRPO under faults, with or without AQN, and its scores."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.cli.outputs import OutputFiles
from shaketable.cli.recorded_runs import RecordedRuns, live, load_rehearsed, settled
from shaketable.cli.terminal import console, plain, print_table, say, table_of, warn
from shaketable.cli.verb import ForceOption, JsonOption, ResumeOption, RunFolderOption, options_of
from shaketable.errors import ShaketableError
from shaketable.train.config import TrainConfig

if TYPE_CHECKING:
    from shaketable.records.record import RunRecord

MOSTLY = 0.9
"""Share of groups without variance from which on the summary mentions it."""


@options_of(
    TrainConfig,
    "task", "plan", "plan_in", "aqn", "steps", "seed", "tis", "warm_start", "prompts", "samples", "micro_batch", "lr",
    "temperature", "beta", "lora", "eval_every", "eval_n", "eval_plans", "save_every",
    "device", "dtype",
    metavar={"plan": "P", "aqn": "A", "tis": "CAP", "warm_start": "N", "lora": "RANK", "eval_plans": "P"},
    default={"task": "", "steps": 100, "device": "auto", "dtype": None},
    flag={"eval_plans": "--eval-plan", "eval_n": ("-n", "--limit"), "prompts": "--problems"},
)  # fmt: skip
def train(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=TrainConfig.model_fields["model"].description)] = "",
    *,
    out: RunFolderOption = None,
    resume: ResumeOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the run would do, print σ, and stop.")] = False,
    json_file: JsonOption = None,
    force: ForceOption = False,
    **fields: Any,
) -> None:
    """Train a model with GRPO under a fault, and measure what the fault costs and what AQN gains.

    The model is scored before the first step, every --eval-every steps and after the last: clean and under the plan,
    greedy, on the same test problems. Every faulty score carries the proof that its faults were there.

    Example: `shaketable train nano --task arithmetic --plan 'relative_gaussian:0.05@op.matmul' --aqn
    'global_decay:0.05-0.0005,stages=10' --steps 60`
    """
    outputs = OutputFiles(json_file, force=force)
    if resume is not None:
        RUNS.resume(context, resume, outputs)
        return
    if not model or not fields["task"]:
        raise ShaketableError("name a model and a --task, e.g. shaketable train nano --task arithmetic; or --resume DIR")
    from shaketable.models import hush

    loggers = tuple(name for name in ("tensorboard", "wandb", "trackio") if find_spec(name) is not None)
    config = TrainConfig.checked(
        model=model, report_to=loggers, **settled(fields, "eval_plans") | _read(fields["plan"], fields["aqn"])
    )
    hush()
    if dry_run:
        _show_plan_of(config)
        return
    from shaketable.train.plans import rehearse

    name = f"train-{Path(config.model).name}-{Path(config.task.partition(',')[0]).stem}"
    RUNS.start(config, name, out, outputs, lambda: load_rehearsed(config, rehearse))


def _read(plan: str | None, aqn: str | None) -> dict[str, Any]:
    """Plan and AQN as lines; a plan's file brings its seed."""
    from shaketable.aqn.spec import AQN
    from shaketable.plan import Plan

    found = None if plan is None else Plan.load(plan)
    from_file = plan is not None and plan.strip().endswith((".yaml", ".yml"))
    return {
        "plan": None if found is None else found.text(),
        "plan_seed": found.seed if found is not None and from_file else None,
        "aqn": None if aqn is None else AQN.load(aqn).text(),
    }


def _show_plan_of(config: TrainConfig) -> None:
    """What the run would do, checked as far as possible without weights."""
    from shaketable.aqn.plot import sigmas
    from shaketable.aqn.spec import AQN
    from shaketable.models import quieten
    from shaketable.train.plans import rehearse

    quieten()
    screen = console()
    skeleton, lines = rehearse(config)
    say(screen, *lines)
    if config.aqn is not None:
        screen.print(sigmas(AQN.load(config.aqn), config.steps, skeleton).render())


def _run(config: TrainConfig, record: RunRecord, *, resume: bool, loaded: Any = None) -> None:
    from shaketable.train.run import Training

    with live(_step, _scores, config.steps) as tell:
        Training(config, record, tell, loaded=loaded).run(resume=resume)


def _scores(facts: dict[str, Any]) -> str:
    return f"step {facts['step']:>5}: " + "  ".join(f"{c['name']} {c['accuracy']:.1%}" for c in facts["conditions"])


def _step(facts: dict[str, Any]) -> dict[str, Any]:
    shown = f"reward {facts['reward']:.2f}  entropy {facts.get('entropy', 0):.2f}"
    shown += f"  KL {facts.get('kl_sampler_trainer', 0):.1e}"
    shown += f"  σ {facts['sigma']:.2g}" if facts["sigma"] else ""
    return {"completed": facts["step"], "description": "training", "shown": shown}


def _show(record: RunRecord, outputs: OutputFiles) -> None:
    """Print the outcome, and write it where it is asked for."""
    from shaketable.train.summary import outcome

    found = outcome(record)
    outputs.save(lambda: found)
    heads = ("step 0", "last step", "n", "injections", "measured error")
    table = table_of("condition", heads, "Accuracy, greedy, with 95 % intervals")
    first = {c["name"]: c for c in found["evaluations"][0]["conditions"]}
    for name, score in found["final"].items():
        error = f"{score['measured_error']:.2%}" if score["injections"] else "–"
        table.add_row(plain(name), _score(first[name]), _score(score), str(score["n"]), f"{score['injections']:,}", error)
    screen = console()
    print_table(screen, table)
    say(screen, *(f"{comparison['of']}: {comparison['sentence']}" for comparison in found["comparisons"]))
    for name, ledger in found["ledgers"].items():
        fires = f"{ledger['forward']:,} forward, {ledger['backward']:,} backward"
        say(screen, f"{name} in training: {fires}; {_measured(ledger)}")
    same = [step["zero_variance"] for step in found["steps"] if step.get("zero_variance") is not None]
    if same and sum(same) / len(same) > MOSTLY:
        share = f"{sum(same) / len(same):.0%} of the groups had one reward for all answers"
        say(screen, f"note: {share}; they carry no gradient")
    for warning in found["warnings"]:
        warn(screen, warning)
    say(screen, f"Weights, clean: {found['model']}")


def _measured(ledger: dict[str, Any]) -> str:
    """Each clause with the magnitude that was asked for (its mean over a schedule) and the one that was measured."""
    shown = []
    for site in ledger["sites"]:
        fault, found = site["fault"].partition(":")[0], site["measured_magnitude"]
        asked = "" if site["asked"] is None else f" asked {site['asked']:.3g},"
        size = found if found is not None else site["measured_error"]
        shown.append(f"{fault}@{site['site']}{asked} measured {size:.3g}" if size is not None else f"{fault}@{site['site']}")
    return "; ".join(shown)


def _score(condition: dict[str, Any]) -> str:
    return f"{condition['accuracy']:.1%} ({condition['ci_low']:.1%}–{condition['ci_high']:.1%})"


RUNS = RecordedRuns("train", TrainConfig, _run, _show)
