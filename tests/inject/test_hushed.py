"""Norms that the operator mode does not look into on a card, tried on a CPU: only where nothing can be missed."""

import copy
import pickle

import pytest
import torch
from card_on_cpu import card
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import shaketable as st
from shaketable.inject import attached
from shaketable.inject.operators import Operators
from shaketable.inject.short.closed import is_closed, is_closed_function

__all__ = ["card"]
cat = torch.mm
ROTATION = modeling_llama.apply_rotary_pos_emb


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


def sign(x):
    return x @ x


def named(x):
    return x.unsqueeze(0).bmm(x)


def given(x, y=torch.mm):
    return y(x, x)


def hidden(x):
    return cat(x, x)


def below(x):
    return rotated(x) + named(x)


def inside(x):
    return (lambda y: y @ y)(x)


def loose(*x):
    return x[0] + x[1]


def round_and_round(x):
    return round_and_round(x)


def rotated(x):
    return torch.cat((-x, x), dim=-1) + x.unsqueeze(1)


def enclosed():
    product = torch.mm
    return lambda x: product(x, x)


OPEN = [sign, named, given, hidden, below, inside, loose, round_and_round, enclosed(), torch.mm, torch.cat, None, LlamaMLP]


@pytest.mark.parametrize("function", OPEN, ids=lambda function: getattr(function, "__name__", "none"))
def test_functions_that_could_hold_a_product_are_looked_into(function):
    assert not is_closed_function(function)


@pytest.mark.parametrize("function", [rotated, ROTATION, modeling_llama.rotate_half], ids=["ours", "whole", "half"])
def test_functions_of_arithmetic_are_closed(function):
    assert is_closed_function(function)


@pytest.fixture
def met(monkeypatch):
    """The functions that the mode is asked about."""
    functions, own = [], Operators.__torch_function__
    monkeypatch.setattr(Operators, "__torch_function__", lambda self, f, *rest: functions.append(f) or own(self, f, *rest))
    return functions


def test_rotations_are_not_looked_into_and_put_back(tiny_llama, as_on_a_card, met):
    first = st.inject(tiny_llama, "relative_gaussian:0.1@op.matmul", seed=1).enable()
    second = st.inject(tiny_llama, "gain:0.1@op.silu", seed=2)
    tiny_llama(torch.arange(8).view(1, 8))
    assert torch.Tensor.neg not in met
    second.enable()
    tiny_llama(torch.arange(8).view(1, 8))
    assert torch.Tensor.neg in met, "with two modes, both are asked"
    first.close(check=False)
    assert modeling_llama.apply_rotary_pos_emb is not ROTATION
    second.close(check=False)
    assert modeling_llama.apply_rotary_pos_emb is ROTATION


def test_what_somebody_else_put_there_stays(tiny_llama, as_on_a_card, monkeypatch):
    with st.inject(tiny_llama, "relative_gaussian:0.1@op.matmul", seed=1, allow_inert=True):
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)
    assert modeling_llama.apply_rotary_pos_emb is rotated


def test_a_second_plan_takes_what_it_finds(tiny_llama, as_on_a_card, monkeypatch):
    """Not what the first one had found there."""

    def other(q, k, cos, sin, unsqueeze_dim=1):
        return q + cos.unsqueeze(unsqueeze_dim), k + sin.unsqueeze(unsqueeze_dim)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    first = st.inject(tiny_llama, "relative_gaussian:0.1@op.matmul", seed=1).enable()
    modeling_llama.apply_rotary_pos_emb = other
    clean = other(*[torch.ones(1, 1, 2, 4)] * 2, *[torch.ones(1, 2, 4)] * 2)[0]
    second = st.inject(tiny_llama, "relative_gaussian:0.1@op.matmul", seed=2).enable()
    assert modeling_llama.apply_rotary_pos_emb is not other
    found = modeling_llama.apply_rotary_pos_emb(*[torch.ones(1, 1, 2, 4)] * 2, *[torch.ones(1, 2, 4)] * 2)[0]
    first.close(check=False)
    second.close(check=False)
    assert torch.equal(found, clean)
    assert modeling_llama.apply_rotary_pos_emb is other


def test_a_product_that_comes_later_is_met(tiny_llama, as_on_a_card, met, monkeypatch):
    """What a proven function calls by name can be exchanged under it."""
    half = modeling_llama.rotate_half
    with st.inject(tiny_llama, "relative_gaussian:0.1@op.matmul", seed=1) as ledger:
        tiny_llama(torch.arange(8).view(1, 8))
        before = ledger.forward
        monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: half(x) + 0 * (x @ x.mT @ x))
        tiny_llama(torch.arange(8).view(1, 8))
        layers = tiny_llama.config.num_hidden_layers
        assert ledger.forward - before == before + 4 * layers


def test_arguments_of_other_kinds_are_looked_into(as_on_a_card, met, tiny_llama):
    class Odd(torch.Tensor):
        pass

    x = torch.ones(1, 1, 4, 8)
    with st.inject(tiny_llama, "relative_gaussian:0.1@op.matmul", seed=1, allow_inert=True):
        for given in (x, x.as_subclass(Odd)):
            met.clear()
            modeling_llama.apply_rotary_pos_emb(given, x, x[0], x[0])
            assert (torch.cat in met) == (type(given) is Odd)


def test_linears_are_struck_without_the_mode(tiny_llama, card, as_on_a_card, met, monkeypatch):
    short = seen(tiny_llama, "relative_gaussian:0.1@op.matmul")
    assert card
    assert met.count(torch._C._nn.linear) == 1, "the head, which has a frame of its own"
    monkeypatch.setattr("shaketable.inject.short.keyed.on_card", lambda x: False)
    long = seen(tiny_llama, "relative_gaussian:0.1@op.matmul")
    assert torch._C._nn.linear in met
    assert all(torch.equal(a, b) for a, b in zip(short[0], long[0], strict=True))
    assert short[1] == long[1]
    assert {type(m) for m in tiny_llama.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
