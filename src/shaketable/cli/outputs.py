"""The files that a verb writes beside what it prints: `--json` and `--html` of every verb.

All are checked before any work is done. A file that exists needs `--force`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.io.replacing import replacing
from shaketable.io.strict_json import strict


class OutputFiles:
    """The JSON and the HTML that were asked for."""

    def __init__(
        self,
        json_file: Path | None = None,
        html_file: Path | None = None,
        *,
        others: Iterable[Path | None] = (),
        reads: Iterable[Path | None] = (),
        force: bool = False,
    ) -> None:
        """Check every file, before the work.

        Args:
            json_file: Where the result goes as JSON.
            html_file: Where it goes as a page.
            others: Files that the verb writes besides.
            reads: Files that it reads, which may not be written to.
            force: Replace whatever exists.
        """
        self.json, self.html = json_file, html_file
        taken = [file for file in reads if file is not None]
        for file in (json_file, html_file, *others):
            if file is None:
                continue
            try:
                problem = _problem(file, taken, force)
            except OSError as error:  # a folder that may not be read or written, a name too long
                problem = error.strerror or str(error)
            except RuntimeError as error:  # a circle of links
                problem = str(error)
            if problem:
                raise ShaketableError(f"cannot write {file}: {problem}")
            taken.append(file)

    def save(self, data: Callable[[], dict[str, Any]], page: Callable[[], str] | None = None) -> None:
        if self.json is not None:
            write_json(self.json, data())
        if self.html is not None and page is not None:
            write(self.html, page())

    @property
    def files(self) -> list[Path]:
        return [f for f in (self.json, self.html) if f is not None]


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Strict JSON; null where a number is infinite."""
    write(path, json.dumps(strict(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _problem(file: Path, taken: list[Path], force: bool) -> str:
    if file.resolve() in [t.resolve() for t in taken]:
        return "this command reads or writes it already"
    if file.exists() and not file.is_file():
        return "it is not a plain file"
    if file.exists() and not force:
        return "it exists and is not overwritten; choose another name, or add --force"
    folder = file.resolve().parent
    if not folder.is_dir():
        return "its folder does not exist"
    with TemporaryFile(dir=folder):  # permissions do not say whether a folder can be written to: a disk may be read-only
        return ""


def write(path: Path, text: str) -> None:
    """All of the file or nothing: written beside its place, then moved there."""
    try:
        with replacing(path.resolve()) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShaketableError(f"cannot write {path}: {error.strerror or error}") from None
