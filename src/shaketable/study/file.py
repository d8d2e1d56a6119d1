"""Study files: YAML, with single values replaced from the command line. Imports no torch.

`--set train.steps=200` walks the mapping by the dots and puts a YAML value there; `--set arms.targeted=null` takes an arm away.
The result is validated as a whole, so that a value set wrongly is refused in the same words as one written wrongly.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

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
    """The studies that ship, by name."""
    return {file.relative_to(SHIPPED).with_suffix("").as_posix(): file for file in sorted(SHIPPED.rglob("*.yaml"))}


def parse_study(data: Mapping[str, Any], name: str = "the study") -> StudyConfig:
    """A study from data, or one line that says what is wrong with it."""
    try:
        return StudyConfig.model_validate(data)
    except ValidationError as error:
        raise ShaketableError(f"{name}: {_why(error)}") from None


def _why(error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    first = next((p for p in problems if p["type"] == "extra_forbidden"), None)
    if first is None:
        missing = problems[0]["type"] == "missing"
        return f"{'.'.join(map(str, problems[0]['loc']))} is missing" if missing else first_problem(error)
    *above, key = (str(part) for part in first["loc"])
    where = f"{'.'.join(above)}: " if above else ""
    return f"{where}unknown key {key!r}; {nearest(key, _fields(above), shown=20)}"


def _fields(path: list[str]) -> list[str]:
    """The keys that the model at a path of the study has."""
    model: type[BaseModel] = StudyConfig
    for part in path:
        if part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model that a field holds: itself, in a mapping or list, or as one of several."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    found = (_model_in(part) for part in typing.get_args(annotation))
    return next((model for model in found if model is not None), None)


def _replace(data: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise ShaketableError(f"--set {text}: write a.b=c, e.g. train.steps=200")
    at: Any = data
    for key in keys[:-1]:
        at = _step(at, key, text)
    new = _value(value, text)
    if isinstance(at, list):
        at[_index(at, keys[-1], text)] = new
    elif new is None and len(keys) > 1:
        at.pop(keys[-1], None)
    else:
        at[keys[-1]] = new


def _step(at: Any, key: str, text: str) -> Any:
    if isinstance(at, list):
        return at[_index(at, key, text)]
    inner = at.setdefault(key, {})
    if inner is None:
        inner = at[key] = {}
    if not isinstance(inner, dict | list):
        raise ShaketableError(f"--set {text}: {key} is {inner!r}, and has nothing inside")
    return inner


def _index(at: list[Any], key: str, text: str) -> int:
    if not key.isdigit() or int(key) >= len(at):
        raise ShaketableError(f"--set {text}: {key} is no place in a list of {len(at)}; they are counted from 0")
    return int(key)


def _value(text: str, whole: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ShaketableError(f"--set {whole}: the value is not YAML: {error}") from None
