"""Names of frameworks that no documentation promises: all that we override, replace or read, checked where they are used.

A release that renames a method which we override never calls ours: a run that should be faulty trains clean. So each module
that depends on such names calls `check` when it is imported, and a missing one ends the program with one line. The tables of
docs/frameworks.md are made from this file. Imports no torch and no framework.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shaketable.errors import ShaketableError

TESTED = {"verl": "0.9.0 and 0.9.1", "vllm": "0.27.1 and 0.32.0", "trl": "1.16", "transformers": "5.10 to 5.22", "ray": "2.60"}
"""Releases with which all names were found."""
_FORWARD, _STEP = "faults act inside of it", "its end proves a step"

CLASSES: dict[str, dict[str, str]] = {
    "verl.utils.config:": {"validate_config": "the driver reads our keys"},
    "verl.trainer.ppo.v1:": {"get_trainer_cls": "the trainer that obeys our keys"},
    "verl.trainer.ppo.utils:Role": {"ActorRolloutRef": "workers with an actor", "ActorRollout": "workers with an actor"},
    "verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync": {
        "_init_resource_pool_mgr": "worker classes are chosen",
        "on_init_end": "workers get instructions",
        "on_step_begin": "step and σ",
        "step": "KL",
        "_consume_sync_metrics": _STEP,
        "_validate": "validations are clean, or say that they are not",
        "on_validate_end": "faults are on again",
        "fit": "ledgers are merged at its end",
    },
    "verl.workers.engine_workers:TrainingWorker": {"infer_batch": _FORWARD, "train_mini_batch": _FORWARD},
    "verl.workers.engine_workers:ActorRolloutRefWorker": {"actor_worker_cls": "the class of the actor"},
    "verl.single_controller.base.decorator:": {"register": "calls to workers", "Dispatch": "calls to workers"},
    "verl.utils.tensordict_utils:": {"get": "tells the reference policy"},
    "vllm.config:VllmConfig": {"__init__": "configs are checked", "__post_init__": "instructions are refused without us"},
    "vllm.v1.engine.core:EngineCore": {"collective_rpc": "calls reset cached prefixes", "reset_prefix_cache": "the same"},
    "vllm.v1.worker.worker_base:WorkerBase": {"__init__": "workers take instructions"},
    "ray.actor:ActorClass": {"_remote": "actors are numbered"},
    "ray._private.serialization:SerializationContext": {"serialize": "ledgers are written before results leave"},
}
"""By `module:Class`, or `module:` for its functions: each name, and what it is needed for."""
OBJECTS: dict[str, dict[str, str]] = {
    "vllm worker": {
        "load_model": "the plan is attached after it",
        "determine_available_memory": "a plan on the whole process stands aside",
        "compile_or_warm_up_model": "the same",
        "execute_model": "a request is computed; clauses are proven",
        "sample_tokens": "a plan on the whole process stands aside",
        "shutdown": "ledgers are written",
        "model_runner": "its `get_model()` is the model",
        "vllm_config": "instructions",
    },
    "verl trainer": {
        "actor_rollout_wg": "calls to actors",
        "llm_server_manager": "its `server_handles` are the samplers",
        "role_worker_mapping": "worker classes",
        "global_steps": "the step",
        "steps_per_epoch": "the epoch",
        "total_training_steps": "the schedule's length",
    },
    "verl actor": {"engine": "its `module` is the model"},
    "trl trainer": {
        "use_vllm": "of its arguments: who samples",
        "vllm_generation": "its `llm`, `mode`, `enable_sleep_mode` and `tensor_parallel_size`, where `use_vllm` is on",
        "_generate_and_score_completions": "samples are compared (`mismatch_every`)",
    },
    "transformers trainer": {
        "training_step": _FORWARD,
        "evaluation_loop": "evaluations are clean",
        "callback_handler": "our numbers are in the log that others report",
    },
}
"""By kind of object: each attribute, and what it is needed for."""


def check(*owners: str) -> None:
    """See that a framework has the names that are needed from some `module:Class`.

    Raises:
        ShaketableError: One line with the first that it has not, and the releases that work.
    """
    for owner in owners:
        module, _, kind = owner.partition(":")
        try:
            found: Any = importlib.import_module(module)
            found = getattr(found, kind) if kind else found
        except (ImportError, AttributeError):
            raise _missing(owner.replace(":", ".").rstrip("."), "") from None
        for name, why in CLASSES[owner].items():
            if not hasattr(found, name):
                raise _missing(f"{module}.{kind}.{name}".replace("..", "."), why)


def check_object(kind: str, found: Any, *names: str) -> None:
    """See that an object has the attributes that are needed of its kind, or those that are named.

    Raises:
        ShaketableError: As `check`.
    """
    for name in names or OBJECTS[kind]:
        if not hasattr(found, name):
            raise _missing(f"{type(found).__module__}.{type(found).__name__}.{name}", OBJECTS[kind][name])


def _missing(name: str, why: str) -> ShaketableError:
    framework = name.split(".")[0]
    framework = framework if framework in TESTED else "transformers"
    try:
        here = version(framework)
    except PackageNotFoundError:
        here = "of this environment"
    need = f" (needed: {why})" if why else ""
    works = f"shaketable was tested with {framework} {TESTED[framework]}"
    return ShaketableError(f"{framework} {here} has no {name}{need}, so faults could be missed; {works}")


def tables() -> str:
    """The tables of docs/frameworks.md."""
    rows = {
        "verl": ("verl.", "verl "),
        "vLLM": ("vllm.", "vllm "),
        "TRL and Transformers": ("trl ", "transformers "),
        "Ray": ("ray.",),
    }
    parts = []
    for title, starts in rows.items():
        lines = [f"| {title}: name | what for |", "|---|---|"]
        for owner, names in {**CLASSES, **OBJECTS}.items():
            if owner.startswith(starts):
                lines += [f"| `{owner.replace(':', '.').rstrip('.')}` `{name}` | {why} |" for name, why in names.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
