"""Passes of a compiled model: each is fresh, counted once and off when the plan is off, whether or not the graph breaks."""

import pytest
import torch
from torch import nn

import shaketable as st

NOISE = "relative_gaussian:0.05@module.linear"
pytestmark = pytest.mark.usefixtures("fresh_graphs")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Stack(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.breaks, self.raises = breaks, [False]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
                if self.raises[0]:
                    raise ValueError("in the middle")
        return x


def model(**how):
    torch.manual_seed(0)
    return Stack(**how).eval()


def data():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("plan", ["mxfp4@module.linear,point=weight", "relative_gaussian:0.05@op.matmul"])
@torch.no_grad()
def test_a_clean_model_of_the_same_class_keeps_its_own_graph(plan):
    clean, faulty = model(), model()
    injection = st.inject(faulty, plan).enable()
    expected = clean(data())
    compiled = {net: torch.compile(net, backend="aot_eager") for net in (clean, faulty)}
    for _ in range(2):
        assert compiled[clean](data()).equal(expected)
        before = injection.fires
        assert not compiled[faulty](data()).allclose(expected)
        assert injection.fires == before + 4
    injection.close()


@torch.no_grad()
def test_passes_of_several_graphs_are_fresh_counted_switched_and_gone():
    net = model(breaks=True)
    call = torch.compile(net, backend="aot_eager")
    clean = call(data())
    injection = st.inject(net, NOISE, seed=1).enable()
    found = [call(data()) for _ in range(3)]
    assert all(not torch.equal(a, b) for i, a in enumerate([clean, *found]) for b in found[i:])
    assert injection.ledger.forward == 3 * 4
    assert injection.ledger.sites[0].magnitude == pytest.approx(0.05, rel=0.15)
    injection.set_magnitude(1e-3)
    assert (call(data()) - clean).norm() < 0.1 * (found[0] - clean).norm()
    with st.phase("rollout"):
        assert not torch.equal(call(data()), clean)
    assert {phase: n["forward"] for phase, n in injection.ledger.sites[0].by("phase").items()} == {"eval": 16, "rollout": 4}
    injection.disable()
    assert torch.equal(call(data()), clean)
    injection.close()
    assert torch.equal(call(data()), clean)


@torch.no_grad()
def test_a_pass_that_raises_between_its_graphs_does_not_spoil_the_next():
    net = model(breaks=True)
    injection = st.inject(net, NOISE).enable()
    call = torch.compile(net, backend="aot_eager")
    first = call(data())
    net.raises[0] = True
    with pytest.raises(ValueError, match="in the middle"):
        call(data())
    net.raises[0] = False
    before = injection.ledger.forward
    found = [call(data()) for _ in range(2)]
    assert injection.ledger.forward == before + 2 * 4
    assert not any(torch.equal(a, b) for a, b in zip([first, found[0]], [found[0], found[1]], strict=True))
    injection.close()
