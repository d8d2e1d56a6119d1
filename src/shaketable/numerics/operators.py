"""Operators of a model: how each one is recognised, what it computes in float64, and the bound that a correct device keeps to.

A function of torch is recognised by its name (`BOUNDED`, `ROUNDED_ONCE`, `SELECTING`), fused attention kernels included; a
module by its type (`leaf_of`). There are four kinds of definition:

*Rounded once*: moving and comparing values, and the IEEE operations. The host does the same in the same dtype and every bit
must agree. *Bounded*: products, sums and transcendental functions, in float64 with a bound. *Selecting*: where an index points
must be the value that the operator selects; equal values may come in any order, no place twice. *Unknown*: the host runs the
same function; if the bits agree the device is right, otherwise the operator is inconclusive.

Bounds of the larger ones (ua = 2^-24; u the unit roundoff of the dtype; K the length of a sum):

    product        δ = ua·s(K)·‖x‖·‖w‖, s(K) = min(K, 5√K + K/16)    (‖x‖·‖w‖ ≥ |x||w|ᵀ: no second matmul)
    softmax        δ = ua·(16 + 2·|x − max| + s(n))·p
    attention      δ = u|o| + (2u + 16ua(4 + ‖q‖·max‖k‖·scale + max|mask|))·(p|v|)     (p may be rounded before it meets v)
    index_add      δ = 1.5·u·n·Σ|x| for the n > 1 values of a row
    layer_norm     δ = 12ua·(|x − mean|/σ + rms(x)/σ)·|w| + 4ua·|b|
    complex a·b    δ = 4ua·|a||b|: a kernel may contract a product and the sum to one rounding

Modules are judged by the *reference*, the model's class rebuilt from its config. The kind of an RMSNorm is not read from its
name: its code is run on the host, and only a module whose results a formula allows is a leaf. Any other module is recorded
function by function.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaketable.numerics.intervals import ACCUMULATION as UA
from shaketable.numerics.intervals import (
    TINY,
    UNIT,
    Allowed,
    Around,
    Precision,
    Product,
    RoundingInterval,
    product_slack,
    summation,
)
from shaketable.sites.nested_tensors import tensors_of

_MOVING = """
    cat concat stack contiguous reshape clone to float half bfloat16 double type type_as expand __getitem__ index_select
    gather where masked_fill masked_fill_ masked_select repeat repeat_interleave embedding dropout flatten unflatten
    chunk split split_with_sizes unbind view transpose permute squeeze unsqueeze T mT t swapaxes movedim roll flip tril
    triu zeros_like ones_like new_zeros new_ones zeros ones full full_like arange one_hot topk sort argsort nonzero
    __setitem__ copy_ fill_ zero_ index_copy_ scatter_ detach masked_scatter maximum minimum max min clamp clip relu
    eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ logical_not logical_and logical_or __and__ __or__
    __invert__ pad tensor hstack vstack expand_as view_as reshape_as tile clamp_min clamp_max
"""
_ARITHMETIC = """
    add sub rsub mul div true_divide multiply subtract divide neg abs __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__
    __truediv__ __rtruediv__ __rdiv__ __neg__ __iadd__ __isub__ __imul__ __itruediv__ add_ sub_ mul_ div_
"""
REDUCED = (torch.bfloat16, torch.float16)
COARSE = 0.125
"""A relative error of a sum above which nothing is proved by being within it."""
ARITHMETIC = frozenset(_ARITHMETIC.split())
ROUNDED_ONCE = ARITHMETIC | frozenset(_MOVING.split())


class TooCoarseError(NotImplementedError):
    """A correct device may return almost anything; only a result that the host makes too is known to be right."""


@dataclass(frozen=True)
class Call:
    """One recorded call, brought to the host."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    """The result's dtype."""
    precision: Precision

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


def product(call: Call, x: Tensor, w: Tensor) -> Around:
    """x @ w with w of shape (…, K, N), both in float64: the products of attention, whose factors are both activations."""
    return Around(x @ w, product_slack(x, w, call.precision.of(call.dtype)), call.dtype)


def _linear(call: Call) -> Product:
    return linear(call, call.get(0, "input"), call.get(1, "weight"), call.get(2, "bias"))


def linear(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, transposed: bool = False) -> Product:
    """x @ wᵀ + bias, or x @ w + bias for a weight that is stored transposed."""
    return Product(x.double(), w.T if transposed else w, bias, call.dtype, call.precision)


def _matmul(call: Call) -> Around:
    x, w = call.args[0].double(), call.get(1, "other", call.kwargs.get("mat2")).double()
    left, right = x.dim() == 1, w.dim() == 1
    whole = product(call, x[None] if left else x, w[:, None] if right else w)
    dims = tuple(dim for dim, is_vector in ((-2, left), (-1, right)) if is_vector)
    assert isinstance(whole.slack, Tensor)
    return Around(whole.value.squeeze(dims), whole.slack.squeeze(dims), call.dtype) if dims else whole


def _addmm(call: Call) -> Around:
    beta, alpha = float(call.kwargs.get("beta", 1)), float(call.kwargs.get("alpha", 1))
    x, w = (call.get(i, f"mat{i}", call.kwargs.get(f"batch{i}")).double() for i in (1, 2))
    value, slack = alpha * (x @ w), abs(alpha) * product_slack(x, w, call.precision.of(call.dtype))
    if beta:
        added = beta * call.get(0, "input").double()
        value, slack = value + added, slack + 4 * UNIT[call.dtype] * added.abs()
    return Around(value, slack + 4 * UA * value.abs(), call.dtype)


def _grouped(call: Call) -> Around:
    """Rows [offs[i−1], offs[i]) times the matrix of expert i. Rows after the last offset are padding and are not judged."""
    x, w, ends = call.args[0], call.args[1], call.get(2, "offs").tolist()
    value, slack = torch.zeros(2, x.shape[0], w.shape[-1], dtype=torch.float64)
    start = 0
    for expert, end in enumerate(ends):
        part = product(call, x[start:end].double(), w[expert].double())
        value[start:end], slack[start:end] = part.value, part.slack
        start = end
    free = (torch.arange(len(value)) >= start)[:, None].expand_as(value)
    return Around(value, slack, call.dtype, free)


def _dim(call: Call, default: Any = None) -> Any:
    """The dimension, by either of its names."""
    return call.get(1, "dim", call.kwargs.get("axis", default))


def _softmax(call: Call) -> Around:
    given, asked = call.args[0], call.kwargs.get("dtype")
    x = given.double() if asked in (None, torch.float32) else given.to(asked).double()
    dim = _dim(call, -1)
    p = x.softmax(dim)
    far = x - x.amax(dim, keepdim=True)
    slack = (UA * (16 + 2 * far.abs().nan_to_num(posinf=0.0)) + summation(x.shape[dim] if x.dim() else 1)) * p + TINY
    if dim not in (-1, x.dim() - 1) and call.dtype != torch.float32:
        slack = slack + 4 * UNIT[call.dtype] * p  # some kernels round between their steps then
    return Around(p, slack, call.dtype)


def attention(call: Call) -> Around:
    """Scaled dot-product attention as one operator, whatever kernel computes it.

    Query heads that share a key are stacked behind one another, so that nothing is repeated. The host's exponentials are
    taken in float32, many times faster; the bound counts their error beside the device's.
    """
    if call.get(4, "dropout_p", 0.0):
        raise NotImplementedError("dropout that is on is random")
    q, k, v = (call.get(i, n).double() for i, n in enumerate(("query", "key", "value")))
    shape = (*q.shape[:-1], v.shape[-1])
    mask, causal, scale = call.get(3, "attn_mask"), call.get(5, "is_causal", False), call.kwargs.get("scale")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if mask is not None and q.dim() > 4:
        mask = mask.expand(*q.shape[:-1], k.shape[-2]).flatten(0, -4)
    q, k, v = (t.reshape(-1, *t.shape[-3:]) for t in (q, k, v))
    batch, heads, queries, size = q.shape
    groups, keys = heads // k.shape[1], k.shape[2]
    scores = ((q * scale).reshape(batch, -1, groups * queries, size) @ k.mT).view(batch, heads, queries, keys)
    longest = k.norm(dim=-1).amax(-1).repeat_interleave(groups, 1)[..., None, None]
    reach = q.norm(dim=-1, keepdim=True) * longest * abs(scale)
    if causal:
        scores.masked_fill_(~torch.ones(queries, keys, dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
        reach = reach + _largest(mask)
    p = (scores - scores.amax(-1, keepdim=True)).float().exp_()
    p = p.div_(p.sum(-1, keepdim=True)) if mask is None else p.div_(p.sum(-1, keepdim=True)).nan_to_num_(0.0)
    p = p.view(batch, -1, groups * queries, keys).double()
    value, weight = ((p @ w).reshape(batch, heads, queries, -1) for w in (v, v.abs()))
    u = UNIT[call.dtype]
    inexact = 2 * u + 16 * UA * (4 + reach)
    if call.dtype == torch.float32 and call.precision.product_input:
        inexact = inexact + 2 * call.precision.product_input * (1 + 2 * reach)
    slack, free = u * value.abs() + inexact * weight + TINY, _unseen(mask, value)
    return Around(value.view(shape), slack.view(shape), call.dtype, None if free is None else free.reshape(shape))


def _largest(mask: Tensor) -> Tensor | float:
    """The largest number that a mask adds to a score of each query; hidden keys have none."""
    if mask.dtype == torch.bool:
        return 0.0
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return mask.double().abs().masked_fill(hidden, 0.0).amax(-1, keepdim=True)


def _unseen(mask: Tensor | None, value: Tensor) -> Tensor | None:
    """Queries whose keys are all masked: kernels differ in their result, so it is not judged."""
    if mask is None:
        return None
    hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
    blind = hidden.all(-1, keepdim=True)
    return blind.expand_as(value) if bool(blind.any()) else None


def silu(x: Tensor, dtype: torch.dtype) -> Around:
    """x·sigmoid(x). Far below zero exp(−x) overflows, and the result may be zero."""
    y = F.silu(x)
    slack = y.abs().mul_(20 * UA).add_(TINY)
    return Around(y, torch.where(x < -80, y.abs() + TINY, slack) if bool((x < -80).any()) else slack, dtype)


def gelu(x: Tensor, dtype: torch.dtype, approximate: str) -> Around:
    """GELU; 1 + erf cancels for negative x, so the bound has a part that goes with |x|."""
    y = F.gelu(x, approximate=approximate)
    return Around(y, 12 * UA * y.abs() + 8 * UA * x.abs() + TINY, dtype)


def layer_norm(x: Tensor, shape: tuple[int, ...], w: Tensor | None, b: Tensor | None, eps: float, dtype: torch.dtype) -> Around:
    """LayerNorm, everything in float64; the mean cancels, so the bound has a part that goes with the size of x."""
    dims = tuple(range(-len(shape), 0))
    y = F.layer_norm(x, shape, w, b, eps)
    spread = torch.sqrt(x.var(dims, unbiased=False, keepdim=True) + eps)
    size = x.square().mean(dims, keepdim=True).sqrt() / spread
    normed = (x - x.mean(dims, keepdim=True)).abs() / spread
    slack = 12 * UA * (normed + size) * (1 if w is None else w.abs()) + (0 if b is None else 4 * UA * b.abs())
    return Around(y, slack + TINY, dtype)


def _layer_norm(call: Call) -> Around:
    x, shape, eps = call.args[0].double(), tuple(call.get(1, "normalized_shape")), call.get(4, "eps", 1e-5)
    w, b = (None if t is None else t.double() for t in (call.get(2, "weight"), call.get(3, "bias")))
    return layer_norm(x, shape, w, b, eps, call.dtype)


def _rms_norm(call: Call) -> RoundingInterval:
    """torch's own: the weight may meet a rounded value or not; an eps that is not given is the dtype's or float32's."""
    x, w, eps = call.args[0].double(), call.get(2, "weight"), call.get(3, "eps")
    dims = tuple(range(-len(call.get(1, "normalized_shape")), 0))
    choices = (torch.finfo(call.dtype).eps, torch.finfo(torch.float32).eps) if eps is None else (eps,)
    allowed = []
    for normed in (normalised(x, small, dims) for small in choices):
        bare = Around.relative(normed, 12, call.dtype).interval()
        allowed.append(bare if w is None else weighted(normed, w.double(), call.dtype))
    return functools.reduce(RoundingInterval.hull, allowed)


def weighted(normed: Tensor, w: Tensor, dtype: torch.dtype) -> RoundingInterval:
    """The weight multiplies the normalised value as it was rounded to the dtype, or before."""
    late = Around.relative(normed * w, 16, dtype).interval()
    return late if dtype == torch.float32 else late.hull(Around.relative(normed, 12, dtype).interval().times(w, dtype))


def normalised(x: Tensor, eps: float, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """x over its root mean square."""
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)


def _conv1d(call: Call) -> Around:
    x, w, bias, rest = call.args[0].double(), call.get(1, "weight").double(), call.get(2, "bias"), call.args[3:]
    rest_by_name = {k: v for k, v in call.kwargs.items() if k not in ("input", "weight", "bias")}
    value, squares = (F.conv1d(a, b, None, *rest, **rest_by_name) for a, b in ((x, w), (x.square(), torch.ones_like(w))))
    slack = summation(w[0].numel()) * squares.sqrt() * w.flatten(1).norm(dim=1)[:, None] + TINY
    if documented := call.precision.of(call.dtype):
        slack = slack + 2 * documented * F.conv1d(x.abs(), w.abs(), None, *rest, **rest_by_name)
    if bias is not None:  # added inside of the kernel, or to a result that has been rounded already
        slack = slack + UNIT[call.dtype] * value.abs() + UA * bias.double().abs()[:, None]
        value = value + bias.double()[:, None]
    return Around(value, slack, call.dtype)


def _relative(
    function: Callable[[Tensor], Tensor], ulps: float, absolute: float = 0.0, rounds_twice: bool = False
) -> Callable[[Call], Around]:
    """A function whose result is right to a few units in the last place of float32, and `absolute` units beside it.

    Where it rounds twice, some device rounds a step in between to a reduced dtype.
    """

    def define(call: Call) -> Around:
        y = function(call.args[0].double())
        size = ulps * UA + (2 * UNIT[call.dtype] if rounds_twice and call.dtype in REDUCED else 0.0)
        return Around(y, size * y.abs() + absolute * UA + TINY, call.dtype)

    return define


def _pow(call: Call) -> Around:
    base = call.args[0].double() if isinstance(call.args[0], Tensor) else call.args[0]
    exponent = call.get(1, "exponent")
    exponent = exponent if isinstance(exponent, int | float) else exponent.double()
    y = torch.pow(base, exponent)
    # Small whole powers of reduced dtypes are products that some devices round one by one.
    slack = 8 * UA if call.dtype in (torch.float32, torch.float64) else 2 * UNIT[call.dtype]
    return Around(y, slack * y.abs() + TINY, call.dtype)


def _reduction(mean: bool) -> Callable[[Call], Around]:
    def define(call: Call) -> Around:
        x, dim, keep = call.args[0].double(), _dim(call), call.get(2, "keepdim", call.kwargs.get("keepdims", False))
        dims = tuple(range(x.dim())) if dim is None else dim
        total, size = x.sum(dims, keepdim=keep), x.abs().sum(dims, keepdim=keep)
        n = x.numel() / max(total.numel(), 1)
        value = total / n if mean else total
        return Around(value, summation(int(n)) * (size / n if mean else size) + TINY, call.dtype)

    return define


def _exp(call: Call) -> Around:
    x = call.args[0].double()
    y = x.exp()
    return Around(y, UA * (8 + 2 * x.abs().clamp(max=1e4)) * y + TINY, call.dtype)


def _index_add(call: Call) -> Around:
    """Each addition into a row may be rounded to the dtype; a row that takes one is right to the last bit."""
    base, dim, index = call.args[0], call.args[1], call.args[2]
    alpha = float(call.kwargs.get("alpha", 1))
    source, u = call.get(3, "source").double() * alpha, UNIT[call.dtype]
    value = base.double().index_add(dim, index, source)
    terms = torch.bincount(index.flatten().long(), minlength=base.shape[dim]).double()
    if float(terms.max()) * u > COARSE:
        raise TooCoarseError(f"{int(terms.max())} values are added into one row in {call.dtype}, rounded each time")
    terms = torch.where(terms > 1, 1.5 * terms, 0.0).view(-1, *[1] * (base.dim() - 1 - dim % base.dim()))
    size = base.double().abs().index_add(dim, index, source.abs())
    return Around(value, u * (terms + 2 * (alpha != 1)) * size, call.dtype)


BOUNDED: dict[str, Callable[[Call], Allowed]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), _grouped),
    **dict.fromkeys(("softmax", "_softmax"), _softmax),
    "scaled_dot_product_attention": attention,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "conv1d": _conv1d,
    "silu": lambda call: silu(call.args[0].double(), call.dtype),
    "gelu": lambda call: gelu(call.args[0].double(), call.dtype, call.kwargs.get("approximate", "none")),
    "tanh": _relative(torch.tanh, 12),
    "sigmoid": _relative(torch.sigmoid, 16),
    "rsqrt": _relative(torch.rsqrt, 8, rounds_twice=True),
    "sqrt": _relative(torch.sqrt, 4),
    "reciprocal": _relative(torch.reciprocal, 4),
    "cos": _relative(torch.cos, 4, 4),
    "sin": _relative(torch.sin, 4, 4),
    "exp": _exp,
    "log": _relative(torch.log, 8, 4),
    "pow": _pow,
    "__pow__": _pow,
    "square": _relative(torch.square, 4),
    "mean": _reduction(True),
    "sum": _reduction(False),
    **dict.fromkeys(("index_add_", "index_add"), _index_add),
}


def rounded_once(call: Call, name: str) -> RoundingInterval:
    """The host does the same in the same dtype.

    Python numbers leave a device some freedom, and whatever it takes is allowed: a number that meets a reduced-precision
    tensor may be rounded to its dtype first, and a division by a number may be a multiplication by its inverse.
    """
    if name == "dropout" and call.get(2, "training", True) and call.get(1, "p", 0.5):
        raise NotImplementedError("dropout that is on is random")
    overwrites = name.endswith("_")  # a copy may lie in memory otherwise, and a kernel go another way there
    kept = tuple(a.clone() if i == 0 and overwrites and isinstance(a, Tensor) else a for i, a in enumerate(call.args))
    if name in ADDITIONS and float(alpha := call.kwargs.get("alpha", 1)) != 1 and call.dtype.is_floating_point:
        return _added(call, float(alpha), name)
    result = call.func(*kept, **call.kwargs)
    exact = RoundingInterval.exactly(kept[0] if result is None else next(tensors_of(result)))
    number = next((a for a in call.args if isinstance(a, float | int) and not isinstance(a, bool)), None)
    if name not in ARITHMETIC or number is None or not call.dtype.is_floating_point:
        return exact
    allowed = exact
    if call.dtype not in (torch.float32, torch.float64):
        for scalar in (float(number), float(torch.tensor(number, dtype=call.dtype))):
            args = tuple(scalar if a is number else a.double() if isinstance(a, Tensor) else a for a in call.args)
            allowed = allowed.hull(Around(call.func(*args, **call.kwargs), 0.0, call.dtype).interval())
    if name in DIVISIONS and isinstance(call.args[0], Tensor) and number:
        inverse = torch.tensor(1.0).div(number).double()
        allowed = allowed.hull(Around(call.args[0].double() * inverse, 0.0, call.dtype).interval())
    return allowed


def _added(call: Call, factor: float, name: str) -> RoundingInterval:
    """x + factor·y, where factor and product are rounded to the dtype first or not; each kernel has its way."""
    x, y = (a.double() if isinstance(a, Tensor) else torch.tensor(float(a)) for a in (call.args[0], call.get(1, "other")))
    sign = 1 if name.startswith("add") else -1
    allowed = []
    for scalar in (factor, float(torch.tensor(factor, dtype=call.dtype)), float(torch.tensor(factor))):
        for product in (y * scalar, (y * scalar).to(call.dtype).double()):
            allowed.append(Around(x + sign * product, 0.0, call.dtype).interval())
    return functools.reduce(RoundingInterval.hull, allowed)


ADDITIONS = ("add", "add_", "sub", "sub_")
"""Functions with a factor `alpha`."""
DIVISIONS = ("div", "__truediv__", "true_divide", "divide", "div_", "__itruediv__")


# ---- complex numbers: rotary embeddings of DeepSeek-V2 and Llama 4 multiply by them


COMPLEX = ("mul", "rmul", "imul", "multiply", "add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "neg")
"""Arithmetic of complex numbers that has a definition."""


def parts(z: Tensor) -> Tensor:
    """Real and imaginary parts as neighbouring channels."""
    return torch.view_as_real(z.resolve_conj()).flatten(-2)


def _complex(call: Call, name: str) -> Allowed:
    """Products and polar coordinates within a bound on the size of the number, anything else as the host makes it."""
    if name.strip("_") in ("mul", "rmul", "imul", "multiply"):
        a, b = (torch.as_tensor(f).to(torch.complex128) for f in (call.args[0], call.get(1, "other")))
        value, size = a * b, a.abs() * b.abs()
    elif name == "polar":
        radius, angle = call.get(0, "abs").double(), call.get(1, "angle").double()
        value, size = torch.polar(radius, angle), 3 * radius.abs()
    else:
        return RoundingInterval.exactly(parts(rounded_once(call, name).low))
    return Around(parts(value), (4 * UA * size).repeat_interleave(2, -1) + TINY, call.dtype.to_real())


# ---- indices

SORTING = ("topk", "sort", "argsort")
SELECTING = (*SORTING, "argmax", "argmin", "max", "min", "mode", "kthvalue")


@dataclass(frozen=True)
class Selection:
    """Indices along a dimension that point to given values."""

    x: Tensor
    dim: int
    index: Tensor
    """As the host selects."""
    values: Tensor
    distinct: bool
    """Whether a place may be selected only once."""

    def outside(self, got: Tensor) -> Tensor:
        """Where an index points to another value, to no value, or to a place that was selected before."""
        size = self.x.shape[self.dim]
        index = got.view(self.values.shape)
        pointed = self.x.gather(self.dim, index.clamp(0, size - 1))
        both_nan = (pointed != pointed) & (self.values != self.values)
        wrong = (index < 0) | (index >= size) | ((pointed != self.values) & ~both_nan)
        if self.distinct and index.shape[self.dim] > 1:
            ordered, order = index.sort(self.dim)
            again = ordered.diff(dim=self.dim) == 0
            wrong = wrong | torch.zeros_like(wrong).scatter(self.dim, order.narrow(self.dim, 1, again.shape[self.dim]), again)
        return wrong.view(got.shape)

    def ends(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """The host's indices at some places, as the lowest and the highest."""
        index = self.index.view(where.shape)[where]
        return index, index


def _selected(call: Call, name: str, results: list[Tensor]) -> list[Allowed | Selection] | None:
    """Allowed results of one call; None where they hold no indices."""
    x = call.args[0]
    has_indices = len(results) == 2 or name.startswith("arg")  # the maximum of whole numbers has none
    if not has_indices or not isinstance(x, Tensor) or not x.dim():
        return None
    expected = list(tensors_of(call.func(*call.args, **call.kwargs)))
    if call.kwargs.get("stable"):
        return [RoundingInterval.exactly(t) for t in expected]
    index = expected[-1]
    if name in ("argmax", "argmin") and _dim(call) is None:
        x, dim, index = x.flatten(), 0, index.view(1)
    else:
        place = 2 if name in ("topk", "kthvalue") else 1
        dim = int(call.get(place, "dim", call.kwargs.get("axis", -1))) % x.dim()
        index = index if index.dim() == x.dim() else index.unsqueeze(dim)
    values = x.gather(dim, index)
    first: list[Allowed | Selection] = [RoundingInterval.exactly(t) for t in expected[:-1]]
    if name == "topk" and not call.get(4, "sorted", True):
        order = results[0].argsort(dim, descending=True)  # in any order, so the host's are put into the device's
        back = order.argsort(dim)
        values, index = values.sort(dim, descending=True).values.gather(dim, back), index.gather(dim, back)
        first = [RoundingInterval.exactly(values)]
    return [*first, Selection(x, dim, index, values, name in SORTING)]


# ---- any function


WITHOUT_VALUES = ("empty", "empty_like", "new_empty", "empty_strided")
"""Functions that return memory as it is."""


def is_defined(name: str) -> bool:
    """Whether a function of that name has a definition, and is not only compared with the host's."""
    return name in ROUNDED_ONCE or name in BOUNDED


def allowed_results(call: Call, name: str, results: list[Tensor]) -> tuple[list[tuple[Tensor, Allowed | Selection]], bool]:
    """Each result of a function with what it may be; and whether there is a definition, or only what the host makes of it."""
    is_complex = any(t.is_complex() for t in tensors_of((call.args, call.kwargs, results)))
    if is_complex:
        is_known = name in ROUNDED_ONCE - ARITHMETIC or name == "polar" or name.strip("_") in COMPLEX
    else:
        is_known = is_defined(name) or not any(t.is_floating_point() for t in results)
    first = results[0]
    if name in BOUNDED and first.is_floating_point():
        try:
            return [(first, BOUNDED[name](call))], is_known
        except TooCoarseError:
            return [(first, rounded_once(call, name))], False
    if name in WITHOUT_VALUES:
        return [], is_known
    if name in SELECTING and (selected := _selected(call, name, results)):
        return list(zip(results, selected, strict=True)), is_known
    if len(results) > 1:
        made = tensors_of(call.func(*call.args, **call.kwargs))
        return [(got, RoundingInterval.exactly(value)) for got, value in zip(results, made, strict=True)], is_known
    if not first.is_complex():
        return [(first, rounded_once(call, name))], is_known
    return [(parts(first), _complex(call, name))], is_known


# ---- modules that are one operator

PRODUCTS = ("linear", "conv1d")
Weight = Callable[[str], Tensor]
"""A parameter of the module, from the file, in the device's dtype, on the host."""
_MODULES: dict[type, str] = {
    nn.Linear: "linear",
    nn.Embedding: "embedding",
    nn.LayerNorm: "layernorm",
    nn.SiLU: "silu",
    nn.Dropout: "identity",
    nn.Identity: "identity",
}
_TRANSFORMERS_MODULES = {"Conv1D": "conv1d", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh"}
"""By name; people write a Conv1D or a GELUActivation of their own."""


@dataclass(frozen=True)
class Leaf:
    """A module with a definition."""

    kind: str
    module: nn.Module
    """The reference's module: attributes are read from it, never weights."""

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added."""
        return self.module._parameters.get("bias") is not None

    def allowed(self, call: Call, weight: Weight) -> Allowed:
        """The results that a correct device may return for this input."""
        x = next(a for a in (*call.args, *call.kwargs.values()) if isinstance(a, Tensor))
        module: Any = self.module
        if self.kind in PRODUCTS:
            bias = weight("bias") if self.has_bias else None
            return linear(call, x, weight("weight"), bias, transposed=self.kind == "conv1d")
        if self.kind == "embedding":
            return RoundingInterval.exactly(F.embedding(x, weight("weight")))
        if self.kind == "identity":
            return RoundingInterval.exactly(x)
        if self.kind == "silu":
            return silu(x.double(), call.dtype)
        if self.kind in ("gelu", "gelu_tanh"):
            return gelu(x.double(), call.dtype, "tanh" if self.kind == "gelu_tanh" else "none")
        if self.kind == "layernorm":
            w, b = (None if module._parameters.get(n) is None else weight(n).double() for n in ("weight", "bias"))
            return layer_norm(x.double(), module.normalized_shape, w, b, module.eps, call.dtype)
        return self._rms_norm(call, x, weight)

    def _rms_norm(self, call: Call, x: Tensor, weight: Weight) -> Allowed:
        """By kind: without a weight; times 1 + weight; times the weight, in float32 or after the value was rounded.

        In float32 both roundings are of a size with the error of the square root, and one bound covers all.
        """
        normed = normalised(x.double(), eps_of(self.module))
        if self.kind == "rmsnorm_bare":
            return Around.relative(normed, 12, call.dtype)
        w = weight("weight").double()
        if self.kind == "rmsnorm" and x.dtype != torch.float32:
            return Around.relative(normed, 12, x.dtype).interval().times(w, call.dtype)
        return Around.relative(normed * (1 + w if self.kind == "rmsnorm_one" else w), 16, call.dtype)


def leaf_of(module: nn.Module) -> Leaf | None:
    """The definition of a reference's module, or None when it has to be looked into."""
    kind = _kind(module)
    return None if kind is None else Leaf(kind, module)


def _kind(module: nn.Module) -> str | None:
    name = type(module).__name__
    kind = _MODULES.get(type(module))
    if kind is None and type(module).__module__.startswith("transformers."):
        kind = _TRANSFORMERS_MODULES.get(name)
    if kind in PRODUCTS and module._parameters.get("weight") is None:
        return None
    if kind in ("silu", "gelu", "gelu_tanh") and "_python" in str(module.__dict__.get("act", "")):
        return None  # written out in Python, and looked into
    if kind is None and "rmsnorm" in name.lower() and not any(module.children()) and eps_of(module) is not None:
        return _norm_kind(module)
    return kind


def _norm_kind(module: nn.Module) -> str | None:
    """Which formula an RMSNorm follows; one that takes a gate, or has parameters besides its weight, follows none.

    This module is run, not its class: one of Qwen 4 takes its mean over groups of channels where it is told to.
    """
    own = [name for name, parameter in module._parameters.items() if parameter is not None]
    if own not in ([], ["weight"]) or len(inspect.signature(type(module).forward).parameters) > 2:
        return None
    kinds = ("rmsnorm_late", "rmsnorm", "rmsnorm_one") if own else ("rmsnorm_bare",)
    return next((k for k in kinds if all(_follows(module, k, dtype) for dtype in (torch.float32, torch.bfloat16))), None)


def _follows(module: nn.Module, kind: str, dtype: torch.dtype) -> bool:
    """Whether the formula allows what a norm makes on the host: its roundings too, at values so small that eps counts."""
    weight, eps = module._parameters.get("weight"), eps_of(module)
    try:
        shape = (int(getattr(module, "normalized_shape", (8,))[-1]),) if weight is None else tuple(weight.shape)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(max(4, 512 // shape[-1]), *shape, generator=generator).mul_(math.sqrt(eps or 1.0)).to(dtype)
        w = torch.empty(0) if weight is None else torch.randn(shape, generator=generator).to(dtype)
        got = _run(module, x, None if weight is None else w)
        call = Call(None, (x,), {}, got.dtype, Precision())
        return got.shape == x.shape and not bool(Leaf(kind, module).allowed(call, lambda name: w).outside(got).any())
    except Exception:  # code that is not called as its model calls it: it is recorded function by function
        return False


def _run(module: nn.Module, x: Tensor, weight: Tensor | None) -> Tensor:
    """Run the code of a norm with another weight: on a copy, and without hooks."""
    probe = type(module).__new__(type(module))
    probe.__dict__.update(module.__dict__, _parameters={"weight": weight})
    with torch.no_grad(), torch._C.DisableTorchFunction():
        got: Tensor = type(module).forward(probe, x)
    return got


def eps_of(module: nn.Module) -> Any:
    """The eps of an RMSNorm; None of a module without one."""
    held = (module.__dict__.get(name) for name in ("variance_epsilon", "eps"))
    return next((eps for eps in held if isinstance(eps, float)), None)
