"""Worker processes of this computer, with its cores and GPUs shared out among them.

    queue ← a thread for every worker ⇄ worker process

Workers have a session of their own: Ctrl-C reaches this process, which ends them; kill -9 of this process they see
themselves. A worker that dies takes its run down and is replaced; the run's record says how it ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.records.record import RunRecord
from shaketable.study.cells import Cell
from shaketable.study.config import StudyConfig
from shaketable.study.engines.queue import RunQueue
from shaketable.study.engines.worker import request

QUIET = {"TOKENIZERS_PARALLELISM": "false"}


def run_locally(study: StudyConfig, queue: RunQueue, folder: Path) -> None:
    """Do all runs of the queue; returns when each has ended."""
    places = slots(study, sum(state != "done" for state in queue.states.values()))
    workers = [_Worker(number, place, study, queue, folder) for number, place in enumerate(places)]
    threads = [threading.Thread(target=worker.serve, daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # a join without end would not hear Ctrl-C
    finally:
        queue.stop()
        for worker in workers:
            worker.end()


def slots(study: StudyConfig, most: int) -> list[dict[str, str]]:
    """The environment of each worker: how many run at a time, and which GPU each sees."""
    engine = study.engine
    limit = {"OMP_NUM_THREADS": str(engine.threads), **QUIET}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = engine.workers or max(1, cores // engine.threads)
    if study.device == "cpu" or engine.gpus == 0:
        return [limit] * max(1, min(count, most))
    share = 1.0 if engine.gpus is None else engine.gpus
    if share > 1:
        raise ShaketableError(f"engine.gpus is {share:g}, and a run uses one GPU at most; write 1, or a part such as 0.25")
    named = ":" in study.device  # one GPU by its number, which every worker then finds by itself
    gpus = [limit | ({} if named else _visible(study.device, gpu)) for gpu in range(1 if named else _gpus())]
    places = gpus * int(1 / share)
    if not places:
        raise ShaketableError(f"there is no GPU for device {study.device!r}; `shaketable env` shows what this machine has")
    return places[: max(1, min(engine.workers or len(places), most))]


def _visible(device: str, gpu: int) -> dict[str, str]:
    name = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}.get(device, "CUDA_VISIBLE_DEVICES")
    return {name: str(gpu)}


def _gpus() -> int:
    import torch

    return int(torch.accelerator.device_count())


class _Worker:
    """A place for runs, and the process that is there now."""

    def __init__(self, number: int, place: dict[str, str], study: StudyConfig, queue: RunQueue, folder: Path) -> None:
        self.number, self.place, self.study, self.queue, self.folder = number, place, study, queue, folder
        self.process: subprocess.Popen[str] | None = None

    def serve(self) -> None:
        """Take runs until there are no more."""
        while (cell := self.queue.take()) is not None:
            self.queue.watch("start", cell, {"worker": self.number})
            try:
                self._do(cell)
            except Exception as error:  # a full disk, say: this run fails, the others go on
                self.queue.failed(cell, f"{type(error).__name__}: {error}", final=True)

    def _do(self, cell: Cell) -> None:
        process = self._alive()
        assert process.stdin is not None
        assert process.stdout is not None
        asked = request(cell, self.study.study, self.folder / "runs", "local")
        try:
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        except OSError:
            return self._died(cell, process)
        for line in process.stdout:
            told = json.loads(line)
            if told["kind"] == "told":
                self.queue.watch(told["what"], cell, told["facts"])
            elif told["kind"] == "ended":
                return self.queue.ended(cell, told["ending"])
            else:
                return self.queue.failed(cell, told["error"], final=told["final"])
        return self._died(cell, process)

    def _alive(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            with (self.folder / f"worker-{self.number}.log").open("a") as log:
                command = [sys.executable, "-m", "shaketable.study.engines.worker"]
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
                environment = {**os.environ, **self.place}
                self.process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        return self.process

    def _died(self, cell: Cell, process: subprocess.Popen[str]) -> None:
        code = process.wait()
        if self.queue.is_stopped:
            return
        text = f"its process died with exit status {code}" + (" (killed; out of memory?)" if code == -9 else "")
        note_death(self.folder / "runs" / cell.name, text, code)
        self.queue.failed(cell, text, final=False)

    def end(self) -> None:
        """End the process; what its run has recorded stays."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()


def note_death(folder: Path, text: str, code: int) -> None:
    """Write into a run's record that the process which worked on it is gone; it could not do so itself."""
    try:
        record = RunRecord.open(folder)
        if not record.events("finished"):
            record.append("failed", error=text, exit=code, final=False)
    except ShaketableError:
        return  # it died before there was a record
