"""Bit-equality, operator by operator: which operators of trainer and engine give the same bits for the same input.

The engine records what each operator read and made; the trainer computes the same operator on the same input. For an operator
that differs, variants of the trainer's computation are tried on the host until one gives the engine's bits. Only such a
variant is called a reason:

    another dtype        the trainer's operator, with its weights cast to the engine's dtype
    another kernel       the trainer's own operator for single rows, or in the engine's batch; another attention
    accumulation order   a product summed in float32 or float64 and rounded once, or split into parts
    cast order           rounded before or after the weight multiplies, in one step or in two

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

from shaketable.capture.decoder import PHASES, Phase
from shaketable.errors import UnavailableError
from shaketable.mismatch.engine import Rollout, RolloutEngine
from shaketable.mismatch.operators import Recompute
from shaketable.mismatch.results import Exact, ExactOperator
from shaketable.mismatch.trainer import Trainer
from shaketable.numerics.decoder_operators import Attention, OperatorCall

Variants = Iterator[tuple[str, Tensor]]


@torch.no_grad()
def compare_bits(trainer: Trainer, engine: RolloutEngine, rollouts: Sequence[Rollout], recorded: int) -> Exact:
    """Compare every operator that the engine records on the first so many rollouts with the trainer's, on the same input."""
    some = rollouts[:recorded]
    found = Exact(len(some), sum(len(r.tokens) for r in some))
    for phase in PHASES:
        rows: dict[str, ExactOperator] = {}
        try:
            host = _Host(trainer.model, phase)
            for start in range(0, len(some), engine.together):
                batch = list(rollouts[start : start + engine.together])
                kept = list(range(min(len(batch), len(some) - start)))
                for place, record in zip(kept, engine.record(batch, phase, kept), strict=True):
                    host.see(batch, place)
                    for call in record.calls:
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

    def __init__(self, model: Any, phase: Phase) -> None:
        self.trainer, self.decode = Recompute(model), phase == "decode"
        self.by_dtype = {self.trainer.dtype: self.trainer}

    def see(self, batch: Sequence[Rollout], place: int) -> None:
        """The next calls are of this rollout of a batch, which the engine pads on the left."""
        lengths = [len(r.prompt if self.decode else r.tokens) for r in batch]
        width = 1 if self.decode else max(lengths)
        self.padding = max(lengths) - lengths[place]
        self.together, self.at = len(batch) * width, place * width + (0 if self.decode else self.padding)

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
        parts = single if self.decode else [slice(0, len(single))]
        kernel = f"{start}another kernel: "
        if len(single) > 1:
            yield f"{kernel}the trainer's own, one row at a time", torch.cat([own.result(_rows(call, p)) for p in single])
        if call.kind == "attention":
            for why, attend in _attentions(0 if self.decode else self.padding, self.padding).items():
                yield kernel + why, torch.cat([_attended(call, own, attend, p) for p in parts])
        elif self.together > 1 and call.kind != "embedding":
            wide = [own.result(_among(_rows(call, p), self.together, self.at)) for p in parts]
            made = torch.cat([x[self.at :][: p.stop - p.start] for x, p in zip(wide, parts, strict=True)])
            yield f"{kernel}the trainer's own, in a batch of {self.together} rows", made
        if call.kind in FORMULAS:
            yield from ((start + why, made) for why, made in FORMULAS[call.kind](call, own))


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


def _among(call: OperatorCall, rows: int, at: int) -> OperatorCall:
    """The same rows among others, which are zero."""
    wide = {name: t.new_zeros(rows, *t.shape[1:]) for name, t in call.inputs.items()}
    for name, t in call.inputs.items():
        wide[name][at : at + len(t)] = t
    return replace(call, inputs=wide, output=call.output.new_zeros(rows, *call.output.shape[1:]))


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
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is None:
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


def _rotations(call: OperatorCall, own: Recompute) -> Variants:
    rotary, x = own.model.get_submodule(own.decoder.rotary), call.inputs["x"].float()
    positions = call.inputs["positions"].unsqueeze(0).to(own.device)
    cos, sin = (t[0].cpu().unsqueeze(1) for t in rotary(torch.zeros(1, device=own.device), positions))
    if cos.shape[-1] != x.shape[-1]:  # only a part of each head is rotated
        return
    half = x.shape[-1] // 2
    for what, dtype in (("", own.dtype), (", with cos and sin in float32", torch.float32)):
        made = x * cos.to(dtype).float() + torch.cat([-x[..., half:], x[..., :half]], -1) * sin.to(dtype).float()
        yield f"cast order: rotates in float32 and rounds once{what}", made.to(own.dtype)


def _activations(call: OperatorCall, own: Recompute) -> Variants:
    act, x, up = own.model.get_submodule(call.name), call.inputs["x"].float(), call.inputs["up"]
    yield "cast order: rounds after it multiplies by up", (act(x) * up.float()).to(own.dtype)
    yield "cast order: rounds before it multiplies by up", act(x).to(own.dtype) * up.to(own.dtype)


FORMULAS = {"rms_norm": _norms, "rotary": _rotations, "activation": _activations}
FORMULAS |= dict.fromkeys(("linear", "lm_head", "router"), _products)


def _attended(call: OperatorCall, own: Recompute, attend: Callable[[Attention], Tensor], some: slice) -> Tensor:
    a = Attention.of(_rows(call, some), own.model.get_submodule(call.name))
    made = attend(replace(a, q=a.q.to(own.dtype), k=a.k.to(own.dtype), v=a.v.to(own.dtype)))
    return made[0].transpose(0, 1).flatten(1)[-(some.stop - some.start) :].to(own.dtype)


def _attentions(rows: int, columns: int) -> dict[str, Callable[[Attention], Tensor]]:
    """Kernels by name; queries and keys of padding in front are added where the engine's batch has some."""

    def sdpa(a: Attention) -> Tensor:
        mask = F.pad(a.mask, (columns, 0, rows, 0))
        q, k, v = (F.pad(t, (0, 0, n, 0)) for t, n in ((a.q, rows), (a.k, columns), (a.v, columns)))
        return F.scaled_dot_product_attention(q, k, v, mask[None, None], scale=a.scale)

    def eager(a: Attention) -> Tensor:
        scores = (a.q @ a.k.mT * a.scale).masked_fill(~a.mask, torch.finfo(a.q.dtype).min)
        return scores.softmax(-1, dtype=torch.float32).to(a.q.dtype) @ a.v

    def wide(a: Attention) -> Tensor:
        return (a.q.float() @ a.k.float().mT * a.scale).masked_fill(~a.mask, -torch.inf).softmax(-1) @ a.v.float()

    behind = f", behind {columns} columns of padding" if columns else ""
    return {f"sdpa with a mask{behind}": sdpa, "eager attention": eager, "attention in float32, rounded once": wide}
