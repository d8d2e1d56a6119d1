"""Norms that the operator mode does not look into on a card, tried on a CPU: only where nothing can be missed."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import shaketable as st
from shaketable.inject import attached
from shaketable.inject.operators import Operators
from shaketable.inject.short.hushed import is_closed


class Product(nn.Module):
    def forward(self, x):
        return x.float() @ x.float()


class Called(nn.Module):
    def forward(self, x):
        return (lambda y: y.pow(2))(x)


class Loose(nn.Module):
    def forward(self, x, mean=torch.mm):
        return mean(x, x)


class Deeper(nn.Module):
    def forward(self, x):
        return x.to(torch.float32).matmul(x)


class Elsewhere(nn.Module):
    def forward(self, x):
        return self.up(x)


@pytest.mark.parametrize("kind", [Product, Called, Loose, Deeper, Elsewhere, LlamaMLP, nn.Linear, nn.SiLU, nn.Module])
def test_whoever_could_hold_a_product_is_looked_into(kind):
    assert not is_closed(kind)


def test_a_norm_written_out_is_closed():
    assert is_closed(LlamaRMSNorm)


def norms(model):
    return [module for module in model.modules() if "RMSNorm" in type(module).__name__]


@pytest.fixture
def as_on_a_card(monkeypatch):
    monkeypatch.setattr(attached, "on_a_card", lambda module: True)


def seen(model, plan):
    """Loss, gradients and ledger of one step."""
    ids = torch.arange(32).view(2, 16)
    model.zero_grad()
    with st.inject(model, plan, seed=3) as ledger:
        loss = model(ids, labels=ids).loss
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())], (ledger.forward, ledger.backward)


@pytest.mark.parametrize("plan", ["op.matmul", "op.all", "op.matmul+rms_norm"])
def test_nothing_changes(tiny_llama, as_on_a_card, monkeypatch, plan):
    short = seen(tiny_llama, f"relative_gaussian:0.1@{plan}")
    monkeypatch.undo()
    long = seen(tiny_llama, f"relative_gaussian:0.1@{plan}")
    assert all(torch.equal(a, b) for a, b in zip(short[0], long[0], strict=True))
    assert short[1] == long[1]


def test_the_mode_is_back_afterwards_and_classes_too(tiny_llama, as_on_a_card):
    first = st.inject(tiny_llama, "relative_gaussian:0.1@op.matmul", seed=1).enable()
    norm = norms(tiny_llama)[0]
    assert type(norm) is not LlamaRMSNorm
    with pytest.raises(AttributeError):
        norm(None)
    assert torch.overrides._get_current_function_mode_stack() == [first._mode]
    second = st.inject(tiny_llama, "gain:0.1@module.rmsnorm,point=weight;gain:0.1@op.matmul", seed=2).enable()
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert type(twin) is LlamaRMSNorm
        assert not [name for name in vars(twin) if "shaketable" in name]
    first.close(check=False)
    second.close(check=False)
    assert {type(module) for module in norms(tiny_llama)} == {LlamaRMSNorm}
    assert not [name for module in norms(tiny_llama) for name in vars(module) if "shaketable" in name]


def test_the_mode_is_not_asked_inside(tiny_llama, as_on_a_card, monkeypatch):
    met, own = [], Operators.__torch_function__
    monkeypatch.setattr(Operators, "__torch_function__", lambda self, func, *rest: met.append(func) or own(self, func, *rest))
    with st.inject(tiny_llama, "relative_gaussian:0.1@op.matmul", seed=1):
        tiny_llama(torch.arange(8).view(1, 8))
    assert torch.rsqrt not in met
    assert torch._C._nn.linear in met
