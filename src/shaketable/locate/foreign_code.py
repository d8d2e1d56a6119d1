"""Code in a model that is not the model's: hooks, replaced methods, other classes, tensors of unknown origin.

An operator is judged by its definition, whoever has a hook on it. Code between operators is judged function by function as
it calls them: a hook that multiplies by two multiplies correctly. So code that was added to a composite module is trusted
like the model's own, and named. `--strict` does not trust it. The same holds for functions and classes that the model finds
by name: those of its own file, its attention, and torch's.

The home of code is read off its globals: `functools.wraps` makes a wrapper look like the function it wraps, but not there. A
name that a file imports is at home in the package it is imported from. Code that was made to deceive can always lie about it;
this finds patches that were forgotten.

Hooks that transformers installs to collect hidden states return nothing and are left out.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import resolve_name
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from shaketable.capture.recorder import Recording
from shaketable.capture.reference import Reference

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
    """Functions and classes that a model finds by name and that were replaced: in its files, what these import, and torch."""
    files = sorted({type(module).__module__ for module in model.modules()} & sys.modules.keys())
    for file in dict.fromkeys([*files, *sorted({used for own in files for used in _imported_files(own)})]):
        bound, names = _bindings(file), vars(sys.modules[file])
        if bound is not None:
            yield from _replaced(file, names if file in files else _functions_of(names, bound), bound)
            yield from _replaced_methods(
                file, names, {home for several in bound.values() for one in several for home in one.packages()}
            )
    for where, owner in (("torch", torch), ("torch.nn.functional", torch.nn.functional), ("torch.Tensor", torch.Tensor)):
        yield from _replaced_in_torch(where, owner)
    if "transformers" in sys.modules:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        configs = [getattr(module, "config", None) for module in model.modules()]
        for name in dict.fromkeys(str(getattr(config, "_attn_implementation", None)) for config in configs):
            for table, kind in ((ALL_ATTENTION_FUNCTIONS, "attention"), (ALL_MASK_ATTENTION_FUNCTIONS, "mask")):
                if name in table and not _is_of(table[name], "transformers"):
                    yield f"{kind}.{name}, which is from {_home(table[name])}"


def _replaced(file: str, names: dict[str, Any], bound: dict[str, set[Binding]]) -> Iterator[str]:
    """Names of a file that no longer stand for the code that its text binds to them."""
    for name, code in list(names.items()):
        if isinstance(code, ModuleType) or not callable(code) or (name.startswith("__") and not isinstance(code, FunctionType)):
            continue
        known = bound.get(name, set()) | bound.get("*", set())
        if not _is_of(code, file):
            is_assigned = Binding("", "") in known and not isinstance(code, FunctionType | type)
            if is_assigned or _home(code).partition(".")[0] in {home for one in known for home in one.packages()}:
                continue
        elif isinstance(code, FunctionType | type):
            if not known or any(one.is_bound_to(code, name, file) for one in known):
                continue
        elif known != {Binding("", name)} and (not isinstance(code, functools.partial) or Binding("", "") in known):
            continue
        yield f"{file.rpartition('.')[2]}.{name}, which is {_origin(name, code)}"


def _functions_of(names: dict[str, Any], bound: dict[str, set[Binding]]) -> dict[str, Any]:
    """The functions under the names of those that a file defines."""
    defined = {name for name, several in bound.items() if any(not one.module and one.name for one in several)}
    return {name: code for name, code in names.items() if isinstance(code, FunctionType) and name in defined}


def _replaced_methods(file: str, names: dict[str, Any], imported: set[str]) -> Iterator[str]:
    """Methods of a file's own classes that are from a package it does not import."""
    for kind in [code for code in names.values() if isinstance(code, type) and code.__module__ == file]:
        for name, code in vars(kind).items():
            if isinstance(code, FunctionType) and not _is_of(code, file) and _home(code).partition(".")[0] not in imported:
                yield f"{kind.__name__}.{name}, which is from {_home(code)}"


def _replaced_in_torch(where: str, owner: Any) -> Iterator[str]:
    """Names of torch that stand for code from elsewhere, or for another function of torch."""
    for name, code in list(vars(owner).items()):
        if isinstance(code, ModuleType) or not callable(code) or (name.startswith("__") and not isinstance(code, FunctionType)):
            continue
        own = _name(code)
        is_another = (
            own != name and "_" not in (own[0], name[0]) and not isinstance(code, type) and getattr(owner, own, None) is code
        )
        if isinstance(code, functools.partial):
            yield f"{where}.{name}, which is a partial of {own} from {_home(code)}"
        elif is_another or not _is_of(code, "torch"):
            yield f"{where}.{name}, which is {_origin(name, code)}"


@dataclass(frozen=True)
class Binding:
    """A name in a file's text: imported from a module, or with an empty module defined or assigned there."""

    module: str
    name: str
    is_decorated: bool = False

    def packages(self) -> set[str]:
        """The package that a name is imported from, and the one that it is defined in when that package only passes it on."""
        package = self.module.partition(".")[0]
        value = getattr(sys.modules.get(self.module), self.name, None) if self.name else None
        passed_on = package not in USED_BY_ALL and callable(value)
        return {package, _home(value).partition(".")[0]} if passed_on else {package}

    def is_bound_to(self, code: FunctionType | type, name: str, file: str) -> bool:
        """Whether a function or class is the one that the text binds; a decorator may wrap it, an assignment bind any."""
        if not self.module:
            own = (code.__globals__.get("__name__"), code.__code__.co_name) if isinstance(code, FunctionType) else None
            as_told = (code.__module__, code.__name__)
            return not self.name or own == (file, name) or (as_told == (file, name) and (self.is_decorated or own is None))
        return code.__name__ == self.name or getattr(sys.modules.get(self.module), self.name, None) is code


@functools.cache
def _bindings(file: str) -> dict[str, set[Binding]] | None:
    """For every name that a file binds: where its value may be from. None without the file's text."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[file]))
    except (OSError, TypeError, SyntaxError):
        return None
    found: dict[str, set[Binding]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            package = sys.modules[file].__package__
            relative = node.level and package
            module = resolve_name("." * node.level + (node.module or ""), package) if relative else node.module or ""
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, set()).add(Binding(module, alias.name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.asname or alias.name.partition(".")[0], set()).add(Binding(alias.name, ""))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names, makers = [node.name], node.decorator_list
        elif isinstance(node, ast.Assign):
            names, makers = [t.id for t in node.targets if isinstance(t, ast.Name)], [node.value]
        else:
            continue
        roots = [word.id for maker in makers for word in ast.walk(maker) if isinstance(word, ast.Name)]
        homes = {Binding(one.module.partition(".")[0], "") for root in roots for one in found.get(root, ()) if one.module}
        for name in names:
            own = Binding("", "") if isinstance(node, ast.Assign) else Binding("", name, bool(makers))
            found.setdefault(name, set()).update({*homes, own})
    return found


def _imported_files(file: str) -> set[str]:
    """Modules of its own package that a file imports from; torch is looked at by itself."""
    package = file.partition(".")[0]
    if package == "torch":
        return set()
    used = {one.module for several in (_bindings(file) or {}).values() for one in several}
    return {name for name in used if name.partition(".")[0] == package and name in sys.modules}


def _is_of(code: Any, home: str) -> bool:
    """Whether code is of a package, or of one that every package uses."""
    found = _home(code).partition(".")[0]
    return found in (home.partition(".")[0], *USED_BY_ALL) or (found in sys.stdlib_module_names and found != "functools")


def unmade(recording: Recording, prefix: str = "") -> Iterator[str]:
    """Operators that were given a tensor that no operator made, or another weight, and modules that returned such a tensor."""
    for record in recording.records:
        if record.external:
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


def _origin(name: str, code: Any) -> str:
    own = _name(code)
    return f"{own} from {_home(code)}" if own.isidentifier() and own != name else f"from {_home(code)}"


def _home(code: Any) -> str:
    inner = _inner(code)
    inner = getattr(inner, "__func__", inner)
    module = getattr(inner, "__globals__", {}).get("__name__") or getattr(inner, "__module__", None)
    return str(module or type(inner).__module__)
