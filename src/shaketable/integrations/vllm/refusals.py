"""What cannot be done inside of vLLM: each is an error of one line, before anything is hooked.

A plan that is accepted and then does nothing is what this project is against. vLLM has several places where a hook would never
be called: replayed CUDA graphs, what was compiled without it, what its LoRA wrappers compute.

What can be known from vLLM's config is refused in the process that the user has started (`front_end.py`). The rest needs the
model, which is in a process that vLLM has started, and vLLM answers an error there by three tracebacks of which the last does
not have it. So `refusing` writes the line to stderr, leaves it where the front end and `shaketable run` find it, and ends such
a process without a traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shaketable.aqn.spec import AQN
from shaketable.errors import PlanError, ShaketableError
from shaketable.inject.injection import Injection, has_same_sites
from shaketable.launch.process import active
from shaketable.plan import Clause, Plan
from shaketable.sites.match import check_range

WHY = "SHAKETABLE_WHY_NOT"
"""The file in which a front end looks for the reason why its engine did not start."""


def is_written(clause: Clause) -> bool:
    """Whether a clause is about weights alone, which need no hooks."""
    return clause.site.level != "op" and set(clause.points) == {"weight"}


def can_act(plan: Plan) -> bool:
    """Whether anything of a plan can happen where nothing is trained."""
    here = {"rollout", "eval"}
    return any("forward" in c.site.directions and (not c.site.phase or here & {*c.site.phase}) for c in plan.clauses)


@contextmanager
def refusing() -> Iterator[None]:
    """An error of ours inside keeps this process from starting: have it told in one line, wherever somebody looks."""
    try:
        yield
    except ShaketableError as error:
        tell(error)
        if multiprocessing.parent_process() is None:
            raise
        raise SystemExit(2) from None


def tell(error: ShaketableError) -> None:
    """Say why an engine does not go on: on stderr, to the front end that waits for it, and to `shaketable run`."""
    sys.stderr.write(f"shaketable: {error}\n")
    sys.stderr.flush()
    if file := os.environ.get(WHY):
        Path(file).write_text(str(error), encoding="utf-8")
    if (ledger := active()) is not None:
        ledger.refused = str(error)
        ledger.flush()


def refuse_idle(plan: Plan) -> None:
    """A plan of a whole program may be about its trainer alone; one that was given to this engine may not."""
    if not can_act(plan):
        raise PlanError(f"{plan.text()}: nothing of it can act where nothing is trained")


def refuse_standstill(aqn: AQN) -> None:
    """A schedule that nobody moves along stays at its first σ, which may be 0."""
    if not aqn.is_steady:
        raise PlanError(
            f"{aqn.text()}: nothing moves this vLLM along the schedule, so σ would stay at its first value. Give it one σ, "
            f"constant:{aqn.schedule.peak():g}, or total_steps and a set_step(n) before every step"
        )


def refuse_layers(plan: Plan, model: Any) -> None:
    """A model that names the number of its layers has no others. What it has is looked at when it is there."""
    if isinstance(count := getattr(model, "num_hidden_layers", None), int):
        for clause in plan.clauses:
            check_range(clause.site, count)


def refuse_captured(plan: Plan, config: Any) -> None:
    """CUDA graphs run no Python: nothing but the weights can be faulty in them."""
    from vllm.platforms import current_platform

    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    captured = mode is not None and getattr(mode, "name", "NONE") != "NONE" and not current_platform.is_cpu()
    hit = [clause for clause in plan.clauses if not is_written(clause)]
    if captured and hit:
        raise PlanError(
            f"{hit[0].text()}: vLLM captures CUDA graphs, in which only faults of weights act; "
            "start it with enforce_eager=True or compilation_config={'cudagraph_mode': 'NONE'}"
        )


def refuse_adapted(injection: Injection) -> None:
    """vLLM's LoRA wrappers compute with the weights of what they wrap and do not call it: nothing there would be hit."""
    attached = injection.models[0]
    wrappers = [m for m in attached.model.modules() if type(m).__name__.endswith("WithLoRA")]
    inside = {id(m) for wrapper in wrappers for m in wrapper.modules()}
    hit = next((taps[0].name for module, taps in attached.points.values() if id(module) in inside), None)
    if hit is None and wrappers and injection.has_operators:
        hit = "every product with an adapter"
    if hit is not None:
        raise PlanError(
            f"{hit}: vLLM's LoRA computes it without a call that could be hit; merge the adapter, or use point=weight"
        )


def refuse_other_sites(plan: Plan, compiled: Injection | None, rank: int) -> None:
    """In a compiled model the taps are where they are: what they do can change, and on a GPU only its magnitude."""
    instead = "start vLLM with the plan (shaketable.integrations.vllm.options), or with enforce_eager=True"
    if compiled is None:
        raise PlanError(f"{plan.text()}: this vLLM model was compiled without taps; {instead}")
    if not has_same_sites(plan, compiled.plan):
        taps = "; ".join(clause.site.text() for clause in compiled.plan.clauses)
        raise PlanError(f"{plan.text()}: this vLLM model is compiled, with taps for other sites ({taps}); {instead}")
    if is_for_one_fault(compiled) and _shape(plan, rank) != _shape(compiled.plan, compiled.rank):
        raise PlanError(
            f"{plan.text()}: this vLLM model is compiled on a GPU, where the fault is part of the graph: of "
            f"{compiled.plan.text()} only magnitudes can change; {instead}"
        )


def is_for_one_fault(compiled: Injection) -> bool:
    """Whether what was compiled can do no other fault than the one it was compiled with."""
    return bool(compiled.tables.all)


def _shape(plan: Plan, rank: int) -> object:
    """All of a plan but its magnitudes, and whose it is."""
    return plan.seed, rank, [(c.site, c.fault.kind, tuple(c.fault.params().items())) for c in plan.clauses]
