"""`shaketable train`: GRPO under faults, with or without AQN, and the scores that came of it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.cli.config_options import options_of
from shaketable.cli.outputs import OutputFiles
from shaketable.cli.recorded_runs import RecordedRuns, live
from shaketable.cli.tables.train import show
from shaketable.cli.verb import ForceOption, JsonOption
from shaketable.errors import ShaketableError
from shaketable.io.output_files import check_free
from shaketable.train.config import TrainConfig

if TYPE_CHECKING:
    from shaketable.records.record import RunRecord


@options_of(
    TrainConfig,
    "task", "plan", "plan_in", "aqn", "steps", "seed", "tis", "warm_start", "prompts", "samples", "micro_batch", "lr",
    "temperature", "beta", "warmup", "lora", "eval_every", "eval_n", "eval_seed", "eval_plans", "save_every",
    "device", "dtype",
    metavar={"plan": "P", "aqn": "A", "tis": "CAP", "warm_start": "N", "lora": "RANK", "eval_plans": "P"},
    default={"task": "", "steps": 100, "device": "auto", "dtype": None},
    flag={"eval_plans": "--eval-plan", "eval_n": ("-n", "--limit"), "prompts": "--problems"},
)  # fmt: skip
def train(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=TrainConfig.model_fields["model"].description)] = "",
    *,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Run folder; a new one under runs/ by default.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with this run; nothing else needed.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the run would do, print and plot σ, and stop.")] = False,
    json_file: JsonOption = None,
    force: ForceOption = False,
    **fields: Any,
) -> None:
    """Train a model with GRPO while the hardware is wrong, and learn what that cost and what AQN bought.

    Scores are taken before the first step, every --eval-every steps and always after the last: clean and under the
    plan, greedy, on the same test problems. Every faulty score carries the proof that its faults were there.

    Example: `shaketable train nano --task arithmetic --plan 'relative_gaussian:0.05@op.matmul' --aqn
    'global_decay:0.05-0.0005,stages=10' --steps 60`
    """
    outputs = OutputFiles("train", model, json_file, of_run=True, force=force)
    runs = RecordedRuns("train", TrainConfig, _run, show)
    if resume is not None:
        runs.resume(context, resume, outputs)
        return
    if not model or not fields["task"]:
        raise ShaketableError("name a model and a --task, e.g. shaketable train nano --task arithmetic; or --resume DIR")
    fields |= _read(**fields)
    from shaketable.models import hush

    hush()
    config = TrainConfig.checked(model=model, report_to=_loggers(), **fields)
    if dry_run:
        _show_plan_of(config, out, force)
        return
    from shaketable.train.plans import rehearse

    runs.start(config, rehearse, f"train-{Path(model).name}-{Path(config.task.partition(',')[0]).stem}", out, outputs)


def _read(
    plan: str | None, aqn: str | None, eval_plans: list[str], device: str | None, dtype: str | None, **_: Any
) -> dict[str, Any]:
    """What stands in files, and what this machine has, in place of their names."""
    from shaketable.aqn.spec import AQN
    from shaketable.models import chosen_device
    from shaketable.plan import Plan

    found = None if plan is None else Plan.load(plan)
    from_file = plan is not None and plan.strip().endswith((".yaml", ".yml"))
    chosen = chosen_device(device)
    return {
        "plan": None if found is None else found.text(),
        "plan_seed": found.seed if found is not None and from_file else None,
        "aqn": None if aqn is None else AQN.load(aqn).text(),
        "eval_plans": tuple(dict.fromkeys(Plan.load(p).text() for p in eval_plans)),
        "device": chosen,
        "dtype": dtype or ("float32" if chosen == "cpu" else "bfloat16"),
    }


def _loggers() -> tuple[str, ...]:
    return tuple(name for name in ("tensorboard", "wandb", "trackio") if find_spec(name) is not None)


def _show_plan_of(config: TrainConfig, out: Path | None, force: bool) -> None:
    """What the run would do, checked as far as it can be without weights; the picture lies beside the run folder."""
    from rich.console import Console

    from shaketable.aqn.plot import plot, sigmas
    from shaketable.models import quieten
    from shaketable.train.plans import rehearse

    picture = Path("aqn-sigma.png") if out is None else out.with_name(f"{out.name}-aqn-sigma.png")
    if config.aqn is not None:
        check_free([picture], [], force)
    quieten()
    console = Console(highlight=False)
    skeleton, lines = rehearse(config)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if config.aqn is not None:
        from shaketable.aqn.spec import AQN

        aqn = AQN.load(config.aqn)
        console.print(sigmas(aqn, config.steps, skeleton).render())
        plot(aqn, config.steps, picture, skeleton)
        console.print(f"σ over the steps is drawn in {picture}", markup=False)


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
