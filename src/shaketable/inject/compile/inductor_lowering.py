"""`shaketable::fused` as inductor writes it: arithmetic that it fuses with what is before and after.

The operator is one node of a graph, and to inductor a pointwise computation: the counters, the hashes and the Box-Muller
transform of `faults/rng.py`, element by element. Every element asks for both normals of its pair and takes one. Neighbours are
a pair, and a thread has several neighbours, so the compiler below inductor sees that they ask for the same and computes it
once: it knows the last bits of their numbers.

With the GPU's own logarithm, root, sine and cosine that is some forty instructions per value; with polynomials twice as many.
Elsewhere inductor's functions are used. Either way the noise is the kernel's up to rounding, and the result is rounded to the
tensor's type before anything else is done with it: inductor would keep it in float32. For bfloat16 that is one instruction,
which rounds two values side by side, of which one is zero: the other half of a float32. (Triton's way there and back takes two,
and the first is among the slowest that a GPU has.)

The first values, clean and faulty, are a second result, which nothing but the proof reads. Were they a slice of the first,
inductor would see a large computation with two readers and write it to memory for both.

Rejected: the same in plain torch operators, traced. A hundred nodes for each of 210 linears, and inductor takes minutes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering, squeeze
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from shaketable.faults.gpu import HEAD

Value = Any
"""What inductor computes with: a name in the code that it writes."""


def register() -> None:
    """Tell inductor how the operator is written."""
    register_lowering(torch.ops.shaketable.fused.default, type_promotion_kind=None)(_fused)
    register_lowering(torch.ops.shaketable.together.default, type_promotion_kind=None)(_together)


def _fused(x: Any, table: Any, at: Any, relative: bool, edition: str) -> tuple[Any, Any]:
    """Both results.

    The first is a buffer, as the product's was: what is made of it is then put into the same kernels as in the clean program,
    where a sum is kept in float32 or not, and with the noise off all bits are the same. Fused, it is not written. The second
    is a view, which inductor does not write to memory either; it would, for its size, if it were none.
    """
    size, load, row = list(x.get_size()), x.make_loader(), _Row(table.make_loader(), at)
    how = x.get_device(), x.get_dtype(), relative

    def inner(index: Sequence[Any]) -> Value:
        return apply(load(index), _place(index, size), row, *how)

    def first(index: Sequence[Any]) -> Value:
        return _first(index[1:], size, load, row, *how)

    ranges = [sympy.S.One, sympy.S(2), sympy.S(HEAD)]
    head = ir.Pointwise.create(device=how[0], dtype=torch.float32, inner_fn=first, ranges=ranges)
    y = ir.Pointwise.create(device=how[0], dtype=how[1], inner_fn=inner, ranges=size)
    y.realize()
    return y, squeeze(head, 0)


def _together(heads: list[Any]) -> Any:
    """`torch.stack` in one kernel, which computes what it stacks; inductor's own may take one for each."""
    loads = [head.make_loader() for head in heads]

    def inner(index: Sequence[Any]) -> Value:
        which, found = ops.index_expr(index[0], torch.int32), _number(0.0)
        for i, load in enumerate(loads):
            is_it = ops.eq(which, _word(i))
            found = ops.where(is_it, ops.masked(is_it, functools.partial(load, index[1:]), 0.0), found)
        return found

    first = heads[0]
    ranges = [sympy.S(len(heads)), *first.get_size()]
    return ir.Pointwise.create(device=first.get_device(), dtype=torch.float32, inner_fn=inner, ranges=ranges)


class _Row:
    """The row of a table that an application reads."""

    def __init__(self, load: Callable[[Sequence[Any]], Value], at: Any) -> None:
        self._load, self._at = load, sympy.sympify(at)

    def __getitem__(self, column: int) -> Value:
        return self._load([self._at, sympy.S(column)])


def apply(x: Value, place: Any, row: _Row, device: torch.device, dtype: torch.dtype, relative: bool) -> Value:
    """The faulty value at a place, numbered in the order of a contiguous tensor."""
    i = ops.to_dtype(ops.index_expr(place, torch.int32), torch.int32)
    z = normal(i, row[0], row[1], ops.to_dtype_bitcast(row[2], torch.float32, torch.int32), device)
    y = rounded(x + x * z if relative else x + z, dtype, device)
    return ops.where(ops.ne(row[3], _word(0)), y, x)


def rounded(y: Value, dtype: torch.dtype, device: torch.device) -> Value:
    """A value as the tensor holds it, in float32 again."""
    if dtype == torch.float32:
        return y
    if dtype == torch.bfloat16 and has_instructions(device):
        bits = _asm("cvt.rn.bf16x2.f32 $0, $1, 0f00000000", y, "=r,f", torch.int32)
        return ops.to_dtype_bitcast(bits, torch.float32, torch.int32)
    return ops.to_dtype(ops.to_dtype(y, dtype, use_compute_types=False), dtype)


def _first(
    index: Sequence[Any], size: list[Any], load: Any, row: _Row, device: torch.device, dtype: torch.dtype, relative: bool
) -> Value:
    """One of the first values, clean or faulty; NaN where the tensor has no more of them."""
    i = index[1]

    def value() -> Value:
        x, is_clean = load(_unfolded(i, size)), ops.eq(ops.index_expr(index[0], torch.int32), _word(0))
        wide = ops.to_dtype(x, torch.float32)
        return ops.where(is_clean, wide, ops.to_dtype(apply(x, i, row, device, dtype, relative), torch.float32))

    count = sympy.prod(size)
    if V.graph.sizevars.statically_known_geq(count, HEAD):
        return value()
    inside = ops.lt(ops.index_expr(i, torch.int64), ops.index_expr(count, torch.int64))
    return ops.masked(inside, value, math.nan)


def normal(i: Value, low: Value, high: Value, scale: Value, device: torch.device) -> Value:
    """The normal of an element, of this scale: `faults/rng.py`, for one of a pair."""
    counter = _shift(i, 1)
    h1 = _first_hash(counter, low, high)
    h2 = _second_hash(h1, counter, high)
    r = radius(_real(_shift(h1, 1)) * _number(2.0**-31) + _number(2.0**-32), device) * scale
    s, q = sine_cosine(_real(h2 << _word(2)) * _number(3.6571409e-10), device)
    swap = ops.lt(h2, _word(0))
    first = _signed(r * ops.where(swap, s, q), h2 << _word(1))
    second = _signed(r * ops.where(swap, q, s), h1 << _word(31))
    return ops.where(ops.eq(i & _word(1), _word(0)), first, second)


def _signed(z: Value, word: Value) -> Value:
    """The value, turned around if the first bit of a word is set."""
    bits = ops.to_dtype_bitcast(z, torch.int32, torch.float32) ^ (word & _word(1 << 31))
    return ops.to_dtype_bitcast(bits, torch.float32, torch.int32)


def _first_hash(counter: Value, low: Value, high: Value) -> Value:
    h = counter ^ low
    h = (h ^ _shift(h, 16)) * _word(0x21F0AAAD)
    h = (h ^ _shift(h, 15)) + high
    h = h * _word(0xD35A2D97)
    h = (h ^ _shift(h, 15)) * _word(0x31848BAB)
    return h ^ _shift(h, 16)


def _second_hash(h: Value, counter: Value, high: Value) -> Value:
    h = h + counter * _word(0x9E3779B9) + high
    h = (h ^ _shift(h, 16)) * _word(0x7FEB352D)
    h = (h ^ _shift(h, 15)) * _word(0x846CA68B)
    return h ^ _shift(h, 16)


def radius(u: Value, device: torch.device) -> Value:
    """√(−2 ln u)."""
    if has_instructions(device):
        return _asm("sqrt.approx.ftz.f32 $0, $1", _asm("lg2.approx.ftz.f32 $0, $1", u) * _number(-2 * math.log(2)))
    return ops.sqrt(ops.log(u) * _number(-2.0))


def sine_cosine(t: Value, device: torch.device) -> tuple[Value, Value]:
    """Of an angle in ±π/4."""
    if has_instructions(device):
        return _asm("sin.approx.ftz.f32 $0, $1", t), _asm("cos.approx.ftz.f32 $0, $1", t)
    return ops.sin(t), ops.cos(t)


def has_instructions(device: torch.device) -> bool:
    """Whether code for this device may name instructions that NVIDIA's GPUs have since Ampere."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _asm(instruction: str, x: Value, constraints: str = "=f,f", dtype: torch.dtype = torch.float32) -> Value:
    return ops.inline_asm_elementwise(x, asm=f"{instruction};", constraints=constraints, dtype=dtype)


def _word(value: int) -> Value:
    value &= 0xFFFFFFFF
    return ops.constant(value - (1 << 32) if value >= 1 << 31 else value, torch.int32)


def _number(value: float) -> Value:
    return ops.constant(value, torch.float32)


def _real(word: Value) -> Value:
    return ops.to_dtype(word, torch.float32, src_dtype=torch.int32)


def _shift(x: Value, by: int) -> Value:
    """The bits of a word, moved to the right."""
    return ops.bitwise_right_shift(x, _word(by)) & _word((1 << (32 - by)) - 1)


def _place(index: Sequence[Any], size: list[Any]) -> Any:
    """The number of an element in the order of a contiguous tensor."""
    place: Any = sympy.S.Zero
    for at, n in zip(index, size, strict=True):
        place = place * n + at
    return place


def _unfolded(place: Any, size: list[Any]) -> list[Any]:
    """The other way round."""
    found, stride = [], sympy.S.One
    for k, n in enumerate(reversed(size)):
        found.append(FloorDiv(place, stride) if k == len(size) - 1 else ModularIndexing(place, stride, n))
        stride = stride * n
    return found[::-1]
