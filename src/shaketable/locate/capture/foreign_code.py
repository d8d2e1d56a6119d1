"""Code in a model that is not the model's: hooks, replaced methods, other classes, tensors of unknown origin.

An operator is judged by its definition, whoever has a hook on it. Code between operators is judged function by function as
it calls them: a hook that multiplies by two multiplies correctly. So code that was added to a composite module is believed
like the model's own, and named. `--strict` does not believe it. The same holds for functions and classes that the model finds
by name: those of its own file, its attention, and torch's.

The home of code is read off its globals: `functools.wraps` makes a wrapper look like the function it wraps, but not there. A
name that a file imports is at home in the package it is imported from. Code that was made to deceive can always lie about it;
this finds patches that somebody forgot.

Hooks that transformers installs to collect hidden states return nothing and are left out.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from shaketable.locate.capture.recorder import Recording
from shaketable.locate.capture.reference import Reference

CALLS = ("forward", "__call__", "_call_impl")
USED_BY_ALL = ("torch", "transformers", "accelerate", "safetensors", "typing_extensions")
HARMLESS = ("transformers.utils.output_capturing", "torch._dynamo.")


def foreign_code(model: nn.Module, reference: Reference) -> list[str]:
    """Every piece of foreign code in the composite modules of a model, in words."""
    shared = [*modules._global_forward_pre_hooks.values(), *modules._global_forward_hooks.values()]
    found = [f"the hook {_name(hook)} of all modules" for hook in shared]
    for path, module in model.named_modules():
        if type(module).__module__.startswith(HARMLESS):
            continue
        if reference.leaf(path) is None:
            found += _of_module(path, module, reference)
        elif "_call_impl" in vars(module):  # a forward of its own is judged, what is put around the whole call is not
            found.append(f"a _call_impl of its own in {path}")
    return list(dict.fromkeys([*found, *_functions(model)]))


def _of_module(path: str, module: nn.Module, reference: Reference) -> Iterator[str]:
    where = path or "the model"
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if not _home(hook).startswith(HARMLESS):
            yield f"the hook {_name(hook)} of {where}"
    for name in ("forward", "_call_impl"):
        if name in vars(module):
            yield f"a {name} of its own in {where}"
    expected = type(reference.skeleton.get_submodule(path))
    if type(module) is not expected:
        yield f"{where} is a {type(module).__name__} where the config makes a {expected.__name__}"
    for name in CALLS:
        owner = next(kind for kind in type(module).__mro__ if name in vars(kind))
        if not _is_of(vars(owner)[name], owner.__module__):
            yield f"{owner.__name__}.{name}, which is from {_home(vars(owner)[name])}"


def _functions(model: nn.Module) -> Iterator[str]:
    """Functions and classes that a model finds by name, and that were replaced: in its own files, its attention, torch's."""
    files = {type(module).__module__ for module in model.modules()}
    for name in sorted(file for file in files if file in sys.modules):
        yield from _replaced(name.rpartition(".")[2], vars(sys.modules[name]), name, _bound_by(name))
    for name, owner in (("torch", torch), ("torch.nn.functional", torch.nn.functional), ("torch.Tensor", torch.Tensor)):
        yield from _replaced(name, vars(owner), "torch", {})
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(attention, str) and "transformers" in sys.modules:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        yield from _replaced("attention", {attention: ALL_ATTENTION_FUNCTIONS.get(attention)}, "transformers", {})


def _replaced(where: str, names: Any, home: str, bound: dict[str, set[str]] | None) -> Iterator[str]:
    """Names whose code is from another package than the file, and not from one that the file takes that name from."""
    for name, code in list(names.items()):
        if isinstance(code, ModuleType) or not callable(code) or (name.startswith("__") and not isinstance(code, FunctionType)):
            continue
        if isinstance(code, functools.partial) and home == "torch":
            yield f"{where}.{name}, which is a partial of {_name(code)} from {_home(code)}"
        elif not _is_of(code, home) and bound is not None:
            known = bound.get(name, set()) | bound.get("*", set())
            is_assigned = "" in known and not isinstance(code, FunctionType | type)
            if not is_assigned and _home(code).partition(".")[0] not in known:
                yield f"{where}.{name}, which is from {_home(code)}"


@functools.cache
def _bound_by(file: str) -> dict[str, set[str]] | None:
    """For every name that a file binds: the packages its value may be from. None without the file's text."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[file]))
    except (OSError, TypeError, SyntaxError):
        return None
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, set()).update(_homes(node.module, alias.name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.asname or alias.name.partition(".")[0], set()).add(alias.name.partition(".")[0])
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names, makers = [node.name], node.decorator_list
        elif isinstance(node, ast.Assign):
            names, makers = [t.id for t in node.targets if isinstance(t, ast.Name)], [node.value]
        else:
            continue
        roots = [word.id for maker in makers for word in ast.walk(maker) if isinstance(word, ast.Name)]
        homes = {home for root in roots for home in found.get(root, ())} | ({""} if makers else set())
        for name in names:
            found.setdefault(name, set()).update(homes)
    return found


def _homes(module: str, name: str) -> set[str]:
    """The package that a name is imported from, and the one that it is defined in when that package only passes it on."""
    package = module.partition(".")[0]
    value = getattr(sys.modules.get(module), name, None)
    passed_on = package not in USED_BY_ALL and callable(value)
    return {package, _home(value).partition(".")[0]} if passed_on else {package}


def _is_of(code: Any, home: str) -> bool:
    """Whether code is of a package, or of one that every package uses."""
    found = _home(code).partition(".")[0]
    return found in (home.partition(".")[0], *USED_BY_ALL) or found in sys.stdlib_module_names


def unmade(recording: Recording, prefix: str = "") -> Iterator[str]:
    """Operators that were given a tensor that no operator made, or another weight, and modules that returned such a tensor."""
    for record in recording.records:
        if record.strangers:
            path = _full(prefix, record.path)
            yield f"{path} was given values that no operator made" + (f" ({record.function})" if record.function else "")
        if record.weights:
            yield f"{_full(prefix, record.path)} was called with a {next(iter(record.weights))} that is not its parameter"
    for path in recording.unmade:
        yield f"{_full(prefix, path)} returned values that no operator made"


def _full(prefix: str, path: str) -> str:
    return ".".join(part for part in (prefix, path) if part) or "the model"


def _inner(code: Any) -> Any:
    return _inner(code.func) if isinstance(code, functools.partial) else code


def _name(code: Any) -> str:
    inner = _inner(code)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _home(code: Any) -> str:
    inner = _inner(code)
    inner = getattr(inner, "__func__", inner)
    module = getattr(inner, "__globals__", {}).get("__name__") or getattr(inner, "__module__", None)
    return str(module or type(inner).__module__)
