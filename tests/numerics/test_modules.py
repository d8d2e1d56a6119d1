"""Modules that are one operator: real ones are inside of their definition, others are not leaves or outside."""

import math

import pytest
import torch
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.pytorch_utils import Conv1D

from shaketable.numerics.intervals import Precision
from shaketable.numerics.operators import Call, leaf_of
from tests.tensors import draw

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def filled(module, dtype):
    """Every parameter gets values, so that nothing is trivially right."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=10 + i))
    return module.to(dtype).eval()


def outside(module, got, *args):
    call = Call(None, args, {}, got.dtype, Precision())
    leaf = leaf_of(module)
    assert leaf is not None
    return leaf.allowed(call, lambda name: dict(module.named_parameters())[name].detach()).outside(got)


MODULES = {
    "Linear": lambda: nn.Linear(32, 24),
    "Linear without bias": lambda: nn.Linear(32, 24, bias=False),
    "Conv1D": lambda: Conv1D(24, 32),
    "LlamaRMSNorm": lambda: LlamaRMSNorm(32, eps=1e-5),
    "GemmaRMSNorm": lambda: GemmaRMSNorm(32, eps=1e-6),
    "LayerNorm": lambda: nn.LayerNorm(32),
    "LayerNorm without bias": lambda: nn.LayerNorm(32, bias=False),
    "LayerNorm without weight": lambda: nn.LayerNorm(32, elementwise_affine=False),
    "SiLU": nn.SiLU,
    "SiLUActivation": SiLUActivation,
    "GELUActivation": GELUActivation,
    "GELUTanh": GELUTanh,
    "Dropout": lambda: nn.Dropout(0.5),
    "Identity": nn.Identity,
}


def inputs(dtype):
    x = draw(2, 9, 32)
    x[0, 0] *= 40
    x[0, 1] *= 1e-3
    x[0, 2] += 5
    x[1, 3] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_what_the_module_returns_is_inside_and_a_wrong_value_is_not(name, dtype):
    module, x = filled(MODULES[name](), dtype), inputs(dtype)
    with torch.no_grad():
        got = module(x).clone()
    assert not outside(module, got, x).any()
    by = 1e-3 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    sized = got.abs() > 0.05
    assert outside(module, got * (1 + by), x)[sized].double().mean() > 0.9
    got[1, 4, 5] = math.nan
    assert outside(module, got, x).nonzero().tolist() == [[1, 4, 5]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (lambda: LlamaRMSNorm(32, eps=1e-5), lambda: LlamaRMSNorm(32, eps=2e-1)),
        (lambda: GemmaRMSNorm(32, eps=1e-6), lambda: LlamaRMSNorm(32, eps=1e-6)),
        (lambda: LlamaRMSNorm(32, eps=1e-6), lambda: GemmaRMSNorm(32, eps=1e-6)),
        (lambda: nn.LayerNorm(32, eps=1e-5), lambda: nn.LayerNorm(32, eps=2e-1)),
        (nn.SiLU, GELUActivation),
        (GELUActivation, nn.ReLU),
    ],
)
def test_another_eps_or_another_function_is_outside(right, wrong, dtype):
    x = draw(2, 9, 32).to(dtype)
    with torch.no_grad():
        got = filled(wrong(), dtype)(x)
    assert outside(filled(right(), dtype), got, x).double().mean() > 0.3


# ---- what is a leaf


class RMSNorm(nn.Module):
    """Has the name, and another formula."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + self.eps)


class GroupedRMSNorm(nn.Module):
    """A mean over groups of channels where it is given a size of them, as Qwen 4's, and over all where not."""

    def __init__(self, size, group=None, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.group, self.eps = group, eps

    def forward(self, x):
        y = x.float().unflatten(-1, (-1, self.group or x.shape[-1]))
        return (self.weight.float() * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)).type_as(x)


class TwiceRoundedRMSNorm(nn.Module):
    """Rounds the root to the dtype before it multiplies, as DeepSeek-V4's: in float32 nobody sees that."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


class LoraLinear(nn.Linear):
    """A Linear, and more."""

    def forward(self, x):
        return super().forward(x) + x.mean()


@pytest.mark.parametrize(
    "make",
    [
        lambda: RMSNorm(8), lambda: GroupedRMSNorm(8, 4), TwiceRoundedRMSNorm, lambda: LoraLinear(8, 8), NewGELUActivation, nn.ReLU,
        lambda: GELUActivation(use_gelu_python=True), lambda: nn.Sequential(nn.Linear(2, 2)),
    ],
)  # fmt: skip
def test_whatever_has_no_definition_is_looked_into(make):
    assert leaf_of(make()) is None


@pytest.mark.parametrize("make", [lambda: GroupedRMSNorm(8), lambda: GroupedRMSNorm(8, 8)])
def test_a_norm_is_known_by_what_it_does_however_it_is_built(make):
    first, second = GroupedRMSNorm(8, 4), make()
    assert leaf_of(first) is None and leaf_of(second).kind.startswith("rmsnorm"), "one of a class says nothing of another"


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kind", [Olmo2RMSNorm, GptOssRMSNorm, nn.RMSNorm])
def test_norms_that_round_once(kind, dtype):
    module, x = filled(kind(32, eps=1e-5), dtype), inputs(dtype)
    assert not outside(module, module(x).detach(), x).any()
