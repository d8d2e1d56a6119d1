"""A tap, and the operator that it places: the only code that changes a tensor, counts that it did, and measures it.

A `Tap` is one fault at one place of one model; whether it acts was decided when the pass began. `apply` is the operator, in
eager, compiled and captured code. Its keys are fixed in forward, so the error of a gradient belongs to the layer and the call
that caused it, in whatever thread backward runs. `pull_back` is its gradient.

**torch.compile.** Dynamo traces our hooks and the operator mode; they leave `shaketable::apply(x, pass, tap, number)` in the
graph, which is opaque. The pass is a tensor of a few numbers (its key, its phase, which clauses act), made by
`shaketable::begin` before the first application, so a graph follows the switch, the magnitude and the phase.

A graph that is traced while a plan is off has no taps: even an operator that does nothing changes which kernels a compiler
fuses, and so the bits. Dynamo guards whether a plan is on (`present`) and keeps both graphs. Sampling engines trace once,
without guards; their graphs always have the taps.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shaketable.errors import PlanError
from shaketable.faults import Draw, FaultBase
from shaketable.faults.rng import key_of, lanes, mix64
from shaketable.inject.counters import measure
from shaketable.inject.passes import Pass, in_backward
from shaketable.plan import PHASES

if TYPE_CHECKING:
    from shaketable.inject.cuda_graphs import DeviceTable
    from shaketable.inject.injection import Injection
    from shaketable.inject.passes import Entry, Frame
    from shaketable.ledger.ledger import Spot


class Tap:
    """One fault at one place of one model."""

    is_held = False
    """Whether its noise is drawn once for many passes."""
    reads_tables = True
    """Whether captured kernels read its key and scale from the table of their GPU."""

    def __init__(self, injection: Injection, clause: int, spot: Spot, name: str, point: str) -> None:
        self.injection = injection
        self.clause = clause
        self.name = name
        self.point = point
        self.index = len(injection.taps)
        self.spot = spot
        self.site = injection.plan.clauses[clause].site
        self.straight = self.site.level == "op"
        """Whether a forward fault leaves gradients alone: an operator's backward is an operator of its own."""
        self.transposed = False
        """Whether the tensor is a weight stored as (in, out)."""
        self.handle = -1
        """The number under which compiled graphs know it."""
        self.tables: dict[torch.device, DeviceTable] = {}
        """Where kernels read what it is to do, per GPU."""
        self._place = injection.plan.seed, clause, name, point
        self._masks: dict[tuple[int, torch.device, bool], Tensor] = {}
        self._references: dict[tuple[bool, int], Tensor | None] = {}
        self.make_keys()

    def make_keys(self) -> None:
        """The keys of its place in this rank."""
        self.keys = tuple(key_of(*self._place, direction, self.injection.rank) for direction in ("forward", "backward"))

    @property
    def fault(self) -> FaultBase:
        """The fault as it is now: its magnitude can change while the plan is active."""
        return self.injection.faults[self.clause]

    def touch(self, x: Tensor, frame: Frame | None) -> Tensor:
        """The tensor with the clause's faults, forward and backward; without a frame, in a graph that is being traced."""
        for direction in self.site.directions:
            x = self.forward(x, frame) if direction == "forward" else self.gradient(x, frame)
        return x

    def forward(self, x: Tensor, frame: Frame | None) -> Tensor:
        """The faulty tensor."""
        if frame is None:
            return trace_forward(x, self.handle)
        if not frame.current.acts_on(self):
            return x
        what = Application(self, frame.current, False, 0, frame.count(self), frame.recomputing)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return apply(x, what)
        result: Tensor = Apply.apply(x, what)
        return result

    def gradient(self, x: Tensor, frame: Frame | None, argument: int = 0, number: int | None = None) -> Tensor:
        """`x` itself, whose gradient will be faulty. `number` tells calls in one pass apart.

        Calls are counted whether or not a gradient is wanted: reentrant checkpointing runs the first pass without.
        """
        if frame is None:
            return trace_gradient(x, self.handle, argument, number, not self.straight)
        n = frame.count((self, argument)) if number is None else number
        if not frame.current.acts_on(self) or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        what = Application(self, frame.current, True, argument, n, frame.recomputing)
        result: Tensor = FaultyGradient.apply(x, what)
        return result

    def key(self, current: Pass, backward: bool, use: int) -> int:
        """Keys all randomness of one application."""
        return mix64(self.keys[backward] ^ current.mixed(use))

    def is_fire(self, what: Application) -> bool:
        """Whether an application counts; one that draws what has been drawn before may not."""
        return True

    def compute(self, x: Tensor, what: Application) -> Tensor:
        """The faulty tensor, neither counted nor measured."""
        fault, draw, mask = what.fault, self._draw(x, what), self.mask(x, what.fault)
        y = fault.apply(x.transpose(-1, -2), draw).transpose(-1, -2) if self.transposed else fault.apply(x, draw)
        return y if mask is None else y.where(mask, x)

    def pull_back(self, g: Tensor, x: Tensor | None, what: Application) -> Tensor:
        """The fault's own gradient, given the clean tensor where the fault asks for it. Not a fire."""
        fault, draw, mask = what.fault, self._draw(g, what), self.mask(g, what.fault)
        if self.transposed:
            turned = fault.gradient(g.transpose(-1, -2), None if x is None else x.transpose(-1, -2), draw)
            result = turned.transpose(-1, -2)
        else:
            result = fault.gradient(g, x, draw)
        return result if mask is None else result.where(mask, g)

    def _draw(self, x: Tensor, what: Application) -> Draw:
        way = what.backward, what.argument
        if way not in self._references:
            known = self.injection.references.get(self._reference_name(way))
            taken = what.fault.reference(x)
            self._references[way] = taken if known is None or taken is None else torch.full_like(taken, known)
        return Draw(what.key, self._references[way])

    def references(self) -> list[tuple[str, float]]:
        """The statistics that its fault took at its first use and keeps, by name."""
        return [(self._reference_name(way), float(taken)) for way, taken in self._references.items() if taken is not None]

    def _reference_name(self, way: tuple[bool, int]) -> str:
        return f"{self.clause} {self.name} {self.point} {'backward' if way[0] else 'forward'} {way[1]}"

    def mask(self, x: Tensor, fault: FaultBase) -> Tensor | None:
        """Which channels are faulty: the last dimension of an activation, the output dimension of a weight."""
        if fault.sparsity == 1 or x.dim() == 0:
            return None
        rows = self.point == "weight" and x.dim() > 1 and not self.transposed
        channels = x.shape[-2 if rows else -1]
        key = (channels, x.device, rows)
        if key not in self._masks:
            mask = lanes(channels, fault.sparsity, key_of(*self._place, "lanes")).to(x.device)
            self._masks[key] = mask.unsqueeze(-1) if rows else mask
        return self._masks[key]


# ---- the operator


@dataclass(slots=True, eq=False)
class Application:
    """One application of a fault: its tap, its pass, and the index of this use of the tap in the pass."""

    tap: Tap
    current: Pass
    backward: bool
    argument: int
    """Of which argument the gradient is; 0 forward."""
    number: int
    """How often the tap was used before in this pass, in this direction and on this argument."""
    recomputing: bool = False

    @property
    def fault(self) -> FaultBase:
        """The fault, as it was when the pass began."""
        return self.current.faults[self.tap.clause]

    @property
    def key(self) -> int:
        """Keys all randomness."""
        return self.tap.key(self.current, self.backward, (self.argument << 32) + self.number)


def apply(x: Tensor, what: Application) -> Tensor:
    """The faulty tensor; counted, and measured when that is due. Torch function modes do not see how it is computed."""
    with torch._C.DisableTorchFunction():
        return _apply(x, what)


def _apply(x: Tensor, what: Application) -> Tensor:
    tap = what.tap
    injection = tap.injection
    if not x.is_floating_point():
        raise PlanError(f"{tap.site.label}: {tap.name} {tap.point} is {x.dtype}; faults act on floating tensors")
    if x.is_cuda and (y := injection.tables.apply(x, what)) is not None:
        injection.fires += 1
        return y
    start, counters = perf_counter(), injection.counters
    y = tap.compute(x, what)
    if what.recomputing and not what.backward:
        counters.count_recomputed(tap)
    elif tap.is_fire(what) and counters.count(tap, what.backward, what.current.phase):
        with torch.no_grad():
            counters.add(tap, what.backward, measure(what.fault, x.detach(), y.detach(), tap.mask(x, what.fault)))
    counters.spend(tap, what.backward, perf_counter() - start)
    injection.fires += 1
    return y


def pull_back(g: Tensor, x: Tensor | None, what: Application) -> Tensor:
    """The gradient with respect to the clean tensor, given that with respect to the faulty one."""
    if what.current.captured:
        return what.tap.injection.tables.pull_back(g, x, what)
    return what.tap.pull_back(g, x, what)


class Apply(torch.autograd.Function):
    """The faulty tensor, with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, what: Application) -> Tensor:
        ctx.what = what
        if what.fault.saves_input and not what.tap.straight:
            ctx.save_for_backward(x)
        return apply(x, what)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g if ctx.what.tap.straight else _pulled_back(ctx, g), None


@once_differentiable
def _pulled_back(ctx: Any, g: Tensor) -> Tensor:
    saved = ctx.saved_tensors
    return pull_back(g, saved[0] if saved else None, ctx.what)


class FaultyGradient(torch.autograd.Function):
    """The tensor itself, with a faulty gradient while the plan is on.

    An operator reads its inputs and gets a view; what a module returns may be overwritten in place and is a copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, what: Application) -> Tensor:
        ctx.what = what
        return x.view_as(x) if what.tap.straight else x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        what: Application = ctx.what
        return apply(g, what) if what.current.acts_on(what.tap) else g, None


# ---- inside torch.compile

_taps: weakref.WeakValueDictionary[int, Tap] = weakref.WeakValueDictionary()
_handles = count()
_graphs = count()
_injections: weakref.WeakValueDictionary[int, Injection] = weakref.WeakValueDictionary()
present: dict[int, bool] = {}
"""Whether what is traced now is to have the taps of an injection, by its number. Reached from here for dynamo's sake: what it
finds through taps it asks for, at every call, tap by tap."""
_BASE = 1 << 16
"""Uses of a tap in one run of one graph; the next graph that runs in the same pass counts from here."""


class GraphTrace:
    """The graph of one injection that is being traced: its open modules, and the pass they belong to. Dynamo traces it."""

    def __init__(self, handle: int, clauses: int) -> None:
        self.handle, self.clauses = handle, clauses
        self.entries: list[Entry] = []
        self.with_gradients = False
        self.begin()

    def begin(self) -> None:
        """A pass begins; it is packed when it is needed."""
        self.known: Tensor | None = None
        self.counts: dict[str, int] = {}
        self.casts: list[Tensor] = []
        """Weights of heads in another type."""
        self.frame: Frame | None = None
        """The frame of what runs between the graphs of the pass."""

    def packed(self, x: Tensor) -> Tensor:
        """The pass, packed. `x` is there for the compiler, which calls what depends on it when it is computed."""
        if not self.entries:  # a part of a model, compiled by itself
            self.begin()
        if self.known is None:
            first = self.entries[0].index if self.entries else 0
            self.known = torch.ops.shaketable.begin(x.detach(), self.handle, first, new_graph(), self.clauses)
        return self.known

    def count(self, who: str) -> int:
        """How often `who` was counted before in this pass."""
        n = self.counts.get(who, 0)
        self.counts[who] = n + 1
        return n


traces: dict[int, GraphTrace] = {}
"""By the number of an injection."""
_gone: list[int] = []
"""Injections that were deleted. Their entries go when the next injection comes, never during a trace: a dictionary that changes
its size while dynamo iterates over it ends the compilation."""


def register(tap: Tap) -> None:
    tap.handle = next(_handles)
    _taps[tap.handle] = tap


def know(injection: Injection) -> int:
    """Give an injection the number under which compiled graphs know it."""
    while _gone:
        gone = _gone.pop()
        del present[gone], traces[gone]
    handle = next(_handles)
    _injections[handle] = injection
    present[handle] = False
    traces[handle] = GraphTrace(handle, len(injection.plan.clauses))
    weakref.finalize(injection, _gone.append, handle)
    return handle


def is_present(handle: int) -> bool:
    """Whether a tap is to be in the graph that is being traced."""
    return present[_injection_of(f"{handle}")]


def _injection_of(handle: str) -> int:
    """The number of a tap's injection; a constant under dynamo. Handles come as text, because dynamo may take a number that
    differs between modules for a variable, of which it can make no constant."""
    return _taps[int(handle)].injection.handle


def new_graph() -> int:
    return next(_graphs)


def note(handle: int, text: str) -> None:
    """Have the ledger say, of every operator clause, what a graph that is being traced does not cover."""
    if (injection := _injections.get(handle)) is not None:
        for clause, site in zip(injection.plan.clauses, injection.sites, strict=True):
            if clause.site.level == "op" and text not in site.notes:
                site.notes.append(text)


def trace_forward(x: Tensor, handle: int) -> Tensor:
    tracing = traces[_injection_of(f"{handle}")]
    packed = tracing.packed(x)
    return torch.ops.shaketable.apply(x, packed, handle, tracing.count(f"{handle}"))  # type: ignore[no-any-return]


def trace_gradient(x: Tensor, handle: int, argument: int, number: int | None, copy: bool) -> Tensor:
    """The tensor itself, whose gradient will be faulty."""
    tracing = traces[_injection_of(f"{handle}")]
    packed = tracing.packed(x)
    n = tracing.count(f"{handle}:{argument}") if number is None else number
    return TracedGradient.apply(x, packed, handle, argument, n, copy)  # type: ignore[no-any-return]


# What `torch.compiler.assume_constant_result` does, without its import of dynamo.
for _constant in (_injection_of, new_graph, note):
    vars(_constant)["_dynamo_marked_constant"] = True


# ---- at run time

UNSAFE = (torch.Tag.cudagraph_unsafe,)
"""Inductor's own CUDA graphs (`mode="reduce-overhead"`) leave out operators with this tag and call them between their parts:
what they count and measure must outlive a replay."""


@torch.library.custom_op("shaketable::begin", mutates_args=(), tags=UNSAFE)
def _begin(after: Tensor, handle: int, entry: int, graph: int, clauses: int) -> Tensor:
    """The pass that runs, packed: key, phase, the first use, and per clause whether it acts.

    `entry` is the outermost module that is in the graph; `graph` keeps compilers from taking two of these for one.
    """
    injection = _injections.get(handle)
    if injection is None or injection.closed or not injection.enabled:
        return torch.zeros(3 + clauses, dtype=torch.int64)
    stack = injection.calls.stack
    frame = stack[-1] if stack else traces[handle].frame
    current = injection.begin_compiled_pass(entry) if frame is None else frame.current
    base = _BASE * frame.count("graphs") if frame is not None else 0
    key = current.key - (1 << 64) if current.key >= 1 << 63 else current.key
    return torch.tensor([key, PHASES.index(current.phase), base, *current.acts], dtype=torch.int64)


@_begin.register_fake
def _(after: Tensor, handle: int, entry: int, graph: int, clauses: int) -> Tensor:
    return torch.empty(3 + clauses, dtype=torch.int64)


def unpack(injection: Injection, packed: Tensor) -> tuple[Pass, int]:
    """The pass in a packed tensor, and the first use of a tap in the graph that has it."""
    key, phase, base, *acts = packed.tolist()
    known = injection.compiled_pass
    if known is None or known.key != key & (1 << 64) - 1 or known.phase != PHASES[phase]:
        faults = tuple(injection.faults)
        known = Pass(injection, PHASES[phase], key & (1 << 64) - 1, tuple(map(bool, acts)), faults)
        injection.compiled_pass = known
    return known, base


def application(handle: int, packed: Tensor, number: int, backward: bool = False, argument: int = 0) -> Application | None:
    """The application that a graph asks for; None where nothing is to be done."""
    tap = _taps.get(handle)
    if tap is None or tap.injection.closed:
        return None
    current, base = unpack(tap.injection, packed)
    again = not backward and in_backward()
    return Application(tap, current, backward, argument, base + number, again) if current.acts_on(tap) else None


@torch.library.custom_op("shaketable::apply", mutates_args=(), tags=UNSAFE)
def _apply_op(x: Tensor, packed: Tensor, tap: int, number: int) -> Tensor:
    what = application(tap, packed, number)
    return x.clone() if what is None else _laid_out_like(x, apply(x, what))


def _laid_out_like(x: Tensor, y: Tensor) -> Tensor:
    """A tensor of its own with the strides that the graph expects."""
    return y if y is not x and y.stride() == x.stride() else torch.empty_like(x).copy_(y)


@torch.library.custom_op("shaketable::pull_back", mutates_args=(), tags=UNSAFE)
def _pull_back(g: Tensor, x: Tensor, packed: Tensor, tap: int, number: int) -> Tensor:
    """The gradient of what was done forward, whether or not the plan is still on."""
    found = _taps.get(tap)
    current, base = (None, 0) if found is None else unpack(found.injection, packed)
    if found is None or current is None or not current.acts[found.clause]:
        return g.clone()
    what = Application(found, current, False, 0, base + number)
    return _laid_out_like(g, pull_back(g, x if x.numel() else None, what))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, packed, ctx.tap, ctx.number = inputs
    tap = _taps.get(int(ctx.tap))
    ctx.straight = tap is None or tap.straight
    keep = tap is not None and not tap.straight and tap.fault.saves_input
    ctx.save_for_backward(x if keep else x.new_empty(0), packed)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
    x, packed = ctx.saved_tensors
    return (g if ctx.straight else _pull_back(g, x, packed, ctx.tap, ctx.number)), None, None, None


_apply_op.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("shaketable::gradient", mutates_args=(), tags=UNSAFE)
def _gradient(g: Tensor, packed: Tensor, tap: int, argument: int, number: int) -> Tensor:
    what = application(tap, packed, number, True, argument)
    return g.clone() if what is None else _laid_out_like(g, apply(g, what))


for _operator in (_apply_op, _pull_back, _gradient):
    _operator.register_fake(lambda x, *_: torch.empty_like(x))


class TracedGradient(torch.autograd.Function):
    """The tensor itself, with a faulty gradient; dynamo traces it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, handle: int, argument: int, number: int, copy: bool) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.handle, ctx.argument, ctx.number = handle, argument, number
        return x.clone() if copy else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (packed,) = ctx.saved_tensors
        faulty = torch.ops.shaketable.gradient(g, packed, ctx.handle, ctx.argument, ctx.number)
        return faulty, None, None, None, None, None


@torch.library.custom_op("shaketable::note_fused", mutates_args={"notes"}, tags=UNSAFE)
def _note_fused(notes: Tensor, packed: Tensor, tap: int) -> None:
    """Count an attention call whose inner products no backend exposes. `notes` keeps compilers from leaving this out."""
    what = application(tap, packed, 0)
    if what is not None and not what.recomputing:
        what.tap.injection.sites[what.tap.clause].fused += 1


_note_fused.register_fake(lambda notes, packed, tap: None)
