"""What cannot be done inside of a vLLM worker: each is an error of one line, before anything is hooked.

A plan that is accepted and then does nothing is what this project is against. vLLM has several places where a hook would never
be called: replayed CUDA graphs, what was compiled without it, what its LoRA wrappers compute.
"""

from __future__ import annotations

from typing import Any

from shaketable.errors import PlanError
from shaketable.inject.injection import Injection
from shaketable.plan import Clause, Plan


def is_written(clause: Clause) -> bool:
    """Whether a clause is about weights alone, which need no hooks."""
    return clause.site.level != "op" and set(clause.points) == {"weight"}


def can_act(plan: Plan) -> bool:
    """Whether anything of a plan can happen where nothing is trained."""
    here = {"rollout", "eval"}
    return any("forward" in c.site.directions and (not c.site.phase or here & {*c.site.phase}) for c in plan.clauses)


def refuse_idle(plan: Plan) -> None:
    """A plan of a whole program may be about its trainer alone; one that was given to this engine may not."""
    if not can_act(plan):
        raise PlanError(f"{plan.text()}: nothing of it can act where nothing is trained")


def refuse_captured(plan: Plan, config: Any, on_cpu: bool) -> None:
    """CUDA graphs run no Python: nothing but the weights can be faulty in them."""
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    captured = mode is not None and getattr(mode, "name", "NONE") != "NONE" and not on_cpu
    struck = [clause for clause in plan.clauses if not is_written(clause)]
    if captured and struck:
        raise PlanError(
            f"{struck[0].text()}: vLLM captures CUDA graphs, in which only faults of weights act; "
            "start it with enforce_eager=True or compilation_config={'cudagraph_mode': 'NONE'}"
        )


def refuse_adapted(injection: Injection) -> None:
    """vLLM's LoRA wrappers compute with the weights of what they wrap and do not call it: nothing there would be struck."""
    attached = injection.models[0]
    wrappers = [m for m in attached.model.modules() if type(m).__name__.endswith("WithLoRA")]
    inside = {id(m) for wrapper in wrappers for m in wrapper.modules()}
    hit = next((taps[0].name for module, taps in attached.points.values() if id(module) in inside), None)
    if hit is None and wrappers and injection.has_operators:
        hit = "every product with an adapter"
    if hit is not None:
        raise PlanError(
            f"{hit}: vLLM's LoRA computes it without a call that could be struck; merge the adapter, or use point=weight"
        )


def refuse_other_sites(plan: Plan, compiled: Injection | None, rank: int) -> None:
    """In a compiled model the taps are where they are, with the keys that they have; only magnitudes can change."""
    known = compiled is not None and _shape(compiled.plan, compiled.rank) == _shape(plan, rank)
    if not known:
        raise PlanError(
            "this vLLM model is compiled, and what was compiled has no taps for this plan; "
            "start vLLM with the plan (shaketable.integrations.vllm.options), or with enforce_eager=True"
        )


def _shape(plan: Plan, rank: int) -> Any:
    """All of a plan but its magnitudes, and whose it is."""
    return plan.seed, rank, [(c.site, c.fault.kind, tuple(c.fault.params().items())) for c in plan.clauses]
