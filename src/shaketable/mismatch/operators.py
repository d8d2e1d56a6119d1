"""Stage 7: every recorded operator of the engine against its rounding interval.

The definitions (`numerics/decoder_operators.py`) are tried on the trainer first: an operator of its own that lies outside is
computed in a way that no definition here knows (a cap on scores), or the trainer's own device is wrong. Such an operator is
not judged in the engine either, and the verdict says so. The definitions use the trainer's weights; `Recompute` gives what the
trainer itself makes of the engine's inputs, for the shares.

Operators are also chained: each must read, bit for bit, what an operator before it made. Otherwise something between them
changes values, which no single operator shows, and which rounding of a whole model may hide.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shaketable.capture.decoder import DecoderParts
from shaketable.capture.reference import Reference
from shaketable.errors import UnavailableError
from shaketable.mismatch.logprobs import chosen
from shaketable.mismatch.results import KindCount, OperatorFault
from shaketable.numerics.classify import fault_class
from shaketable.numerics.decoder_operators import EXACT, LEAST, SIGMAS, TF32, Definitions, OperatorCall, visible
from shaketable.numerics.intervals import UNIT, Allowed, Around, host_arithmetic

LOWER = (torch.bfloat16, torch.float16)
PRODUCTS = ("linear", "lm_head", "router", "attention")
GAINS = 32
"""Tokens below which a gain of experts is not judged."""
CHAINED = ("x", "residual", "up", "q", "k", "v")
"""Inputs that an operator before made; of keys and values those of the tokens that are computed."""


@dataclass
class _Judged:
    """One operator over all sequences of one phase."""

    call: OperatorCall
    phase: str
    order: int
    values: int = 0
    outside: int = 0
    lanes: set[int] = field(default_factory=set)
    lanes_of: int = 0
    looks_like: str = ""
    """The class of fault; empty when nothing is wrong."""
    text: str = ""
    products: list[Tensor] = field(default_factory=list)
    """Of experts, (tokens, 2): the products of errors and of values with the values, of each token."""

    def fault(self) -> OperatorFault:
        lanes = sorted(self.lanes)
        return OperatorFault(self.call.name, self.call.kind, self.phase, lanes, self.lanes_of, self.looks_like, self.text)


class Judge:
    """Judges the calls of one engine by the trainer's model; `dtype` and `own_weights` are those of `Definitions`."""

    def __init__(self, model: Any, dtype: torch.dtype, own_weights: Mapping[str, Tensor] | None = None) -> None:
        source, rotary = Reference(model), DecoderParts.of(model).rotary
        self.definitions = Definitions(model, source, rotary, dtype, own_weights)
        self.of_trainer = Definitions(model, source, rotary, next(model.parameters()).dtype)
        self.rows: dict[tuple[str, str], _Judged] = {}
        self.unjudged: dict[str, str] = {}
        """Operators without a definition, with the reason."""
        self.unchained: set[str] = set()
        """Operators of the trainer that read what no operator made, such as embeddings that are scaled in between."""

    def leave_out(self, calls: Sequence[OperatorCall]) -> None:
        """Try the definitions on calls of the trainer: an operator that lies outside there is not judged."""
        self.unchained |= {call.name for _, call in unmade(calls)}
        for call in _with_routers(calls):
            found = self._allowed(call, self.of_trainer)
            with host_arithmetic():
                is_outside = found is not None and bool(found.outside(call.flat).any())
            if is_outside:
                self.unjudged[call.name] = "the trainer itself computes it in a way that has no definition here"

    def judge(self, calls: Sequence[OperatorCall], phase: str) -> None:
        """Judge calls that an engine recorded."""
        for order, call in enumerate(_with_routers(calls)):
            if call.name in self.unjudged or (allowed := self._allowed(call, self.definitions)) is None:
                continue
            row = self.rows.setdefault((call.name, phase), _Judged(call, phase, order))
            row.lanes_of = call.flat.shape[-1]
            row.values += call.flat.numel()
            with host_arithmetic():
                self._add(row, call, allowed)

    def chain(self, calls: Sequence[OperatorCall], phase: str) -> None:
        """Find operators that read what no operator before them made; needs a record of every operator."""
        for order, call in unmade(calls):
            if call.name not in self.unchained:
                row = self.rows.setdefault((call.name, phase), _Judged(call, phase, order))
                row.looks_like = row.looks_like or "a change between two operators"
                row.text = row.text or "it reads values that no operator before it made"

    def _allowed(self, call: OperatorCall, definitions: Definitions) -> Allowed | None:
        try:
            with host_arithmetic():
                return definitions.allowed(call)
        except UnavailableError as error:
            self.unjudged.setdefault(call.name, str(error))
            return None

    def _add(self, row: _Judged, call: OperatorCall, allowed: Allowed) -> None:
        outside = allowed.outside(call.flat)
        if bool(outside.any()):
            row.outside += int(outside.sum())
            row.lanes |= set(outside.any(0).nonzero().flatten().tolist())
            row.looks_like = row.looks_like or self._class(call, allowed, outside)
            row.text = f"{row.outside:,} of {row.values:,} values lie outside of their rounding interval"
        if call.kind == "attention" and (wrong := self.definitions.attention(call).wrong()) is not None:
            row.looks_like, row.text = ("scale" if "scale" in wrong else row.looks_like or "noise"), wrong
        if call.kind == "experts" and isinstance(allowed, Around):
            value = allowed.value if allowed.free is None else allowed.value.masked_fill(allowed.free, 0.0)
            row.products.append(torch.stack([((call.flat - value) * value).sum(-1), value.square().sum(-1)], 1))
            if (gain := gain_of(torch.cat(row.products), call.output.dtype)) is not None and not row.looks_like:
                row.looks_like, row.text = "gain", f"its values are multiplied by {1 + gain:.4g}"

    def _class(self, call: OperatorCall, allowed: Allowed, outside: Tensor) -> str:
        """The class of a fault: another precision, the next position, or one of locate's classes."""
        own = self.definitions

        def is_inside(other: OperatorCall, definitions: Definitions = own, precision: Any = EXACT) -> bool:
            return not bool(definitions.allowed(other, precision).outside(other.flat).any())

        if call.output.dtype == torch.float32 and call.kind in PRODUCTS and is_inside(call, precision=TF32):
            return "products of factors with 10 bits (TF32)"
        for lower in LOWER if call.output.dtype not in LOWER and call.kind != "experts" else ():
            if is_inside(_lowered(call, lower), own.in_dtype(lower)):
                return f"computed in {str(lower).removeprefix('torch.')}"
        for shift in (1, -1) if call.kind == "rotary" else ():
            inputs = call.inputs | {"positions": (call.inputs["positions"] + shift).clamp_min(0)}
            if is_inside(replace(call, inputs=inputs)):
                return f"positions off by {shift:+d}"
        if call.kind == "experts":
            return "wrong experts, or wrong weights of them"
        low, high = allowed.ends(outside)
        return fault_class(call.flat, low, high, outside)

    def wrong(self) -> list[OperatorFault]:
        """The wrong operators, in the order of computation, prefill first."""
        found = [row for row in self.rows.values() if row.outside or row.looks_like]
        return [row.fault() for row in sorted(found, key=lambda r: (r.order, r.phase != "prefill"))]

    def kinds(self) -> dict[str, KindCount]:
        """By kind: how many operators and values were judged, and how many lie outside."""
        found: dict[str, KindCount] = {}
        for row in self.rows.values():
            one = found.get(row.call.kind, KindCount())
            found[row.call.kind] = KindCount(one.operators + 1, one.values + row.values, one.outside + row.outside)
        return found

    def reasons(self) -> list[str]:
        """Operators that were not judged, by reason."""
        lines = []
        for why in dict.fromkeys(self.unjudged.values()):
            names = [name for name, reason in self.unjudged.items() if reason == why]
            lines.append(f"{names[0]}{f' and {len(names) - 1} more operators' if len(names) > 1 else ''}: {why}")
        return lines


def gain_of(products: Tensor, dtype: torch.dtype) -> float | None:
    """By how much values are multiplied that single rounding intervals let pass; None where rounding explains it.

    Rounding goes either way: no more than a unit of the dtype is left, nor six standard errors, with tokens as blocks.
    """
    (errors, squares), total = products.T, float(products[:, 1].sum())
    if len(products) < GAINS or total == 0:
        return None
    gain = float(errors.sum()) / total
    error = float((errors - gain * squares).square().sum().sqrt()) / total
    return gain if abs(gain) > max(UNIT[dtype], LEAST) and abs(gain) > SIGMAS * error else None


def unmade(calls: Sequence[OperatorCall]) -> list[tuple[int, OperatorCall]]:
    """Operators that read values which no operator before them made, and their places; a head may read some rows only."""
    found: list[tuple[int, OperatorCall]] = []
    made: set[int] = set()
    for order, call in enumerate(calls):
        count = len(call.output)
        read = [_bits(call.inputs[key][-count:]) for key in CHAINED if key in call.inputs]
        if call.kind == "lm_head":
            read = [_bits(row) for row in call.inputs["x"]]
        if call.kind != "log_softmax" and not made.issuperset(read):
            found.append((order, call))
        made |= {_bits(call.output)} | ({_bits(row) for row in call.output} if call.kind == "rms_norm" else set())
    return found


def _bits(x: Tensor) -> int:
    return hash((x.double() + 0.0).contiguous().numpy().tobytes())


def _with_routers(calls: Sequence[OperatorCall]) -> list[OperatorCall]:
    """Calls of experts, with the logits of the router that sent tokens to them."""
    routers = {call.layer: call.output for call in calls if call.kind == "router"}
    return [
        replace(call, inputs=call.inputs | {"router": routers[call.layer]})
        if call.kind == "experts" and call.layer in routers
        else call
        for call in calls
    ]


def _lowered(call: OperatorCall, dtype: torch.dtype) -> OperatorCall:
    """The same call as if its inputs were values of a coarser dtype, and its result where it is on that grid."""
    inputs = {k: t.to(dtype) if t.is_floating_point() else t for k, t in call.inputs.items()}
    coarse = call.output.to(dtype)
    return replace(
        call, inputs=inputs, output=coarse if torch.equal(coarse.to(call.output.dtype), call.output) else call.output
    )


class Recompute:
    """The trainer's operators on given inputs, one at a time, in its own dtype and with its own kernels."""

    def __init__(self, model: Any) -> None:
        self.model, self.decoder = model, DecoderParts.of(model)
        weight = next(model.parameters())
        self.dtype, self.device = weight.dtype, weight.device

    @torch.no_grad()
    def result(self, call: OperatorCall) -> Tensor:
        """The trainer's result of a call, on the CPU, with the channels of all heads in the last dimension."""
        if call.kind == "log_softmax":
            return torch.tensor(chosen(call.inputs["x"], call.inputs["ids"].tolist()), dtype=torch.float64).unsqueeze(1)
        x = {k: (t.to(self.device, self.dtype) if t.is_floating_point() else t.to(self.device)) for k, t in call.inputs.items()}
        return self._compute(call, x).reshape(call.output.shape[0], -1).cpu()

    def _compute(self, call: OperatorCall, x: dict[str, Tensor]) -> Tensor:
        if call.kind == "router":
            made = self.model.get_submodule(call.name)(x["x"])
            return made[0] if isinstance(made, tuple) else made  # type: ignore[no-any-return]
        if call.kind in ("linear", "lm_head", "embedding", "rms_norm", "experts"):
            given = x["ids"] if call.kind == "embedding" else x["x"] + x["residual"] if "residual" in x else x["x"]
            made = self.model.get_submodule(call.name)(given.unsqueeze(0))
            return made[0][0] if isinstance(made, tuple) else made[0]  # type: ignore[no-any-return]
        if call.kind == "residual":
            return x["residual"] + x["x"]
        if call.kind == "activation":
            return self.model.get_submodule(call.name)(x["x"]) * x["up"]  # type: ignore[no-any-return]
        if call.kind == "rotary":
            return self._rotary(call, x)
        if call.kind == "attention":
            return self._attention(call, x)
        raise UnavailableError(f"the trainer cannot compute {call.kind} by itself")

    def _rotary(self, call: OperatorCall, x: dict[str, Tensor]) -> Tensor:
        module = self.model.get_submodule(call.name.rpartition(".")[0])
        rotate = vars(sys.modules[type(module).__module__])["apply_rotary_pos_emb"]
        heads = x["x"].transpose(0, 1).unsqueeze(0)
        cos, sin = self.model.get_submodule(self.decoder.rotary)(heads, x["positions"].unsqueeze(0))
        return rotate(heads, heads, cos, sin)[0][0].transpose(0, 1)  # type: ignore[no-any-return]

    def _attention(self, call: OperatorCall, x: dict[str, Tensor]) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        module, name = self.model.get_submodule(call.name), self.model.config._attn_implementation
        eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        q, k, v = (x[n].transpose(0, 1).unsqueeze(0) for n in ("q", "k", "v"))
        seen = visible(module, call.inputs["positions"], k.shape[2])
        whole = bool((seen == torch.ones_like(seen).tril()).all()) and seen.shape[0] == seen.shape[1]
        mask = None
        if name != "sdpa" or not whole:
            mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill(~seen, torch.finfo(self.dtype).min)
            mask = mask[None, None].to(self.device)
        return attend(module, q, k, v, mask, dropout=0.0, scaling=module.scaling)[0][0]  # type: ignore[no-any-return]
