"""Files that a verb writes: checked before any work is done, never overwritten without --force, written atomically."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

from shaketable.errors import ShaketableError
from shaketable.io.replacing import replacing


def check_free(files: list[Path], inputs: list[Path], force: bool, is_own: Callable[[Path], bool] = lambda file: False) -> None:
    """Check that every file can be written and that none is lost, before any of them is written.

    Args:
        files: To be written.
        inputs: That are read, and may not be written to.
        force: Replace files that exist.
        is_own: Whether an existing file may be replaced without `force`.
    """
    taken = list(inputs)
    for file in files:
        try:
            problem = _problem(file, taken, force or is_own(file))
        except OSError as error:  # a folder that may not be read or written, a name too long
            problem = error.strerror or str(error)
        except RuntimeError as error:  # a circle of links
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
