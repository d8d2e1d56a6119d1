"""What each kind of operator computes, in float64, with the bound that a correct engine keeps to.

Modules have locate's definitions, and attention locate's bound; what is defined here is what lies between modules. An engine
may fuse what the trainer computes in steps, so every place in which a correct program may round, or not, is allowed either
way:

    rms_norm    the normalised value rounded before the weight multiplies, or not; the sum before it rounded, or not, both
                where it is multiplied and where its mean square is taken
    activation  act(x) rounded before it multiplies `up`, or not
    rotary      δ = (4u + 8ua·|angle|)·(|x₁| + |x₂|): cos and sin in the dtype, and the angle off by some units of float32
    residual    rounded once: no slack
    log_softmax in float32 whatever the model's dtype, from logits as the head made them; its bound is derived in `log_softmax`

Attention is in `attention.py`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shaketable.capture.reference import Reference
from shaketable.mismatch.engines.engine import NotToldError, OperatorCall
from shaketable.mismatch.operators.attention import Attended
from shaketable.mismatch.operators.observe import DecoderParts
from shaketable.mismatch.rounding import Dither
from shaketable.numerics.intervals import ACCUMULATION as UA
from shaketable.numerics.intervals import TINY, UNIT, Allowed, Around, Precision, Product, RoundingInterval, summation
from shaketable.numerics.operators import Call, Leaf

DRAWS = 6
EXPERTS = 8.0
"""Times the noise of random rounding: what the result of a block of experts may be off by."""
ROUTERS = ("gate", "router")
EXACT = Precision()
TF32 = Precision(2.0**-10)


class Definitions:
    """The trainer's definitions of its operators.

    Args:
        model: The trainer's; its weights and numbers are believed, its arithmetic is not used.
        dtype: In which the engine holds its weights: the trainer's are rounded to it.
        held: Weights that the engine rounded from the source of the trainer's, and not from the trainer's.
    """

    def __init__(self, model: Any, dtype: torch.dtype, held: Mapping[str, Tensor] | None = None) -> None:
        self.decoder, self.dtype, self.held = DecoderParts.of(model), dtype, held or {}
        self.model, self.reference = model, Reference(model)

    def allowed(self, call: OperatorCall, precision: Precision = EXACT) -> Allowed:
        """What a correct engine may make of these inputs, in the shape that `flat` gives an output."""
        define: Callable[[OperatorCall, Precision], Allowed] | None = {
            "embedding": self._embedding,
            "linear": self._linear,
            "lm_head": self._linear,
            "router": self._linear,
            "rms_norm": self._norm,
            "rotary": self._rotary,
            "attention": self._attention,
            "activation": self._activation,
            "residual": self._residual,
            "experts": self._experts,
            "log_softmax": lambda call, precision: log_softmax(call),
        }.get(call.kind)
        if define is None:
            raise NotToldError(f"there is no definition of {call.kind}")
        return define(call, precision)

    def weight(self, name: str) -> Tensor:
        """A parameter of the trainer as the engine should hold it."""
        return self.held[name] if name in self.held else self.reference.weight(name).to(self.dtype)

    def _embedding(self, call: OperatorCall, precision: Precision) -> Allowed:
        return RoundingInterval.exactly(self.weight(f"{call.name}.weight")[call.inputs["ids"].long()].to(call.output.dtype))

    def _linear(self, call: OperatorCall, precision: Precision) -> Allowed:
        module = self.model.get_submodule(call.name)
        bias = None if module._parameters.get("bias") is None else self.weight(f"{call.name}.bias")
        return Product(call.inputs["x"].double(), self.weight(f"{call.name}.weight"), bias, call.output.dtype, precision)

    def _norm(self, call: OperatorCall, precision: Precision) -> Allowed:
        own = self.reference.leaf(call.name)
        if own is None:
            raise NotToldError(f"{call.name} follows no formula that is known")
        parts = []
        for total in (totals := _norm_inputs(call)):
            if own.kind in ("rmsnorm", "rmsnorm_late"):
                weight = self.weight(f"{call.name}.weight").double()
                for other in totals:
                    parts += _weighted(total * _scale(own.module, other), weight, call.output.dtype)
                continue
            given = Call(None, (total,), {}, call.output.dtype, precision, lambda t: t)
            found = own.allowed(given, lambda name: self.weight(f"{call.name}.{name}"))
            part = found.interval() if isinstance(found, Around) else found
            assert isinstance(part, RoundingInterval)
            parts.append(part)
        allowed = functools.reduce(RoundingInterval.hull, parts)
        return RoundingInterval(*(end.flatten(1) if end.dim() == 3 else end for end in (allowed.low, allowed.high)))

    def _rotary(self, call: OperatorCall, precision: Precision) -> Allowed:
        rotary = self.model.get_submodule(self.decoder.rotary)
        x, positions = call.inputs["x"].double(), call.inputs["positions"]
        cos, sin = (
            t[0].double().cpu() for t in rotary(torch.zeros(1, device=self._device), positions.unsqueeze(0).to(self._device))
        )
        if cos.shape[-1] != x.shape[-1]:
            raise NotToldError("only a part of each head is rotated")
        half = x.shape[-1] // 2
        other = torch.cat([-x[..., half:], x[..., :half]], -1)
        value = x * cos.unsqueeze(1) + other * sin.unsqueeze(1)
        angle = positions.double().unsqueeze(1) * rotary.inv_freq.double().abs().cpu()
        slack = (4 * UNIT[call.output.dtype] + 8 * UA * (1 + torch.cat([angle, angle], -1))).unsqueeze(1)
        return Around(value.flatten(1), (slack * (x.abs() + other.abs())).flatten(1) + TINY, call.output.dtype)

    @property
    def _device(self) -> torch.device:
        found: torch.device = next(self.model.parameters()).device
        return found

    def _attention(self, call: OperatorCall, precision: Precision) -> Allowed:
        return self.attended(call).allowed(precision)

    def attended(self, call: OperatorCall) -> Attended:
        """A call of attention, with who sees whom and the trainer's scale."""
        return Attended.of(call, self.model.get_submodule(call.name))

    def _activation(self, call: OperatorCall, precision: Precision) -> Allowed:
        own = self.reference.leaf(call.name)
        if own is None or own.kind not in ("silu", "gelu", "gelu_tanh"):
            raise NotToldError(f"there is no definition of {call.name}")
        x, up, dtype = call.inputs["x"], call.inputs["up"].double(), call.output.dtype
        given = Call(None, (x,), {}, x.dtype, precision, lambda t: t.double())
        inner = own.allowed(given, lambda name: torch.empty(0))
        assert isinstance(inner, Around)
        once = Around(inner.value * up, inner.slack * up.abs() + UA * (inner.value * up).abs() + TINY, dtype).interval()
        ends = inner.interval()
        sides = ends.low.double() * up, ends.high.double() * up
        return once.hull(RoundingInterval(torch.minimum(*sides).to(dtype), torch.maximum(*sides).to(dtype)))

    def _residual(self, call: OperatorCall, precision: Precision) -> Allowed:
        """The sum, of a branch that Granite multiplies by a number first."""
        factor = float(getattr(self.model.config, "residual_multiplier", 1.0))
        branch = call.inputs["x"].double() * factor
        slack = 0.0 if factor == 1.0 else UNIT[call.output.dtype] * branch.abs() + TINY
        return Around(branch + call.inputs["residual"].double(), slack, call.output.dtype)

    @torch.no_grad()
    def _experts(self, call: OperatorCall, precision: Precision) -> Allowed:
        """A block of experts in float64, with the trainer's weights and the engine's own router logits.

        Its slack is what random rounding of its parts does (`Dither`): the root mean square over DRAWS readings, of the value
        or of its token, whichever is larger, times EXPERTS. Tokens whose last chosen expert ties with the next are free.
        """
        if "router" not in call.inputs:
            raise NotToldError("the engine does not tell the router logits of these experts")
        block, stored = self._routed_block(call)
        x = call.inputs["x"].double().unsqueeze(0)
        value = _first(block(x))[0]
        unit = call.output.dtype
        squares = torch.zeros_like(value)
        for draw in range(DRAWS):
            with Dither(unit, draw):
                squares += (_first(block(x))[0] - value).square() / DRAWS
        noise = torch.maximum(squares.sqrt(), squares.mean(-1, keepdim=True).sqrt())
        return Around(value, EXPERTS * noise + 4 * UNIT[unit] * value.abs() + TINY, unit, _ties(call.inputs["router"], stored))

    def _routed_block(self, call: OperatorCall) -> tuple[Any, Any]:
        """The trainer's block in float64, whose router gives what it would for the engine's logits; and that."""
        source = self.model.get_submodule(call.name)
        block = copy.deepcopy(source).cpu().to(self.dtype).double()
        for name, parameter in block.named_parameters():
            if (own := self.held.get(f"{call.name}.{name}")) is not None:
                parameter.data = own.double()
        for module in block.modules():
            if (config := getattr(module, "config", None)) is not None and hasattr(config, "_experts_implementation"):
                config._experts_implementation = "eager"
        name = next((n for n in ROUTERS if n in block._modules), None)
        if name is None:
            raise NotToldError(f"{call.name} has no router with a name that is known ({', '.join(ROUTERS)})")
        router, logits = block.get_submodule(name), call.inputs["router"].double()
        count = logits.shape[-1]
        router.weight = torch.nn.Parameter(torch.eye(count, dtype=torch.float64))
        for size in ("hidden_dim", "hidden_size"):
            if hasattr(router, size):
                setattr(router, size, count)
        if router._parameters.get("bias") is not None:
            router.bias = torch.nn.Parameter(torch.zeros(count, dtype=torch.float64))
        stored = router(logits)
        router.forward = lambda *args, **kwargs: stored
        return block, stored


def _first(made: Any) -> Tensor:
    """The result of a block that may return its router's choice too."""
    found: Tensor = made[0] if isinstance(made, tuple) else made
    return found


def _ties(logits: Tensor, stored: Any) -> Tensor | None:
    """Tokens whose last chosen expert has the logit of the next one: either may be taken."""
    k = stored[-1].shape[-1] if isinstance(stored, tuple) else 0
    if not 0 < k < logits.shape[-1]:
        return None
    ordered = logits.sort(-1, descending=True).values
    return (ordered[:, k - 1] == ordered[:, k]).unsqueeze(1)


def flat(call: OperatorCall) -> Tensor:
    """An output with the channels of all heads in its last dimension."""
    return call.output.flatten(1) if call.output.dim() == 3 else call.output


def log_softmax(call: OperatorCall) -> Around:
    """y = z − log Σ exp(z_j), z = x − max x, of one token of each row, computed in float32 with roundings of ua = 2^-24.

    The parts of the bound, in the order of the computation; S is the sum over V tokens and p the softmax:

        z_j        rounded once, ua·|z_j|: exp(z_j) is off by that, relative, and the sum by ua·Σ p_j|z_j|
        exp        right to four units of float32, each: 4ua of the sum
        S          all terms are positive, so Σ|term| = S: ua·s(V), relative, with the s(V) = min(V, 5√V + V/16) of a product
        log S      what S is off by, relative, log S is off by, absolute; log itself is right to four units: 4ua·|log S|
        y          z rounded, one more sum and difference, in either order, with max x added back or not:
                   2ua·(|x| + |max x| + |log S|)

    A result in a lower dtype is rounded to it once more, which `Around` does.
    """
    x = call.inputs["x"].double()
    top = x.amax(-1, keepdim=True)
    z = x - top
    total = z.exp().sum(-1, keepdim=True)
    log = total.log()
    picked = x.gather(1, call.inputs["ids"].unsqueeze(1))
    spread = (z.exp() / total * z.abs()).nan_to_num().sum(-1, keepdim=True)
    slack = spread + 4 + summation(x.shape[-1]) / UA + 4 * log + 2 * (picked.abs() + top.abs() + log)
    dtype = torch.float32 if call.output.dtype == torch.float64 else call.output.dtype
    return Around(picked - top - log, UA * slack, dtype)


def _norm_inputs(call: OperatorCall) -> list[Tensor]:
    """What is normalised, in float64: a sum as it is rounded to its dtype, or before."""
    if "residual" not in call.inputs:
        return [call.inputs["x"].double()]
    total = call.inputs["x"].double() + call.inputs["residual"].double()
    dtype = call.inputs["x"].dtype
    return [total.to(dtype).double(), *([] if dtype == torch.float32 else [total.float().double()])]


def _scale(norm: Any, x: Tensor) -> Tensor:
    """What an RMSNorm multiplies with; a kernel may take it from a sum before it is rounded, and multiply the rounded one."""
    bare = Leaf("rmsnorm_bare", norm).allowed(Call(None, (x,), {}, x.dtype, EXACT, lambda t: t), lambda name: torch.empty(0))
    assert isinstance(bare, Around)
    return (bare.value * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True).clamp_min(1e-300)


def _weighted(normed: Tensor, weight: Tensor, dtype: torch.dtype) -> list[RoundingInterval]:
    """The weight multiplies what was rounded to the dtype, or what was not."""
    late = Around.relative(normed * weight, 16, dtype).interval()
    if dtype == torch.float32:
        return [late]
    inner = Around.relative(normed, 12, dtype).interval()
    ends = inner.low.double() * weight, inner.high.double() * weight
    return [late, RoundingInterval(torch.minimum(*ends).to(dtype), torch.maximum(*ends).to(dtype))]
