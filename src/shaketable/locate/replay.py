"""Rounding-interval replay: every recorded operator computed again on the host, from the inputs it really had.

Because each operator is judged from its own recorded inputs, a violation belongs to that operator and to no other. The
verdict of the host modes rests on this probe; it trusts the host's arithmetic, the file's weights and the model's code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shaketable.capture.recorder import Record, Recording, function_name, is_in_place, is_wrapped
from shaketable.capture.reference import Reference
from shaketable.numerics.intervals import Allowed, Precision, RoundingInterval, host_arithmetic
from shaketable.numerics.operators import PRODUCTS, Call, Selection, allowed_results, parts
from shaketable.sites.nested_tensors import map_tensors, tensors_of

_LOWERED = "linear matmul __matmul__ mm bmm mv addmm addbmm baddbmm einsum conv1d conv2d conv3d scaled_dot_product_attention"
LOWERED = frozenset(_LOWERED.split())
"""Functions whose arguments autocast gives a lower dtype; others take them as they are."""
_CANNOT = (NotImplementedError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, StopIteration)
"""Errors of a definition that does not fit the call: then the operator cannot be judged."""


@dataclass
class Violation:
    """An operator whose result a correct device could not have returned."""

    path: str
    function: str | None
    order: int
    """Position in the call."""
    outside: Tensor
    """Which values, on the host."""
    got: Tensor
    low: Tensor
    """The allowed range, at the values that are outside."""
    high: Tensor

    @property
    def share(self) -> float:
        """The share of values outside of their interval."""
        return float(self.outside.double().mean()) if self.outside.numel() else 0.0


@dataclass
class Judgement:
    """The result of a replay."""

    violations: list[Violation] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    """Operators that cannot be judged, with the reason."""
    coverage: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each operator: rows made and rows replayed. `agreed` are rows of a function without a definition, of which
    host and device have made the same bits."""

    def cover(self, label: str, item: _Expected) -> None:
        """Count what was looked at of one result."""
        rows, how = rows_of(item.got), "replayed" if item.is_defined else "agreed"
        counts = self.coverage.setdefault(label, {"rows": 0, "replayed": 0})
        counts["rows"] += rows
        counts[how] = counts.get(how, 0) + rows


@dataclass(frozen=True)
class _Expected:
    """A result with what it may be."""

    got: Tensor
    allowed: Allowed | Selection
    is_defined: bool = True
    """Whether a result that is not allowed is wrong; without a definition that is not known."""


def rows_of(tensor: Tensor) -> int:
    """Number of rows of channels in a tensor."""
    return tensor.shape[:-1].numel() if tensor.numel() else 0


def judge(
    recording: Recording,
    reference: Reference,
    prefix: str,
    precision: Precision,
    skip: set[str] | None = None,
) -> Judgement:
    """Replay every operator of a recording, but for the leaves to skip; `prefix` is the recorded module's path in the model."""
    judgement = Judgement()
    replay = _Replay(reference, prefix, precision)
    with host_arithmetic():
        for order, record in enumerate(recording.records):
            if record.func is None and skip and record.path in skip:
                continue
            label = ":".join(part for part in (record.path, record.function) if part)
            is_view = _is_view(record)
            try:
                made = replay.viewed(record) if is_view else replay.expected(record)
                outside = [item.allowed.outside(item.got) for item in made]
            except _CANNOT as error:
                line = next(iter(str(error).splitlines()), "no message")
                judgement.unknown.setdefault(label, f"{type(error).__name__}: {line}")
                continue
            for item, wrong in zip(made, outside, strict=True):
                is_wrong = bool(wrong.any())
                if is_wrong and not item.is_defined:
                    text = f"no host definition of {record.function}, and host and device differ"
                    judgement.unknown.setdefault(label, text)
                    continue
                if not is_view:  # a view computes nothing, so there are no rows to count
                    judgement.cover(label, item)
                if is_wrong:
                    ends = item.allowed.ends(wrong)
                    found = Violation(record.path, record.function, order, wrong, item.got, *ends)
                    judgement.violations.append(found)
    return judgement


def _is_view(record: Record) -> bool:
    """Whether the result is the input's own memory: nothing was computed."""
    given, made = list(tensors_of((record.args, record.kwargs))), list(tensors_of(record.output))
    if record.function is None or is_in_place(record.function) or any(is_wrapped(t) for t in (*given, *made)):
        return False
    inputs = {t.untyped_storage().data_ptr() for t in given if t.numel()}
    return bool(inputs) and all(t.untyped_storage().data_ptr() in inputs for t in made)


class _Replay:
    """The host's side of one recording."""

    def __init__(self, reference: Reference, prefix: str, precision: Precision) -> None:
        self.reference, self.prefix, self.precision = reference, prefix, precision

    def viewed(self, record: Record) -> list[_Expected]:
        """Views show the values of their input, each in its place."""
        near = self.reference.near
        args, kwargs = map_tensors(record.args, near), _on_host(map_tensors(record.kwargs, near))
        results = (record.output, record.func(*args, **kwargs))
        got, expected = ([parts(t) if t.is_complex() else t for t in tensors_of(value)] for value in results)
        is_defined = record.function != "as_strided"  # its strides are those of the device
        return [
            _Expected(one, RoundingInterval.exactly(other), is_defined)
            for one, other in zip(map(near, got), expected, strict=True)
            if (one.data_ptr(), one.shape, one.stride()) != (other.data_ptr(), other.shape, other.stride())
        ]

    def expected(self, record: Record) -> list[_Expected]:
        """Allowed results of an operator."""
        results = [self.reference.near(t) for t in tensors_of(record.output)]
        args, kwargs = self._arguments(record)
        call = Call(record.func, args, kwargs, results[0].dtype, self.precision)
        if record.func is None:
            return [self._leaf(call, results[0], record)]
        pairs, is_defined = allowed_results(call, function_name(record.func), results)
        return [_Expected(got, allowed, is_defined) for got, allowed in pairs]

    def _arguments(self, record: Record) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments on the host; the model's parameters come from the file."""
        name = record.function or ""
        lowered = record.lowered if record.func is None or name in LOWERED else None

        def bring(tensor: Tensor) -> Tensor:
            known = self.reference.like(tensor) if tensor.numel() else None
            return as_autocast(self.reference.near(tensor) if known is None else known, lowered)

        args, kwargs = map_tensors(record.args, bring), map_tensors(record.kwargs, bring)
        if record.func is not None and not args and "input" in kwargs:  # by name: definitions take it as the first argument
            args = (kwargs.pop("input"),)
        if name.endswith("_") and args and isinstance(args[0], Tensor):
            args = (args[0].clone(), *args[1:])
        return args, _on_host(kwargs)

    def _leaf(self, call: Call, got: Tensor, record: Record) -> _Expected:
        """A module by its definition."""
        full = ".".join(part for part in (self.prefix, record.path) if part)
        leaf = self.reference.leaf(full)
        assert leaf is not None
        lowered = record.lowered if leaf.kind in PRODUCTS else None

        def weight(name: str) -> Tensor:
            return as_autocast(self.reference.weight(f"{full}.{name}"), lowered)

        return _Expected(got, leaf.allowed(call, weight))


def as_autocast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """An argument as an autocast to `dtype` casts it; it leaves numbers and integer tensors alone."""
    return tensor if dtype is None or not tensor.dim() or not tensor.is_floating_point() else tensor.to(dtype)


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the host as the device where there is one."""
    return {**kwargs, "device": "cpu"} if kwargs.get("device") is not None else kwargs
