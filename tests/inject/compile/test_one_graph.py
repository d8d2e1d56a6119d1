"""A model that opens its frame in its own forward: a compiled pass is one graph, with few guards more than the clean one."""

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as entries
from torch._C._dynamo.guards import DictGuardManager

import shaketable as st
from shaketable.inject import attach
from shaketable.inject.compile import custom_ops
from shaketable.inject.device.table import DeviceTable
from shaketable.inject.fast import linear

pytest.importorskip("triton")
NOISE = "relative_gaussian:0.05@module.linear"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Stack(nn.Module):
    def __init__(self, layers=2, breaks=False):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.breaks, self.raises = breaks, [False]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
                if self.raises[0]:
                    raise ValueError("in the middle")
        return x


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(linear, "on_gpu", lambda module: True)
    monkeypatch.setattr(custom_ops, "on_gpu", lambda x: True)
    monkeypatch.setattr(attach, "reaches_gpu", lambda module: True)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(**how):
    torch.manual_seed(0)
    return Stack(**how).eval()


def tabled(net, plan=NOISE, **more):
    injection = st.inject(net, plan, **more).enable()
    injection.tables._add(DeviceTable(injection, torch.device("cpu"), injection.taps))
    return injection


def data():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Recorder:
    """A backend that keeps the operators of every graph, and runs it as it is."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, _):
        self.graphs.append([node for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    @property
    def names(self):
        return [[str(node.target).removeprefix("shaketable.") for node in nodes] for nodes in self.graphs]


def guards(net):
    """How many questions dynamo asks before it calls what it has compiled, and how many graphs that is."""
    torch._dynamo.reset()
    made = Recorder()
    torch.compile(net, backend=made)(data())
    (entry,) = entries(type(net).forward.__code__)
    return leaves(entry.guard_manager.root), len(made.graphs)


def leaves(manager):
    found = list(manager.get_child_managers())
    if isinstance(manager, DictGuardManager):
        found += [part for pair in manager.get_key_value_managers().values() for part in pair if part is not None]
    return len(manager.get_leaf_guards()) + sum(map(leaves, found))


@torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
@torch.no_grad()
def test_a_linear_costs_one_guard_and_a_layer_another():
    more = []
    for layers in (2, 6):
        net = model(layers=layers)
        clean, _ = guards(net)
        injection = tabled(net)
        shaken, frames = guards(net)
        injection.close()
        assert frames == 1
        more.append(shaken - clean)
    assert more[0] < 100
    assert more[1] - more[0] <= (6 - 2) * (2 + 1)


@torch.no_grad()
def test_python_is_called_when_there_is_something_to_compute():
    """New keys before the first hit and after its product; what the other layers read before the second layer's."""
    net, made = model(layers=3), Recorder()
    injection = tabled(net)
    torch.compile(net, backend=made, fullgraph=True)(data())
    (nodes,), (names,) = made.graphs, made.names
    products = [node for node in nodes if "linear" in str(node.target)]
    hit = [i for i, name in enumerate(names) if name.startswith("fused")]
    begin, fill, copy = names.index("begin"), names.index("fill"), names.index("copy_rows")
    assert nodes[fill].args[-1] is products[0]
    assert nodes[copy].args[-1] is products[2]
    assert begin < fill < hit[0] < hit[1] < copy < hit[2]
    assert names[-1] == "tell"
    injection.close()


@pytest.mark.parametrize("how", [{}, {"breaks": True}])
@torch.no_grad()
def test_it_is_fresh_live_counted_off_and_gone(how):
    net = model(**how)
    call = torch.compile(net, backend="aot_eager")
    clean = call(data())
    injection = tabled(net, seed=1)
    assert type(net) is not Stack
    assert not net._forward_pre_hooks
    assert not net._forward_hooks
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
    assert type(net) is Stack
    assert not [name for name in vars(net) if "shaketable" in name]
    assert torch.equal(call(data()), clean)


@torch.no_grad()
def test_the_noise_is_that_of_a_hooked_model(monkeypatch):
    def three():
        net = model(layers=3)
        injection = tabled(net, seed=5)
        call = torch.compile(net, backend="aot_eager")
        found = [call(data()) for _ in range(3)]
        injection.close()
        return found

    whole = three()
    monkeypatch.setattr(attach.Attached, "_is_fast_as_a_whole", False)
    assert all(torch.equal(a, b) for a, b in zip(whole, three(), strict=True))


@torch.no_grad()
def test_two_plans_are_in_one_graph():
    net, made = model(), Recorder()
    up, down = tabled(net, "relative_gaussian:0.05@module.up"), tabled(net, "absolute_gaussian:0.1@module.down")
    call = torch.compile(net, backend=made, fullgraph=True)
    call(data()), call(data())
    assert len(made.graphs) == 1
    assert (up.ledger.forward, down.ledger.forward) == (4, 4)
    up.close()
    call(data())
    assert (up.ledger.forward, down.ledger.forward) == (4, 6)
    down.close()
    assert type(net) is Stack


@torch.no_grad()
def test_a_pass_that_raises_between_its_graphs_does_not_spoil_the_next():
    net = model(breaks=True)
    injection = tabled(net)
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
    assert not custom_ops.traces[injection.handle].entries
    injection.close()


@pytest.mark.parametrize("whole", [False, True])
@torch._inductor.config.patch({"triton.cudagraphs": True})
@torch.no_grad()
def test_nothing_that_needs_python_is_in_a_graph_that_is_captured(whole):
    """Three graphs then, of which the one in the middle is the model; one where the user forbids others."""
    net, made = model(), Recorder()
    injection = tabled(net)
    call = torch.compile(net, backend=made, fullgraph=whole)
    found = [call(data()) for _ in range(3)]
    assert injection.ledger.forward == 3 * 4
    assert not torch.equal(found[0], found[1])
    assert len(made.graphs) == (1 if whole else 3)
    if not whole:
        assert set(made.names[0]) >= {"begin", "fill", "copy_rows"}
        assert not {"begin", "fill", "copy_rows", "tell"} & set(made.names[1])
        assert made.names[2] == ["tell"]
    injection.disable()
    made.graphs.clear()
    call(data())
    assert len(made.graphs) == 1, "the clean graph is not cut"
    injection.close()


@pytest.mark.parametrize(("mode", "graphs"), [("default", 1), ("reduce-overhead", 3)])
@torch.no_grad()
def test_a_mode_that_captures_is_known(mode, graphs):
    net = model()
    injection = tabled(net)
    torch._dynamo.utils.counters.clear()
    torch.compile(net, mode=mode)(data())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert injection.ledger.forward == 4
    injection.close()


def test_a_call_that_raises_leaves_no_frame():
    net = model()
    injection = tabled(net)
    with pytest.raises(RuntimeError):
        net(torch.ones(2, 7))
    assert not injection.calls.stack
    net(data())
    assert injection.ledger.forward == 4
    injection.close()


@torch.no_grad()
def test_a_real_model_is_shaken_in_one_graph_and_off_bit_for_bit(tinier_llama):
    net, ids = tinier_llama, torch.arange(32).view(2, 16)
    kind, call = type(net), torch.compile(net)
    clean, tokens = call(input_ids=ids).logits, net.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    injection = tabled(net)
    torch._dynamo.utils.counters.clear()
    found = [call(input_ids=ids).logits for _ in range(2)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not any(torch.equal(a, b) for a, b in zip([clean, found[0]], found, strict=True))
    assert injection.ledger.forward == 2 * 14
    net.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert injection.ledger.sites[0].by("phase")["rollout"]["forward"] == 2 * 14
    injection.disable()
    assert torch.equal(call(input_ids=ids).logits, clean)
    injection.close()
    assert type(net) is kind
    assert torch.equal(net.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0), tokens)
