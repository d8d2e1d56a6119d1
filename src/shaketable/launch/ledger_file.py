"""The ledger of a process under `shaketable run`, in a JSON file that is kept up to date.

The file is written when it is made, so that a process which never acts can be named; within a twentieth of a second of any
change, less often when writing would cost more than 5 % of a core; and whenever `flush` or `catch_up` is called. Writes are
atomic: kill -9 loses at most the changes since the last one. Workers of Ray and of multiprocessing call `catch_up` before they
hand out a result, which must not be ahead of the file.

A full disk must not stop a program that knows nothing of us: except in `flush`, the error is one line on stderr, and the next
write that succeeds has everything.

Imports no torch: that import is what makes the plan of a process active.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaketable.io.replacing import WRITER, replacing
from shaketable.launch import process_identity
from shaketable.ledger.ledger import Ledger
from shaketable.plan import PHASES

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection
    from shaketable.launch.process import ProcessInjection

SCHEMA = "shaketable.process/1"
PAUSE = 0.05
SHARE = 20
"""A write is followed by a pause of so many times what it took."""
TRIES = 20


class KeptFile:
    """A JSON file, and the function that makes its content."""

    def __init__(self, path: Path, ask: Callable[[], dict[str, Any]], news: Callable[[], object] | None = None) -> None:
        """Args:
        path: The file.
        ask: Makes its content, as plain data.
        news: Differs whenever the content does; compared instead of it, where that is cheaper.
        """
        self.path = path
        self._ask, self._news = ask, news
        self._written = ""
        self._seen: object = None
        self._has_failed = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=WRITER, daemon=True)
        self.try_flush()

    def start(self) -> None:
        """Follow the process from now on, in a thread."""
        self._thread.start()

    def close(self) -> None:
        """End that thread, and write once more."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self.try_flush()

    def flush(self) -> None:
        """Write, if there is anything new."""
        with self._lock:
            seen = self._news() if self._news is not None else None  # before the content, which may be newer and never older
            for attempt in range(TRIES):
                try:
                    content = self._ask()
                    break
                except RuntimeError:  # a dictionary grew meanwhile: the program goes on
                    if attempt == TRIES - 1:
                        raise
                    time.sleep(0.001)
            text = json.dumps(content)
            if text != self._written:
                with replacing(self.path) as draft:
                    draft.write_text(text, encoding="utf-8")
                self._written = text
            self._seen = seen

    def catch_up(self) -> None:
        """Write, if `news` says that there is anything new; costs next to nothing when there is not."""
        if self._news is None or self._news() != self._seen:
            self.try_flush()

    def try_flush(self) -> None:
        """Write, if there is anything new and it can be written."""
        try:
            self.flush()
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                sys.stderr.write(f"shaketable: cannot write {self.path}: {error.strerror}; it is behind what was done\n")
            self._has_failed = True

    def _follow(self) -> None:
        pause, before = PAUSE, 0.0
        while not self._closing.wait(pause):
            start = time.thread_time()
            self.catch_up()
            cost = time.thread_time() - start
            pause, before = max(PAUSE, SHARE * min(cost, before)), cost  # the first write pays for imports


class LedgerFile:
    """The ledger of this process on disk."""

    def __init__(self, process: ProcessInjection, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.engines: list[tuple[str, Injection, Ledger]] = []
        """Models of sampling engines, their injections, and their ledgers under the plan of the process."""
        self.refused: str | None = None
        """Why a sampling engine of this process cannot do what the plan says."""
        self.fork = False
        self.distributed: tuple[int, int] | None = None
        """Rank and number of ranks, of a process group that this process has joined, also when it has left it since."""
        self.name = process_identity.ProcessName()
        """The last one known: a driver that has left its cluster is still the driver in the ledger."""
        self._begin()
        self._file.flush()  # raises where the folder cannot be written to
        self._file.start()

    def _begin(self) -> None:
        self.started = time.time()
        self._file = KeptFile(self.folder / f"process-{os.getpid()}-{secrets.token_hex(4)}.json", self._record, self._news)

    def flush(self) -> None:
        """Write, if there is anything new."""
        self._file.try_flush()

    def catch_up(self) -> None:
        """Write, if anything was done since the last time. On a GPU kernels count by themselves: there one has to look."""
        if any(injection.tables.all for injection in self._injections()):
            self._file.try_flush()
        else:
            self._file.catch_up()

    def after_fork(self) -> None:
        """A forked child has a ledger of its own, which starts from zero."""
        self.distributed = None
        self.process.after_fork()
        self.engines.clear()
        self.name = self.name.child()
        self.fork = True
        self._begin()
        self._file.start()

    def _record(self) -> dict[str, Any]:
        found = self.name if self.fork else process_identity.current_name()
        self.name = found if found.label else self.name
        process, ledger = self.process, self._whole()
        if process.reports is not None:
            process.reports.judge(ledger)
        return {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "rank": process.injection.rank,
            "place": self.name.label,
            "actor": self.name.actor,
            "forked": self.fork,
            "command": " ".join([Path(sys.argv[0]).name if sys.argv else "python", *sys.argv[1:]])[:60],
            "started": self.started,
            "models": [*process.names, *(name for name, _, _ in self.engines)],
            "refused": self.refused,
            "late": sorted(process.late),
            "unmatched": sorted(set(process.unmatched))[:8],
            "unmatched_models": sorted(process.unmatched_models),
            "phases": [phase for phase, passes in self._passes().items() if passes],
            "trained": self._is_trained(),
            "distributed": self.note_rank(),
            "engine": bool(self.engines),
            "ledger": ledger.to_dict() | {"processes": 1},
        }

    def _injections(self) -> list[Injection]:
        return [self.process.injection, *(injection for _, injection, _ in self.engines)]

    def _news(self) -> tuple[object, ...]:
        mine, fires = self.process, sum(injection.fires for injection in self._injections())
        known = len(mine.names), len(mine.late), len(mine.unmatched), len(mine.unmatched_models), len(self.engines)
        passes = (n.bit_length() for n in self._passes().values())  # the 1st, 2nd, 4th, … is news
        return fires, *passes, self._is_trained(), self.distributed, self.refused, *known

    def _is_trained(self) -> bool:
        return self.process.reports is not None and self.process.reports.trained

    def _passes(self) -> dict[str, int]:
        """Passes of whole models, by phase."""
        return {phase: sum(injection.inert_check.phases[phase] for injection in self._injections()) for phase in PHASES}

    def note_rank(self) -> tuple[int, int] | None:
        """Remember the process group that this process is in now; the one that is remembered, if any."""
        if self.distributed is None and any(name in os.environ for name in ("RANK", "LOCAL_RANK")):
            self.distributed = self.process.group()
        return self.distributed

    def _whole(self) -> Ledger:
        """The ledger of all injections of this process."""
        mine = self.process.injection.ledger
        return Ledger.merge([mine, *(ledger for _, _, ledger in self.engines)]) if self.engines else mine
