"""Records one call of a layer: every operator with its inputs and its output.

Two kinds of operator are recorded. A *leaf* is a module that is one operator by definition (a Linear, an RMSNorm, a SiLU):
its inputs are taken before all other hooks, its output after them, and nothing inside is recorded. Everything else is a
*function*: torch functions seen by a TorchFunctionMode in the modules that call them (the rotation, attention, residual
additions). A fused attention kernel is one such function. Of a function that torch has written in Python and that has no
definition here (multi-head attention), those inside are recorded.

The recorder also follows every tensor from the operator that made it to the operator that takes it. Where hooks of other code
change the input or the result of a module, there is a *break*, and that module is named. A changed result of the layer itself
counts as the result of its last operator, the residual addition: the other probes judge it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from shaketable.errors import ModelError
from shaketable.numerics.operators import is_defined
from shaketable.sites.composite_functions import is_composite, opened
from shaketable.sites.nested_tensors import map_tensors, tensors_of

_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"}
_IN_PLACE |= {"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}


@dataclass
class Record:
    """One operator in one call."""

    path: str
    """Module path inside of the layer: the leaf itself, or the module that calls the function."""
    func: Any
    """The torch function; None for a leaf."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    external: tuple[str, ...] = ()
    """Arguments that no recorded operator made."""
    overwrites: bool = False
    """Whether a leaf wrote into its arguments."""
    autocast: torch.dtype | None = None
    """The dtype of the autocast that the model's own code put on; None without."""

    @property
    def function(self) -> str | None:
        """The function's name; None for a leaf."""
        return None if self.func is None else function_name(self.func)

    @property
    def lowered(self) -> torch.dtype | None:
        """The dtype that autocast gave the arguments; None where it left them as they were."""
        first = next(tensors_of(self.output), None)
        return self.autocast if first is not None and first.dtype == self.autocast else None


@dataclass
class Break:
    """A tensor that was changed between two operators, where a module takes or returns it."""

    path: str
    side: str
    """`input` or `output`."""
    after: int
    """Number of operators recorded by then."""
    expected: Tensor
    got: Tensor


@dataclass
class Recording:
    """One call of a layer."""

    records: list[Record] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    output: Any = None
    unmade: list[str] = field(default_factory=list)
    """Paths of modules whose own code returned a tensor that no recorded operator made."""
    written: set[int] = field(default_factory=set)
    """Memory of the module's own parameters and buffers that was overwritten."""

    def part_before(self, order: int) -> str | None:
        """Which part of the layer made what one of the layer's own functions takes: its attention, its MLP, a norm."""
        given = {id(t) for t in tensors_of((self.records[order].args, self.records[order].kwargs))}
        inner = [r for r in self.records[:order] if r.path]
        makers = [r for r in inner if any(id(t) in given for t in tensors_of(r.output))]
        return next((r.path.partition(".")[0] for r in reversed(makers or inner)), None)


class Recorder(TorchFunctionMode):
    """Records calls of one module (a decoder layer, or the whole model with its layers as leaves).

    recorder = Recorder(layer, lambda path, module: isinstance(module, nn.Linear))
    with recorder.watching() as recording:
        layer(x)
    """

    def __init__(self, root: nn.Module, is_leaf: Callable[[str, nn.Module], bool]) -> None:
        super().__init__()
        self.root = root
        self.is_leaf = is_leaf
        self.recording = Recording()
        self._depth = 0
        """Number of leaves that are being called, one inside of the other."""
        self._paths: list[str] = []
        """Containers that are being called."""
        self._arrived: list[tuple[Tensor, ...]] = []
        self._known: dict[int, Tensor] = {}
        self._owned: set[int] = set()
        self._patched = patched_methods()
        self._parameters: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[Recording]:
        """Hook the root and its parts, and watch functions, while the context is open."""
        hooks = [hook for path, module in self._parts() for hook in self._hook(path, module)]
        tensors = [tensor for module in self.root.modules() for tensor in tensors_of(vars(module))]
        self._parameters = {id(p) for p in self.root.parameters()}
        self._owned = {t.untyped_storage().data_ptr() for t in tensors if t.layout == torch.strided}
        self._keep = tensors
        try:
            with torch.no_grad(), self:
                yield self.recording
        finally:
            for hook in hooks:
                hook.remove()

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules to hook: leaves, and their containers; nothing inside of a leaf. Scripted modules take no hooks."""
        leaves = [path for path, module in self.root.named_modules() if isinstance(module, torch.jit.ScriptModule)]
        for path, module in self.root.named_modules():
            if any(path == leaf or path.startswith(f"{leaf}.") for leaf in leaves):
                continue
            if path and self.is_leaf(path, module):
                leaves.append(path)
            yield path, module

    def _hook(self, path: str, module: nn.Module) -> list[RemovableHandle]:
        if path and self.is_leaf(path, module):
            leaf = _Leaf(self, path)
            before = module.register_forward_pre_hook(leaf.before, with_kwargs=True, prepend=True)
            return [before, module.register_forward_hook(leaf.after, with_kwargs=True, always_call=True)]
        return [
            module.register_forward_pre_hook(partial(self._given, path), with_kwargs=True, prepend=True),
            module.register_forward_pre_hook(partial(self._entered, path), with_kwargs=True),
            module.register_forward_hook(partial(self._returned, path), prepend=True),
            module.register_forward_hook(partial(self._left, path), with_kwargs=True, always_call=True),
        ]

    # ---- functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        func = self._patched.get(id(func), func)
        if self._depth or not self._paths:
            return func(*args, **kwargs)
        if is_composite(func) and not is_defined(function_name(func)):
            with self:
                return opened(func)(*args, **kwargs)
        kept = self._before_overwriting(args, kwargs) if _overwrites(func, kwargs) else (args, kwargs)
        external = self.external(args, kwargs)
        result = func(*args, **kwargs)
        made = args[0] if result is None and args else result
        if any(not is_wrapped(t) for t in tensors_of(made)):
            self.note(Record(self._paths[-1], func, *kept, made, external))
        return result

    def _before_overwriting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of what is about to be overwritten, for this record and for those before it."""
        target = kwargs["out"] if kwargs.get("out") is not None else args[:1] or kwargs
        without = {k: v for k, v in kwargs.items() if k not in ("out", "inplace")}
        copies = self.copies(target, (args, without))
        self.recording.written |= copies.memory & self._owned
        self.put_back(copies)
        return copies.of(args), copies.of(without)

    def copies(self, target: Any, others: Any = ()) -> _Copies:
        """Copies of these tensors, and of all that were recorded or are given with them and share their memory."""
        copies = _Copies({t.untyped_storage().data_ptr() for t in tensors_of(target) if not is_wrapped(t)})
        for value in (target, others, *((r.args, r.kwargs, r.output) for r in self.recording.records)):
            copies.take(value)
        return copies

    def put_back(self, copies: _Copies) -> None:
        """Let the records hold copies of what is overwritten."""
        for record in self.recording.records:
            record.args, record.kwargs = copies.of(record.args), copies.of(record.kwargs)
            record.output = copies.of(record.output)

    def note(self, record: Record) -> None:
        """Keep a record."""
        first = next(tensors_of(record.output), None)
        if first is not None and torch.is_autocast_enabled(first.device.type):
            record.autocast = torch.get_autocast_dtype(first.device.type)
        self.learn(record.output)
        self.recording.records.append(record)

    # ---- tensors that are accounted for

    def external(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
        """Names of the arguments that hold a tensor which no recorded operator made."""
        inputs = [*enumerate(args), *kwargs.items()]
        return tuple(str(k) for k, v in inputs if any(not self.knows(t) for t in tensors_of(v)))

    def learn(self, value: Any) -> None:
        """These tensors are accounted for."""
        for tensor in all_tensors(value):
            self._known[id(tensor)] = tensor

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor was made by a recorded operator, or belongs to the layer: a parameter, a buffer, an attribute."""
        if id(tensor) in self._known or is_wrapped(tensor):
            return True
        return tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() in self._owned

    def check_parameters(self, path: str, module: nn.Module) -> None:
        """Refuse a call with other tensors in the place of a module's parameters, as `functional_call` puts them."""
        if any(id(p) not in self._parameters for p in module.parameters()):
            raise ModelError(f"{path} is called with other tensors than its parameters (functional_call); that is not judged")

    # ---- containers: hooks that find values which other code's hooks have changed

    def _given(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before all other hooks."""
        if self._depth:
            return
        if not self._paths and path == "":
            self.learn((args, kwargs))
        self._arrived.append(tuple(tensors_of((args, kwargs))))
        self._paths.append(path)

    def _entered(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After all other hooks on the input."""
        if self._depth or not self._paths:
            return
        for old, new in zip(self._arrived.pop(), tensors_of((args, kwargs)), strict=False):
            if new is not old and not self.knows(new):
                self._note_break(path, "input", old, new)

    def _returned(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Before all other hooks on the output: a scripted function or a kernel may have made it."""
        if self._depth or not self._paths or self._paths[-1] != path:
            return
        for tensor in tensors_of(output):
            if not self.knows(tensor):
                likely = self._last_like(path, tensor)
                with torch._C.DisableTorchFunction():
                    is_copy = likely is not None and same(likely[1], tensor)
                if not is_copy:
                    self.recording.unmade.append(path)
                self.learn(tensor)

    def _left(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After all other hooks. A tensor that one of them put there stands for the last of its kind that was made inside."""
        if self._depth or not self._paths or self._paths[-1] != path:
            return
        self._paths.pop()
        for tensor in tensors_of(output):
            if self.knows(tensor) or (likely := self._last_like(path, tensor)) is None:
                continue
            if path == "":
                likely[0].output = tensor
                self.learn(tensor)
            else:
                self._note_break(path, "output", likely[1], tensor)
        if path == "":
            self.recording.output = output

    def _note_break(self, path: str, side: str, expected: Tensor, got: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            if not same(expected, got):
                self.recording.breaks.append(Break(path, side, len(self.recording.records), expected, got))
        self.learn(got)

    def _last_like(self, path: str, tensor: Tensor) -> tuple[Record, Tensor] | None:
        """The last tensor of this shape and dtype that was made inside of a module, and its record."""
        prefix = f"{path}." if path else ""
        for record in reversed(self.recording.records):
            if record.path == path or record.path.startswith(prefix):
                for made in tensors_of(record.output):
                    if made.shape == tensor.shape and made.dtype == tensor.dtype:
                        return record, made
        return None


class _Copies:
    """Copies of tensors that share some memory, made before it is overwritten."""

    def __init__(self, memory: set[int]) -> None:
        self.memory = memory
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, value: Any) -> None:
        """Copy the tensors of this memory."""
        for tensor in tensors_of(value):
            if id(tensor) not in self.pairs and not is_wrapped(tensor) and tensor.untyped_storage().data_ptr() in self.memory:
                self.pairs[id(tensor)] = (tensor, tensor.clone())

    def of(self, value: Any) -> Any:
        """The same nest with the copies in it."""
        return map_tensors(value, lambda tensor: self.pairs.get(id(tensor), (tensor, tensor))[1])

    def differ(self) -> bool:
        """Whether something was overwritten since."""
        return any(not same(tensor, copy) for tensor, copy in self.pairs.values())


class _Leaf:
    """Hooks of a leaf."""

    def __init__(self, recorder: Recorder, path: str) -> None:
        self.recorder = recorder
        self.path = path
        self.arguments: list[tuple[Any, _Copies]] = []
        self.external: tuple[str, ...] = ()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.recorder._depth == 0:
            self.external = self.recorder.external(args, kwargs)
            self.recorder.check_parameters(self.path, module)
            with torch._C.DisableTorchFunction():
                is_torch_s = type(module).__module__.startswith("torch.nn.")  # of which `inplace` is known
                may_overwrite = getattr(module, "inplace", False) is True or not is_torch_s
                copies = self.recorder.copies((args, kwargs) if may_overwrite else ())
                self.arguments.append((snapshot((args, kwargs)), copies))
        self.recorder._depth += 1

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.recorder._depth -= 1
        if self.recorder._depth == 0 and self.arguments:
            self.recorder.learn((args, kwargs))
            (given, named), copies = self.arguments.pop()
            with torch._C.DisableTorchFunction():
                overwrites = copies.differ()
            if overwrites:
                self.recorder.put_back(copies)
                given, named = copies.of(given), copies.of(named)
            self.recorder.note(Record(self.path, None, given, named, output, self.external, overwrites))


@contextmanager
def watched(
    modules: Mapping[str, nn.Module],
    after: Callable[[str, Tensor, Tensor], Tensor | None],
    before: Callable[[str, Tensor], Tensor | None] | None = None,
) -> Iterator[None]:
    """Look at the inputs and outputs of some modules, for as long as the context is open.

        with watched({"q": layer.self_attn.q_proj}, lambda name, x, y: print(name, x.shape, y.shape)):
            model(ids)

    Args:
        modules: By the names that the callbacks are given.
        after: Called with name, first tensor of the input, first tensor of the output, behind all hooks that were set before.
            A tensor that it returns is put in the place of the output's.
        before: Called with name and first tensor of the input, ahead of all other hooks. A tensor that it returns is put in
            its place.
    """

    def enter(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = next(tensors_of((args, kwargs)))
        other = None if before is None else before(name, first)
        return None if other is None else map_tensors((args, kwargs), lambda t: other if t is first else t)

    def leave(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        first = next(tensors_of(output))
        other = after(name, next(tensors_of((args, kwargs))), first)
        return None if other is None else map_tensors(output, lambda t: other if t is first else t)

    hooks: list[RemovableHandle] = []
    try:
        for name, module in modules.items():
            if before is not None:
                hooks.append(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True, prepend=True))
            hooks.append(module.register_forward_hook(partial(leave, name), with_kwargs=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every value; NaNs are equal to each other."""
    return torch.equal(a, b) or (a.shape == b.shape and not bool(differing(a, b).any()))


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors differ; NaNs do not differ from each other."""
    return (a != b) & ~(a.isnan() & b.isnan())


def channels(differs: Tensor) -> list[int]:
    """Those in which something differs."""
    flat = differs.reshape(-1, differs.shape[-1]) if differs.dim() else differs.reshape(1, 1)
    found: list[int] = flat.any(0).nonzero().flatten().tolist()
    return found


def snapshot(value: Any) -> Any:
    """The same nest in containers of its own: a layer that writes into them, or into a cache, does not change it."""
    return copied(value, lambda tensor: tensor)


def copied(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with every tensor changed, also those of caches.

    A cache that grows puts longer tensors in the place of its own; any other writes into them, so these are cloned.
    """
    if _is_cache(value):
        grows = "Dynamic" in type(value).__name__ or hasattr(value, "layers")
        made = copy.copy(value)
        made.__dict__.update({k: copied(v, change if grows else torch.clone) for k, v in vars(value).items()})
        return made
    if isinstance(value, list | tuple) and any(_is_cache(v) or isinstance(v, list | tuple) for v in value):
        members = [copied(v, change) for v in value]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    if isinstance(value, dict) and type(value) is dict:
        return {k: copied(v, change) for k, v in value.items()}
    return map_tensors(value, change)


def all_tensors(value: Any, only_cached: bool = False) -> Iterator[Tensor]:
    """Every tensor of a nest, also those of caches; or those of caches only."""
    if _is_cache(value):
        yield from all_tensors(list(vars(value).values()))
    elif isinstance(value, list | tuple):
        for member in value:
            yield from all_tensors(member, only_cached)
    elif type(value) is dict:
        yield from all_tensors(list(value.values()), only_cached)
    elif not only_cached:
        yield from tensors_of(value)


def _is_cache(value: Any) -> bool:
    """Whether an object holds the keys and values, or states, of earlier tokens: a cache of transformers, or a layer of one."""
    kinds = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "EncoderDecoderCache")
    return any(kind.__name__ in kinds for kind in type(value).__mro__)


def main_result(output: Any) -> Tensor:
    """The hidden states in the result of a layer: its first tensor of numbers that has channels, or else its first tensor."""
    tensors = list(tensors_of(output))
    if not tensors:
        raise ModelError(f"a layer returns a {type(output).__name__}, in which no tensor is found")
    return next((t for t in tensors if t.dim() > 1 and t.is_floating_point()), tensors[0])


def patched_methods() -> dict[int, Any]:
    """Replaced methods of tensors, and torch's own for each: a mode is shown the replacement, which has run already."""
    own = vars(torch._C.TensorBase)
    homes = {name: getattr(code, "__globals__", {}).get("__name__", "torch") for name, code in vars(torch.Tensor).items()}
    patched = [name for name, home in homes.items() if name in own and home.partition(".")[0] != "torch"]
    return {id(vars(torch.Tensor)[name]): own[name] for name in patched}


def function_name(func: Any) -> str:
    """The short name of a torch function; a property's getter is named after the property."""
    name = str(getattr(func, "__name__", func))
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


def is_in_place(name: str) -> bool:
    """Whether a function of that name writes into its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _overwrites(func: Any, kwargs: dict[str, Any]) -> bool:
    return is_in_place(function_name(func)) or kwargs.get("out") is not None or kwargs.get("inplace") is True


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor has no memory that can be read: inside of vmap, on the meta device, or sparse."""
    wrapped = bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
    return wrapped or tensor.device.type == "meta" or tensor.layout != torch.strided
