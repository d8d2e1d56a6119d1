"""Code in a model that is not the model's: hooks, replaced methods, other classes, tensors of unknown origin.

An operator is judged by its definition, whoever has a hook on it. Code between operators is judged function by function as
it calls them: a hook that multiplies by two multiplies correctly. So code that was added to a composite module is trusted
like the model's own, and named. `--strict` does not trust it. The same holds for functions and classes that the model finds
by name: those of its own file, its attention, and torch's.

A file's text says what its names stand for: a function or class that it defines, a name of the module that it imports from.
Code that was made to deceive can always lie about its home; this finds patches that were forgotten.

Hooks that transformers installs to collect hidden states return nothing and are left out.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from importlib.util import resolve_name
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from shaketable.capture.recorder import Recording
from shaketable.capture.reference import Reference

USED_BY_ALL = ("torch", "transformers", "accelerate", "safetensors", "typing_extensions")
HARMLESS = ("transformers.utils.output_capturing", "torch._dynamo.")
CLEAN_COPIES = "shaketable.inject.modules"
"""Has a function on `nn.Module` while a plan is open on any model, so that copies of it carry no faults."""
TORCH = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.Tensor": torch.Tensor,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "torch._C._nn": torch._C._nn,
    "torch.nn.Module": nn.Module,
}


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
    for file, is_own in _files(model).items():
        found += _replaced(file, is_own)
    for where, owner in TORCH.items():
        found += _replaced_in_torch(where, owner)
    return list(dict.fromkeys([*found, *_replaced_attention(model)]))


def _of_module(path: str, module: nn.Module, reference: Reference) -> Iterator[str]:
    where = path or "the model"
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if not _home(hook).startswith(HARMLESS):
            yield f"the hook {_name(hook)} of {where}"
    for name in ("forward", "_call_impl"):
        if name in vars(module):
            yield f"a {name} of its own in {where}"
    expected = type(reference.expected[path])
    if type(module) is not expected:
        yield f"{where} is a {type(module).__name__} where the config makes a {expected.__name__}"


def _replaced_attention(model: nn.Module) -> Iterator[str]:
    """Functions in the tables of transformers for attention and masks that are not those of their name."""
    if "transformers" not in sys.modules:
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = (
        (ALL_ATTENTION_FUNCTIONS, "attention", "transformers.integrations."),
        (ALL_MASK_ATTENTION_FUNCTIONS, "mask", "transformers.masking_utils"),
    )
    configs = [getattr(module, "config", None) for module in model.modules()]
    for name in dict.fromkeys(str(getattr(config, "_attn_implementation", None)) for config in configs):
        for table, kind, home in tables:
            own = re.sub(r"_\d+$", "", name.rpartition("|")[2])
            if name not in table:
                continue
            code = table[name]
            if _home(code).startswith("transformers.utils."):  # a decorator of the library around its own function
                code = inspect.unwrap(code)
            if not (_home(code).startswith(home) and _name(code).startswith(own)):
                yield f"{kind}.{name}, which is from {_home(code)}"


def _replaced_in_torch(where: str, owner: Any) -> Iterator[str]:
    """Names of torch that stand for code from elsewhere, or for another function of torch."""
    for name, code in list(vars(owner).items()):
        if isinstance(code, ModuleType) or not callable(_inner(code)):
            continue
        own = _name(code)
        is_another = (
            own != name and "_" not in (own[0], name[0]) and not isinstance(code, type) and getattr(owner, own, None) is code
        )
        if isinstance(code, functools.partial | functools.partialmethod):
            yield f"{where}.{name}, which is a partial of {own} from {_home(code)}"
        elif is_another or not (_is_of(code, "torch") or _home(code) == CLEAN_COPIES):
            yield f"{where}.{name}, which is {_origin(name, code)}"


# ---- files: names and methods against the text that defines them


@dataclass
class FileText:
    """The names that a file's text binds."""

    defined: set[str] = field(default_factory=set)
    """Functions and classes by their qualified names."""
    decorated: set[str] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)
    imported: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    """Module and name; the name is empty for a module, and * for all of one."""

    @property
    def packages(self) -> set[str]:
        """Packages that the file imports from."""
        return {module.partition(".")[0] for several in self.imported.values() for module, _ in several}


@functools.cache
def _text(file: str) -> FileText | None:
    """The text of a file that was imported; None where it cannot be read."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[file]))
    except (OSError, TypeError, SyntaxError):
        return None
    found = FileText()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            package = sys.modules[file].__package__
            relative = node.level and package
            module = resolve_name("." * node.level + (node.module or ""), package) if relative else node.module or ""
            for alias in node.names:
                found.imported.setdefault(alias.asname or alias.name, set()).add((module, alias.name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found.imported.setdefault(alias.asname or alias.name.partition(".")[0], set()).add((alias.name, ""))

    def define(node: ast.AST, prefix: str, is_decorated: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = prefix + child.name
                found.defined.add(name)
                if is_decorated or child.decorator_list:
                    found.decorated.add(name)
                if isinstance(child, ast.ClassDef):
                    define(child, f"{name}.", name in found.decorated)
            else:
                if isinstance(child, ast.Assign) and not prefix:
                    found.assigned |= {target.id for target in child.targets if isinstance(target, ast.Name)}
                define(child, prefix, is_decorated)

    define(tree, "", False)
    return found


def _files(model: nn.Module) -> dict[str, bool]:
    """Files of a model's classes (True), and those of their packages that they import from."""
    own = sorted({type(module).__module__ for module in model.modules()} & sys.modules.keys() - {"builtins"})
    imported = sorted({used for file in own for used in _imported_files(file)})
    return {file: file in own for file in [*own, *imported]}


def _imported_files(file: str) -> set[str]:
    """Modules of its own package that a file imports from."""
    package = file.partition(".")[0]
    text = None if package == "torch" else _text(file)
    used = {module for several in text.imported.values() for module, _ in several} if text else set()
    return {name for name in used if name.partition(".")[0] == package and name in sys.modules}


def _replaced(file: str, is_own: bool) -> Iterator[str]:
    """Names of a file, and methods of its classes, that no longer stand for the code that its text binds to them."""
    text, names = _text(file), vars(sys.modules[file])
    if text is None:
        return
    for name, value in list(names.items()):
        if isinstance(value, ModuleType) or not callable(value) or name.startswith("__"):
            continue
        if (is_own or (isinstance(value, FunctionType) and name in text.defined)) and not _is_bound(value, name, file, text):
            yield f"{file.rpartition('.')[2]}.{name}, which is {_origin(name, value)}"
        if isinstance(value, type) and value.__module__ == file:
            for method, code in vars(value).items():
                if isinstance(_inner(code), FunctionType) and not _is_method(
                    code, f"{value.__qualname__}.{method}", file, text
                ):
                    yield f"{value.__name__}.{method}, which is from {_home(code)}"


def _is_bound(value: Any, name: str, file: str, text: FileText) -> bool:
    """Whether a name of a file stands for what its text binds to it."""
    if name in text.defined and _is_defined(value, name, file, text):
        return True
    if any(_is_imported(value, name, *source) for source in (*text.imported.get(name, ()), *text.imported.get("*", ()))):
        return True
    if name in text.assigned and (not isinstance(value, FunctionType | type) or _is_of(value, file, text.packages)):
        return True
    is_bound = "*" in text.imported or name in text.imported or name in text.defined or name in text.assigned
    return not is_bound and _is_of(value, file)


def _is_defined(value: Any, name: str, file: str, text: FileText) -> bool:
    """Whether a function or class is the one that a file's text defines under a name, with the decorators that it has there."""
    if isinstance(value, type):
        return (value.__module__, value.__qualname__) == (file, name)
    if isinstance(value, functools.partial) or not _is_of(value, file, text.packages):
        return False
    wrapped = value
    while wrapped is not None:
        if isinstance(wrapped, FunctionType) and (_home(wrapped), wrapped.__code__.co_qualname) == (file, name):
            return True
        wrapped = getattr(wrapped, "__wrapped__", None)
    return name in text.decorated and (not isinstance(value, FunctionType) or "<locals>" in value.__code__.co_qualname)


def _is_imported(value: Any, name: str, module: str, source: str) -> bool:
    """Whether a value is what a module has under a name, or had before that name was replaced."""
    source = name if source == "*" else source
    here = getattr(sys.modules.get(module), source, None)
    if here is value:
        return True
    home = _home(value)
    text = _text(home) if home in sys.modules else None
    is_known = text is None or (source in text.defined and _is_defined(value, source, home, text))
    return is_known and getattr(value, "__name__", None) == source and home in (module, _home(here))


def _is_method(code: Any, name: str, file: str, text: FileText) -> bool:
    """Whether a method is its class's own, or one that the class was given by a package that its file uses."""
    function = _inner(code)
    if name in text.defined:
        return _is_defined(function, name, file, text)
    return _is_of(function, file, text.packages) or _home(function) not in sys.modules


def _is_of(code: Any, home: str, packages: Collection[str] = ()) -> bool:
    """Whether code is of a package, of one that every package uses, or of some others."""
    found = _home(code).partition(".")[0]
    allowed = {home.partition(".")[0], *USED_BY_ALL, *packages}
    return found in allowed or (found in sys.stdlib_module_names and found != "functools")


def unmade(recording: Recording, prefix: str = "") -> Iterator[str]:
    """Operators that were given a tensor that no operator made, and modules that returned one."""
    for record in recording.records:
        if record.external:
            path = _full(prefix, record.path)
            yield f"{path} was given values that no operator made" + (f" ({record.function})" if record.function else "")
    for path in recording.unmade:
        yield f"{_full(prefix, path)} returned values that no operator made"


def _full(prefix: str, path: str) -> str:
    return ".".join(part for part in (prefix, path) if part) or "the model"


def _inner(code: Any) -> Any:
    """The function in a partial, a property, or a method of a class."""
    if isinstance(code, functools.partial | functools.partialmethod):
        return _inner(code.func)
    if isinstance(code, property):
        return code.fget
    return getattr(code, "__func__", code)


def _name(code: Any) -> str:
    inner = _inner(code)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _origin(name: str, code: Any) -> str:
    own = _name(code)
    return f"{own} from {_home(code)}" if own.isidentifier() and own != name else f"from {_home(code)}"


def _home(code: Any) -> str:
    inner = _inner(code)
    module = getattr(inner, "__globals__", {}).get("__name__") or getattr(inner, "__module__", None)
    return str(module or type(inner).__module__)
