"""Code in a model that is not the model's: hooks, replaced methods, other classes, tensors from nowhere.

An operator is judged by its definition, whoever has a hook on it. What lies between operators is judged function by
function as the code calls them: a hook that multiplies by two multiplies correctly. So code that came to a composite
module from elsewhere is believed like the model's own, and the least is to name it. `--strict` does not believe it.

Hooks that transformers installs to collect hidden states return nothing and are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as modules

from shaketable.locate.capture.recorder import Recording
from shaketable.locate.capture.reference import Reference

HARMLESS = ("transformers.utils.output_capturing", "torch._dynamo.")


def foreign_code(model: nn.Module, reference: Reference) -> list[str]:
    """Every piece of foreign code in the composite modules of a model, in words."""
    shared = [*modules._global_forward_pre_hooks.values(), *modules._global_forward_hooks.values()]
    found = [f"the hook {_name(hook)} of all modules" for hook in shared]
    for path, module in model.named_modules():
        if reference.leaf(path) is None and not type(module).__module__.startswith(HARMLESS):
            found += _of_module(path, module, reference)
    return list(dict.fromkeys(found))


def _of_module(path: str, module: nn.Module, reference: Reference) -> Iterator[str]:
    where = path or "the model"
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if not _home(hook).startswith(HARMLESS):
            yield f"the hook {_name(hook)} of {where}"
    if "forward" in vars(module):
        yield f"a forward of its own in {where}"
    expected = type(reference.skeleton.get_submodule(path))
    if type(module) is not expected:
        yield f"{where} is a {type(module).__name__} where the config makes a {expected.__name__}"
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    if _home(vars(owner)["forward"]) != owner.__module__ and owner is not nn.Module:
        yield f"{owner.__name__}.forward, which is from {_home(vars(owner)['forward'])}"


def unmade(recording: Recording, prefix: str = "") -> Iterator[str]:
    """Operators that were given a tensor that no operator made."""
    for record in recording.records:
        if record.strangers:
            path = ".".join(part for part in (prefix, record.path) if part) or "the model"
            yield f"{path} was given values that no operator made" + (f" ({record.function})" if record.function else "")


def _inner(code: Any) -> Any:
    return _inner(code.func) if isinstance(code, functools.partial) else code


def _name(code: Any) -> str:
    inner = _inner(code)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _home(code: Any) -> str:
    return str(getattr(_inner(code), "__module__", None) or "nowhere")
