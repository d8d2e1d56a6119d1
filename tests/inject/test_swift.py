"""The short way of linears and layers on a card, tried on a CPU: what it changes about modules, and that it changes no noise.

The kernels themselves are on the card (tests/gpu); here every strike takes the ordinary way in the end, from the subclass.
"""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shaketable as st
from shaketable.inject import attached
from shaketable.inject.short import swift

NOISE = "relative_gaussian:0.1@module.linear"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, scale=1.0):
        return x + scale * self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self, again=None):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.again = again

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.again is None else checkpoint(layer, x, use_reentrant=self.again)
        return x


@pytest.fixture
def as_on_a_card(monkeypatch):
    monkeypatch.setattr(swift, "on_a_card", lambda module: True)
    monkeypatch.setattr(attached.Attached, "_is_short", lambda self, part, entry, tapped: part.module in self.anatomy.layers)


def model(again=None):
    torch.manual_seed(0)
    return Stack(again)


def shaken(net, plan=NOISE):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with st.inject(net, plan, seed=3) as ledger:
        found = [net(x) for _ in range(2)]
        sum(y.square().sum() for y in found).backward()
        with torch.no_grad():
            found.append(net(x))
    return [y.detach() for y in found] + [p.grad for p in net.parameters()], ledger


@pytest.mark.parametrize("again", [None, True, False])
def test_the_noise_is_that_of_hooks(again, as_on_a_card, monkeypatch):
    short, ledger = shaken(model(again))
    monkeypatch.undo()
    hooked, other = shaken(model(again))
    assert all(torch.equal(a, b) for a, b in zip(short, hooked, strict=True))
    assert ledger.forward == other.forward == 3 * 6
    assert ledger.to_dict()["sites"][0]["recomputed"] == other.to_dict()["sites"][0]["recomputed"]


def test_modules_look_the_same_and_get_their_classes_back(as_on_a_card):
    net = model()
    linear, layer = net.layers[0].up, net.layers[0]
    clean = net(torch.ones(2, 8))
    injection = st.inject(net, NOISE).enable()
    assert type(linear) is not nn.Linear
    assert isinstance(linear, nn.Linear)
    assert type(layer) is not Block
    assert (type(linear).__name__, type(layer).__qualname__) == ("Linear", "Block")
    assert inspect.signature(layer.forward) == inspect.signature(Block().forward)
    assert not linear._forward_hooks
    assert not layer._forward_hooks
    assert not torch.equal(net(torch.ones(2, 8)), clean)
    injection.disable()
    assert torch.equal(net(torch.ones(2, 8)), clean)
    injection.close(check=False)
    assert (type(linear), type(layer)) == (nn.Linear, Block)
    assert not [name for name in (*vars(linear), *vars(layer)) if "shaketable" in name]
    assert torch.equal(net(torch.ones(2, 8)), clean)


def test_copies_are_clean(as_on_a_card):
    net = model()
    clean = net(torch.ones(2, 8))
    with st.inject(net, NOISE, allow_inert=True):
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert (type(twin.layers[0].up), type(twin.layers[0])) == (nn.Linear, Block)
            assert torch.equal(twin(torch.ones(2, 8)), clean)


def test_two_plans_and_one_on_the_weights_of_the_same_linears(as_on_a_card):
    net = model()
    clean = net(torch.ones(2, 8))
    first = st.inject(net, NOISE, seed=1).enable()
    second = st.inject(net, f"{NOISE};gain:0.1@module.linear,point=weight", seed=2).enable()
    assert not torch.equal(net(torch.ones(2, 8)), clean)
    assert (first.ledger.forward, [site.forward for site in second.ledger.sites]) == (6, [6, 6])
    first.close()
    net(torch.ones(2, 8))
    assert [site.forward for site in second.ledger.sites] == [12, 12]
    second.close()
    assert all(type(layer.up) is nn.Linear for layer in net.layers)
    assert torch.equal(net(torch.ones(2, 8)), clean)


def test_a_forward_of_its_own_is_hooked(as_on_a_card):
    """accelerate's device_map puts a forward into the module, which does not ask the class any more."""
    net = model()
    linear = net.layers[0].up
    own = linear.forward
    linear.forward = lambda x: own(x)
    with st.inject(net, NOISE) as ledger:
        net(torch.ones(2, 8))
    assert ledger.forward == 6


def test_a_layer_that_raises_leaves_no_frame(as_on_a_card):
    net = model()
    with st.inject(net, NOISE, allow_inert=True) as ledger:
        with pytest.raises(RuntimeError):
            net(torch.ones(2, 7))
        net(torch.ones(2, 8))
    assert ledger.forward == 6
