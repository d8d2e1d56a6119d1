"""Be called right after torch, or a framework that starts workers, has been imported.

Standard library only: this runs in every Python of the program.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def _on_torch(module: ModuleType) -> None:
    from shaketable.launch.process import activate

    activate()


def _on_generate(module: ModuleType) -> None:
    from shaketable.sites.phases import as_rollout

    mixin = module.GenerationMixin
    mixin.generate = as_rollout(mixin.generate)


def _on_ray(module: ModuleType) -> None:
    from shaketable.integrations.ray import follow

    follow(module)


def _on_vllm_worker(module: ModuleType) -> None:
    from shaketable.integrations.vllm import adopt_workers

    adopt_workers(module.WorkerBase)


def _on_vllm_engine(module: ModuleType) -> None:
    from shaketable.integrations.vllm import guard_cache

    guard_cache(module.EngineCore)


def _on_vllm_config(module: ModuleType) -> None:
    from shaketable.integrations.vllm import check_config

    check_config(module.VllmConfig)


def _on_vllm_client(module: ModuleType) -> None:
    from shaketable.integrations.vllm import tell_reasons

    tell_reasons(module.MPClient)


def _on_vllm_executor(module: ModuleType) -> None:
    from shaketable.integrations.vllm import end_quietly

    end_quietly(module.Executor)


def _on_vllm_command(module: ModuleType) -> None:
    from shaketable.integrations.vllm import with_a_name

    vars(module)["main"] = with_a_name(module.main)


WATCHED: dict[str, Callable[[ModuleType], None]] = {
    "torch": _on_torch,
    "transformers.generation.utils": _on_generate,
    "ray": _on_ray,
    "vllm.entrypoints.cli.main": _on_vllm_command,
    "vllm.config": _on_vllm_config,
    "vllm.v1.engine.core_client": _on_vllm_client,
    "vllm.v1.executor.abstract": _on_vllm_executor,
    "vllm.v1.worker.worker_base": _on_vllm_worker,
    "vllm.v1.engine.core": _on_vllm_engine,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds a watched module as everybody else would, and adds a call after it has run."""

    def __init__(self, watched: dict[str, Callable[[ModuleType], None]]) -> None:
        self.watched = watched
        self.busy: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.watched or fullname in self.busy:
            return None
        self.busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.busy.discard(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_tell(module: ModuleType) -> None:
            run(module)
            self.watched[fullname](module)

        spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


def install(watched: dict[str, Callable[[ModuleType], None]] = WATCHED) -> None:
    """Begin to watch; what is imported already is told at once. Does nothing the second time."""
    if any(isinstance(finder, AfterImport) and finder.watched is watched for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, AfterImport(watched))
    for name, tell in watched.items():
        if name in sys.modules:
            tell(sys.modules[name])
