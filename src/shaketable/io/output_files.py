"""Files that a verb writes: looked at before any work is done, never overwritten unasked, written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shaketable.errors import ShaketableError


def check_free(files: list[Path], inputs: list[Path], force: bool) -> None:
    """Every file can be written and takes nothing away; before any of them is written."""
    taken = list(inputs)
    for file in files:
        try:
            problem = _problem(file, taken, force)
        except (OSError, RuntimeError) as error:  # a folder that may not be read, a name too long, a circle of links
            problem = str(error)
        if problem:
            raise ShaketableError(f"cannot write {file}: {problem}")
        taken.append(file)


def _problem(file: Path, taken: list[Path], force: bool) -> str:
    if file.resolve() in [t.resolve() for t in taken]:
        return "this command reads or writes it already"
    if file.exists() and not file.is_file():
        return "it is not a plain file"
    if file.exists() and not force:
        return "it exists and is not overwritten; choose another name, or add --force"
    return "" if file.resolve().parent.is_dir() else "its folder does not exist"


def write(path: Path, text: str) -> None:
    """All of the file or nothing: written beside its place, then moved there."""
    place = path.resolve()
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(place)
    except OSError as error:
        raise ShaketableError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
