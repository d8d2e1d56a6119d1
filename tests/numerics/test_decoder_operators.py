"""Operators between modules: every order in which engines round is allowed, a wrong one is not."""

import pytest
import torch

from shaketable.capture.reference import Reference
from shaketable.models import load_model
from shaketable.numerics.decoder_operators import Definitions, OperatorCall, log_softmax, log_softmax_call

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


def call(logits, ids, made):
    return log_softmax_call(logits, ids, made.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1))


@pytest.mark.parametrize("size", [64, 49_152])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_float32_is_inside_in_any_order_and_half_of_the_vocabulary_is_not(size, spread):
    logits = torch.randn(16, size, generator=torch.Generator().manual_seed(0)) * spread
    ids = list(range(16))
    terms = (logits - logits.amax(-1, keepdim=True)).exp()
    one_by_one = logits - logits.amax(-1, keepdim=True) - terms.cumsum(-1)[:, -1:].log()
    for made in (logits.log_softmax(-1), logits - logits.logsumexp(-1, keepdim=True), one_by_one):
        one = call(logits, ids, made)
        assert not bool(log_softmax(one).outside(one.output).any())
    half = call(logits, ids, logits - logits[:, : size // 2].logsumexp(-1, keepdim=True))
    assert bool(log_softmax(half).outside(half.output).any())
