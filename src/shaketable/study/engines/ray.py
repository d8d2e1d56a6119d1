"""The same study on a Ray cluster: one task per arm and seed, records written to a store that all nodes see.

Ray places the tasks; the queue here decides which may start, so that diagnoses come first and a crashed run is tried again
by our rules and not by Ray's, whose retries no record would mention. A task does what a local worker does. Progress is read
from the records, which every node writes anyway.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.study.cells import Cell
from shaketable.study.config import StudyConfig
from shaketable.study.engines.local import QUIET, note_death
from shaketable.study.engines.queue import RunQueue
from shaketable.study.engines.worker import answer, request
from shaketable.study.store import summaries

LOOK = 1.0
"""Seconds between two looks at the records."""


def run_on_ray(study: StudyConfig, queue: RunQueue, folder: Path) -> None:
    """Do all runs of the queue on the cluster; returns when each has ended."""
    try:
        import ray
    except ImportError:
        raise ShaketableError("the ray engine needs Ray: pip install 'shaketable[ray]'") from None
    mine = not ray.is_initialized()
    if mine:
        _connect(ray, study)
    try:
        _serve(ray, study, queue, folder)
    finally:
        queue.stop()
        if mine:
            ray.shutdown()


def _connect(ray: Any, study: StudyConfig) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False, "logging_level": "ERROR"}
    if study.engine.address is not None:
        check_reachable(study.engine.address)
        options = {"address": study.engine.address, "log_to_driver": False, "logging_level": "ERROR"}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ShaketableError(f"cannot reach the Ray cluster {study.engine.address or '(local)'}: {error}") from None


def check_reachable(address: str) -> None:
    """Refuse at once a cluster that nobody answers for; Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # `auto`: Ray looks by itself, and gives up soon
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise ShaketableError(f"cannot reach the Ray cluster {address}: {error}") from None


def _serve(ray: Any, study: StudyConfig, queue: RunQueue, folder: Path) -> None:
    under_way: dict[Any, Cell] = {}
    limit = study.engine.workers or 10_000
    pace = _Pace(folder)
    while not queue.is_over:
        while len(under_way) < limit and (cell := queue.take_now()) is not None:
            queue.watch("start", cell, {"worker": len(under_way)})
            under_way[_submit(ray, study, cell, folder)] = cell
        if not under_way:
            time.sleep(LOOK)
            continue
        for task in ray.wait(list(under_way), num_returns=1, timeout=LOOK)[0]:
            _note(ray, task, under_way.pop(task), queue, folder)
        pace.tell(under_way.values(), queue)


def _submit(ray: Any, study: StudyConfig, cell: Cell, folder: Path) -> Any:
    engine = study.engine
    gpus = (0 if study.device == "cpu" else 1) if engine.gpus is None else engine.gpus
    environment = {"env_vars": {"OMP_NUM_THREADS": str(engine.threads), **QUIET}}
    task = ray.remote(answer).options(num_cpus=engine.threads, num_gpus=gpus, max_retries=0, runtime_env=environment)
    return task.remote(request(cell, study.study, (folder / "runs").absolute(), "ray"))


def _note(ray: Any, task: Any, cell: Cell, queue: RunQueue, folder: Path) -> None:
    try:
        told = ray.get(task)
    except ray.exceptions.RayError as error:
        text = f"its Ray worker died: {str(error).splitlines()[0]}"
        note_death(folder / "runs" / cell.name, text, -1)
        return queue.failed(cell, text, final=False)
    if told["kind"] == "ended":
        return queue.ended(cell, told["ending"])
    return queue.failed(cell, told["error"], final=told["final"])


class _Pace:
    """How far runs are, by their records."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, dict[str, int]()

    def tell(self, cells: Any, queue: RunQueue) -> None:
        """Tell the queue's watcher of steps that were made since the last look."""
        steps = {found.name: found.step for found in summaries(self.folder)}
        for cell in cells:
            step = steps.get(cell.name)
            if step is not None and step != self.seen.get(cell.name):
                self.seen[cell.name] = step
                queue.watch("step", cell, {"step": step})
