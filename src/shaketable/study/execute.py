"""Doing the runs of a study: which may start, where they are done, and what is reported of them.

    states ← one loop → places → a worker process of this computer, or a Ray task → `run_cell.do`

A place takes a run and gives a future. Locally that is a process for every place, which does run after run: importing torch
takes longer than a small run. It is not a pool of several processes, which fails as a whole: a crash, or the kernel's
out-of-memory killer, must end one run and nothing else. On Ray it is a task.

A run that crashed is tried again as often as the study says; one that cannot be done as it was asked for is not, since it would
end the same way. A run that another process works on is looked at again until it is done, or free.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from shaketable.errors import ShaketableError
from shaketable.io.locks import is_held
from shaketable.records.record import RunRecord
from shaketable.study.cells import Cell, own_cells
from shaketable.study.config import StudyConfig
from shaketable.study.runs import Run
from shaketable.study.store import define

State = Literal["waiting", "running", "elsewhere", "done", "failed"]
Happening = Literal["start", "done", "failed", "again", "elsewhere"]
Watch = Callable[[Happening, Cell, str], None]
"""Called with what happened to a run, and the error of one that failed or is tried again."""
PATIENCE = 0.3
"""Seconds between two looks at what other processes do."""


@dataclass(frozen=True)
class WorkerAnswer:
    ending: Literal["done", "elsewhere", "failed"]
    error: str = ""
    final: bool = False
    """Whether it would fail again."""


def run_study(study: StudyConfig, store: Path, watch: Watch) -> dict[str, State]:
    """Start or resume whatever is missing of a study that `forecast.check` has accepted; how each run ended, by its name."""
    folder = store / study.study
    define(study, store)
    cells = own_cells(study)
    done = finished(cells, folder)
    states: dict[str, State] = {cell.name: "done" if cell.name in done else "waiting" for cell in cells}
    if len(done) < len(cells):
        left = len(cells) - len(done)
        places = RayPlaces(study) if study.engine.kind == "ray" else LocalPlaces(slots(study, left), folder)
        try:
            _Loop(study, cells, states, folder, watch, places).run()
        finally:
            places.close()
    return states


def finished(cells: list[Cell], folder: Path) -> set[str]:
    """Names of the runs in a study's folder that need nothing more."""
    return {cell.name for cell in cells if Run.of(cell, folder / "runs").is_done}


@dataclass
class _Loop:
    study: StudyConfig
    cells: list[Cell]
    states: dict[str, State]
    folder: Path
    watch: Watch
    places: LocalPlaces | RayPlaces

    def __post_init__(self) -> None:
        self.runs = self.folder / "runs"
        self.crashes: dict[str, int] = {}
        self.under_way: dict[Future[WorkerAnswer], Cell] = {}

    def run(self) -> None:
        self.runs.mkdir(parents=True, exist_ok=True)
        while not all(state in ("done", "failed") for state in self.states.values()):
            while len(self.under_way) < self.places.most and (cell := self._ready()) is not None:
                self._start(cell)
            if not self.under_way:  # others do what is left, or nothing is
                time.sleep(PATIENCE)
                continue
            over, _ = wait(self.under_way, PATIENCE, FIRST_COMPLETED)
            for future in over:
                self._note(future, self.under_way.pop(future))

    def _ready(self) -> Cell | None:
        """The next run that may start."""
        states = self.states
        for cell in self.cells:
            if states[cell.name] == "elsewhere" and not is_held(self.runs, cell.name):
                states[cell.name] = "waiting"  # done or killed by now: starting it finds out
            before = "done" if cell.needs is None else states[cell.needs]
            if states[cell.name] == "waiting" and before == "failed":
                self._fail(cell, f"it needs {cell.needs}, which failed")
            elif states[cell.name] == "waiting" and before == "done":
                return cell
        return None

    def _start(self, cell: Cell) -> None:
        self.states[cell.name] = "running"
        self.watch("start", cell, "")
        runs = self.runs.absolute() if self.places.name == "ray" else self.runs
        self.under_way[self.places.submit(cell, self.study.study, runs, self.places.name)] = cell

    def _note(self, future: Future[WorkerAnswer], cell: Cell) -> None:
        try:
            answer = future.result()
        except Exception as error:  # not of the run, which answers with its errors: of its process
            text, code = self.places.death(future, error)
            with contextlib.suppress(ShaketableError):  # it died before there was a record
                record = RunRecord.open(self.runs / cell.name)
                if not record.events("finished"):
                    record.append("failed", error=text, exit=code, final=False)
            answer = WorkerAnswer("failed", text)
        if answer.ending != "failed":
            self.states[cell.name] = answer.ending
            self.watch(answer.ending, cell, "")
            return
        crashes = self.crashes[cell.name] = self.crashes.get(cell.name, 0) + 1
        if answer.final or crashes > self.study.engine.retries:
            self._fail(cell, answer.error)
        else:
            self.states[cell.name] = "waiting"
            self.watch("again", cell, answer.error)

    def _fail(self, cell: Cell, error: str) -> None:
        self.states[cell.name] = "failed"
        self.watch("failed", cell, error)


# ---- within the process of a run


def answer(cell: Cell, study: str, runs: Path, by: str) -> WorkerAnswer:
    """Do a run; errors are part of the answer."""
    import gc

    import torch

    from shaketable.models import quieten
    from shaketable.study.run_cell import do

    torch.set_num_threads(cell.threads)
    quieten()
    try:
        return WorkerAnswer(do(cell, study, runs, by))
    except ShaketableError as error:
        return WorkerAnswer("failed", str(error), final=True)
    except Exception as error:
        traceback.print_exc()
        return WorkerAnswer("failed", f"{type(error).__name__}: {error}")
    finally:
        gc.collect()
        if torch.accelerator.is_available():
            torch.get_device_module().empty_cache()


# ---- places of this computer


def slots(study: StudyConfig, most: int) -> list[dict[str, str]]:
    """The environment of each worker: how many run at a time, and which GPU each sees."""
    engine = study.engine
    limit = _limits(study)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = engine.workers or max(1, cores // engine.threads)
    if study.device == "cpu" or engine.gpus == 0:
        return [limit] * max(1, min(count, most))
    share = 1.0 if engine.gpus is None else engine.gpus
    if ":" in study.device:  # one GPU by its number, which every worker then finds by itself
        gpus = [limit]
    else:
        import torch

        kinds = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
        visible = kinds.get(study.device, "CUDA_VISIBLE_DEVICES")
        gpus = [limit | {visible: str(gpu)} for gpu in range(torch.accelerator.device_count())]
    places = gpus * int(1 / share)
    if not places:
        raise ShaketableError(f"there is no GPU for device {study.device!r}; `shaketable env` shows what this machine has")
    return places[: max(1, min(engine.workers or len(places), most))]


def _limits(study: StudyConfig) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(study.engine.threads), "TOKENIZERS_PARALLELISM": "false"}


class LocalPlaces:
    """A worker process for every place, replaced when it dies. Whatever libraries print goes to its log."""

    name = "local"

    def __init__(self, environments: list[dict[str, str]], folder: Path) -> None:
        self.most = len(environments)
        self.workers = [_Worker(environment, folder / f"worker-{n}.log") for n, environment in enumerate(environments)]

    def submit(self, *run: Any) -> Future[WorkerAnswer]:
        """Start a run, as `answer` takes it, on a worker that is free; there are never more than `most`."""
        worker = next(worker for worker in self.workers if worker.future is None or worker.future.done())
        worker.future = worker.submit(*run)
        return worker.future

    def death(self, future: Future[WorkerAnswer], error: BaseException) -> tuple[str, int]:
        """Why the process of a run is gone, and its exit status."""
        if not isinstance(error, BrokenProcessPool):
            return f"{type(error).__name__}: {error}", -1
        code = next(worker for worker in self.workers if worker.future is future).bury()
        return f"its process died with exit status {code}" + (" (killed; out of memory?)" if code == -9 else ""), code

    def close(self) -> None:
        for worker in self.workers:
            process = worker.process
            if process is not None and process.is_alive():
                process.terminate()
                process.join(5)
                if process.is_alive():
                    process.kill()
            worker.bury()


@dataclass
class _Worker:
    """A pool of one process."""

    environment: dict[str, str]
    log: Path
    future: Future[WorkerAnswer] | None = None
    pool: ProcessPoolExecutor | None = None
    process: BaseProcess | None = None

    def submit(self, *run: Any) -> Future[WorkerAnswer]:
        if self.pool is not None:
            return self.pool.submit(answer, *run)
        words = (self.environment, str(self.log.absolute()), os.getpid())
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=_begin, initargs=words)
        others = {process.pid for process in multiprocessing.active_children()}
        future = self.pool.submit(answer, *run)
        self.process = next((p for p in multiprocessing.active_children() if p.pid not in others), None)
        return future

    def bury(self) -> int:
        """The exit status of the process that is gone."""
        pool, process = self.pool, self.process
        self.pool = self.process = None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        return -1 if process is None or process.exitcode is None else process.exitcode


def _begin(environment: dict[str, str], log: str, parent: int) -> None:
    """Of a worker process: its own session, for Ctrl-C ends it through its parent; and it does not outlive that.

    A worker whose parent is gone ends at once, also in the midst of a run: nothing would collect it, and the next `study run`
    would wait for it.
    """
    os.environ.update(environment)  # before torch is imported
    os.setsid()
    printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(printed, stream)

    def die_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=die_with_parent, daemon=True).start()


# ---- places of a Ray cluster


class RayPlaces:
    """Ray tasks, on a store that all nodes see. Retries are ours and not Ray's, which no record would mention."""

    name = "ray"

    def __init__(self, study: StudyConfig) -> None:
        try:
            import ray
        except ImportError:
            raise ShaketableError("--workers ray needs Ray: pip install 'shaketable[ray]'") from None
        self.ray, engine = ray, study.engine
        self.most = engine.workers or 10_000
        self.mine = not ray.is_initialized()
        if self.mine:  # joins the cluster that RAY_ADDRESS names, or starts one
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            own: dict[str, Any] = {} if "RAY_ADDRESS" in os.environ else {"include_dashboard": False}
            try:
                ray.init(log_to_driver=False, logging_level="ERROR", **own)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ShaketableError(f"cannot reach the Ray cluster: {error}") from None
        gpus = (0 if study.device == "cpu" else 1) if engine.gpus is None else engine.gpus
        options = {"num_cpus": engine.threads, "num_gpus": gpus, "max_retries": 0}
        self.task = ray.remote(answer).options(**options, runtime_env={"env_vars": _limits(study)})

    def submit(self, *run: Any) -> Future[WorkerAnswer]:
        """Start a run, as `answer` takes it, wherever Ray has room."""
        future: Future[WorkerAnswer] = self.task.remote(*run).future()
        return future

    def death(self, future: Future[WorkerAnswer], error: BaseException) -> tuple[str, int]:
        """What Ray says."""
        return f"its Ray worker died: {str(error).splitlines()[0]}", -1

    def close(self) -> None:
        if self.mine:
            self.ray.shutdown()
