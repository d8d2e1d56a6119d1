"""Bit-equality, operator by operator: which operators of trainer and engine give the same bits for the same input.

The engine records what each operator read and made, one rollout at a time; the trainer computes the same operator on the same
input. For an operator that differs, variants of the trainer's computation are tried on the host until one gives the engine's
bits. Only such a variant is called a reason:

    another dtype        the trainer's operator, with its weights cast to the engine's dtype
    another kernel       the trainer's own operator for single rows; another attention
    accumulation order   a product summed in float32 or float64 and rounded once, or split into parts
    cast order           a norm that rounds before or after the weight multiplies

Everything else is "unknown", with the largest difference in units in the last place of the engine's dtype (`ulp`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shaketable.capture.decoder import PHASES
from shaketable.errors import UnavailableError
from shaketable.mismatch.engine import Rollout, RolloutEngine
from shaketable.mismatch.operators import Recompute
from shaketable.mismatch.results import Exact, ExactOperator
from shaketable.mismatch.trainer import Trainer
from shaketable.numerics.decoder_operators import Attention, OperatorCall
from shaketable.numerics.operators import eps_of

Variants = Iterator[tuple[str, Tensor]]


@torch.no_grad()
def compare_bits(trainer: Trainer, engine: RolloutEngine, rollouts: Sequence[Rollout], recorded: int) -> Exact:
    """Compare every operator that the engine records on the first so many rollouts with the trainer's, on the same input."""
    some = rollouts[:recorded]
    found = Exact(len(some), sum(len(r.tokens) for r in some))
    for phase in PHASES:
        rows: dict[str, ExactOperator] = {}
        try:
            host = _Host(trainer.model, one_row_at_a_time=phase == "decode")
            for rollout in some:
                for call in engine.record([rollout], phase)[0].calls:
                    _add(rows.setdefault(call.name, ExactOperator(call.name, call.kind, phase)), call, host)
        except UnavailableError as error:
            found.unavailable.append(f"{phase}: {error}")
        found.operators += rows.values()
    return found


def _add(row: ExactOperator, call: OperatorCall, host: _Host) -> None:
    made, got = host.trainer.result(call), call.output.flatten(1)
    equal = int((made.double() == got.double()).sum())
    if equal < got.numel():
        row.variant = host.variant(call, got) if not row.why else row.variant and host.variant(call, got)
    row.values, row.equal, row.ulp = row.values + got.numel(), row.equal + equal, max(row.ulp, _ulps(made, got))


def _ulps(made: Tensor, got: Tensor) -> int:
    """How many numbers of the engine's dtype lie between two results, at most."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    bits = [x.to(got.dtype).contiguous().view(integer).long() for x in (made, got)]
    a, b = (torch.where(x < 0, torch.iinfo(integer).min - x, x) for x in bits)
    return int((a - b).abs().max())


class _Host:
    """Variants of the trainer's operators, computed on the engine's inputs."""

    def __init__(self, model: Any, one_row_at_a_time: bool) -> None:
        self.trainer, self.one_row_at_a_time = Recompute(model), one_row_at_a_time
        self.by_dtype = {self.trainer.dtype: self.trainer}

    def variant(self, call: OperatorCall, got: Tensor) -> str:
        """The first variant that gives the engine's bits; empty when none does."""
        if call.kind == "log_softmax":
            made = call.inputs["x"].float().log_softmax(-1).gather(1, call.inputs["ids"].unsqueeze(1))
            return "another dtype: in float32" if torch.equal(made.double(), got.double()) else ""
        variants = self._variants(call, got.dtype)
        return next((why for why, made in variants if torch.equal(made.reshape(got.shape).double(), got.double())), "")

    def _variants(self, call: OperatorCall, dtype: torch.dtype) -> Variants:
        if dtype not in self.by_dtype:
            self.by_dtype[dtype] = Recompute(_cast(self.trainer.model, dtype))
        own, start = self.by_dtype[dtype], ""
        if own is not self.trainer:
            names = [str(d).removeprefix("torch.") for d in (own.dtype, self.trainer.dtype)]
            yield (start := f"another dtype: {names[0]} instead of {names[1]}"), own.result(call)
            start += "; "
        single = [slice(i, i + 1) for i in range(len(call.output))]
        kernel = f"{start}another kernel: "
        if len(single) > 1:
            yield f"{kernel}the trainer's own, one row at a time", torch.cat([own.result(_rows(call, p)) for p in single])
        if call.kind == "attention":
            parts = single if self.one_row_at_a_time else [slice(0, len(single))]
            for why, attend in ATTENTIONS.items():
                yield kernel + why, torch.cat([_attended(call, own, attend, p) for p in parts])
        if call.kind == "rms_norm":
            yield from ((start + why, made) for why, made in _norms(call, own))
        if call.kind in ("linear", "lm_head", "router"):
            yield from ((start + why, made) for why, made in _products(call, own))


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """The model with its parameters in another dtype; its buffers, such as frequencies of rotations, stay."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data = parameter.data.to(dtype)
    return other


def _rows(call: OperatorCall, some: slice) -> OperatorCall:
    """A call of some rows; in attention, these see the keys up to the last of them."""
    keys = int(call.inputs["positions"][some.stop - 1]) + 1 if "k" in call.inputs else None
    inputs = {name: t[:keys] if name in ("k", "v") else t[some] for name, t in call.inputs.items()}
    return replace(call, inputs=inputs, output=call.output[some])


def _products(call: OperatorCall, own: Recompute) -> Variants:
    module = own.model.get_submodule(call.name)
    x, weight = call.inputs["x"].to(own.dtype), module.weight.cpu()
    bias = module._parameters.get("bias")
    for parts, dtype in ((1, torch.float32), (1, torch.float64), (2, torch.float32), (4, torch.float32), (8, torch.float32)):
        pairs = zip(x.to(dtype).chunk(parts, 1), weight.to(dtype).chunk(parts, 1), strict=True)
        how = f"in {str(dtype).removeprefix('torch.')}{'' if parts == 1 else f', in {parts} parts'} and rounded once"
        total = torch.stack([a @ b.mT for a, b in pairs]).sum(0)
        yield f"accumulation order: summed {how}", (total if bias is None else total + bias.cpu()).to(own.dtype)


def _norms(call: OperatorCall, own: Recompute) -> Variants:
    module = own.model.get_submodule(call.name)
    if (eps := eps_of(module)) is None:
        return
    weight, x = module.weight.cpu(), call.inputs["x"].to(own.dtype).float()
    sums = {"": x}
    if "residual" in call.inputs:
        wide = x + call.inputs["residual"].float()
        sums = {"": wide.to(own.dtype).float(), ", of a sum that was not rounded": wide}
    for what, total in sums.items():
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
        yield f"cast order: multiplies by the weight before it rounds{what}", (normed * weight.float()).to(own.dtype)
        yield f"cast order: rounds before it multiplies by the weight{what}", normed.to(own.dtype) * weight


def _attended(call: OperatorCall, own: Recompute, attend: Callable[[Attention], Tensor], some: slice) -> Tensor:
    a = Attention.of(_rows(call, some), own.model.get_submodule(call.name))
    made = attend(replace(a, q=a.q.to(own.dtype), k=a.k.to(own.dtype), v=a.v.to(own.dtype)))
    return made[0].transpose(0, 1).flatten(1)[-(some.stop - some.start) :].to(own.dtype)


def _sdpa(a: Attention) -> Tensor:
    return F.scaled_dot_product_attention(a.q, a.k, a.v, a.mask[None, None], scale=a.scale)


def _eager(a: Attention) -> Tensor:
    scores = (a.q @ a.k.mT * a.scale).masked_fill(~a.mask, torch.finfo(a.q.dtype).min)
    return scores.softmax(-1, dtype=torch.float32).to(a.q.dtype) @ a.v


def _wide(a: Attention) -> Tensor:
    return (a.q.float() @ a.k.float().mT * a.scale).masked_fill(~a.mask, -torch.inf).softmax(-1) @ a.v.float()


ATTENTIONS = {"sdpa with a mask": _sdpa, "eager attention": _eager, "attention in float32, rounded once": _wide}
