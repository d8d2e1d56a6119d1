"""The operator inside torch.compile: registered operators that find their tap at run time.

Dynamo traces our hooks and the operator mode; what they leave in the graph is `shaketable::apply(x, ticket, tap, number)`. The
operator is opaque, so no state of ours is baked in: the switch, the magnitude, the phase and the noise are those of the pass
that runs. Without a live tap (the injection was closed) it is the identity.

The *ticket* of a pass is a few numbers in a tensor (moment, phase, what acts), made by `shaketable::begin` before the first
application of a pass and handed to every one of them. So compiled code draws the noise that eager code draws, a gradient has
the pass of its forward call, and what activation checkpointing computes again has the ticket of the first time. If a frame is
open when the graph runs (only a part of the model is compiled), the ticket is that of the frame's pass.

A graph that is traced while a plan is off has nothing of it: it is the clean graph, bit for bit. An operator that does nothing
is still between its neighbours, and a compiler that fuses other kernels, or tries other block sizes for them, sums in another
order. So whether a plan is there at all (`present`) is asked while tracing. Dynamo guards the answer, one item of a dictionary
per injection however many taps it has, and keeps both graphs; whatever else changes is read at run time. Rejected: the switch
as an operand, which was the only way before (measured: 0.07 on logits of 4.5, in bfloat16, with everything off). Where a graph
is traced once, without guards, taps are in it whatever the switch says: `Injection.sampler`.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shaketable.inject import fault_operator
from shaketable.inject.compile.registries import leave_with
from shaketable.inject.fault_operator import Application
from shaketable.inject.pass_context import Pass, in_backward
from shaketable.plan import PHASES

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection
    from shaketable.inject.pass_context import Entry, Frame
    from shaketable.inject.tap import Tap

_taps: weakref.WeakValueDictionary[int, Tap] = weakref.WeakValueDictionary()
_handles = count()
_graphs = count()
_newest = -1
_injections: weakref.WeakValueDictionary[int, Injection] = weakref.WeakValueDictionary()
present: dict[int, bool] = {}
"""Whether what is traced now is to have the taps of an injection, by its number. Reached from here for dynamo's sake: what it
finds through taps it asks for, at every call, tap by tap."""
_BASE = 1 << 16
"""Uses of a tap in one run of one graph; the next graph that runs in the same pass counts from here."""


class GraphTrace:
    """What is being traced of one injection: the modules that are open, and the pass they belong to. Dynamo traces it."""

    def __init__(self, handle: int, clauses: int) -> None:
        self.handle, self.clauses = handle, clauses
        self.entries: list[Entry] = []
        self.with_gradients = False
        self.forget()

    def forget(self) -> None:
        """Be as before the first pass."""
        self.entries.clear()
        self.begin()

    def begin(self) -> None:
        """A pass begins; its ticket is made when it is needed."""
        self.known: Tensor | None = None
        self.counts: dict[str, int] = {}
        self.frame: Frame | None = None
        """The frame of what runs between the graphs of the pass."""

    def ticket(self, x: Tensor) -> Tensor:
        """The ticket of the pass. `x` is there for the compiler, which calls what depends on it when it is computed."""
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


def register(tap: Tap) -> None:
    """Give a tap the number under which compiled graphs know it."""
    global _newest
    tap.handle = _newest = next(_handles)
    _taps[tap.handle] = tap


def know(injection: Injection) -> int:
    """Give an injection the number under which compiled graphs know it."""
    handle = next(_handles)
    _injections[handle] = injection
    present[handle] = False
    traces[handle] = GraphTrace(handle, len(injection.plan.clauses))
    for table in (present, traces):
        leave_with(injection, table, handle)
    return handle


def newest() -> int:
    """The number that was given last; graphs that are kept beyond the process hold such numbers."""
    return _newest


def is_present(handle: int) -> bool:
    """Whether a tap is to be in the graph that is being traced."""
    return present[_injection_of(f"{handle}")]


def _injection_of(handle: str) -> int:
    """The number of a tap's injection. It stays that: a constant, to whoever traces.

    Handles come as text: torch 2.7 and 2.8 take a number that differs between modules for a variable one, which no constant can
    be made of.
    """
    return _taps[int(handle)].injection.handle


def new_graph() -> int:
    """A number for the graph that is being traced; a constant in it."""
    return next(_graphs)


def note(handle: int, text: str) -> None:
    """Have the ledger say, of every operator clause, what a graph that is being traced does not cover."""
    if (injection := _injections.get(handle)) is not None:
        for clause, site in zip(injection.plan.clauses, injection.sites, strict=True):
            if clause.site.level == "op" and text not in site.notes:
                site.notes.append(text)


def note_closed_attention(injection: Injection) -> None:
    """The same, when a graph runs, for attention that dynamo takes as one function, and does not show to modes."""
    for attached in injection.models:
        if attached.has_closed_attention:
            note(injection.handle, "torch.nn.MultiheadAttention is compiled as one function: its products are not covered")


def trace(x: Tensor, tap: Tap) -> Tensor:
    """What a hook leaves in the graph for a module-level tap."""
    if not is_present(tap.handle):
        return x
    for direction in tap.site.directions:
        x = trace_forward(x, tap.handle) if direction == "forward" else trace_gradient(x, tap.handle, 0, None, True)
    return x


def trace_forward(x: Tensor, handle: int) -> Tensor:
    """The faulty tensor."""
    tracing = traces[_injection_of(f"{handle}")]
    ticket = tracing.ticket(x)
    return torch.ops.shaketable.apply(x, ticket, handle, tracing.count(f"{handle}"))  # type: ignore[no-any-return]


def trace_gradient(x: Tensor, handle: int, argument: int, number: int | None, copy: bool) -> Tensor:
    """The tensor itself, whose gradient will be faulty."""
    tracing = traces[_injection_of(f"{handle}")]
    ticket = tracing.ticket(x)
    n = tracing.count(f"{handle}:{argument}") if number is None else number
    return TracedGradient.apply(x, ticket, handle, argument, n, copy)  # type: ignore[no-any-return]


# What `torch.compiler.assume_constant_result` does, without its import of dynamo.
for _constant in (_injection_of, new_graph, note):
    vars(_constant)["_dynamo_marked_constant"] = True


def live(handle: int) -> Tap | None:
    """The tap of a handle, if its injection is there."""
    tap = _taps.get(handle)
    return tap if tap is not None and not tap.injection.closed else None


# ---- at run time


@torch.library.custom_op("shaketable::begin", mutates_args=())
def _begin(after: Tensor, handle: int, entry: int, graph: int, clauses: int) -> Tensor:
    """The ticket of the pass that runs: moment, phase, the first use, and per clause whether it acts.

    `entry` is the outermost module that is in the graph; `graph` keeps compilers from taking two of these for one.
    """
    injection = _injections.get(handle)
    if injection is None or injection.closed or not injection.enabled:
        return torch.zeros(3 + clauses, dtype=torch.int64)
    stack = injection.calls.stack
    frame = stack[-1] if stack else traces[handle].frame
    if injection.has_operators:
        note_closed_attention(injection)
    current = injection.begin_compiled_pass(entry) if frame is None else frame.current
    base = _BASE * frame.count("graphs") if frame is not None else 0
    moment = current.moment - (1 << 64) if current.moment >= 1 << 63 else current.moment
    return torch.tensor([moment, PHASES.index(current.phase), base, *current.acts], dtype=torch.int64)


@_begin.register_fake
def _(after: Tensor, handle: int, entry: int, graph: int, clauses: int) -> Tensor:
    return torch.empty(3 + clauses, dtype=torch.int64)


def read(injection: Injection, ticket: Tensor) -> tuple[Pass, int]:
    """The pass of a ticket, and the first use of a tap in the graph that has it."""
    moment, phase, base, *acts = ticket.tolist()
    known = injection.compiled_pass
    if known is None or known.moment != moment & (1 << 64) - 1 or known.phase != PHASES[phase]:
        faults = tuple(injection.faults)
        known = Pass(injection, PHASES[phase], moment & (1 << 64) - 1, tuple(map(bool, acts)), faults)
        injection.compiled_pass = known
    return known, base


def application(handle: int, ticket: Tensor, number: int, backward: bool = False, argument: int = 0) -> Application | None:
    """The application that a graph asks for; None where nothing is to be done."""
    tap = live(handle)
    if tap is None:
        return None
    current, base = read(tap.injection, ticket)
    again = not backward and in_backward()
    return Application(tap, current, backward, argument, base + number, again) if current.acts_on(tap) else None


@torch.library.custom_op("shaketable::apply", mutates_args=())
def _apply(x: Tensor, ticket: Tensor, tap: int, number: int) -> Tensor:
    """The faulty tensor."""
    what = application(tap, ticket, number)
    return x.clone() if what is None else _laid_out_like(x, fault_operator.apply(x, what))


@_apply.register_fake
def _(x: Tensor, ticket: Tensor, tap: int, number: int) -> Tensor:
    return torch.empty_like(x)


def _laid_out_like(x: Tensor, y: Tensor) -> Tensor:
    """A tensor of its own with the strides the graph was told to expect."""
    return y if y is not x and y.stride() == x.stride() else torch.empty_like(x).copy_(y)


@torch.library.custom_op("shaketable::pull_back", mutates_args=())
def _pull_back(g: Tensor, x: Tensor, ticket: Tensor, tap: int, number: int) -> Tensor:
    """The gradient of what was done forward, whether or not the plan is still on."""
    found = _taps.get(tap)
    current, base = (None, 0) if found is None else read(found.injection, ticket)
    if found is None or current is None or not current.acts[found.clause]:
        return g.clone()
    what = Application(found, current, False, 0, base + number)
    return _laid_out_like(g, fault_operator.pull_back(g, x if x.numel() else None, what))


@_pull_back.register_fake
def _(g: Tensor, x: Tensor, ticket: Tensor, tap: int, number: int) -> Tensor:
    return torch.empty_like(g)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ticket, ctx.tap, ctx.number = inputs
    tap = _taps.get(int(ctx.tap))
    ctx.straight = tap is None or tap.straight
    keep = tap is not None and not tap.straight and tap.fault.saves_input
    ctx.save_for_backward(x if keep else x.new_empty(0), ticket)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
    x, ticket = ctx.saved_tensors
    return (g if ctx.straight else _pull_back(g, x, ticket, ctx.tap, ctx.number)), None, None, None


_apply.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("shaketable::gradient", mutates_args=())
def _gradient(g: Tensor, ticket: Tensor, tap: int, argument: int, number: int) -> Tensor:
    """A gradient as the tap leaves it."""
    what = application(tap, ticket, number, True, argument)
    return g.clone() if what is None else _laid_out_like(g, fault_operator.apply(g, what))


@_gradient.register_fake
def _(g: Tensor, ticket: Tensor, tap: int, argument: int, number: int) -> Tensor:
    return torch.empty_like(g)


class TracedGradient(torch.autograd.Function):
    """The tensor itself, with a faulty gradient; dynamo traces it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ticket: Tensor, handle: int, argument: int, number: int, copy: bool) -> Tensor:
        ctx.save_for_backward(ticket)
        ctx.handle, ctx.argument, ctx.number = handle, argument, number
        return x.clone() if copy else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (ticket,) = ctx.saved_tensors
        faulty = torch.ops.shaketable.gradient(g, ticket, ctx.handle, ctx.argument, ctx.number)
        return faulty, None, None, None, None, None


@torch.library.custom_op("shaketable::note_fused", mutates_args={"notes"})
def _note_fused(notes: Tensor, ticket: Tensor, tap: int) -> None:
    """Count an attention call whose inner products no backend exposes. `notes` keeps compilers from leaving this out."""
    found = live(tap)
    if found is not None and read(found.injection, ticket)[0].acts_on(found) and not in_backward():
        found.injection.sites[found.clause].fused += 1


@_note_fused.register_fake
def _(notes: Tensor, ticket: Tensor, tap: int) -> None:
    return None


__all__ = ["GraphTrace", "live", "register", "trace", "trace_forward"]
