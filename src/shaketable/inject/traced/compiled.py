"""Taps inside torch.compile: custom operators that find their tap at run time.

Dynamo traces our hooks and the operator mode; what they leave in the graph is `shaketable::strike(x, handle)`. The
operator is opaque, so no state of ours is baked in: the switch, the magnitude, the phase and the noise are those of
the moment of the call. Without a live tap (the injection was closed) it is the identity.

A graph that is traced while a plan is off has nothing of it: it is the clean graph, bit for bit. An operator that does nothing
is still between its neighbours, and a compiler that fuses other kernels, or tries other block sizes for them, sums in another
order. So whether a plan is there at all (`present`) is asked while tracing. Dynamo guards the answer, one item of a dictionary
per injection however many taps it has, and keeps both graphs; whatever else changes is read at run time. Rejected: the switch
as an operand, which was the only way before (measured: 0.07 on logits of 4.5, in bfloat16, with everything off). Where a graph
is traced once, without guards, taps are in it whatever the switch says: `Injection.traced_once`.

On a card that would cost a call of Python per tap and pass. There, noise on what a linear returns is arithmetic that inductor
fuses with its neighbours (`fused.py`), or, where the model is not compiled as a whole, its Triton kernel, in place. Both read
key and scale from the injection's board (`board.py`); what is opaque is one call before the first strike of a pass,
`shaketable::begin`, which asks for the phase and lets the board's clock tick.

In a compiled graph there are no frames. A tap counts its own calls, per phase; a call inside backward is a
recomputation (activation checkpointing) and takes the newest moment that has not been recomputed yet.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shaketable.inject.calls import in_backward
from shaketable.inject.taps import Blow, Tap
from shaketable.inject.traced import fused

if TYPE_CHECKING:
    from shaketable.inject.board import Board
    from shaketable.inject.injection import Injection

_taps: weakref.WeakValueDictionary[int, Tap] = weakref.WeakValueDictionary()
_handles = count()
_newest = -1
_injections: weakref.WeakValueDictionary[int, Injection] = weakref.WeakValueDictionary()
present: dict[int, bool] = {}
"""Whether what is traced now is to have the taps of an injection, by its number. Reached from here for dynamo's sake: what it
finds through taps it asks for, at every call, tap by tap."""
_pending: weakref.WeakKeyDictionary[Tap, list[tuple[int, str]]] = weakref.WeakKeyDictionary()
_PENDING_MAX = 64


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
    weakref.finalize(injection, present.pop, handle, None)
    return handle


def newest() -> int:
    """The number that was given last; graphs that are kept beyond the process hold such numbers."""
    return _newest


def is_present(handle: int) -> bool:
    """Whether a tap is to be in the graph that is being traced."""
    return present[_injection_of(handle)]


def _injection_of(handle: int) -> int:
    """The number of a tap's injection. It stays that: a constant, to whoever traces."""
    return _taps[handle].injection.handle


def trace(x: Tensor, tap: Tap) -> Tensor:
    """What a hook leaves in the graph for a module-level tap."""
    if not is_present(tap.handle):
        return x
    for direction in tap.site.directions:
        x = trace_forward(x, tap.handle) if direction == "forward" else TracedEcho.apply(x, tap.handle, 0, True)
    return x


def trace_fresh(x: Tensor, handle: int) -> Tensor:
    """The same for a forward tap on what a linear has just computed, and which may be written to."""
    if not is_present(handle):
        return x
    seat = seat_of(handle)
    if seat is None or not on_a_card(x) or torch.is_grad_enabled() or not x.is_contiguous():
        return trace_forward(x, handle)
    gathering = fused.passes[seat.number]
    gathering.begin(x)
    if gathering.takes(x, seat):
        return gathering.strike(x, seat)
    if gathering.is_open:
        return trace_forward(x, handle)
    torch.ops.shaketable.shake(x, gathering.rows, gathering.proof, seat.row, seat.place, seat.relative)
    return x


def seat_of(handle: int) -> fused.Seat | None:
    """Where a tap is on the board of a card. It stays there: a constant, to whoever traces."""
    tap = _taps.get(handle)
    return None if tap is None else tap.seat


def is_captured() -> bool:
    """Whether what is being traced is for a compiler that captures it into CUDA graphs, and may be in several parts.

    A graph that writes to what it is given is not captured, and one that is captured runs no Python.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._inductor import config

    traced = InstructionTranslator.current_tx()
    compiler: Any = traced.output.compiler_fn
    settings = compiler.get_compiler_config() if hasattr(compiler, "get_compiler_config") else {}
    return not traced.one_graph and bool(settings.get("triton.cudagraphs", config.triton.cudagraphs))


# What `torch.compiler.assume_constant_result` does, without its import of dynamo.
seat_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_captured._dynamo_marked_constant = True  # type: ignore[attr-defined]
_injection_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def on_a_card(x: Tensor) -> bool:
    """Whether kernels can read the board where this tensor is."""
    return x.is_cuda


def trace_forward(x: Tensor, handle: int) -> Tensor:
    """The faulty tensor."""
    y, _ = torch.ops.shaketable.strike(x, handle)
    return y  # type: ignore[no-any-return]


def live(handle: int) -> Tap | None:
    """The tap of a handle, if it would do anything now."""
    tap = _taps.get(handle)
    return tap if tap is not None and tap.is_active and not tap.injection.closed else None


@torch.library.custom_op("shaketable::begin", mutates_args={"rows"})
def _begin(rows: Tensor, handle: int, after: Tensor | None = None) -> None:
    """The head of a pass: new keys and the state of this moment for every kernel of it.

    `rows` are those of the board, or a copy that a compiler has made to keep its graph functional. `after` is not looked at: a
    compiler orders what it compiles as it likes, but calls this when that is computed, or on its way (`fused.py`).
    """
    injection = _injections.get(handle)
    if injection is None or injection.closed:
        rows.zero_()
        return
    for board in injection.boards.on(rows.device):
        board.tick(injection.phase_now())
    if injection.boards.rows is not None and rows.data_ptr() != injection.boards.rows.data_ptr():
        rows.copy_(injection.boards.rows)
    injection.fires += 1


@_begin.register_fake
def _(rows: Tensor, handle: int, after: Tensor | None = None) -> None:
    return None


def _define_shake() -> None:
    """The operator whose kernel inductor launches by itself; only where Triton is."""
    from torch.library import triton_op, wrap_triton

    from shaketable.faults.gpu import dispatch, noise_kernels

    @triton_op("shaketable::shake", mutates_args={"x", "proof"})
    def shake(x: Tensor, rows: Tensor, proof: Tensor, row: int, place: int, relative: bool) -> None:
        n = x.numel()
        grid = ((n + dispatch.BLOCK - 1) // dispatch.BLOCK,)
        kind = dispatch.RELATIVE if relative else dispatch.ADDITIVE
        wrap_triton(noise_kernels.noise)[grid](
            x, x, n, 0.0, 0, 0, x, rows, proof, row, place,
            KIND=kind, UNIT=False, LIVE=True, FAST=True, EVEN=n % dispatch.BLOCK == 0, BLOCK=dispatch.BLOCK,
        )  # fmt: skip


def place_on(board: Board) -> None:
    """Tell the taps of a board where on it they are, so that graphs can be traced with that."""
    if not hasattr(torch.ops.shaketable, "shake"):
        _define_shake()
    fused.place_on(board)


def _forward_blow(tap: Tap) -> Blow | None:
    pending = _pending.setdefault(tap, [])
    if in_backward() and pending:
        moment, phase = pending.pop()
        return tap.blow_at(moment, phase, (False, 0), recomputing=True)
    phase = tap.injection.phase_now()
    if not tap.acts_in(phase):
        return None
    moment = tap.injection.calls.new_moment((tap, 0), phase)
    if torch.is_grad_enabled() or tap.injection.is_training:
        pending.append((moment, phase))
        del pending[:-_PENDING_MAX]
    return tap.blow_at(moment, phase, (False, 0))


@torch.library.custom_op("shaketable::strike", mutates_args=())
def _strike(x: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    """The faulty tensor and the key it was made with; key -1 where nothing was done."""
    tap = live(handle)
    blow = _forward_blow(tap) if tap is not None else None
    if tap is None or blow is None:
        return x.clone(), torch.zeros(2, dtype=torch.int64)
    return _laid_out_like(x, tap.strike(x, blow)), _pack(blow.key)


def _laid_out_like(x: Tensor, y: Tensor) -> Tensor:
    """A tensor of its own with the strides the graph was told to expect."""
    return y if y is not x and y.stride() == x.stride() else torch.empty_like(x).copy_(y)


@_strike.register_fake
def _(x: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty(2, dtype=torch.int64)


def _pack(key: int) -> Tensor:
    return torch.tensor([key & 0xFFFFFFFF, (key >> 32) | 1 << 32], dtype=torch.int64)


def _unpack(packed: Tensor) -> int | None:
    low, high = packed.tolist()
    return low | (high & 0xFFFFFFFF) << 32 if high else None


@torch.library.custom_op("shaketable::pull_back", mutates_args=())
def _pull_back(g: Tensor, x: Tensor, packed: Tensor, handle: int) -> Tensor:
    tap, key = _taps.get(handle), _unpack(packed)
    if tap is None or key is None or tap.straight:
        return g.clone()
    return _laid_out_like(g, tap.pull_back(g, x if x.numel() else None, Blow(tap.fault, key, "")))


@_pull_back.register_fake
def _(g: Tensor, x: Tensor, packed: Tensor, handle: int) -> Tensor:
    return torch.empty_like(g)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.handle = inputs
    tap = _taps.get(int(ctx.handle))
    keep = tap is not None and not tap.straight and tap.fault.saves_input
    ctx.straight = tap is None or tap.straight
    ctx.save_for_backward(x if keep else x.new_empty(0), output[1])


def _backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor, None]:
    x, packed = ctx.saved_tensors
    return (g if ctx.straight else _pull_back(g, x, packed, ctx.handle)), None


_strike.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("shaketable::echo", mutates_args=())
def _echo(g: Tensor, handle: int, argument: int) -> Tensor:
    """A gradient as the tap leaves it."""
    tap = live(handle)
    phase = tap.injection.phase_now() if tap is not None else ""
    if tap is None or not tap.acts_in(phase):
        return g.clone()
    moment = tap.injection.calls.new_moment((tap, argument + 1), phase)
    return _laid_out_like(g, tap.strike(g, tap.blow_at(moment, phase, (True, argument)), backward=True))


@_echo.register_fake
def _(g: Tensor, handle: int, argument: int) -> Tensor:
    return torch.empty_like(g)


class TracedEcho(torch.autograd.Function):
    """The tensor itself, with a faulty gradient; dynamo traces it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: int, argument: int, copy: bool) -> Tensor:
        ctx.handle, ctx.argument = handle, argument
        return x.clone() if copy else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.ops.shaketable.echo(g, ctx.handle, ctx.argument), None, None, None


__all__ = ["TracedEcho", "live", "register", "trace", "trace_forward"]
