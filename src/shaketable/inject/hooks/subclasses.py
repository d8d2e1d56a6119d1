"""Classes that modules are given while a plan is on them, and layers and models on a GPU, which open their frames that way.

A subclass that looks like a module's own class is quicker than hooks and sees what hooks cannot: `weights/on_read.py` makes
weights properties in one, `fast/linear.py` puts noise on what a linear returns. Copies and pickles are of the original class;
`exchanged` takes ours out from under one that somebody else made of it meanwhile.

A pre-hook with keywords and a hook that also runs after an exception make torch call a module through its long way: on a GPU,
where a forward pass of a small model waits for Python, that alone cost a tenth of it. So a module that nothing else of a plan
is on opens and closes its frames in its forward, and only where they are needed: where operators must be told their layer, and
where it may be computed a second time, by those whose checkpointing is not torch's own.

The model itself opens one always. torch.compile makes graphs of their own of hooks on the module that it is given, so that a
pass was three of them, each with guards, and what one left for the next (a table per layer, two numbers per linear) was guarded
value by value. In its forward, the head and the end of a pass are in the model's own graph. Plans on operators and on weights
keep their hooks, as nobody has measured them; so do engines, which trace a forward that they have found before.
"""

from __future__ import annotations

import copyreg
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection
    from shaketable.inject.pass_context import Entry

_REBUILD: Any = vars(copyreg)["_reconstructor"]
"""Python's own: a pickle that named a function of ours could not be read without us."""
_SLOT = "_shaketable_frames"
_ALWAYS = "_shaketable_frames_always"
"""Those that are opened also where no gradient is wanted: a compiled graph guards every list that its code looks into."""


class LayerFrame:
    """The frame of one injection at one layer, or at the whole model. Removed like a hook."""

    def __init__(self, module: nn.Module, injection: Injection, entry: Entry) -> None:
        self.module, self.injection, self.entry = module, injection, entry
        if _SLOT not in module.__dict__:
            original: Any = type(module)
            module.__dict__[_SLOT] = []
            module.__class__ = framed(original)
        self._slots = (_SLOT, _ALWAYS) if injection.has_operators or entry.is_root else (_SLOT,)
        for slot in self._slots:
            module.__dict__.setdefault(slot, []).append(self)

    def remove(self) -> None:
        """Open no more frames here; the last one gives the module its own class back."""
        frames: list[LayerFrame] = self.module.__dict__.get(_SLOT, [])
        if self not in frames:
            return
        for slot in self._slots:
            self.module.__dict__[slot].remove(self)
            if not self.module.__dict__[slot]:
                del self.module.__dict__[slot]
        if not frames:
            now: Any = type(self.module)
            ours = next(kind for kind in now.__mro__ if "_shaketable_original" in kind.__dict__)
            self.module.__class__ = exchanged(now, ours, ours._shaketable_original)


@functools.cache
def framed(original: Any) -> Any:
    """The class of a layer, with a forward that opens frames."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        used = self.training or torch.is_grad_enabled()
        frames: list[LayerFrame] = self.__dict__.get(_SLOT if used else _ALWAYS, ())
        if not frames:
            return original.forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return _traced(original, self, frames, args, kwargs)
        try:
            _enter(frames, args, kwargs)
            return original.forward(self, *args, **kwargs)
        finally:
            _leave(frames)

    return dressed(original, _SLOT, {"forward": forward, "_shaketable_original": original})


def _traced(original: Any, module: Any, frames: list[LayerFrame], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same for those who compile. A graph can be broken here, by the module or by us, but not inside of a `try`."""
    apart = any(frame.injection.is_traced_apart(frame.entry) for frame in frames)
    _enter(frames, args, kwargs, lazily=not apart)
    if apart:
        torch._dynamo.graph_break()
    found = original.forward(module, *args, **kwargs)
    if apart:
        torch._dynamo.graph_break()
    _leave(frames)
    return found


def _enter(frames: list[LayerFrame], args: tuple[Any, ...], kwargs: dict[str, Any], lazily: bool = False) -> None:
    for frame in frames:
        frame.injection.enter(frame.entry, args, kwargs, lazily)


def _leave(frames: list[LayerFrame]) -> None:
    for frame in frames:
        frame.injection.leave(frame.entry)


def exchanged(kind: Any, old: Any, new: Any) -> Any:
    """`kind` with `new` in the place of `old`, also below a class that `fully_shard` has made of it meanwhile."""
    return new if kind is old else _exchanged(kind, old, new)


@functools.cache
def _exchanged(kind: Any, old: Any, new: Any) -> Any:
    bases = tuple(exchanged(base, old, new) if old in base.__mro__ else base for base in kind.__bases__)
    body = {k: v for k, v in kind.__dict__.items() if k not in ("__dict__", "__weakref__")}
    return type(kind.__name__, bases, body)


def dressed(original: Any, slot: str, body: dict[str, Any]) -> Any:
    """A subclass that looks like the class itself, and of which copies and pickles are of that class, and clean.

    Clean of what is in the module's dictionary under a name that begins with `slot`.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        state: Any = original.__reduce_ex__(self, protocol)[2]
        return _REBUILD, (plain, object, None), {k: v for k, v in state.items() if not k.startswith(slot)}

    plain = original.__dict__.get("_shaketable_plain", original)
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    more = {"__reduce_ex__": reduce, "_shaketable_plain": plain}
    return type(original.__name__, (original,), body | names | more)


def on_gpu(module: nn.Module) -> bool:
    """Whether the parameters of a module are on a CUDA device."""
    return any(p.is_cuda for p in module.parameters(recurse=False))


def reaches_gpu(module: nn.Module) -> bool:
    """The same, or those of a module in it."""
    return any(p.is_cuda for p in module.parameters())
