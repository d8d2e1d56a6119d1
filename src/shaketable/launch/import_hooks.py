"""Call a function right after torch, or a framework that starts workers, has been imported.

Standard library only: this runs in every Python of the program.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Watched = dict[str, Callable[[ModuleType], None]]
"""Functions by the name of a module; each is given that module once it has been imported."""


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


def _on_vllm(module: ModuleType) -> None:
    from shaketable.integrations.vllm import patch

    patch(module)


WATCHED: Watched = {
    "torch": _on_torch,
    "transformers.generation.utils": _on_generate,
    "ray": _on_ray,
    "vllm.config": _on_vllm,
    "vllm.v1.worker.worker_base": _on_vllm,
    "vllm.v1.engine.core": _on_vllm,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds a watched module as it would be found without us, and adds a call after it has run."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self._finding: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.watched or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            self.watched[fullname](module)

        spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec


def install(watched: Watched = WATCHED) -> None:
    """Begin to watch; for modules that are imported already the function is called at once. Does nothing the second time."""
    if any(isinstance(finder, AfterImport) and finder.watched is watched for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, AfterImport(watched))
    for name, function in watched.items():
        if name in sys.modules:
            function(sys.modules[name])
