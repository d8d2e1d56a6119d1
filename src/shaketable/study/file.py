"""Study files: YAML, with single values replaced from the command line. Imports no torch.

`--set train.steps=200` walks the mapping by the dots and puts a YAML value there; `--set arms.targeted=null` takes an arm away.
The result is validated as a whole, so that a value set wrongly is refused in the same words as one written wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from shaketable.errors import ShaketableError, first_problem, nearest
from shaketable.io.yaml_file import Loader, read_yaml
from shaketable.study.config import StudyConfig

SHIPPED = Path(__file__).parents[1] / "data" / "studies"


def load_study(path: Path, replaced: Iterable[str] = ()) -> StudyConfig:
    """The study of a file, or the shipped one of that name, with `a.b=c` replacements."""
    data = read_yaml(_found(path), "the study")
    if not isinstance(data, dict):
        raise ShaketableError(f"the study {path} must hold a mapping, not {type(data).__name__}")
    for text in replaced:
        _replace(data, text)
    return parse_study(data, str(path))


def _found(path: Path) -> Path:
    """The file itself, or for a name without an ending the study that ships under it."""
    if path.suffix or path.exists():
        return path
    files = shipped()
    if path.as_posix() not in files:
        missing = f"cannot read the study {path}: No such file or directory, and none of that name ships"
        raise ShaketableError(f"{missing}; {nearest(path.as_posix(), files)}")
    return files[path.as_posix()]


def shipped() -> dict[str, Path]:
    return {file.relative_to(SHIPPED).with_suffix("").as_posix(): file for file in sorted(SHIPPED.rglob("*.yaml"))}


def parse_study(data: Mapping[str, Any], name: str = "the study") -> StudyConfig:
    try:
        return StudyConfig.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        missing = f"{'.'.join(map(str, first['loc']))} is missing" if first["type"] == "missing" else ""
        raise ShaketableError(f"{name}: {missing or first_problem(error)}") from None


def _replace(data: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise ShaketableError(f"--set {text}: write a.b=c, e.g. train.steps=200")
    try:
        new = yaml.load(value, Loader)
    except yaml.YAMLError as error:
        raise ShaketableError(f"--set {text}: the value is not YAML: {error}") from None
    at = data
    for key in keys[:-1]:
        if at.get(key) is None:
            at[key] = {}
        at = at[key]
        if not isinstance(at, dict):
            raise ShaketableError(f"--set {text}: {key} is {at!r}, and has nothing inside")
    if new is None and len(keys) > 1:
        at.pop(keys[-1], None)
    else:
        at[keys[-1]] = new
