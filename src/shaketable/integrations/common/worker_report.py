"""The report of each worker of a framework: a file of its own, which the trainer can read at any time.

Calls into a framework's workers do not always return anything (verl's do not), and a worker that dies answers nothing.
A folder that many machines share shows a file late. So `flush` takes a number, which is in the report from then on and proves
that it is not older than the question.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.launch.ledger_file import KeptFile
from shaketable.ledger.ledger import Ledger

SCHEMA = "shaketable.worker/1"


class WorkerReport:
    """The file of one worker."""

    def __init__(self, folder: Path, role: str, ask: Callable[[], dict[str, Any]]) -> None:
        """Args:
        folder: Where the reports of all workers are.
        role: What the worker is: sampler, actor.
        ask: What it did, as plain data, with `plan` and `aqn` the ledgers of those or None.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ShaketableError(f"cannot use {folder} for ledgers: {error.strerror}") from None
        self.role, self.ask = role, ask
        self.started = time.time()
        self._mark = 0
        self._file = KeptFile(folder / f"worker-{os.getpid()}-{secrets.token_hex(4)}.json", self._body)
        self._file.flush()
        self._file.start()
        atexit.register(self.flush)

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._file.path

    def flush(self, mark: int | None = None) -> None:
        """Write, if there is anything new; `mark`, and all later reports, have the number of the question in them."""
        self._mark = self._mark if mark is None else mark
        self._file.flush()

    def close(self) -> None:
        """Stop following the worker, and write once more."""
        atexit.unregister(self.flush)
        self._file.close()

    def _body(self) -> dict[str, Any]:
        head = {"schema": SCHEMA, "role": self.role, "pid": os.getpid(), "started": self.started, "mark": self._mark}
        return head | self.ask()


def read_reports(folder: str | Path) -> list[dict[str, Any]]:
    """The reports of all workers, in the order in which they began."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("worker-*.json")]
    return sorted(reports, key=lambda report: report["started"])


def merged(reports: Iterable[dict[str, Any]], what: str = "plan") -> Ledger | None:
    """The ledgers of plan or aqn of several workers, as one; None when none of them has any."""
    ledgers = [Ledger.from_dict(report[what]) for report in reports if report.get(what)]
    return Ledger.merge(ledgers) if ledgers else None
