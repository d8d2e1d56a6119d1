"""The files that a verb writes beside what it prints: `--json` and `--html` of every verb.

All are checked before any work is done. They say which verb wrote them, for which model or study, and under which options, so
that the same command may be given twice. Anything else that exists needs `--force`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from hashlib import sha256
from html import escape, unescape
from pathlib import Path
from typing import Any

from shaketable.io.output_files import check_free, write

QUESTION: ContextVar[str] = ContextVar("question", default="")
"""A digest of the options of the verb that runs, without those that say where results go."""
TARGETS = ("json_file", "html_file", "png_file", "force", "config_file", "show_config")
HEAD = 4000
"""Characters of a page in which its generator stands."""


def digest(options: dict[str, Any]) -> str:
    """Tells two calls of a verb apart."""
    asked = sorted((name, str(value)) for name, value in options.items() if name not in TARGETS)
    return sha256(repr(asked).encode()).hexdigest()[:8]


class OutputFiles:
    """The JSON and the HTML that were asked for."""

    def __init__(
        self,
        verb: str,
        subject: str,
        json_file: Path | None = None,
        html_file: Path | None = None,
        *,
        others: Iterable[Path | None] = (),
        reads: Iterable[Path | None] = (),
        of_run: bool = False,
        force: bool = False,
    ) -> None:
        """Check every file, before the work.

        Args:
            verb: Which one writes, e.g. `locate`.
            subject: The model or study.
            json_file: Where the result goes as JSON.
            html_file: Where it goes as a page.
            others: Files that the verb writes besides, which are never replaced without `force`.
            reads: Files that it reads, which may not be written to.
            of_run: The verb has a folder for every run. Two calls with the same options are two runs, so nothing is replaced.
            force: Replace whatever exists.
        """
        self.verb, self.subject, self.json, self.html = verb, subject, json_file, html_file
        self.question = "" if of_run or verb.startswith("study") else QUESTION.get()  # two verbs write a study's report
        given = [f for f in (json_file, html_file) if f is not None]
        inputs = [f for f in reads if f is not None]
        check_free(given, inputs, force, is_own=lambda file: not of_run and generator_of(file) == self.generator)
        check_free([f for f in others if f is not None], [*inputs, *given], force)

    def save(self, data: Callable[[], dict[str, Any]], page: Callable[[], str] | None = None) -> None:
        """Write what was asked for."""
        if self.json is not None:
            write_json(self.json, data(), self.generator)
        if self.html is not None and page is not None:
            write_page(self.html, page(), self.generator)

    @property
    def files(self) -> list[Path]:
        """Those that were asked for."""
        return [f for f in (self.json, self.html) if f is not None]

    @property
    def generator(self) -> str:
        """What the files are marked with."""
        return f"shaketable {self.verb} {self.subject} {self.question}".rstrip()


def write_json(path: Path, data: dict[str, Any], generator: str) -> None:
    """Strict JSON with the name of what made it; null where a number is infinite."""
    text = json.dumps(_finite({**data, "generator": generator}), indent=1, ensure_ascii=False, allow_nan=False)
    write(path, text + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_report(path: Path, text: str, generator: str) -> None:
    """A report in HTML, Markdown or JSON with the name of what made it."""
    if text.startswith("{"):
        write_json(path, json.loads(text), generator)
    else:
        write_page(path, text, generator)


def write_page(path: Path, page: str, generator: str) -> None:
    """A page of HTML or Markdown with the name of what made it."""
    if page.startswith("<!doctype html>"):
        mark = f'<meta name="generator" content="{escape(generator)}">'
        write(path, page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{mark}', 1))
    else:
        write(path, f"{page.rstrip()}\n\n<!-- generator: {generator} -->\n")


def generator_of(path: Path) -> str | None:
    """What made a JSON file or a page; None for anything that we did not write."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if found := re.search(r'<meta name="generator" content="([^"]*)">', text[:HEAD]):
        return unescape(found[1])
    if found := re.search(r"\n<!-- generator: (.*) -->\n\Z", text):
        return found[1]
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = data.get("generator") if isinstance(data, dict) else None
    return name if isinstance(name, str) else None
