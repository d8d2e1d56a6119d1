"""A JSON file that follows what a process does.

It is written when it is made, so that a process which never acts can be named; within a twentieth of a second of any change,
less often when writing would cost more than 5 % of a core (twice in a row: the first time pays for imports, and a worker that
is killed soon after would have lost its second pass); and whenever `flush` or `catch_up` is called. Writes are atomic, so
kill -9 loses at most what happened since the last one, and a reader never sees half a file.

A busy machine may let the thread that writes wait for a second. Whoever hands something out that must not be ahead of the file
calls `catch_up` first, as workers of Ray and of multiprocessing do: clocks prove nothing.

A disk that is full must not stop or hang a program that knows nothing of us: whoever does not ask for the file itself (`flush`)
is told once, on stderr, and the next write that succeeds has everything.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shaketable.io.replacing import WRITER, replacing

PAUSE = 0.05
SHARE = 20
"""A write is followed by a pause of so many times what it took."""
TRIES = 20


def pause_after(cost: float, before: float) -> float:
    """Seconds to the next look, from what this write and the one before it took."""
    return max(PAUSE, SHARE * min(cost, before))


class KeptFile:
    """A file, and whom to ask for its content."""

    def __init__(self, path: Path, ask: Callable[[], dict[str, Any]], news: Callable[[], object] | None = None) -> None:
        """Args:
        path: The file.
        ask: What goes into it, as plain data.
        news: Something that is another thing whenever the content is; asked instead of it, where that is cheaper.
        """
        self.path = path
        self._ask, self._news = ask, news
        self._written = ""
        self._seen: object = None
        self._is_told = False
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
            text = json.dumps(self._asked())
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
            self._is_told = False
        except OSError as error:
            if not self._is_told:
                sys.stderr.write(f"shaketable: cannot write {self.path}: {error.strerror}; it is behind what was done\n")
            self._is_told = True

    def _asked(self) -> dict[str, Any]:
        """The program goes on while we ask: a dictionary that grew meanwhile is read again."""
        for _ in range(TRIES):
            try:
                return self._ask()
            except RuntimeError:
                time.sleep(0.001)
        return self._ask()

    def _follow(self) -> None:
        pause, before = PAUSE, 0.0
        while not self._closing.wait(pause):
            start = time.thread_time()
            self.catch_up()
            cost = time.thread_time() - start
            pause, before = pause_after(cost, before), cost
