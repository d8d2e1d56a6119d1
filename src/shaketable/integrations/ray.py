"""A plan in the actors and tasks of Ray: under `shaketable run`, or by `ray.init(runtime_env=runtime_env(plan, ledger=…))`.

Workers of a running cluster are children of a raylet that never saw our environment. They get the job's `runtime_env`: its
variables, and its `worker_process_setup_hook`, which Ray calls in each worker before any task. Ours is `begin`.

**Nothing leaves a worker before its ledger is written**: no result, no error, no argument of another call. Ray kills workers
whenever they are no longer needed. What a worker did in a call whose result was not awaited is written within 0.05 seconds; for
those the driver waits half a second before it shuts down.

**Noise** is keyed as in `launch/process_identity.py`. Actors have ranks of their own. One that is restarted begins again at
pass 0 of the same rank. A task has the noise of its id.
"""

from __future__ import annotations

import atexit
import copy
import os
import pkgutil
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaketable.errors import PlanError, ShaketableError
from shaketable.integrations.common.wrapping import wrap_once
from shaketable.integrations.names import check
from shaketable.launch import import_hooks, process_identity

if TYPE_CHECKING:
    from shaketable.launch.run import RunResult
    from shaketable.plan import Plan

PLAN, LEDGER, MARK = "SHAKETABLE_PLAN", "SHAKETABLE_LEDGER", "SHAKETABLE_MARK"
BEGIN = "shaketable.integrations.ray.begin"
HOOK = "worker_process_setup_hook"
WRITE_SECONDS = 0.5
_NOT_SHIPPED = {process_identity.PLACE, "SHAKETABLE_CACHE", "SHAKETABLE_RANK", MARK}
_naming = threading.Lock()


# ---- the driver


def runtime_env(
    plan: str | Path | Plan,
    *,
    ledger: str | Path,
    seed: int | None = None,
    base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A `runtime_env` for `ray.init` that puts a plan into every worker of the job. The driver itself gets no faults.

    Args:
        plan: A line of the plan language, a YAML file, or a `Plan`.
        ledger: A folder that all nodes see, new or empty.
        seed: Keys all noise; overrides the plan's own.
        base: Your own runtime_env; all of it is kept.

    Raises:
        PlanError: The plan cannot be read, or the folder holds another run.
    """
    import ray

    from shaketable.launch.run import new_folder
    from shaketable.plan import Plan

    resolved, folder = Plan.load(plan, seed=seed), Path(ledger).resolve()
    new_folder(folder)
    follow(ray)
    return _merged(base, {PLAN: resolved.text(), "SHAKETABLE_SEED": str(resolved.seed), LEDGER: str(folder)})


def collect(folder: str | Path, *, allow_inert: bool = False) -> RunResult:
    """Merge what the workers left in `folder` into its `ledger.json`. Call it after `ray.shutdown()`.

    Raises:
        InertError: No worker imported torch, or a clause of the plan did nothing in any of them; not with `allow_inert`.
    """
    from shaketable.errors import InertError
    from shaketable.launch import run as runner

    result = runner.collect(Path(folder), [], 0, allow_inert=allow_inert)
    if result.exit_code == runner.NOTHING_INJECTED:
        raise InertError("; ".join(result.warnings) + " (allow_inert=True accepts this)")
    return result


def follow(ray: Any) -> None:
    """Let `ray.init` carry the plan of the environment, number actors, and wait for ledgers. Does nothing the second time."""
    if process_identity.current_task is _current_task:
        return
    check("ray.actor:ActorClass", "ray._private.serialization:SerializationContext")
    process_identity.current_task, process_identity.current_name = _current_task, _current_name
    wrap_once(ray, "init", _init_with_plan)
    wrap_once(ray, "shutdown", _shutdown_after_ledgers)
    wrap_once(ray.actor.ActorClass, "_remote", partial(_create_numbered, Counter()))
    wrap_once(ray._private.serialization.SerializationContext, "serialize", _serialize_after_ledger)
    atexit.register(_wait_for_ledgers)


def _init_with_plan(init: Callable[..., Any], *args: Any, **options: Any) -> Any:
    import ray

    if PLAN in os.environ and LEDGER in os.environ and not ray.is_initialized():
        job, own = options.get("job_config"), options.get("runtime_env")
        base = job.runtime_env if own is None and job is not None else own
        ours = {k: v for k, v in os.environ.items() if k.startswith("SHAKETABLE_") and k not in _NOT_SHIPPED}
        options["runtime_env"] = _merged(base, ours)
    return init(*args, **options)


def _merged(base: Mapping[str, Any] | None, ours: dict[str, str]) -> dict[str, Any]:
    """The user's runtime_env with our variables and our hook."""
    env = dict(base or {})
    theirs = env.get("env_vars") or {}
    if theirs.get(PLAN, ours[PLAN]) != ours[PLAN]:
        raise PlanError(f"two plans for one Ray job: {theirs[PLAN]!r} of runtime_env and {ours[PLAN]!r}; leave one out")
    mark = f"ray-{secrets.token_hex(4)}.mark"
    (Path(ours[LEDGER]) / mark).touch()
    env["env_vars"] = {**theirs, **ours, MARK: mark}
    hook = env.get(HOOK)
    env[HOOK] = BEGIN if hook in (None, BEGIN) else _ours_first(hook)
    return env


def _ours_first(theirs: Callable[[], Any] | str) -> Callable[[], None]:
    def begin_and_go_on() -> None:
        begin()
        (pkgutil.resolve_name(theirs) if isinstance(theirs, str) else theirs)()

    return begin_and_go_on


def _create_numbered(
    made: Counter[tuple[str, str]], create: Callable[..., Any], actor: Any, args: Any = None, kwargs: Any = None, **options: Any
) -> Any:
    if not options.get("get_if_exists"):  # Ray comes back without it when there is something to make
        name = actor.__ray_metadata__.class_name.rpartition(".")[2]
        options["runtime_env"] = _placed(options.get("runtime_env"), _next_place(made, name, options.get("name")))
    return create(actor, args, kwargs, **options)


def _next_place(made: Counter[tuple[str, str]], kind: str, name: str | None) -> str:
    """`RANK:LABEL` of the next actor of this class. Its name is shown and keys nothing."""
    maker = f"{process_identity.rank_here()}.{process_identity.current_task()}"
    with _naming:
        made[maker, kind] += 1
        n = made[maker, kind]
    above = f"{process_identity.label_here()}/" if process_identity.label_here() else ""
    return f"{process_identity.number(f'{maker}/{kind}#{n}')}:{above}{kind}#{n}" + (f" {name}" if name else "")


def _placed(base: Any, place: str) -> Any:
    from ray.runtime_env import RuntimeEnv

    env = RuntimeEnv() if base is None else copy.deepcopy(base)
    env["env_vars"] = {**env.get("env_vars", {}), process_identity.PLACE: place}
    return env


def _shutdown_after_ledgers(shutdown: Callable[..., Any], *args: Any, **options: Any) -> Any:
    _wait_for_ledgers()
    return shutdown(*args, **options)


def _serialize_after_ledger(serialize: Callable[..., Any], context: Any, value: Any) -> Any:
    """All that leaves a process of Ray is serialized by this one function."""
    import ray

    if context.worker.mode == ray.WORKER_MODE:
        process_identity.before_an_answer()
    return serialize(context, value)


def _wait_for_ledgers() -> None:
    import ray

    if ray.is_initialized() and ray._private.worker.global_worker.mode != ray.WORKER_MODE:
        time.sleep(WRITE_SECONDS)


# ---- the worker


def begin() -> None:
    """Called by Ray in each worker, before any task.

    Raises:
        ShaketableError: This node does not see the driver's mark in the ledger folder: it would look as if it had no torch.
    """
    folder = Path(os.environ[LEDGER])
    if not (folder / os.environ[MARK]).exists():
        where = socket.gethostname()
        raise ShaketableError(f"node {where} does not see the driver's ledger folder {folder}; name one that all nodes share")
    startup = str(Path(import_hooks.__file__).with_name("startup"))
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != startup]
    os.environ["PYTHONPATH"] = os.pathsep.join([startup, *path])
    import_hooks.install()


def _current_task() -> int:
    """Names the task that runs in this worker; an actor is one long task, unless it has a rank to tell it from others."""
    import ray

    worker = ray._private.worker.global_worker
    if worker.mode != ray.WORKER_MODE:
        return 0
    if worker.actor_id.is_nil():
        return _key(worker.current_task_id.hex())
    return 0 if process_identity.label_here() else _key(worker.actor_id.hex())


@lru_cache(maxsize=8)
def _key(text: str) -> int:
    return process_identity.number(text, size=8)


def _current_name() -> process_identity.ProcessName:
    import ray

    worker, label = ray._private.worker.global_worker, process_identity.label_here()
    if worker.mode is None:
        return process_identity.ProcessName(label).child()
    if worker.mode != ray.WORKER_MODE:
        return process_identity.ProcessName("driver")
    if worker.actor_id.is_nil():
        return process_identity.ProcessName(f"tasks of {label}" if label else "tasks")
    actor = worker.actor_id.hex()
    return process_identity.ProcessName(label or f"actor {actor[:8]}", actor)
