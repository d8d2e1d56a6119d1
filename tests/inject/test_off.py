"""A graph that is traced while a plan is off is the clean one; dynamo keeps both, and one guard chooses."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.node import map_arg

import shaketable as st
from shaketable.inject.injection import Injection
from shaketable.plan import Plan
from tests import slow
from tests.tensors import same, step_logits

pytestmark = pytest.mark.usefixtures("fresh_graphs")
PLANS = [
    "relative_gaussian:0.05@module.linear,direction=both",
    "relative_gaussian:0.05@module.rmsnorm,point=weight",
    "relative_gaussian:0.05@op.matmul;dead_zone:0.1@module.rmsnorm",
]


class Recorder:
    """A backend that keeps what a compiler is given, forward and backward, and runs it as it is."""

    def __init__(self):
        self.graphs = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, module, _):
        self.graphs.append(written(module.graph))
        return make_boxed_func(module.forward)

    def ours(self):
        return [any("shaketable" in line for line in lines) for lines in self.graphs]


def written(graph):
    """The operators of a graph on what they are called; what it is given is numbered when it is used, whatever its name."""
    numbers = {}

    def number(node):
        return f"%{numbers.setdefault(node, len(numbers))}"

    calls = [node for node in graph.nodes if node.op != "placeholder"]
    return [f"{number(n)} = {n.op} {n.target} {map_arg((n.args, n.kwargs), number)}, {n.meta.get('val')}" for n in calls]


def step(function, model):
    return [step_logits(function, model), *(p.grad.clone() for p in model.parameters())]


class Tower(nn.Module):
    def __init__(self, floors=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(floors))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


NOISE = "relative_gaussian:0.1@module.linear"


def tower(**how):
    torch.manual_seed(0)
    return Tower(**how), torch.randn(4, 8)


@pytest.mark.parametrize("plan", [PLANS[0], *map(slow, PLANS[1:])])
def test_the_graph_of_a_plan_that_is_off_is_the_clean_graph(tinier_llama, plan):
    record = Recorder()
    compiled = torch.compile(tinier_llama, backend=record.backend)
    clean = step(compiled, tinier_llama)
    injection = st.inject(tinier_llama, plan, allow_inert=True).enable().disable()
    assert same(step(compiled, tinier_llama), clean), "traced for the first time when it is off"
    forward, backward = record.graphs[:2]
    assert record.graphs == [forward, backward] * 2
    assert not any(record.ours())
    injection.enable()
    assert not same(step(compiled, tinier_llama), clean)
    assert any(record.ours()[4:])
    injection.set_magnitude(0)
    assert same(step(compiled, tinier_llama), clean)
    injection.set_magnitude(0.01)
    assert not same(step(compiled, tinier_llama), clean)
    assert len(record.graphs) == 6, "there are two of each, and no more"
    injection.close()
    assert same(step(compiled, tinier_llama), clean)
    assert record.graphs[6:] == [forward, backward]


def test_nothing_but_the_switch_makes_another_graph():
    net, x = tower()
    record = Recorder()
    compiled = torch.compile(net, backend=record.backend)
    injection = st.inject(net, f"{NOISE},phase=rollout").enable()
    for magnitude in (0.1, 1e-3, 2.0):
        injection.set_magnitude(magnitude)
        injection.step += 1
        compiled(x)
        with st.phase("rollout"):
            compiled(x)
    other = st.inject(tower()[0], NOISE)
    compiled(x)
    del other
    compiled(x)
    assert record.ours() == [True]
    injection.close()


def test_taps_are_in_a_graph_that_is_traced_once():
    """As engines do it: traced while the plan is quiet, without guards, and never again."""
    net, x = tower()
    record = Recorder()
    injection = Injection(Plan.parse(NOISE), sampler=True)
    injection.attach(net)
    injection.models[0].hook()
    compiled = torch.compile(net, backend=record.backend, options={"guard_filter_fn": lambda guards: [False] * len(guards)})
    clean = compiled(x)
    assert torch.equal(clean, net(x))
    injection.enable()
    assert not torch.equal(compiled(x), clean)
    injection.set_magnitude(0)
    assert torch.equal(compiled(x), clean)
    assert record.ours() == [True]
    assert injection.ledger.forward == 3
    injection.close(check=False)
