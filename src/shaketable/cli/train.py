"""`shaketable train`: GRPO under faults, with or without AQN, and the scores that came of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.cli.tables.train import show
from shaketable.errors import ShaketableError
from shaketable.io.output_files import check_free

if TYPE_CHECKING:
    from shaketable.harden.grpo.config import TrainConfig
    from shaketable.harden.grpo.run import Tell
    from shaketable.records.record import RunRecord

TASK = "arithmetic, gsm8k, a .jsonl file, or my_tasks.py:Class, whose code is run; options after commas: arithmetic,level=2."


RESUME_TAKES = ("resume", "json_file", "force")


def train(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="nano, smollm2-135m, a folder with safetensors, or a hub id.")] = "",
    task: Annotated[str, typer.Option("--task", help=TASK)] = "",
    plan: Annotated[str | None, typer.Option("--plan", metavar="P", help="The hardware's errors: a plan, or its YAML.")] = None,
    plan_in: Annotated[
        str, typer.Option("--plan-in", help="Where the plan acts in training: both, rollout, loss, or eval (scores only).")
    ] = "both",
    aqn: Annotated[
        str | None,
        typer.Option("--aqn", metavar="A", help="Noise in the sampler: global_decay:0.05-0.0005,stages=10 or its YAML."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps.")] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Keys problems, sampling and noise.")] = 0,
    tis: Annotated[
        float | None, typer.Option("--tis", metavar="CAP", help="Truncated importance sampling, e.g. 2; off by default.")
    ] = None,
    warm_start: Annotated[
        int,
        typer.Option(
            "--warm-start",
            metavar="N",
            help="N supervised steps on the task's answers first, the same for all arms and seeds, cached; 0 is off.",
        ),
    ] = 0,
    prompts: Annotated[int, typer.Option("--prompts", help="Problems per step.")] = 16,
    samples: Annotated[int, typer.Option("--samples", help="Answers per problem: the group rewards are compared in.")] = 8,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Answers per backward pass; 0 is a whole step.")] = 0,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate; chosen by the model's size by default.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="Of the sampling.")] = 1.0,
    beta: Annotated[float, typer.Option("--beta", help="Weight of the KL to the first policy.")] = 0.0,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps of linear warm-up.")] = 0,
    lora: Annotated[
        int, typer.Option("--lora", metavar="RANK", help="Train LoRA adapters of this rank; 0 is all weights.")
    ] = 0,
    eval_every: Annotated[int, typer.Option("--eval-every", help="Steps between scores; first and last always.")] = 0,
    eval_n: Annotated[int, typer.Option("--eval-n", help="Test problems, drawn at random.")] = 200,
    eval_seed: Annotated[int, typer.Option("--eval-seed", help="Draws them, and keys the noise they are scored under.")] = 0,
    eval_plan: Annotated[
        list[str] | None, typer.Option("--eval-plan", metavar="P", help="Score under this plan too; can be repeated.")
    ] = None,
    save_every: Annotated[int, typer.Option("--save-every", help="Steps between checkpoints; 0 is a tenth of the run.")] = 0,
    decoding: Annotated[
        str, typer.Option("--decoding", help="Of rollouts: auto, dynamic, or static (CUDA graphs; auto is that on CUDA).")
    ] = "auto",
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, npu, …; what this machine has by default.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16 (default on an accelerator).")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Run folder; a new one under runs/ by default.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with this run; nothing else needed.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the run would do, print and plot σ, and stop.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write steps and final scores.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the --json file, or the plot of --dry-run.")] = False,
) -> None:
    """Train a model with GRPO while the hardware is wrong, and learn what that cost and what AQN bought.

    Scores are taken before the first step, every --eval-every steps and always after the last: clean and under the
    plan, greedy, on the same test problems. Every faulty score carries the proof that its faults were there.

    Example: `shaketable train nano --task arithmetic --plan 'relative_gaussian:0.05@op.matmul' --aqn
    'global_decay:0.05-0.0005,stages=10' --steps 60`
    """
    check_free([f for f in (json_file,) if f is not None], [], force)
    if resume is not None:
        given = [f"--{n.replace('_', '-')}" for n in context.params if is_given(context, n) and n not in RESUME_TAKES]
        if given:
            raise ShaketableError(f"--resume goes on as the run was configured: drop {', '.join(given)}")
        _go_on(resume, json_file)
        return
    if not model or not task:
        raise ShaketableError("name a model and a --task, e.g. shaketable train nano --task arithmetic; or --resume DIR")
    from shaketable.harden.aqn.spec import AQN
    from shaketable.plan import Plan

    text, plan_seed = _plan(plan)
    noise = None if aqn is None else AQN.load(aqn).text()
    eval_plans = tuple(dict.fromkeys(Plan.load(p).text() for p in eval_plan or ()))
    chosen = chosen_device(device)
    fields = {
        "model": model, "task": task, "plan": text, "plan_seed": plan_seed, "plan_in": plan_in, "aqn": noise, "steps": steps,
        "seed": seed, "tis": tis, "prompts": prompts, "samples": samples, "micro_batch": micro_batch, "lr": lr,
        "temperature": temperature, "beta": beta, "warmup": warmup, "lora": lora, "eval_every": eval_every, "eval_n": eval_n,
        "eval_seed": eval_seed, "eval_plans": eval_plans, "save_every": save_every, "warm_start": warm_start,
        "decoding": decoding, "device": chosen,
        "dtype": dtype or ("float32" if chosen == "cpu" else "bfloat16"), "report_to": _loggers(),
    }  # fmt: skip
    from shaketable.harden.grpo.config import TrainConfig
    from shaketable.models import hush

    hush()
    config = TrainConfig.checked(**fields)
    if dry_run:
        _show_plan_of(config, out, force)
        return
    _start(config, out, json_file)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _plan(plan: str | None) -> tuple[str | None, int | None]:
    """The plan in one line, and the seed that its file names."""
    if plan is None:
        return None, None
    from shaketable.plan import Plan

    found = Plan.load(plan)
    return found.text(), found.seed if plan.strip().endswith((".yaml", ".yml")) else None


def chosen_device(device: str | None) -> str:
    """The device that was asked for, if it is here; what this machine has by default."""
    import torch

    from shaketable.models import check_device

    if device is None:
        return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    check_device(device)
    return device


def _loggers() -> tuple[str, ...]:
    return tuple(name for name in ("tensorboard", "wandb", "trackio") if find_spec(name) is not None)


def _show_plan_of(config: TrainConfig, out: Path | None, force: bool) -> None:
    """What the run would do, checked as far as it can be without weights; the picture lies beside the run folder."""
    from rich.console import Console

    from shaketable.harden.aqn.plot import plot, sigmas
    from shaketable.harden.grpo.dry_run import rehearse
    from shaketable.models import quieten

    picture = Path("aqn-sigma.png") if out is None else out.with_name(f"{out.name}-aqn-sigma.png")
    if config.aqn is not None:
        check_free([picture], [], force)
    quieten()
    console = Console(highlight=False)
    skeleton, lines = rehearse(config)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if config.aqn is not None:
        from shaketable.harden.aqn.spec import AQN

        aqn = AQN.load(config.aqn)
        console.print(sigmas(aqn, config.steps, skeleton).render())
        plot(aqn, config.steps, picture, skeleton)
        console.print(f"σ over the steps is drawn in {picture}", markup=False)


def _start(config: TrainConfig, out: Path | None, json_file: Path | None) -> None:
    from shaketable.harden.grpo.dry_run import rehearse
    from shaketable.models import load_model, quieten
    from shaketable.records.record import RunRecord, check_new, unique_folder

    if out is not None:
        check_new(out)
    quieten()
    rehearse(config)
    name = f"train-{Path(config.model).name}-{Path(config.task.partition(',')[0]).stem}"
    folder = out or unique_folder(Path("runs"), name)
    from shaketable.records.environment import gather

    loaded = load_model(config.model, device=config.device, dtype="float32")  # before a folder is made: it may be broken
    record = RunRecord.create(folder, "train", config.model_dump(mode="json"), gather())
    _run(config, record, json_file, resume=False, loaded=loaded)


def _go_on(folder: Path, json_file: Path | None) -> None:
    from shaketable.harden.grpo.config import TrainConfig
    from shaketable.records.record import RunRecord

    record = RunRecord.open(folder, "train")
    if record.events("finished"):
        show(record, json_file)
        return
    _run(TrainConfig.checked(**record.config), record, json_file, resume=True)


def _run(config: TrainConfig, record: RunRecord, json_file: Path | None, *, resume: bool, loaded: Any = None) -> None:
    from shaketable.harden.grpo.run import Training
    from shaketable.models import quieten

    quieten()

    again = f"shaketable train --resume {record.folder}"
    typer.echo(f"recording in {record.folder}; after an interruption: {again}", err=True)
    with record.alone(), _live(config.steps) as tell:
        Training(config, record, tell, loaded=loaded).run(resume=resume)
    show(record, json_file)


@contextmanager
def _live(steps: int) -> Iterator[Tell]:
    """A bar with the numbers that matter; scores and warnings stay on the screen above it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    text, numbers = TextColumn("{task.description}"), TextColumn("{task.fields[shown]}")
    columns = (text, BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), numbers)
    with Progress(*columns, console=console, transient=True) as bar:
        row = bar.add_task("starting", total=steps, shown="")

        def tell(kind: str, facts: dict[str, Any]) -> None:
            if kind == "stage":
                counted = {"completed": facts["done"], "total": facts["total"]} if "total" in facts else {}
                bar.update(row, description=facts["text"], **counted)
            elif kind == "step":
                bar.update(row, completed=facts["step"], total=steps, description="training", shown=_numbers(facts))
            elif kind == "evaluation":
                scores = "  ".join(f"{c['name']} {c['accuracy']:.1%}" for c in facts["conditions"])
                console.print(f"step {facts['step']:>5}: {scores}", markup=False)
            else:
                console.print(f"[bold yellow]warning:[/] {facts['text']}")

        yield tell


def _numbers(facts: dict[str, Any]) -> str:
    shown = f"reward {facts['reward']:.2f}  entropy {facts.get('entropy', 0):.2f}"
    shown += f"  KL {facts.get('kl_sampler_trainer', 0):.1e}"
    return shown + (f"  σ {facts['sigma']:.2g}" if facts["sigma"] else "")
