"""vLLM: a plan, or AQN, in the workers that sample, without a change to vLLM.

By the entry point `vllm.general_plugins` vLLM calls `register` in its front end, in its engine and in every worker. A worker
with instructions (from `additional_config` or the environment) attaches them to its model right after it was loaded, before
anything is compiled (`vllm/worker.py`). Every worker also answers the calls of `Extension`, over `collective_rpc`.

vLLM logs a plugin that fails, and goes on. With instructions it must not: then `register` ends the process with one line, or
makes vLLM refuse a config that has instructions. Where vLLM does not load plugins (`VLLM_PLUGINS` names others), `shaketable
run` and `options` still reach the workers: the one watches vLLM being imported, the other names an extension class whose module
does what the plugin does, and raises.

This file imports no torch: every vLLM on the machine loads it.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shaketable.integrations.common.wrapping import wrap_once

if TYPE_CHECKING:
    from shaketable.integrations.vllm.worker import Shaker

CHANGES = ("set_plan", "set_magnitude", "set_aqn", "set_sigma", "set_step", "set_phase", "clear")
"""Calls after which the engine's cache of prefixes holds what another model computed."""
EXTENSION = "shaketable.integrations.vllm.extension.Extension"
"""The worker extension that `options` names."""
PATCHED = {
    "vllm.config": ("VllmConfig", "__init__", "shaketable.integrations.vllm.refusals.init_and_check"),
    "vllm.v1.worker.worker_base": ("WorkerBase", "__init__", "shaketable.integrations.vllm.init_and_adopt"),
    "vllm.v1.engine.core": ("EngineCore", "collective_rpc", "shaketable.integrations.vllm.reset_cache_and_call"),
}
"""By module: a class of vLLM, its method, and what of ours is put around that."""
_SLOT = "_shaketable"


def options(
    plan: Any = None, aqn: Any = None, *, seed: int | None = None, total_steps: int = 1, ledger: str | None = None
) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM`, or for vLLM's engine arguments, that put a plan or AQN into its workers.

    Args:
        plan: A line of the plan language, a YAML file, or a `Plan`.
        aqn: A line that `AQN.load` reads, a YAML file, or an `AQN`.
        seed: Keys the noise of the plan; overrides the plan's own.
        total_steps: Steps that the schedule of AQN is stretched over; `Sampler.set_step` moves along them.
        ledger: A folder in which every worker leaves its ledger.
    """
    from shaketable.integrations.common.instructions import Instructions

    given = {"plan": plan, "aqn": aqn, "seed": seed, "total_steps": total_steps, "ledger": ledger}
    instructions = Instructions.from_mapping({key: value for key, value in given.items() if value is not None})
    body = instructions.model_dump(exclude_none=True)
    return {"additional_config": {"shaketable": body}, "worker_extension_cls": EXTENSION}


def register() -> None:
    """The plugin: called by vLLM in each of its processes, possibly several times."""
    try:
        _install()
    except Exception as error:
        _refuse_instructions(f"shaketable cannot inject faults into this vLLM: {type(error).__name__}: {error}")


def _install() -> None:
    import importlib

    from shaketable.integrations.common.instructions import Instructions
    from shaketable.integrations.names import CLASSES, check

    check(*(owner for owner in CLASSES if owner.startswith("vllm.")))
    Instructions.from_env(os.environ)
    for module in PATCHED:
        patch(importlib.import_module(module))


def _refuse_instructions(why: str) -> None:
    """No-op unless instructions are configured."""
    if os.environ.get("SHAKETABLE_PLAN"):
        sys.stderr.write(f"{why}\n")
        sys.stderr.flush()
        raise SystemExit(2)
    from vllm.config import VllmConfig

    def finish_or_refuse(finish: Callable[..., None], config: Any, *args: Any) -> None:
        finish(config, *args)
        if isinstance(config.additional_config, dict) and config.additional_config.get("shaketable"):
            raise RuntimeError(why)

    wrap_once(VllmConfig, "__post_init__", finish_or_refuse)


def patch(module: Any) -> None:
    """Wrap the method of one of vLLM's classes with our function, for all later instances."""
    kind, method, ours = PATCHED[module.__name__]
    wrap_once(getattr(module, kind), method, pkgutil.resolve_name(ours))


def init_and_adopt(init: Callable[..., None], worker: Any, *args: Any, **kwargs: Any) -> None:
    """`WorkerBase.__init__`, after which the worker answers our calls and obeys its instructions."""
    from shaketable.integrations.vllm.refusals import refusing
    from shaketable.integrations.vllm.worker import Shaker

    init(worker, *args, **kwargs)
    for name in CALLS:
        if not hasattr(type(worker), name):
            worker.__dict__[name] = functools.partial(getattr(Extension, name), worker)
    with refusing():
        worker.__dict__[_SLOT] = Shaker(worker)


def reset_cache_and_call(
    call: Callable[..., Any], core: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
) -> Any:
    """`EngineCore.collective_rpc`, which resets the cache of prefixes when a call of ours changes what the model computes."""
    if method not in CHANGES:
        return call(core, method, timeout, args, kwargs)
    if not core.reset_prefix_cache():
        from shaketable.errors import ShaketableError

        raise ShaketableError(f"{method} while requests are running: what they have cached would be of another model")
    return call(core, method, timeout, args, {**(kwargs or {}), "cache_was_reset": True})


def _call(name: str) -> Callable[..., Any]:
    def call(worker: Any, *args: Any, cache_was_reset: bool = False, **kwargs: Any) -> Any:
        return getattr(_shaker(worker, cache_was_reset or name not in CHANGES), name)(*args, **kwargs)

    return call


class Extension:
    """Calls that a worker answers over `collective_rpc`: the methods of these names of `Shaker`.

    Subclass it together with a framework's own extension.
    """

    set_plan = _call("set_plan")
    set_magnitude = _call("set_magnitude")
    set_aqn = _call("set_aqn")
    set_sigma = _call("set_sigma")
    set_step = _call("set_step")
    set_phase = _call("set_phase")
    clear = _call("clear")
    ledger = _call("ledger")


CALLS = (*CHANGES, "ledger")


def _shaker(worker: Any, confirmed: bool) -> Shaker:
    from shaketable.errors import ShaketableError

    found: Shaker | None = getattr(worker, _SLOT, None)
    if found is None:
        raise ShaketableError("this vLLM worker was made before shaketable's plugin was loaded")
    if not confirmed and worker.vllm_config.cache_config.enable_prefix_caching:
        raise ShaketableError("the engine's prefix cache was not reset: VLLM_PLUGINS must name shaketable, or caching be off")
    return found


class Sampler:
    """The workers of a `vllm.LLM`, as one."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in CALLS:
            raise AttributeError(f"a sampler has no {name!r}; valid: {', '.join(CALLS)}")
        return functools.partial(self._call, name)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        answers = self.llm.collective_rpc(name, args=args, kwargs=kwargs)
        return answers if name == "ledger" else None


def connect(llm: Any) -> Sampler:
    """A `vllm.LLM` whose workers take instructions: `connect(llm).set_sigma(0.01)`, `.ledger()`."""
    return Sampler(llm)
