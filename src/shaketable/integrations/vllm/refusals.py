"""Errors of one line for plans that cannot act inside of vLLM, raised before anything is hooked.

What the config alone shows is refused in the user's own process, where vLLM makes that config (`init_and_check`). The rest
needs the model, in a process that vLLM has started: `refusing` prints one line, also for `shaketable run`, and ends it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shaketable.aqn.spec import AQN
from shaketable.errors import PlanError, ShaketableError
from shaketable.integrations.common.instructions import VARIABLES, Instructions
from shaketable.integrations.vllm import EXTENSION
from shaketable.launch.process import active
from shaketable.launch.run import default_folder
from shaketable.plan import Clause, Plan
from shaketable.sites.match import check_range


@contextmanager
def refusing() -> Iterator[None]:
    """An error of ours inside ends this process with one line."""
    try:
        yield
    except ShaketableError as error:
        tell(error)
        if multiprocessing.parent_process() is None:
            raise
        raise SystemExit(2) from None


def tell(error: ShaketableError) -> None:
    """Say why an engine stops: on stderr, and to `shaketable run`."""
    sys.stderr.write(f"shaketable: {error}\n")
    sys.stderr.flush()
    if (ledger := active()) is not None:
        ledger.refused = str(error)
        ledger.flush()


def is_written(clause: Clause) -> bool:
    """Whether a clause is about weights alone, which need no hooks."""
    return clause.site.level != "op" and set(clause.points) == {"weight"}


def can_act(plan: Plan) -> bool:
    """Whether anything of a plan can happen where nothing is trained."""
    here = {"rollout", "eval"}
    return any("forward" in c.site.directions and (not c.site.phase or here & {*c.site.phase}) for c in plan.clauses)


# ---- what a config shows


def read_instructions(config: Any) -> Instructions | None:
    """The instructions of vLLM's `additional_config`, or else of the environment.

    Raises:
        ShaketableError: Both have instructions, and not the same.
    """
    given = _own(config)
    own = Instructions.from_mapping(given) if given else None
    inherited = Instructions.from_env(os.environ)
    if own is not None and inherited is not None and own.digest() != inherited.digest():
        raise ShaketableError("additional_config and the environment order different plans; give one of them")
    return own if own is not None else inherited


def _own(config: Any) -> Any:
    """The instructions that the config itself has."""
    return config.additional_config.get("shaketable") if isinstance(config.additional_config, dict) else None


def init_and_check(init: Callable[..., None], config: Any, *args: Any, **kwargs: Any) -> None:
    """`VllmConfig.__init__`, then `check`. In `__post_init__` pydantic would put a plan's error into one of its own."""
    init(config, *args, **kwargs)
    check(config)


def check(config: Any) -> None:
    """Refuse what cannot be done in a vLLM with this config, and see to it that a ledger is kept.

    Where instructions came by the environment the program does not know about us and ends; otherwise the caller gets the error.
    """
    if config.model_config is None:
        return
    try:
        if (instructions := read_instructions(config)) is not None:
            _check(instructions, config)
    except ShaketableError as error:
        if _own(config):
            raise
        tell(error)
        raise SystemExit(2) from None


def _check(instructions: Instructions, config: Any) -> None:
    extension = config.parallel_config.worker_extension_cls
    if instructions.plan is not None:
        plan = Plan.parse(instructions.plan)
        if not os.environ.get(VARIABLES["plan"]):
            refuse_idle(plan)
        if isinstance(count := getattr(config.model_config.hf_text_config, "num_hidden_layers", None), int):
            for clause in plan.clauses:
                check_range(clause.site, count)
        refuse_unhooked(plan, config)
    if instructions.aqn is not None and not extension and instructions.total_steps == 1:
        refuse_standstill(AQN.load(instructions.aqn))
    if instructions.ledger is None and active() is None and extension != EXTENSION:  # nobody could ask what it did
        folder = str(default_folder().resolve())
        if own := _own(config):
            own["ledger"] = folder
        else:
            os.environ[VARIABLES["ledger"]] = folder


def refuse_idle(plan: Plan) -> None:
    """A plan of a whole program may be about its trainer alone; one that was given to this engine may not."""
    if not can_act(plan):
        raise PlanError(f"{plan.text()}: nothing of it can act where nothing is trained")


def refuse_standstill(aqn: AQN) -> None:
    """A schedule that nothing advances stays at its first σ, which may be 0."""
    if not aqn.is_steady:
        raise PlanError(
            f"{aqn.text()}: nothing moves this vLLM along the schedule, so σ would stay at its first value. Give it one σ, "
            f"constant:{aqn.schedule.peak():g}, or total_steps and a set_step(n) before every step"
        )


def refuse_unhooked(plan: Plan, config: Any) -> None:
    """CUDA graphs run no Python, and LoRA's wrappers do not call what they wrap: only weights can be faulty there."""
    from vllm.platforms import current_platform

    hit = next((clause.text() for clause in plan.clauses if not is_written(clause)), None)
    if hit and config.compilation_config.cudagraph_mode and not current_platform.is_cpu():
        raise PlanError(
            f"{hit}: vLLM captures CUDA graphs, in which only faults of weights act; "
            "start it with enforce_eager=True or compilation_config={'cudagraph_mode': 'NONE'}"
        )
    if hit and config.lora_config is not None:
        raise PlanError(f"{hit}: vLLM's LoRA computes without calls that could be hit; merge the adapter, or use point=weight")
