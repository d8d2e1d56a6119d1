"""The ledger of a process whose code never heard of us, on disk."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shaketable.launch import process_identity
from shaketable.launch.live_json import KeptFile
from shaketable.ledger.ledger import Ledger
from shaketable.plan import PHASES

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection
    from shaketable.launch.process import ProcessInjection

SCHEMA = "shaketable.process/1"


class LedgerFile:
    """The ledger of this process on disk."""

    def __init__(self, injection: ProcessInjection, folder: Path) -> None:
        self.injection = injection
        self.folder = folder
        self.engines: list[tuple[str, Injection, Ledger]] = []
        """Models of sampling engines in this process, their injections, and what those did under the plan of the process:
        an engine may be given another plan, which has another ledger."""
        self.refused: str | None = None
        """Why a sampling engine of this process cannot do what the plan says."""
        self.fork = False
        self.distributed: tuple[int, int] | None = None
        """Rank and number of ranks, of a process group that this process has joined, also when it has left it since."""
        self._inherited = False
        """Whether the process group is that of the parent, which this process is a fork of."""
        self.place = process_identity.Place()
        """The last one known: a driver that has left its cluster is still the driver in the ledger."""
        self._begin()
        self._file.flush()  # raises where the folder cannot be written to; later it is too late to stop anybody
        self._file.start()

    def _begin(self) -> None:
        self.started = time.time()
        self._file = KeptFile(self.folder / f"process-{os.getpid()}-{secrets.token_hex(4)}.json", self._record, self._news)

    def flush(self) -> None:
        """Write, if there is anything new."""
        self._file.try_flush()

    def close(self) -> None:
        """Stop following the process, and write once more."""
        self._file.close()

    def catch_up(self) -> None:
        """Write, if anything was done since the last time. On a GPU kernels count by themselves: there one has to look."""
        if any(injection.tables.all for injection in self._injections()):
            self._file.try_flush()
        else:
            self._file.catch_up()

    def after_fork(self) -> None:
        """A forked child has a ledger of its own, which starts from zero."""
        process_identity.note_fork()
        self.injection.ledger.clear()
        self.injection.inert_check.clear()
        self.injection.unmatched_models.clear()
        if self.injection.notices is not None:
            self.injection.notices.after_fork()
        self.distributed, self._inherited = None, _is_in_a_group()
        self.injection.has_group_of_parent = self._inherited
        self.engines.clear()
        self.injection.calls._lock = threading.Lock()
        self.injection.attaching = threading.RLock()
        self.place = self.place.child()
        self.fork = True
        self._begin()
        self._file.start()

    def _record(self) -> dict[str, Any]:
        found = self.place if self.fork else process_identity.current_place()
        self.place = found if found.label else self.place
        ledger, notices = self._whole(), self.injection.notices
        if notices is not None:
            notices.look(ledger.sites)
        return {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "rank": self.injection.rank,
            "place": self.place.label,
            "actor": self.place.actor,
            "forked": self.fork,
            "command": " ".join([Path(sys.argv[0]).name if sys.argv else "python", *sys.argv[1:]])[:60],
            "started": self.started,
            "models": [*self.injection.names, *(name for name, _, _ in self.engines)],
            "refused": self.refused,
            "late": sorted(self.injection.late),
            "unmatched": sorted(set(self.injection.unmatched))[:8],
            "unmatched_models": sorted(self.injection.unmatched_models),
            "phases": [phase for phase, passes in self._passes().items() if passes],
            "trained": notices is not None and notices.trained,
            "distributed": self.note_rank(),
            "engine": bool(self.engines),
            "ledger": ledger.to_dict() | {"processes": 1},
        }

    def _injections(self) -> list[Injection]:
        return [self.injection, *(injection for _, injection, _ in self.engines)]

    def _news(self) -> tuple[object, ...]:
        mine, fires = self.injection, sum(injection.fires for injection in self._injections())
        known = len(mine.names), len(mine.late), len(mine.unmatched), len(mine.unmatched_models), len(self.engines)
        trained = mine.notices is not None and mine.notices.trained
        passes = (n.bit_length() for n in self._passes().values())  # the 1st, 2nd, 4th, … is news
        return fires, *passes, trained, self.distributed, self.refused, *known

    def _passes(self) -> dict[str, int]:
        """Passes of whole models, by phase."""
        return {phase: sum(injection.inert_check.phases[phase] for injection in self._injections()) for phase in PHASES}

    def note_rank(self) -> tuple[int, int] | None:
        """Remember the process group that this process is in now; the one that is remembered, if any."""
        if self.distributed is None and not self._inherited and _is_a_rank():
            self.distributed = dist.get_rank(), dist.get_world_size()
        return self.distributed

    def _whole(self) -> Ledger:
        """What the plan did in this process."""
        mine = self.injection.ledger
        return Ledger.merge([mine, *(ledger for _, _, ledger in self.engines)]) if self.engines else mine


def _is_in_a_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_a_rank() -> bool:
    """Whether a launcher of ranks has started this process, and it has joined the others."""
    return _is_in_a_group() and any(name in os.environ for name in ("RANK", "LOCAL_RANK"))
