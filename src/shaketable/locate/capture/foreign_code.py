"""Code in a model that is not the model's: hooks, replaced methods, other classes, tensors from nowhere.

An operator is judged by its definition, whoever has a hook on it. What lies between operators is judged function by
function as the code calls them: a hook that multiplies by two multiplies correctly. So code that came to a composite
module from elsewhere is believed like the model's own, and the least is to name it. `--strict` does not believe it. The
same holds for functions that the model calls by name: those of its own file, its attention, and torch's.

Where code is from is read off its globals: `functools.wraps` makes a wrapper look like what it wraps, but not there. Code that
was made to deceive can always lie about it; this finds patches that nobody remembers.

Hooks that transformers installs to collect hidden states return nothing and are left out.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FunctionType
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
    """Functions that a model calls by name, and that were replaced: in its own files, its attention, torch's."""
    files = {type(module).__module__ for module in model.modules()}
    for name in sorted(file for file in files if file in sys.modules):
        yield from _replaced(name.rpartition(".")[2], vars(sys.modules[name]), name)
    for name, owner in (("torch", torch), ("torch.nn.functional", torch.nn.functional), ("torch.Tensor", torch.Tensor)):
        yield from _replaced(name, vars(owner), "torch")
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(attention, str) and "transformers" in sys.modules:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        yield from _replaced("attention", {attention: ALL_ATTENTION_FUNCTIONS.get(attention)}, "transformers")


def _replaced(where: str, names: Any, home: str) -> Iterator[str]:
    for name, code in list(names.items()):
        if isinstance(code, FunctionType) and not _is_of(code, home):
            yield f"{where}.{name}, which is from {_home(code)}"


def _is_of(code: Any, home: str) -> bool:
    """Whether code is of a package, or of what every package uses."""
    found = _home(code).partition(".")[0]
    return found in (home.partition(".")[0], *USED_BY_ALL) or found in sys.stdlib_module_names


def unmade(recording: Recording, prefix: str = "") -> Iterator[str]:
    """Operators that were given a tensor that no operator made, and modules that returned one."""
    for record in recording.records:
        if record.strangers:
            path = _full(prefix, record.path)
            yield f"{path} was given values that no operator made" + (f" ({record.function})" if record.function else "")
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
    return str(getattr(inner, "__globals__", {}).get("__name__") or getattr(inner, "__module__", None) or "nowhere")
