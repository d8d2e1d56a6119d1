"""Definitions of leaves against formulas in float64: how far a result may be off, and from what it is computed."""

import math

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shaketable.numerics import operators as leaf_modules
from shaketable.numerics.intervals import Precision
from shaketable.numerics.operators import Call, Leaf, leaf_of
from tests.tensors import draw

UNIT = 2.0**-24


class RMSNorm(nn.Module):
    """In float32, rounded to the dtype, and then times the weight."""

    def __init__(self, size=8, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def normed(self, x):
        return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x):
        return self.weight * self.normed(x).to(x.dtype)


class LateRMSNorm(RMSNorm):
    def forward(self, x):
        return (self.weight.float() * self.normed(x)).to(x.dtype)


class OneRMSNorm(RMSNorm):
    def forward(self, x):
        return ((1 + self.weight.float()) * self.normed(x)).to(x.dtype)


class BareRMSNorm(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


NORMS = {"rmsnorm": RMSNorm, "rmsnorm_late": LateRMSNorm, "rmsnorm_one": OneRMSNorm, "rmsnorm_bare": BareRMSNorm}


def allowed(leaf, x, dtype=None, precision=None, kwargs=None, args=None, **weights):
    given = (x,) if args is None else args
    call = Call(None, given, kwargs or {}, dtype or x.dtype, precision or Precision(), lambda t: t.double())
    return leaf.allowed(call, lambda name: weights[name])


def share_outside(leaf, got, x, **weights):
    return float(allowed(leaf, x, got.dtype, **weights).outside(got).double().mean())


# ---- norms


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_is_known_by_its_formula(kind):
    assert leaf_of(NORMS[kind]()).kind == kind


@pytest.mark.parametrize("eps", [1e-6, 1e-2, 0.0])
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_is_known_whatever_its_eps(kind, eps):
    assert leaf_of(NORMS[kind](eps=eps)).kind == kind


@pytest.mark.parametrize("size", [1, 2, 8, 600])
def test_a_norm_is_known_whatever_its_size(size):
    assert leaf_of(RMSNorm(size)).kind in ("rmsnorm", "rmsnorm_late")
    assert leaf_of(OneRMSNorm(size)).kind == "rmsnorm_one"


def formula(kind, x, w, eps=1e-6):
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    return y if kind == "rmsnorm_bare" else y * ((1 + w.double()) if kind == "rmsnorm_one" else w.double())


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_may_be_off_by_a_few_units_and_not_by_forty(kind):
    x, w = draw(6, 8), draw(8, seed=1)
    leaf = Leaf(kind, NORMS[kind]())
    exact = formula(kind, x, w)
    assert share_outside(leaf, exact.float(), x, weight=w) == 0
    for off in (10, -10):
        assert share_outside(leaf, (exact * (1 + off * UNIT)).float(), x, weight=w) == 0, off
    for off in (40, -40):
        assert share_outside(leaf, (exact * (1 + off * UNIT)).float(), x, weight=w) == 1, off


@pytest.mark.parametrize("kind", NORMS)
def test_the_eps_of_the_definition_counts(kind):
    x, w = draw(6, 8) * 0.01, draw(8, seed=1)
    for eps, outside in ((1e-4, 0.0), (1.01e-4, 1.0)):
        got = formula(kind, x, w, eps).float()
        assert share_outside(Leaf(kind, NORMS[kind](eps=1e-4)), got, x, weight=w) == outside


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_that_rounds_twice_and_one_that_rounds_once_are_told_apart(dtype):
    x, w = draw(64, 32).to(dtype), draw(32, seed=1).to(dtype)
    inner = (x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(dtype)
    twice, once = (inner.double() * w.double()).to(dtype), formula("rmsnorm_late", x, w).to(dtype)
    early, late = Leaf("rmsnorm", RMSNorm(32)), Leaf("rmsnorm_late", LateRMSNorm(32))
    assert share_outside(early, twice, x, weight=w) == 0 == share_outside(late, once, x, weight=w)
    assert share_outside(early, once, x, weight=w) > 0.1 and share_outside(late, twice, x, weight=w) > 0.1


def test_the_result_may_have_a_wider_dtype_than_the_input():
    x, w = draw(4, 8).bfloat16(), draw(8, seed=1)
    inner = formula("rmsnorm_bare", x, w).bfloat16()
    got = (inner.double() * w.double()).float()
    assert share_outside(Leaf("rmsnorm", RMSNorm()), got, x, weight=w) == 0
    assert share_outside(Leaf("rmsnorm", RMSNorm()), got * (1 + 2.0**-12), x, weight=w) > 0.9


class TwoInputsRMSNorm(RMSNorm):
    def forward(self, x, gate=None):
        return super().forward(x)


class IntegerEpsRMSNorm(RMSNorm):
    def __init__(self):
        super().__init__(eps=1)


class FailingRMSNorm(RMSNorm):
    def forward(self, x):
        raise RuntimeError("not on this device")


class MissingRMSNorm(RMSNorm):
    def forward(self, x):
        return x * self.missing


class TextRMSNorm(RMSNorm):
    def forward(self, x):
        return x * "text"


class LateEpsRMSNorm(RMSNorm):
    def forward(self, x):
        return self.weight * (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)).to(x.dtype)


class FlatRMSNorm(RMSNorm):
    def forward(self, x):
        return super().forward(x).flatten()


@pytest.mark.parametrize(
    "kind", [TwoInputsRMSNorm, IntegerEpsRMSNorm, FailingRMSNorm, FlatRMSNorm, MissingRMSNorm, TextRMSNorm, LateEpsRMSNorm]
)
def test_a_norm_that_takes_more_or_fails_or_says_no_eps_is_looked_into(kind):
    assert leaf_of(kind()) is None


def test_a_norm_is_run_without_touching_the_random_stream_or_the_module():
    norm = RMSNorm()
    state, weight = torch.random.get_rng_state(), norm.weight
    assert leaf_of(norm).module is norm
    assert torch.equal(state, torch.random.get_rng_state()) and norm.weight is weight and weight.requires_grad


class Doubling(TorchFunctionMode):
    """A faulty device: every sum of squares is twice what it should be."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if getattr(func, "__name__", "") == "pow" else result


def test_a_norm_is_run_below_whatever_mode_is_active():
    with Doubling():
        assert leaf_of(RMSNorm()).kind == "rmsnorm"


@pytest.mark.parametrize("affine", [True, False])
def test_the_norm_of_torch_is_known_with_and_without_a_weight(affine):
    norm = nn.RMSNorm(16, eps=1e-5, elementwise_affine=affine)
    assert leaf_of(norm).kind == ("rmsnorm_late" if affine else "rmsnorm_bare")


# ---- layer norm


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_a_layer_norm_may_be_off_by_a_few_units(shift, bias):
    module, x = nn.LayerNorm(16, eps=1e-5, bias=bias), draw(6, 16) + shift
    weights = {"weight": draw(16, seed=1), "bias": draw(16, seed=2)}
    mean, spread = x.double().mean(-1, keepdim=True), x.double().var(-1, unbiased=False, keepdim=True).add(1e-5).sqrt()
    exact = (x.double() - mean) / spread * weights["weight"].double() + (weights["bias"].double() if bias else 0)
    leaf = leaf_of(module)
    assert leaf.kind == "layernorm" and share_outside(leaf, exact.float(), x, **weights) == 0
    size = (x.double().square().mean(-1, keepdim=True).sqrt() / spread) * weights["weight"].double().abs()
    assert share_outside(leaf, (exact + 6 * UNIT * size).float(), x, **weights) < 0.05
    assert share_outside(leaf, (exact + 1e-5).float(), x, **weights) > 0.8
    assert share_outside(leaf, (exact - 1e-5).float(), x, **weights) > 0.8


def test_a_channel_that_dominates_may_be_off_by_as_many_units_of_its_own():
    x = torch.full((3, 64), 0.01)
    x[:, 5] = torch.tensor([4.0, -7.0, 90.0])
    got = torch.nn.functional.layer_norm(x.double(), (64,))
    leaf = leaf_of(nn.LayerNorm(64, elementwise_affine=False))
    assert got[:, 5].abs().min() > 7 and share_outside(leaf, (got * (1 + 9 * UNIT)).float(), x) == 0
    assert allowed(leaf, x).outside((got * (1 + 30 * UNIT)).float())[:, 5].all()


def test_a_layer_norm_without_parameters_has_a_slack_of_its_own():
    module, x = nn.LayerNorm(16, elementwise_affine=False), draw(6, 16)
    got = torch.nn.functional.layer_norm(x.double(), (16,)).float()
    assert share_outside(leaf_of(module), got, x) == 0
    assert share_outside(leaf_of(module), got * (1 + 1e-5), x) > 0.5


# ---- products


def test_a_conv1d_is_a_linear_with_its_weight_transposed():
    class Conv1D(nn.Module):
        __module__ = "transformers.pytorch_utils"

        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(3))

    x, weight, bias = draw(5, 4), draw(4, 3, seed=1), draw(3, seed=2)
    leaf = leaf_of(Conv1D())
    assert leaf.kind == "conv1d"
    got = (x.double() @ weight.double() + bias.double()).float()
    assert share_outside(leaf, got, x, weight=weight, bias=bias) == 0
    assert share_outside(leaf, got + 1e-4, x, weight=weight, bias=bias) == 1


def test_a_product_without_its_bias_is_outside_and_one_that_has_none_asks_for_none():
    x, weight, bias = draw(5, 4), draw(3, 4, seed=1), torch.full((3,), 0.01)
    product = (x.double() @ weight.double().T).float()
    assert share_outside(leaf_of(nn.Linear(4, 3)), product, x, weight=weight, bias=bias) == 1
    assert share_outside(leaf_of(nn.Linear(4, 3, bias=False)), product, x, weight=weight) == 0


def test_factors_that_are_documented_as_rounded_are_allowed_to_be():
    x, weight = draw(5, 64), draw(3, 64, seed=1)
    got = (x.bfloat16().double() @ weight.bfloat16().double().T).float()
    leaf = leaf_of(nn.Linear(64, 3, bias=False))
    assert allowed(leaf, x, weight=weight).outside(got).double().mean() > 0.9
    assert not allowed(leaf, x, precision=Precision(2.0**-8), weight=weight).outside(got).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [11, 12])
def test_only_small_float32_weights_are_widened_and_kept(monkeypatch, dtype, limit):
    monkeypatch.setattr(leaf_modules, "WIDENED", limit)
    weight, x, widened = draw(3, 4, seed=1).to(dtype), draw(5, 4).to(dtype), []

    def wide(tensor):
        widened.append(tensor)
        return tensor.double()

    call = Call(None, (x,), {}, dtype, Precision(), wide)
    product = leaf_of(nn.Linear(4, 3, bias=False)).allowed(call, lambda name: weight)
    assert any(t is weight for t in widened) is (dtype == torch.float32 and limit == 12)
    assert not product.outside((x.double() @ weight.double().T).to(dtype)).any()


def test_a_linear_that_has_lost_its_weight_is_looked_into():
    module = nn.Linear(4, 3)
    module.weight = None
    assert leaf_of(module) is None


# ---- the rest


@pytest.mark.parametrize("args", [(None, 3), ("mode",), ()])
def test_the_input_is_the_first_tensor_however_it_is_given(args):
    x = draw(3, 4)
    kwargs = {"flag": True, "hidden": x, "other": x * 2}
    interval = allowed(leaf_of(nn.Identity()), x, args=args, kwargs=kwargs)
    assert not interval.outside(x).any() and interval.outside(x * 2).all()


def test_a_positional_input_comes_before_a_named_one():
    x = draw(3, 4)
    assert not allowed(leaf_of(nn.Identity()), x, args=(x,), kwargs={"other": x * 2}).outside(x).any()


@pytest.mark.parametrize(
    ("kind", "value"),
    [("silu", 1 / (1 + math.exp(-1.0))), ("gelu", 0.5 * (1 + math.erf(1 / math.sqrt(2)))),
     ("gelu_tanh", 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715)))],
)  # fmt: skip
def test_activations_are_their_formulas(kind, value):
    x = torch.tensor([1.0])
    leaf = Leaf(kind, nn.SiLU())
    assert not allowed(leaf, x).outside(torch.tensor([value])).any()
    assert allowed(leaf, x).outside(torch.tensor([value * (1 + 2e-5)])).all()


@pytest.mark.parametrize("module", [nn.Dropout(0.5), nn.Identity()])
def test_what_does_nothing_returns_every_bit(module):
    x = torch.tensor([1.0, -3.0])
    assert allowed(leaf_of(module), x).outside(torch.tensor([1.0, -3.0 * (1 + 2.0**-23)])).tolist() == [False, True]


def test_an_embedding_takes_the_rows_of_the_weight_it_is_given():
    table = draw(5, 3)
    interval = allowed(leaf_of(nn.Embedding(5, 3)), torch.tensor([[4, 0]]), weight=table, dtype=torch.float32)
    assert not interval.outside(table[[4, 0]][None]).any() and interval.outside(table[[0, 4]][None]).all()


@pytest.mark.parametrize("name", ["SiLUActivation", "GELUActivation", "GELUTanh"])
@pytest.mark.parametrize(("function", "leaf"), [("_gelu_python", False), ("fused", True)])
def test_an_activation_written_out_in_python_is_looked_into(name, function, leaf):
    module = type(name, (nn.Module,), {"__module__": "transformers.activations"})()
    module.act = function
    assert (leaf_of(module) is not None) is leaf


@pytest.mark.parametrize("name", ["Conv1D", "SiLUActivation", "GELUActivation", "GELUTanh"])
def test_a_module_of_somebody_s_own_is_not_known_by_its_name(name):
    module = type(name, (nn.Module,), {})()
    module.weight = nn.Parameter(torch.zeros(2, 2))
    assert leaf_of(module) is None


class PairRMSNorm(nn.Module):
    """Returns what it normalised too."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, x):
        return x, x


class PickyRMSNorm(PairRMSNorm):
    def forward(self, x):
        assert x.dim() == 3
        return x


class NumberRMSNorm(PairRMSNorm):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))


class BareRMSNorm(PairRMSNorm):
    def __init__(self):
        super().__init__()
        self.weight, self.normalized_shape = None, 4


@pytest.mark.parametrize("kind", [PairRMSNorm, PickyRMSNorm, NumberRMSNorm, BareRMSNorm])
def test_a_norm_of_somebody_s_own_that_cannot_be_tried_is_looked_into(kind):
    assert leaf_of(kind()) is None
