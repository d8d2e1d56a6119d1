"""Reading a user's files: every complaint names the file, and the line where there is one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError

Rows = list[tuple[int, dict[str, Any]]]


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte-order mark and with plain line ends."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ShaketableError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ShaketableError(f"{path}: line {line} is not UTF-8") from None


def read_rows(path: Path) -> Rows:
    """The objects of a JSONL file with their line numbers; blank lines are passed over, an empty file is refused."""
    lines = read_text(path).split("\n")  # splitlines would cut at U+2028, which JSON allows inside a string
    rows = [(number, _object(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ShaketableError(f"{path} is empty; expected one JSON object on each line")
    return rows


def require(path: Path, rows: Rows, key: str, what: str) -> None:
    """Refuse rows without a value at `key`, with their count and the first line."""
    bad = [number for number, row in rows if not str("" if row.get(key) is None else row[key]).strip()]
    refuse(path, bad, len(rows), f"no {key}", what)


def refuse(path: Path, bad: Iterable[int], total: int, missing: str, what: str) -> None:
    """Refuse a file when lines are bad: how many, and which is the first."""
    if lines := list(bad):
        raise ShaketableError(f"{path}: {len(lines)} of {total} {what} have {missing} (first: line {lines[0]})")


def text_at(path: Path, number: int, row: dict[str, Any], key: str) -> str:
    """The value at a key as text; only texts and numbers have one."""
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ShaketableError(f"{path}: line {number}: {key} must be a text or a number, not {type(value).__name__}")
    return str(value).strip()


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ShaketableError(f"{path}: line {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ShaketableError(f"{path}: line {number} holds {type(row).__name__}, not an object such as {{…}}")
    return row
