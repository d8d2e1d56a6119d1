"""Where a vLLM worker lets us in: its orders, its loading of weights, its packing of them, and its loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shaketable.errors import PlanError, ShaketableError
from shaketable.harden.aqn import AQN
from shaketable.integrations.orders import Orders
from shaketable.launch.process import active
from shaketable.plan import Clause, Plan

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection
    from shaketable.integrations.vllm_worker import Shaker

_prepared: Orders | None = None


def prepare(orders: Orders | None) -> None:
    """Have the taps of a plan compiled into every vLLM that is made in this process from now on; they do nothing until
    `set_plan` asks for that plan. For trainers that make their vLLM before they can say what it is for."""
    global _prepared
    _prepared = orders


def prepared() -> Orders | None:
    """What was prepared last."""
    return _prepared


def orders_of(config: Any) -> Orders | None:
    """The orders of a worker: of vLLM's `additional_config`, or else of its environment.

    vLLM keeps compiled graphs by its whole config. Where ledgers go says nothing about a graph, and is taken out of it.

    Raises:
        ShaketableError: Both have orders, and not the same.
    """
    given = config.additional_config if isinstance(config.additional_config, dict) else {}
    own = Orders.from_mapping(given["shaketable"]) if given.get("shaketable") else None
    inherited = Orders.from_env(os.environ)
    if own is not None and inherited is not None and own.digest() != inherited.digest():
        raise ShaketableError("additional_config and the environment order different plans; give one of them")
    if own is not None:
        given["shaketable"] = {key: value for key, value in given["shaketable"].items() if key != "ledger"}
    return own if own is not None else inherited


def watch_new_weights(shaker: Shaker) -> None:
    """Weights reach a running engine through the model's `load_weights`, whoever sends them."""
    model = shaker.model
    if "load_weights" in model.__dict__ or not hasattr(model, "load_weights"):
        return
    load: Callable[..., Any] = model.load_weights  # type: ignore[assignment]

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        shaker.before_new_weights()
        return load(*args, **kwargs)

    model.__dict__["load_weights"] = load_weights


def is_about_linear_weights(orders: Orders) -> bool:
    plan = Plan.parse(orders.plan, seed=orders.seed) if orders.plan is not None else None
    of_plan = plan is not None and any("weight" in clause.points for clause in plan.clauses)
    return of_plan or (orders.aqn is not None and "linear" in AQN.load(orders.aqn).roles)


def is_written(clause: Clause) -> bool:
    """Whether a clause is about weights alone, which need no hooks."""
    return clause.site.level != "op" and set(clause.points) == {"weight"}


def can_act(plan: Plan) -> bool:
    """Whether anything of a plan can happen where nothing is trained."""
    here = {"rollout", "eval"}
    return any("forward" in c.site.directions and (not c.site.phase or here & {*c.site.phase}) for c in plan.clauses)


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


@contextmanager
def unpacked() -> Iterator[None]:
    """While a model is loaded: linears keep their weights, and multiply as torch does."""
    import vllm.model_executor.layers.utils as layers

    def keep(layer: nn.Module, remove_weight: bool) -> None:
        layer.__dict__["cpu_linear"] = torch.nn.functional.linear

    pack = layers.dispatch_cpu_unquantized_gemm
    layers.dispatch_cpu_unquantized_gemm = keep
    try:
        yield
    finally:
        layers.dispatch_cpu_unquantized_gemm = pack


def standing_aside(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the worker, during which a plan on the whole process does nothing: the worker has its own."""

    def quietly(*args: Any, **kwargs: Any) -> Any:
        process = active()
        with process.injection.standing_aside() if process is not None else nullcontext():
            return call(*args, **kwargs)

    return quietly
