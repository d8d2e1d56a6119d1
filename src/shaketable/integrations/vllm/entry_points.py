"""Where a vLLM worker lets us in: its instructions, its loading of weights, its packing of them, and its loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shaketable.aqn.spec import AQN
from shaketable.errors import ShaketableError
from shaketable.integrations.common.instructions import Instructions
from shaketable.integrations.vllm.refusals import refusing
from shaketable.launch.process import active
from shaketable.plan import Plan

if TYPE_CHECKING:
    from shaketable.integrations.vllm.worker import Shaker

LOOP = ("load_model", "determine_available_memory", "compile_or_warm_up_model", "execute_model", "sample_tokens")
"""What an engine does with its model; a plan on the whole process stands aside."""
_WATCHED = "_shaketable_watched"
_prepared: Instructions | None = None


def prepare(instructions: Instructions | None) -> None:
    """Have the taps of a plan compiled into every vLLM that is made in this process from now on; they do nothing until
    `set_plan` asks for that plan. For trainers that make their vLLM before they can say what it is for."""
    global _prepared
    _prepared = instructions


def prepared() -> Instructions | None:
    """What was prepared last."""
    return _prepared


def read_instructions(config: Any) -> Instructions | None:
    """The instructions of vLLM's `additional_config`, or else of the environment.

    Raises:
        ShaketableError: Both have instructions, and not the same.
    """
    given = config.additional_config if isinstance(config.additional_config, dict) else {}
    own = Instructions.from_mapping(given["shaketable"]) if given.get("shaketable") else None
    inherited = Instructions.from_env(os.environ)
    if own is not None and inherited is not None and own.digest() != inherited.digest():
        raise ShaketableError("additional_config and the environment order different plans; give one of them")
    return own if own is not None else inherited


def instructions_of(config: Any) -> Instructions | None:
    """The instructions of a worker.

    vLLM keeps compiled graphs by its whole config. Where ledgers go says nothing about a graph, and is taken out of it.
    """
    found = read_instructions(config)
    given = config.additional_config if isinstance(config.additional_config, dict) else {}
    if own := given.get("shaketable"):
        given["shaketable"] = {key: value for key, value in own.items() if key != "ledger"}
    return found


def watch_new_weights(shaker: Shaker) -> None:
    """Weights reach a running engine through the model's `load_weights`, whoever sends them."""
    model = shaker.model
    if "load_weights" in model.__dict__ or not hasattr(model, "load_weights"):
        return
    model.__dict__["load_weights"] = _told_before(shaker, model.load_weights)  # type: ignore[arg-type]


def is_about_linear_weights(instructions: Instructions) -> bool:
    """Whether linears must keep their weights: the plan, or AQN, is about them."""
    plan = Plan.parse(instructions.plan, seed=instructions.seed) if instructions.plan is not None else None
    of_plan = plan is not None and any("weight" in clause.points for clause in plan.clauses)
    return of_plan or (instructions.aqn is not None and "linear" in AQN.load(instructions.aqn).roles)


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
        file = active()
        with file.process.standing_aside() if file is not None else nullcontext():
            return call(*args, **kwargs)

    return quietly


def follow_instructions(shaker: Shaker, instructions: Instructions) -> None:
    """Attach when the model has been loaded, and switch on at the first request."""
    worker = shaker.worker
    if instructions.plan is not None and any(c.site.level == "op" for c in Plan.parse(instructions.plan).clauses):
        os.environ["VLLM_USE_AOT_COMPILE"] = "0"
    for name in LOOP:
        if (method := getattr(worker, name, None)) is not None:
            worker.__dict__[name] = standing_aside(method)
    load, stop = worker.load_model, worker.shutdown

    def load_model(*args: Any, **kwargs: Any) -> Any:
        with unpacked() if shaker.instructions and is_about_linear_weights(instructions) else nullcontext():
            result = load(*args, **kwargs)
        with refusing():
            shaker.on_loaded(instructions)
        return result

    def shutdown() -> None:
        shaker.flush()
        stop()

    worker.__dict__.update(load_model=load_model, shutdown=shutdown)
    watch_requests(shaker)


def watch_requests(shaker: Shaker) -> None:
    """Be told before and after each request, and before vLLM reads its weights again. Does nothing the second time."""
    worker = shaker.worker
    if _WATCHED in worker.__dict__:
        return
    worker.__dict__[_WATCHED] = True
    execute, reload = worker.execute_model, getattr(worker, "reload_weights", None)

    def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if not scheduled.total_num_scheduled_tokens:
            return execute(scheduled, *args, **kwargs)
        with shaker.serving():
            return execute(scheduled, *args, **kwargs)

    worker.__dict__["execute_model"] = execute_model
    if reload is not None:
        worker.__dict__["reload_weights"] = _told_before(shaker, reload)


def _told_before(shaker: Shaker, load: Callable[..., Any]) -> Callable[..., Any]:
    """A function that replaces weights: those that are there are clean when it begins."""

    def run(*args: Any, **kwargs: Any) -> Any:
        shaker.before_new_weights()
        return load(*args, **kwargs)

    return run
