"""Every recorded operator inside of its rounding interval, or not: then it is a defect, with layer, operator, lanes and class.

The definitions are tried on the trainer first: whichever of its own operators lies outside is computed in a way that no
definition here knows (a multiplier of the residual stream, a cap on scores), or the trainer's own device is wrong. Such an
operator is not judged in the engine either, and the verdict says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shaketable.locate.replay import Violation
from shaketable.mismatch.engines.engine import NotToldError, OperatorCall
from shaketable.mismatch.operators.definitions import EXACT, TF32, Definitions, flat
from shaketable.numerics.classify import fault_class
from shaketable.numerics.intervals import host_arithmetic

LOWER = (torch.bfloat16, torch.float16)
PRODUCTS = ("linear", "lm_head", "router", "attention")


@dataclass
class Judged:
    """One operator over all sequences of one phase."""

    name: str
    kind: str
    layer: int | None
    phase: str
    order: int
    values: int = 0
    outside: int = 0
    lanes: set[int] = field(default_factory=set)
    lanes_of: int = 0
    fault: str = ""
    """What it looks like; empty when nothing is wrong."""
    text: str = ""

    @property
    def is_wrong(self) -> bool:
        """Outside of its interval, or beyond what rounding explains."""
        return bool(self.outside or self.fault)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        facts = {"name": self.name, "kind": self.kind, "layer": self.layer, "phase": self.phase, "values": self.values}
        lanes = sorted(self.lanes)
        return facts | {
            "outside": self.outside,
            "lanes": lanes,
            "lanes_of": self.lanes_of,
            "class": self.fault,
            "text": self.text,
        }


class Judge:
    """Judges the calls of one engine."""

    def __init__(self, model: Any, dtype: torch.dtype, held: Mapping[str, Tensor] | None = None) -> None:
        self.definitions = Definitions(model, dtype, held or {})
        self.rows: dict[tuple[str, str], Judged] = {}
        self.unjudged: dict[str, str] = {}
        """Operators that nobody can judge, with the reason."""

    def leave_out(self, calls: Sequence[OperatorCall]) -> None:
        """Try the definitions on calls of the trainer: what lies outside there is not judged."""
        for call in _with_routers(calls):
            found = self._outside(call)
            if found is not None and bool(found.any()):
                self.unjudged[call.name] = "the trainer itself computes it in a way that has no definition here"

    def judge(self, calls: Sequence[OperatorCall], phase: str) -> None:
        """Judge what an engine recorded."""
        for order, call in enumerate(_with_routers(calls)):
            if call.name in self.unjudged or (outside := self._outside(call)) is None:
                continue
            new = Judged(call.name, call.kind, call.layer, phase, order)
            row = self.rows.setdefault((call.name, phase), new)
            row.values += outside.numel()
            row.lanes_of = outside.shape[-1]
            with host_arithmetic():
                self._take(row, call, outside)

    def _outside(self, call: OperatorCall) -> Tensor | None:
        try:
            with host_arithmetic():
                return self.definitions.allowed(call).outside(flat(call))
        except NotToldError as error:
            self.unjudged.setdefault(call.name, str(error))
            return None

    def _take(self, row: Judged, call: OperatorCall, outside: Tensor) -> None:
        if bool(outside.any()):
            row.outside += int(outside.sum())
            row.lanes |= set(outside.any(0).nonzero().flatten().tolist())
            row.fault = row.fault or self._class(call, outside)
            row.text = f"{row.outside:,} of {row.values:,} values lie outside of their rounding interval"
        if call.kind == "attention" and (wrong := self.definitions.attended(call).wrong()) is not None:
            row.fault, row.text = ("scale" if "scale" in wrong else row.fault or "noise"), wrong

    def _class(self, call: OperatorCall, outside: Tensor) -> str:
        """What it looks like: another precision, the next position, or one of locate's classes."""
        if call.output.dtype == torch.float32 and call.kind in PRODUCTS and self._is_inside(call, call, TF32):
            return "products of factors with 10 bits (TF32)"
        for lower in LOWER if call.output.dtype not in LOWER and call.kind != "experts" else ():
            if self._is_inside(call, _lowered(call, lower), EXACT, lower):
                return f"computed in {str(lower).removeprefix('torch.')}"
        for shift in (1, -1) if call.kind == "rotary" else ():
            inputs = call.inputs | {"positions": (call.inputs["positions"] + shift).clamp_min(0)}
            if self._is_inside(call, replace(call, inputs=inputs), EXACT):
                return f"positions off by {shift:+d}"
        if call.kind == "experts":
            return "wrong experts, or wrong weights of them"
        low, high = self.definitions.allowed(call).ends(outside)
        violation = Violation(call.name, None, 0, outside, flat(call), low, high)
        return fault_class(violation.got, violation.low, violation.high, violation.outside)

    def _is_inside(self, call: OperatorCall, other: OperatorCall, precision: Any, dtype: torch.dtype | None = None) -> bool:
        definitions = self.definitions if dtype is None else _in_dtype(self.definitions, dtype)
        return not bool(definitions.allowed(other, precision).outside(flat(other)).any())

    def found(self) -> list[Judged]:
        """What is wrong, in the order of computation, prefill first."""
        return sorted((r for r in self.rows.values() if r.is_wrong), key=lambda r: (r.order, r.phase != "prefill"))

    def summary(self) -> dict[str, Any]:
        """By kind: how many operators and values were judged, and how many lie outside."""
        kinds: dict[str, dict[str, int]] = {}
        for row in self.rows.values():
            counts = kinds.setdefault(row.kind, {"operators": 0, "values": 0, "outside": 0, "wrong": 0})
            counts["operators"] += 1
            counts["values"] += row.values
            counts["outside"] += row.outside
            counts["wrong"] += row.is_wrong
        return kinds


def _with_routers(calls: Sequence[OperatorCall]) -> list[OperatorCall]:
    """Calls of experts, with the logits of the router that sent tokens to them."""
    routers = {call.layer: call.output for call in calls if call.kind == "router"}
    return [
        replace(call, inputs=call.inputs | {"router": routers[call.layer]})
        if call.kind == "experts" and call.layer in routers
        else call
        for call in calls
    ]


def _in_dtype(definitions: Definitions, dtype: torch.dtype) -> Definitions:
    other = Definitions.__new__(Definitions)
    vars(other).update(vars(definitions), dtype=dtype)
    return other


def _lowered(call: OperatorCall, dtype: torch.dtype) -> OperatorCall:
    """The same call as if it had been given values of a coarser dtype, and made them where it did."""
    inputs = {k: t.to(dtype) if t.is_floating_point() else t for k, t in call.inputs.items()}
    coarse = call.output.to(dtype)
    made = coarse if torch.equal(coarse.to(call.output.dtype), call.output) else call.output
    return OperatorCall(call.name, call.kind, call.layer, inputs, made)
