"""What torch functions compute, in float64, with the bound that a correct device keeps to.

Three kinds. *Rounded once*: moving, selecting and comparing values, and the IEEE operations; the host does the same in
the same dtype and every bit must agree. *Bounded*: products, sums and transcendental functions; float64 and a bound.
*Unknown*: the host runs the same function; if the bits agree the device is right, if not nobody can say, and the probe
is inconclusive.

Bounds (ua = 2^-24; u the unit roundoff of the dtype; K the length of a sum):

    product        δ = ua·s(K)·‖x‖·‖w‖, s(K) = min(K, 5√K + K/16)    (‖x‖·‖w‖ ≥ |x||w|ᵀ: no second matmul)
    softmax        δ = ua·(16 + 2·|x − max| + s(n))·p
    attention      δ = u|o| + (2u + 16ua(4 + ‖q‖·max‖k‖·scale + max|mask|))·(p|v|)     (p may be rounded before it meets v)
    silu           δ = 20ua·|y|
    gelu           δ = 12ua·|y| + 8ua·|x|       (1 + erf cancels for negative x)
    sums           δ = ua·s(n)·Σ|x|
    index_add      δ = 1.5·u·n·Σ|x| for the n > 1 values of a row
    layer_norm     δ = 12ua·(|x − mean|/σ + rms(x)/σ)·|w| + 4ua·|b|
    einsum         δ = ua·K·Σ|x||w|, and u·Σ|x||w| for every result in between that is rounded
    conv1d         as a product, over a window
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shaketable.numerics.intervals import ACCUMULATION as UA
from shaketable.numerics.intervals import TINY, UNIT, Allowed, Around, Precision, Product, RoundingInterval, summation
from shaketable.sites.nested_tensors import map_tensors, tensors_of

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
    """Of the result."""
    precision: Precision
    wide: Callable[[Tensor], Tensor]
    """A tensor in float64; remembers what it made for a layer's tensors."""

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


def product(call: Call, x: Tensor, w: Tensor) -> Around:
    """x @ w with w of shape (…, K, N), both in float64: the products of attention, whose factors are both activations."""
    return Around(x @ w, product_slack(call, x, w), call.dtype)


def product_slack(call: Call, x: Tensor, w: Tensor) -> Tensor:
    """How far a correct product may be from the float64 one, before its result is rounded."""
    norms = x.norm(dim=-1, keepdim=True) * w.norm(dim=-2, keepdim=True)
    slack: Tensor = summation(x.shape[-1]) * norms + TINY
    documented = call.precision.product_input if call.dtype == torch.float32 else call.precision.partial_sum
    if documented:
        slack = slack + 2 * documented * (x.abs() @ w.abs())
    return slack


def _linear(call: Call) -> Product:
    x, w = call.get(0, "input"), call.get(1, "weight")
    return Product(call.wide(x), w, call.get(2, "bias"), call.dtype, call.precision)


def _matmul(call: Call) -> Around:
    x, w = call.wide(call.args[0]), call.wide(call.get(1, "other", call.kwargs.get("mat2")))
    left, right = x.dim() == 1, w.dim() == 1
    whole = product(call, x[None] if left else x, w[:, None] if right else w)
    dims = tuple(dim for dim, is_vector in ((-2, left), (-1, right)) if is_vector)
    assert isinstance(whole.slack, Tensor)
    return Around(whole.value.squeeze(dims), whole.slack.squeeze(dims), call.dtype) if dims else whole


def _addmm(call: Call) -> Around:
    beta, alpha = float(call.kwargs.get("beta", 1)), float(call.kwargs.get("alpha", 1))
    x, w = (call.wide(call.get(i, f"mat{i}", call.kwargs.get(f"batch{i}"))) for i in (1, 2))
    value, slack = alpha * (x @ w), abs(alpha) * product_slack(call, x, w)
    if beta:
        added = beta * call.get(0, "input").double()
        value, slack = value + added, slack + 4 * UNIT[call.dtype] * added.abs()
    return Around(value, slack + 4 * UA * value.abs(), call.dtype)


def _grouped(call: Call) -> Around:
    """Rows [offs[i−1], offs[i]) times the matrix of expert i; what stands behind the last of them is nobody's business."""
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
    x = call.wide(given) if asked in (None, torch.float32) else given.to(asked).double()
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
    q, k, v = (call.wide(call.get(i, n)) for i, n in enumerate(("query", "key", "value")))
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
    """Queries that may look at no key: what they get is nobody's business, and kernels differ."""
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
    x, shape, eps = call.wide(call.args[0]), tuple(call.get(1, "normalized_shape")), call.get(4, "eps", 1e-5)
    w, b = (None if t is None else t.double() for t in (call.get(2, "weight"), call.get(3, "bias")))
    return layer_norm(x, shape, w, b, eps, call.dtype)


def _rms_norm(call: Call) -> RoundingInterval:
    """The weight may meet a value that is rounded already; an eps that is not given is the dtype's own, or float32's."""
    x, w, eps = call.wide(call.args[0]), call.get(2, "weight"), call.get(3, "eps")
    mean = x.square().mean(tuple(range(-len(call.get(1, "normalized_shape")), 0)), keepdim=True)
    allowed = []
    for small in (torch.finfo(call.dtype).eps, torch.finfo(torch.float32).eps) if eps is None else (eps,):
        normed = x * torch.rsqrt(mean + small)
        inner = Around.relative(normed, 12, call.dtype).interval()
        if w is None:
            allowed.append(inner)
            continue
        ends = inner.low.double() * w.double(), inner.high.double() * w.double()
        allowed.append(RoundingInterval(torch.minimum(*ends).to(call.dtype), torch.maximum(*ends).to(call.dtype)))
        allowed.append(Around.relative(normed * w.double(), 16, call.dtype).interval())
    return functools.reduce(RoundingInterval.hull, allowed)


def _einsum(call: Call) -> Around:
    """Any number of factors; what is summed of one of them alone, and products of two of three, may be rounded in between."""

    def computed(change: Callable[[Tensor], Tensor]) -> Tensor:
        result: Tensor = call.func(*map_tensors(call.args, change))
        return result

    value, size = computed(call.wide), computed(lambda factor: call.wide(factor).abs())
    terms = computed(lambda factor: torch.ones(factor.shape, dtype=torch.float64))
    factors = len(list(tensors_of(call.args)))
    between = 0 if _sums_only_shared(call.args[0], factors) else factors
    documented = call.precision.product_input if call.dtype == torch.float32 else call.precision.partial_sum
    return Around(value, (UA * terms + 2 * between * UNIT[call.dtype] + 2 * documented) * size + TINY, call.dtype)


def _sums_only_shared(equation: Any, factors: int) -> bool:
    """Whether an einsum is one product of two factors, and sums only over what both have."""
    if not isinstance(equation, str) or factors != 2:
        return False
    inputs, _, output = equation.replace(" ", "").partition("->")
    one, two = (set(letters) for letters in inputs.split(","))
    return (one ^ two) <= set(output) or "->" not in equation


def _conv1d(call: Call) -> Around:
    x, w, bias, rest = call.wide(call.args[0]), call.get(1, "weight").double(), call.get(2, "bias"), call.args[3:]
    rest_by_name = {k: v for k, v in call.kwargs.items() if k not in ("input", "weight", "bias")}
    value, squares = (F.conv1d(a, b, None, *rest, **rest_by_name) for a, b in ((x, w), (x.square(), torch.ones_like(w))))
    slack = summation(w[0].numel()) * squares.sqrt() * w.flatten(1).norm(dim=1)[:, None] + TINY
    documented = call.precision.product_input if call.dtype == torch.float32 else call.precision.partial_sum
    if documented:
        slack = slack + 2 * documented * F.conv1d(x.abs(), w.abs(), None, *rest, **rest_by_name)
    if bias is not None:  # added inside of the kernel, or to a result that has been rounded already
        slack = slack + UNIT[call.dtype] * value.abs() + UA * bias.double().abs()[:, None]
        value = value + bias.double()[:, None]
    return Around(value, slack, call.dtype)


def _glu(call: Call) -> Around:
    """Half of the channels times the sigmoid of the others, which may be rounded first, and may be zero far below zero."""
    a, b = call.wide(call.args[0]).chunk(2, call.get(1, "dim", -1))
    y = a * torch.sigmoid(b)
    relative = 20 * UA + (2 * UNIT[call.dtype] if call.dtype in REDUCED else 0.0)
    return Around(y, torch.where(b < -80, 1.0, relative) * y.abs() + TINY, call.dtype)


def _relative(
    function: Callable[[Tensor], Tensor], ulps: float, absolute: float = 0.0, rounds_twice: bool = False
) -> Callable[[Call], Around]:
    """A function whose result is right to a few units in the last place of float32.

    Args:
        function: In float64.
        ulps: How many.
        absolute: Units of float32 that do not go with the result.
        rounds_twice: Whether some device rounds a step in between to a reduced dtype.
    """

    def define(call: Call) -> Around:
        y = function(call.wide(call.args[0]))
        size = ulps * UA + (2 * UNIT[call.dtype] if rounds_twice and call.dtype in REDUCED else 0.0)
        return Around(y, size * y.abs() + absolute * UA + TINY, call.dtype)

    return define


def _pow(call: Call) -> Around:
    base = call.wide(call.args[0]) if isinstance(call.args[0], Tensor) else call.args[0]
    exponent = call.get(1, "exponent")
    exponent = exponent if isinstance(exponent, int | float) else call.wide(exponent)
    y = torch.pow(base, exponent)
    # Small whole powers of reduced dtypes are products that some devices round one by one.
    slack = 8 * UA if call.dtype in (torch.float32, torch.float64) else 2 * UNIT[call.dtype]
    return Around(y, slack * y.abs() + TINY, call.dtype)


def _reduction(mean: bool) -> Callable[[Call], Around]:
    def define(call: Call) -> Around:
        x, dim, keep = call.wide(call.args[0]), _dim(call), call.get(2, "keepdim", call.kwargs.get("keepdims", False))
        dims = tuple(range(x.dim())) if dim is None else dim
        total, size = x.sum(dims, keepdim=keep), x.abs().sum(dims, keepdim=keep)
        n = x.numel() / max(total.numel(), 1)
        value = total / n if mean else total
        return Around(value, summation(int(n)) * (size / n if mean else size) + TINY, call.dtype)

    return define


def _exp(call: Call) -> Around:
    x = call.wide(call.args[0])
    y = x.exp()
    return Around(y, UA * (8 + 2 * x.abs().clamp(max=1e4)) * y + TINY, call.dtype)


def _erf(call: Call) -> Around:
    """In reduced dtypes it is several units off on some devices, and small values may come back as zero."""
    y = torch.erf(call.wide(call.args[0]))
    few = y.abs() * (8 * UNIT[call.dtype] + (y.abs() < UNIT[call.dtype]).double()) if call.dtype in REDUCED else 0.0
    return Around(y, 8 * UA * y.abs() + few + TINY, call.dtype)


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
    "einsum": _einsum,
    "conv1d": _conv1d,
    "glu": _glu,
    "silu": lambda call: silu(call.wide(call.args[0]), call.dtype),
    "gelu": lambda call: gelu(call.wide(call.args[0]), call.dtype, call.kwargs.get("approximate", "none")),
    "tanh": _relative(torch.tanh, 12),
    "sigmoid": _relative(torch.sigmoid, 16),
    "rsqrt": _relative(torch.rsqrt, 8, rounds_twice=True),
    "sqrt": _relative(torch.sqrt, 4),
    "reciprocal": _relative(torch.reciprocal, 4),
    "cos": _relative(torch.cos, 4, 4),
    "sin": _relative(torch.sin, 4, 4),
    "erf": _erf,
    "exp": _exp,
    "log": _relative(torch.log, 8, 4),
    "pow": _pow,
    "__pow__": _pow,
    "square": _relative(torch.square, 4),
    "mean": _reduction(True),
    "sum": _reduction(False),
    **dict.fromkeys(("index_add_", "index_add"), _index_add),
}


def is_defined(name: str) -> bool:
    """Whether a function of that name is judged, and not only compared with the host's."""
    return name in ROUNDED_ONCE or name in BOUNDED


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
