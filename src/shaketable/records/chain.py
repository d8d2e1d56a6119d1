"""The chain that holds the lines of a record together.

Each line ends in `"sha"`, the first 16 digits of the SHA-256 of the sha before it and of its own bytes. So a line that was
edited, dropped, put in or moved breaks the chain where it happened, and reading stops there with its number.

This finds accidents and quiet edits. A whole new chain with a new seal is accepted: comparing the digest of the study
(`study/verify.py`) with one that was published or signed elsewhere finds that.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shaketable.errors import ShaketableError

SCHEMA = "shaketable.run/2"
_LINK = re.compile(rb', "sha": "([0-9a-f]{16})"}\n')
_LINK_BYTES = 29


@dataclass
class ChainReader:
    """How far a reader has come, and what the next line must chain from."""

    path: Path
    lines: int = 0
    size: int = 0
    sha: str = ""

    def take(self, line: bytes) -> dict[str, Any]:
        """The event of the next line, without its link; raises when this is not the line that was written there."""
        body, carried = parted(line)
        event, first = object_of(body), self.lines == 0
        self.lines, self.size, self.sha = self.lines + 1, self.size + len(line), link(self.sha, body)
        if first and event is not None and not carried and event.get("schema") not in (SCHEMA, None):
            raise ShaketableError(f"{self.path} is of another version: schema {event['schema']!r}")
        if event is None or not is_event(event):
            what = f"was changed at line {self.lines}" if carried != self.sha else "is damaged"
            raise ShaketableError(f"{self.path} {what}: line {self.lines} is no event")
        if carried != self.sha:
            raise ShaketableError(f"{self.path} was changed at line {self.lines}")
        return event

    def check(self, seal: dict[str, Any], torn: int = 0) -> None:
        """Hold what was read against the seal; `torn` bytes came after the last whole line."""
        if self.size + torn < seal["bytes"]:
            raise ShaketableError(f"{self.path} was truncated: it ends after line {self.lines} of {seal['lines']}")
        if (self.lines, self.size + torn, self.sha) != (seal["lines"], seal["bytes"], seal["sha"]):
            raise ShaketableError(f"{self.path} was changed after it was finished")


def is_event(line: dict[str, Any]) -> bool:
    """Whether an object is an event: it has a kind, and its step is a number, which one that goes on must have."""
    kind, step = line.get("event"), line.get("step")
    return isinstance(kind, str) and isinstance(step, int if kind == "resumed" else int | None)


def is_seal(found: dict[str, Any]) -> bool:
    """Whether an object is what `RunRecord.seal` writes."""
    kinds = {"lines": int, "bytes": int, "sha": str, "attempts": int | None}
    return all(isinstance(found.get(name), kind) for name, kind in kinds.items())


def link(previous: str, body: bytes) -> str:
    """The sha of a line: of the one before it, and of its own bytes."""
    return hashlib.sha256(previous.encode() + body).hexdigest()[:16]


def parted(line: bytes) -> tuple[bytes, str]:
    """A line's body and the sha that it carries; "" where it carries none."""
    found = _LINK.fullmatch(line[-_LINK_BYTES:])
    return (line[:-_LINK_BYTES] + b"}", found[1].decode()) if found else (line.removesuffix(b"\n"), "")


def last_lines(file: BinaryIO, size: int, window: int = 1 << 16) -> list[bytes]:
    """The whole lines in the last `window` bytes of a file, or in more where those hold none; without a torn one."""
    start = max(0, size - window)
    file.seek(start)
    whole = file.read(size - start).split(b"\n")[:-1]
    if start and len(whole) < 2:
        return last_lines(file, size, 4 * window)
    return [line + b"\n" for line in (whole[1:] if start else whole)]


def linked(body: bytes, sha: str) -> bytes:
    """A line that carries its sha."""
    return body[:-1] + f', "sha": "{sha}"}}\n'.encode()


def object_of(text: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None where there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
