"""A task from one line of text: `NAME[,key=value…]`.

    arithmetic,level=2                      a built-in task
    gsm8k,path=DIR
    test.parquet                            verl's GSM8K: the same as gsm8k,path=test.parquet
    problems.jsonl,max_new_tokens=32        a user's own problems
    my_tasks.py:Riddles,path=riddles.txt    a user's own Task subclass, from a file
    my_package.tasks:Riddles                or from a module that Python can import

The last two run the code that they name, with all that it does when it is imported: `code_in` tells them from the others, and
`study run` wants `--allow-code` for a study file with one.

Keys are the task's fields, checked by pydantic; values hold no comma.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError
from typing_extensions import TypeIs

from shaketable.errors import ShaketableError, first_problem, nearest
from shaketable.evaluate.tasks.arithmetic import Arithmetic
from shaketable.evaluate.tasks.files import GSM8K, JsonlTask, TextTask
from shaketable.evaluate.tasks.task import Task

BUILT_IN: dict[str, type[Task]] = {c.name: c for c in (Arithmetic, GSM8K, TextTask, JsonlTask)}


def code_in(text: str) -> str | None:
    """The file or module that `load_task` would run for this task; None for those that are only data."""
    name = text.partition(",")[0].strip()
    return name if ":" in name and not name.endswith((".jsonl", ".parquet")) else None


def load_task(text: str) -> Task:
    """The task that a line of text names; one clear line when there is none."""
    name, *rest = (part.strip() for part in text.split(","))
    fields: dict[str, Any] = _fields(name, rest)
    if name.endswith((".jsonl", ".parquet")):
        return _made(JsonlTask if name.endswith(".jsonl") else GSM8K, {**fields, "path": name}, name)
    if code_in(name) is None and name not in BUILT_IN:
        own = "a file of your own is written problems.jsonl or my_tasks.py:Class"
        raise ShaketableError(f"unknown task {name!r}; {nearest(name, BUILT_IN)}; {own}")
    return _made(BUILT_IN[name] if code_in(name) is None else _own(name), fields, name)


def _fields(name: str, parts: list[str]) -> dict[str, str]:
    found = dict[str, str]()
    for part in parts:
        key, _, value = (word.strip() for word in part.partition("="))
        if not key or not value or key in found:
            raise ShaketableError(f"task {name}: {part!r} is not key=value, each key once")
        found[key] = value
    return found


def _made(task: type[Task], fields: dict[str, Any], name: str) -> Task:
    for key in fields:
        if key not in task.model_fields:
            raise ShaketableError(f"task {name} has no key {key!r}; {nearest(key, task.model_fields)}")
    try:
        return task.model_validate(fields)
    except ValidationError as error:
        raise ShaketableError(f"task {name}: {first_problem(error)}") from None


def _own(name: str) -> type[Task]:
    source, _, wanted = name.rpartition(":")
    module = _file(source) if source.endswith(".py") else _module(source)
    task = vars(module).get(wanted)
    if not _is_task(task) or inspect.isabstract(task):
        others = [key for key, value in vars(module).items() if _is_task(value) and not inspect.isabstract(value)]
        raise ShaketableError(f"{name} is not a finished subclass of Task; {nearest(wanted, others)}")
    return task


def _is_task(thing: object) -> TypeIs[type[Task]]:
    return inspect.isclass(thing) and issubclass(thing, Task) and thing is not Task


def _file(source: str) -> ModuleType:
    """A module from a file, under a name that hides no other module."""
    path = Path(source).resolve()
    if not path.is_file():
        raise ShaketableError(f"cannot read {source}: no such file")
    spec = importlib.util.spec_from_file_location(f"task_file_{hashlib.sha256(bytes(path)).hexdigest()[:16]}", path)
    assert spec is not None, source  # a .py file has a spec and a loader
    assert spec.loader is not None, source
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pydantic looks up the names in annotations
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ShaketableError(f"{source} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _module(source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except Exception as error:
        raise ShaketableError(f"{source} cannot be imported ({error}); a file is written my_tasks.py:Class") from error
