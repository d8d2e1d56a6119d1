"""The operators of a decoder between and inside its modules: one table of what each reads, makes and may round.

A call holds rows of tokens and no batch dimension. In prefill a row is a token of the whole sequence; in decode the prompt is
read first and a row is one later token. With T rows and S positions of the whole sequence, and the names of layer 3:

    embedding   ids (T)                                                  → (T, hidden)       model.embed_tokens
    rms_norm    x (T, hidden)                                            → (T, hidden)       model.layers.3.input_layernorm
    linear      x (T, in)                                                → (T, out)          model.layers.3.self_attn.q_proj
    rotary      x (T, heads, size), positions (T)                        → (T, heads, size)  model.layers.3.self_attn.rotary_q
    attention   q (T, heads, size), k, v (S, kv, size), positions (T)    → (T, heads·size)   model.layers.3.self_attn
    activation  x (T, inner), up (T, inner)                              → (T, inner)        model.layers.3.mlp.act_fn
    residual    x (T, hidden), residual (T, hidden)                      → (T, hidden)       model.layers.3.attention_residual
    router      x (T, hidden)                                            → (T, experts)      model.layers.3.mlp.gate
    experts     x (T, hidden)                                            → (T, hidden)       model.layers.3.mlp, as a whole
    lm_head     x (t, hidden)                                            → (t, vocabulary)   lm_head, at any rows
    log_softmax x (c, vocabulary), ids (c)                               → (c, 1)            log_softmax, of the completion

There are rotary_q and rotary_k, attention_residual and mlp_residual; an activation is act(x)·up. A fused kernel appears as its
parts where the parts can be seen, else as the last of them: a norm that adds first is `rms_norm` with `residual` beside `x`.
`k` and `v` are what was made for the cache: a cache that rounds shows in the attention that reads it.

Modules have the definitions of `leaf_modules`, attention that of `operators`. An engine may fuse what the trainer computes in
steps, so every place in which a correct program may round, or not, is allowed either way:

    rms_norm    the normalised value rounded before the weight multiplies, or not; the sum before it rounded, or not, both
                where it is multiplied and where its mean square is taken
    activation  act(x) rounded before it multiplies `up`, or not
    rotary      δ = (4u + 8ua·|angle|)·(|x₁| + |x₂|): cos and sin in the dtype, and the angle off by some units of float32
    residual    rounded once: no slack
    log_softmax in float32 whatever the model's dtype, from logits as the head made them
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shaketable.errors import UnavailableError
from shaketable.numerics import operators
from shaketable.numerics.intervals import ACCUMULATION as UA
from shaketable.numerics.intervals import TINY, UNIT, Allowed, Around, Precision, Product, RoundingInterval, summation
from shaketable.numerics.operators import Call, Leaf
from shaketable.numerics.random_rounding import RandomRounding

EXACT = Precision()
TF32 = Precision(2.0**-10)
DRAWS = 6
EXPERTS = 8.0
"""Times the noise of random rounding: how far the result of a block of experts may be off."""
ROUTERS = ("gate", "router")
SCALE = 2.0
"""In units of the dtype (2^-8 in bfloat16): scores that were rounded twice can be off by one of them, in one direction
where few of them repeat."""
LEAST = 1e-4
"""The same in float32, where sums have errors of their own."""
SIGMAS = 6.0
EXCESS = 4.0


@dataclass(frozen=True)
class OperatorCall:
    """The inputs and the result of one operator, on the CPU, in the dtypes of the engine that ran it."""

    name: str
    """The trainer's name of the module; see the table above."""
    kind: str
    layer: int | None
    inputs: dict[str, Tensor]
    output: Tensor

    @property
    def flat(self) -> Tensor:
        """The result with the channels of all heads in its last dimension."""
        return self.output.flatten(1) if self.output.dim() == 3 else self.output

    def copied(self) -> OperatorCall:
        """With tensors of its own, on the CPU."""
        inputs = {key: t.detach().cpu().clone() for key, t in self.inputs.items()}
        return replace(self, inputs=inputs, output=self.output.detach().cpu().clone())


def log_softmax_call(logits: Tensor, ids: Sequence[int], logprobs: Tensor) -> OperatorCall:
    """The last operator: logits of a completion's tokens, and the log-probabilities that were returned for them."""
    inputs = {"x": logits, "ids": torch.tensor(list(ids))}
    return OperatorCall("log_softmax", "log_softmax", None, inputs, logprobs.unsqueeze(1))


class Source(Protocol):
    """Weights and definitions of modules by their full names (`capture.reference.Reference`)."""

    def weight(self, name: str) -> Tensor:
        """A parameter."""

    def leaf(self, path: str) -> Leaf | None:
        """The definition of a module; None where it has none."""


class Definitions:
    """The definitions of a model's operators, from its weights and attributes; its arithmetic is not used.

    The engine holds the model's weights rounded to `dtype`, but for `own_weights`, which it rounded from their source.
    """

    def __init__(
        self, model: Any, source: Source, rotary: str, dtype: torch.dtype, own_weights: Mapping[str, Tensor] | None = None
    ) -> None:
        self.model, self.source, self.rotary = model, source, rotary
        self.dtype, self.own_weights = dtype, own_weights or {}

    def in_dtype(self, dtype: torch.dtype) -> Definitions:
        """The same with weights in another dtype."""
        return Definitions(self.model, self.source, self.rotary, dtype, self.own_weights)

    def allowed(self, call: OperatorCall, precision: Precision = EXACT) -> Allowed:
        """All that a correct engine may make of these inputs, in the shape of `OperatorCall.flat`."""
        define: Callable[[OperatorCall, Precision], Allowed] | None = {
            "embedding": self._embedding,
            "linear": self._linear,
            "lm_head": self._linear,
            "router": self._linear,
            "rms_norm": self._norm,
            "rotary": self._rotary,
            "attention": lambda call, precision: self.attention(call).allowed(precision),
            "activation": self._activation,
            "residual": self._residual,
            "experts": self._experts,
            "log_softmax": lambda call, precision: log_softmax(call),
        }.get(call.kind)
        if define is None:
            raise UnavailableError(f"there is no definition of {call.kind}")
        return define(call, precision)

    def weight(self, name: str) -> Tensor:
        """A parameter as the engine should hold it."""
        return self.own_weights[name] if name in self.own_weights else self.source.weight(name).to(self.dtype)

    def attention(self, call: OperatorCall) -> Attention:
        """A call of attention, with its mask and the model's scale."""
        return Attention.of(call, self.model.get_submodule(call.name))

    def _embedding(self, call: OperatorCall, precision: Precision) -> Allowed:
        rows, dtype = self.weight(f"{call.name}.weight")[call.inputs["ids"].long()], call.output.dtype
        if (scale := getattr(self.model.get_submodule(call.name), "embed_scale", None)) is None:
            return RoundingInterval.exactly(rows.to(dtype))
        value = rows.double() * float(torch.as_tensor(scale).to(self.dtype))  # Gemma
        return Around(value, UA * value.abs() + TINY, dtype)

    def _linear(self, call: OperatorCall, precision: Precision) -> Allowed:
        module = self.model.get_submodule(call.name)
        bias = None if module._parameters.get("bias") is None else self.weight(f"{call.name}.bias")
        return Product(call.inputs["x"].double(), self.weight(f"{call.name}.weight"), bias, call.output.dtype, precision)

    def _norm(self, call: OperatorCall, precision: Precision) -> Allowed:
        own = self.source.leaf(call.name)
        if own is None:
            raise UnavailableError(f"{call.name} follows no formula that is known")
        parts = []
        for total in (totals := _norm_inputs(call)):
            if own.kind in ("rmsnorm", "rmsnorm_late"):
                weight, eps = self.weight(f"{call.name}.weight").double(), operators.eps_of(own.module)
                for (
                    other
                ) in totals:  # a kernel may take the mean square of a sum before it is rounded, and multiply the rounded one
                    scale = torch.rsqrt(other.square().mean(-1, keepdim=True) + eps)
                    parts.append(operators.weighted(total * scale, weight, call.output.dtype))
                continue
            given = Call(None, (total,), {}, call.output.dtype, precision)
            found = own.allowed(given, lambda name: self.weight(f"{call.name}.{name}"))
            part = found.interval() if isinstance(found, Around) else found
            assert isinstance(part, RoundingInterval)
            parts.append(part)
        allowed = functools.reduce(RoundingInterval.hull, parts)
        return RoundingInterval(*(end.flatten(1) if end.dim() == 3 else end for end in (allowed.low, allowed.high)))

    def _rotary(self, call: OperatorCall, precision: Precision) -> Allowed:
        rotary, device = self.model.get_submodule(self.rotary), next(self.model.parameters()).device
        x, positions = call.inputs["x"].double(), call.inputs["positions"]
        made = rotary(torch.zeros(1, device=device), positions.unsqueeze(0).to(device))
        cos, sin = (t[0].double().cpu() for t in made)
        if cos.shape[-1] != x.shape[-1]:
            raise UnavailableError("only a part of each head is rotated")
        half = x.shape[-1] // 2
        other = torch.cat([-x[..., half:], x[..., :half]], -1)
        value = x * cos.unsqueeze(1) + other * sin.unsqueeze(1)
        angle = positions.double().unsqueeze(1) * rotary.inv_freq.double().abs().cpu()
        slack = (4 * UNIT[call.output.dtype] + 8 * UA * (1 + torch.cat([angle, angle], -1))).unsqueeze(1)
        return Around(value.flatten(1), (slack * (x.abs() + other.abs())).flatten(1) + TINY, call.output.dtype)

    def _activation(self, call: OperatorCall, precision: Precision) -> Allowed:
        own = self.source.leaf(call.name)
        if own is None or own.kind not in ("silu", "gelu", "gelu_tanh"):
            raise UnavailableError(f"there is no definition of {call.name}")
        x, up, dtype = call.inputs["x"], call.inputs["up"].double(), call.output.dtype
        given = Call(None, (x,), {}, x.dtype, precision)
        inner = own.allowed(given, lambda name: torch.empty(0))
        assert isinstance(inner, Around)
        once = Around(inner.value * up, inner.slack * up.abs() + UA * (inner.value * up).abs() + TINY, dtype).interval()
        return once.hull(inner.interval().times(up, dtype))

    def _residual(self, call: OperatorCall, precision: Precision) -> Allowed:
        return Around(call.inputs["x"].double() + call.inputs["residual"].double(), 0.0, call.output.dtype)

    @torch.no_grad()
    def _experts(self, call: OperatorCall, precision: Precision) -> Allowed:
        """A block of experts in float64, with the model's weights and the engine's own router logits.

        Its slack is the effect of random rounding on it: the root mean square over DRAWS readings, of the value or of its
        token, whichever is larger, times EXPERTS. Tokens whose last chosen expert ties with the next are free.
        """
        if "router" not in call.inputs:
            raise UnavailableError("the engine does not record the router logits of these experts")
        block, choice = self._routed_block(call)
        x, dtype = call.inputs["x"].double().unsqueeze(0), call.output.dtype

        def made() -> Tensor:
            found = block(x)
            result: Tensor = found[0] if isinstance(found, tuple) else found
            return result[0]

        value = made()
        squares = torch.zeros_like(value)
        for draw in range(DRAWS):
            with RandomRounding(dtype, draw):
                squares += (made() - value).square() / DRAWS
        noise = torch.maximum(squares.sqrt(), squares.mean(-1, keepdim=True).sqrt())
        free = _ties(call.inputs["router"], choice)
        return Around(value, EXPERTS * noise + 4 * UNIT[dtype] * value.abs() + TINY, dtype, free)

    def _routed_block(self, call: OperatorCall) -> tuple[Any, Any]:
        """The block in float64 with a router that returns what it makes of the engine's logits; and that."""
        block = copy.deepcopy(self.model.get_submodule(call.name)).cpu().to(self.dtype).double()
        for name, parameter in block.named_parameters():
            if (own := self.own_weights.get(f"{call.name}.{name}")) is not None:
                parameter.data = own.double()
        for module in block.modules():
            if (config := getattr(module, "config", None)) is not None and hasattr(config, "_experts_implementation"):
                config._experts_implementation = "eager"
        name = next((n for n in ROUTERS if n in block._modules), None)
        if name is None:
            raise UnavailableError(f"{call.name} has no router with a name that is known ({', '.join(ROUTERS)})")
        router, logits = block.get_submodule(name), call.inputs["router"].double()
        count = logits.shape[-1]
        router.weight = nn.Parameter(torch.eye(count, dtype=torch.float64))
        for size in ("hidden_dim", "hidden_size"):
            if hasattr(router, size):
                setattr(router, size, count)
        if router._parameters.get("bias") is not None:
            router.bias = nn.Parameter(torch.zeros(count, dtype=torch.float64))
        choice = router(logits)
        router.forward = lambda *args, **kwargs: choice
        return block, choice


def _ties(logits: Tensor, choice: Any) -> Tensor | None:
    """Tokens whose last chosen expert has the logit of the next one: either may be taken."""
    k = choice[-1].shape[-1] if isinstance(choice, tuple) else 0
    if not 0 < k < logits.shape[-1]:
        return None
    ordered = logits.sort(-1, descending=True).values
    return (ordered[:, k - 1] == ordered[:, k]).unsqueeze(1)


def log_softmax(call: OperatorCall) -> Around:
    """y = z − log Σ exp(z_j), z = x − max x, of one token of each row, computed in float32 with roundings of ua = 2^-24.

    The parts of the bound, in the order of the computation; S is the sum over V tokens and p the softmax:

        z_j        rounded once, ua·|z_j|: exp(z_j) is off by that, relative, and the sum by ua·Σ p_j|z_j|
        exp        right to four units of float32, each: 4ua of the sum
        S          all terms are positive, so Σ|term| = S: ua·s(V), relative, with the s(V) = min(V, 5√V + V/16) of a product
        log S      off, absolute, by what S is off by, relative; log itself is right to four units: 4ua·|log S|
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
    """The normalised values in float64: a sum as it is rounded to its dtype, or before."""
    if "residual" not in call.inputs:
        return [call.inputs["x"].double()]
    total = call.inputs["x"].double() + call.inputs["residual"].double()
    dtype = call.inputs["x"].dtype
    return [total.to(dtype).double(), *([] if dtype == torch.float32 else [total.float().double()])]


def visible(attention: nn.Module, positions: Tensor, keys: int) -> Tensor:
    """The mask of attention: each query sees the keys up to itself, and within its window where it has one."""
    places = torch.arange(keys).unsqueeze(0)
    seen = places <= positions.unsqueeze(1)
    own = vars(attention)
    window = own["sliding_window"] if "sliding_window" in own else getattr(own.get("config"), "sliding_window", None)
    return seen if not window else seen & (places > positions.unsqueeze(1) - int(window))


@dataclass(frozen=True)
class Attention:
    """One call of attention: its rounding interval, and two statistics of errors that the interval is too wide to show.

    The interval is that of `operators.attention`; where scores may have been rounded to a reduced dtype before the softmax, as
    eager attention does, it is wider by 3u·max|score|·(p|v|). In bfloat16 that is wide enough to hide a wrong scale of the
    softmax or a cache that rounds. But rounding errors have a known sign and size:

    - A wrong scale shifts all scores one way: `a` of  got − y = a·∂y/∂log(scale)  by least squares over all values of the
      call. Its standard error takes the values of one head and token as one, since they share their scores. A defect above
      `SCALE` units of the dtype and above `SIGMAS` standard errors.
    - The mean square of got − y, over that of roundings of the scores (twice), of p and of the result:
          u²/3·(y² + Σp²v² + 2·Σp²(v − y)²·score²)
      A healthy kernel is at one or below it. A defect above `EXCESS`.

    q, k and v are (1, heads, tokens, size), keys and values repeated for every query head.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    scale: float
    got: Tensor
    """(tokens, heads·size)."""

    @classmethod
    def of(cls, call: OperatorCall, module: nn.Module) -> Attention:
        """A recorded call of one of the model's modules."""
        q, k, v = (call.inputs[n].transpose(0, 1).unsqueeze(0) for n in ("q", "k", "v"))
        groups = q.shape[1] // k.shape[1]
        mask = visible(module, call.inputs["positions"], k.shape[2])
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return cls(q, k, v, mask, float(vars(module)["scaling"]), call.output.flatten(1))

    @property
    def unit(self) -> float:
        """Unit roundoff of the result."""
        return UNIT[self.got.dtype]

    @cached_property
    def scores(self) -> Tensor:
        """Scaled, zero where the mask is."""
        return ((self.q.double() * self.scale) @ self.k.double().mT).masked_fill(~self.mask, 0.0)

    @cached_property
    def p(self) -> Tensor:
        """The weights of the values."""
        return self.scores.masked_fill(~self.mask, -math.inf).softmax(-1)

    @cached_property
    def value(self) -> Tensor:
        """The result in float64."""
        return self.p @ self.v.double()

    @cached_property
    def error(self) -> Tensor:
        """The result minus its definition, (1, heads, tokens, size)."""
        return self.got.double().view(self.got.shape[0], self.q.shape[1], -1).transpose(0, 1).unsqueeze(0) - self.value

    def allowed(self, precision: Precision) -> Around:
        """All that a correct kernel may return."""
        given = {"attn_mask": self.mask, "scale": self.scale}
        call = Call(None, (self.q, self.k, self.v), given, self.got.dtype, precision)
        found = operators.attention(call)
        slack, free = found.slack, found.free
        assert isinstance(slack, Tensor)
        if self.got.dtype in operators.REDUCED:
            reach = self.scores.abs().amax(-1, keepdim=True)
            slack = slack + 3 * self.unit * reach * (self.p @ self.v.double().abs())

        def rows(x: Tensor) -> Tensor:
            return x[0].transpose(0, 1).flatten(1)

        return Around(rows(found.value), rows(slack), self.got.dtype, None if free is None else rows(free))

    def scale_error(self) -> tuple[float, float]:
        """The relative error of the scale of the softmax, and its standard error."""
        mean = (self.p * self.scores).sum(-1, keepdim=True)
        slope, d = (self.p * (self.scores - mean)) @ self.v.double(), self.error
        norm = float(slope.square().sum())
        if norm == 0:
            return 0.0, math.inf
        a = float((d * slope).sum()) / norm
        together = ((d - a * slope) * slope).sum(-1)
        return a, math.sqrt(float(together.square().sum())) / norm

    def excess(self) -> float:
        """Mean square error over that of roundings; it means nothing in float32, where sums have errors of their own."""
        v, y = self.v.double(), self.value
        squares = self.p.square()
        weighted = squares * self.scores.square()
        spread = weighted @ v.square() - 2 * y * (weighted @ v) + y.square() * weighted.sum(-1, keepdim=True)
        expected = self.unit**2 / 3 * (y.square() + squares @ v.square() + 2 * spread)
        return float(self.error.square().mean() / expected.mean().clamp_min(1e-300))

    def wrong(self) -> str | None:
        """The finding of the two statistics; None when there is none."""
        a, error = self.scale_error()
        if abs(a) > max(SCALE * self.unit, LEAST) and abs(a) > SIGMAS * error:
            return f"the scale of its softmax is off by a factor of {1 + a:.4g}"
        excess = self.excess() if self.got.dtype in operators.REDUCED else 0.0
        return f"its errors are {math.sqrt(excess):.3g} times what rounding makes" if excess > EXCESS else None
