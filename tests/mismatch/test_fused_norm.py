"""A norm that adds first: every order in which engines round is allowed, another eps is not."""

import pytest
import torch

from shaketable.capture.reference import Reference
from shaketable.models import load_model
from shaketable.numerics.decoder_operators import Definitions, OperatorCall

NAME = "model.layers.1.post_attention_layernorm"


@pytest.fixture(scope="module")
def model():
    return load_model("nano", dtype=torch.bfloat16)[0]


def as_vllm_writes_it(x, residual, weight, eps):
    total = x.float() + residual.float()
    return (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)).to(weight.dtype) * weight


def as_its_cpu_kernel_does_it(x, residual, weight, eps):
    total = x.float() + residual.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return (total.bfloat16().float() * scale * weight.float()).bfloat16()


def as_transformers_does_it(x, residual, weight, eps):
    total = (x + residual).float()
    return weight * (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)).bfloat16()


FORMULAS = [as_vllm_writes_it, as_its_cpu_kernel_does_it, as_transformers_does_it]


@pytest.mark.parametrize("formula", FORMULAS)
def test_each_order_of_rounding_is_allowed_and_another_eps_is_not(model, formula):
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(64, 128, generator=generator).mul(0.05).bfloat16() for _ in range(2))
    norm = model.get_submodule(NAME)
    weight, definitions = norm.weight.detach(), Definitions(model, Reference(model), "model.rotary_emb", torch.bfloat16)

    def outside(eps):
        call = OperatorCall(NAME, "rms_norm", 1, {"x": x, "residual": residual}, formula(x, residual, weight, eps))
        return int(definitions.allowed(call).outside(call.output).sum())

    assert outside(norm.variance_epsilon) == 0
    assert outside(100 * norm.variance_epsilon) > 4000
