"""Noise that inductor fuses, tried on a CPU with a board there: the same operators, written by inductor in C++."""

from unittest import mock

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.faults import Draw, gpu, make_fault
from shaketable.faults.gpu import dispatch
from shaketable.inject.compile import custom_ops
from shaketable.inject.compile import fused_noise as fused
from shaketable.inject.device.table import USES, DeviceTable
from shaketable.inject.fast import linear
from shaketable.inject.fault_operator import Application

pytest.importorskip("triton")
HOOKS_AND_MODEL = 3
"""Graphs of a module that is compiled itself: its hooks have graphs of their own."""
NOISE = "relative_gaussian:0.05@module.linear"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(32, 64), nn.Linear(32, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Stack(nn.Module):
    def __init__(self, times=1, breaks=False):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.times, self.breaks = times, breaks

    def forward(self, x):
        for layer in self.layers:
            if self.breaks:
                torch._dynamo.graph_break()
            for _ in range(self.times):
                x = layer(x)
        return x


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(linear, "on_gpu", lambda module: True)
    monkeypatch.setattr(custom_ops, "on_gpu", lambda x: True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def tabled(net, plan=NOISE, **more):
    injection = st.inject(net, plan, **more).enable()
    injection.tables._add(DeviceTable(injection, torch.device("cpu"), injection.taps))
    return injection


def test_the_counters_of_a_table_go_on():
    first, second = (tabled(model(), allow_inert=True) for _ in range(2))
    table = first.tables.first
    table.sums.copy_(torch.rand(table.sums.shape, dtype=torch.float64))
    second.go_on(first.counted())
    again = second.tables.first
    assert torch.equal(again.sums, table.sums)
    again.is_used = True
    assert second.ledger.forward == 0, "what another process had counted is not told again"
    again.sums[0, 0] += 3
    assert second.ledger.forward == 3
    for injection in (first, second):
        injection.close(check=False)


def model(**how):
    torch.manual_seed(0)
    return Stack(**how).eval()


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def row(key, scale, on=1):
    words = torch.tensor([key & 0xFFFFFFFF, key >> 32, 0, on]).to(torch.int32)
    words[2:3] = torch.tensor([scale]).view(torch.int32)
    return torch.stack([torch.zeros(4, dtype=torch.int32), words])


def data(n=16, dtype=torch.float32):
    return torch.randn(2, n, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(("relative", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.float16)])
@pytest.mark.parametrize("shape", [(3, 17, 40), (2, 5)])
def test_inductor_writes_the_noise_of_the_fault(relative, dtype, shape):
    """The same key is the same noise within rounding, whoever computes it; and what is told is what was done."""
    x = torch.randn(shape).to(dtype)
    draw, fault = Draw(12345), make_fault({"kind": "relative_gaussian" if relative else "absolute_gaussian", "magnitude": 0.1})
    table = row(draw.normal_key, 0.1)
    wanted = fault.apply(x, draw)
    written = torch.compile(
        lambda x, t: [2 * part for part in torch.ops.shaketable.fused(x, t, 1, relative, fused.EDITION)], fullgraph=True
    )
    for y, head in (
        torch.ops.shaketable.fused(x, table, 1, relative, fused.EDITION),
        [part / 2 for part in written(x, table)],
    ):
        torch.testing.assert_close(y, wanted)
        n = min(x.numel(), gpu.HEAD)
        assert torch.equal(head[0, :n], x.flatten()[:n].float())
        assert torch.equal(head[1, :n], y.flatten()[:n].float())
        assert head[:, n:].isnan().all()
    off = torch.full((4,), 7, dtype=torch.int32)
    off[3] = 0
    assert torch.equal(written(x, torch.stack([off, off]))[0] / 2, x)


def test_inductor_computes_what_is_told_in_one_kernel_per_layer():
    x = torch.randn(6, 32)

    def both(x, table):
        hit = [torch.ops.shaketable.fused(x + i, table, 1, True, fused.EDITION) for i in range(3)]
        return sum(y for y, _ in hit), torch.ops.shaketable.together([head for _, head in hit])

    for a, b in zip(torch.compile(both)(x, row(5, 0.1)), both(x, row(5, 0.1)), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("dynamic", [None, True])
@torch.no_grad()
def test_a_compiled_pass_is_fresh_live_counted_and_off(dynamic):
    """As a function that calls the model, all in one graph; and as the model itself, of any length."""
    net = model()
    call = torch.compile(net if dynamic else lambda x: net(x), fullgraph=True, dynamic=dynamic)
    clean = call(data())
    injection = tabled(net, seed=1)
    before = graphs()
    found = [call(data()) for _ in range(3)]
    made = graphs()
    assert made - before == (HOOKS_AND_MODEL if dynamic else 1)
    assert all(not torch.equal(a, b) for i, a in enumerate([clean, *found]) for b in found[i:])
    assert injection.ledger.forward == 3 * 6
    assert injection.ledger.to_dict()["sites"][0]["measured_magnitude"] == pytest.approx(0.05, rel=0.05)
    injection.set_magnitude(1e-3)
    assert (call(data()) - clean).norm() < 0.1 * (found[0] - clean).norm()
    assert graphs() == made, "nothing was compiled again"
    injection.disable()
    assert torch.equal(call(data()), clean)
    injection.enable()
    injection.set_magnitude(0)
    assert torch.equal(call(data()), clean)
    injection.set_magnitude(1e-3)
    with st.phase("rollout"):
        assert not torch.equal(call(data()), clean)
    phases = {phase: n["forward"] for phase, n in injection.ledger.sites[0].by("phase").items()}
    assert phases == {"eval": 4 * 6, "rollout": 6}
    if dynamic:
        assert call(data(9)).shape == (2, 9, 32)
        assert injection.ledger.forward == 6 * 6
    assert graphs() == made + 1, "one graph more, for when it is off"
    assert not torch._dynamo.utils.counters["graph_break"]
    injection.close()
    assert torch.equal(call(data()), clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_off_is_bit_identical_in_a_real_model(tinier_llama, dtype):
    """Inductor keeps sums of a smaller type in float32 inside of a kernel; where it cuts must not depend on us."""
    net, ids = tinier_llama.to(dtype), torch.arange(32).view(2, 16)
    call = torch.compile(net)
    clean = call(input_ids=ids).logits
    injection = tabled(net, NOISE)
    assert not torch.equal(call(input_ids=ids).logits, clean)
    assert injection.ledger.forward == 14
    injection.disable()
    assert torch.equal(call(input_ids=ids).logits, clean)
    injection.enable()
    injection.set_magnitude(0)
    assert torch.equal(call(input_ids=ids).logits, clean)
    injection.close()


def shaken(plan=NOISE, backend="aot_eager", seed=1, **how):
    """Three compiled passes, and the plan's ledger."""
    net = model(**how)
    call, before = torch.compile(net, backend=backend), graphs()
    injection = tabled(net, plan, seed=seed)
    with torch.no_grad():
        found = [call(data()) for _ in range(3)]
    assert (graphs() - before > HOOKS_AND_MODEL) == how.get("breaks", False)
    made = fused.passes[injection.handle]
    assert not made.copies + made.heads + made.loose + list(made.marks)
    assert not made.is_due
    injection.close()
    assert injection.handle not in fused.passes
    return found, injection.ledger


def test_it_is_keyed():
    first, again, other = (shaken(seed=seed)[0] for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a in first for b in other)


@pytest.mark.parametrize("n", [100, 5000])
def test_it_is_the_noise_and_the_proof_of_a_kernel_per_linear(n):
    """Both read the same row of the same board, and tell the same."""
    injection = tabled(model(), seed=3, allow_inert=True)
    table, tap = injection.tables.all[0], injection.taps[4]
    current = injection.begin_pass(injection.models[0].entries[id(injection.models[0].model)], "eval")
    row, x = table.row(Application(tap, current, False, 0, 0)), torch.randn(n)
    with mock.patch.object(dispatch, "fits", return_value=True):
        alone = gpu.noise(x, 0.0, 0, relative=True, live=row)
    by_kernel = table.sums[row.place].clone()
    written, head = torch.ops.shaketable.fused(x, row.rows, row.row, True, fused.EDITION)
    torch.testing.assert_close(written, alone)
    table.sums.zero_()
    torch.ops.shaketable.tell(table.sums, row.rows, [head[None]], f"{row.row} {row.place} 0 ")
    by_pass = table.sums[row.place]
    assert torch.equal(by_pass[:5], by_kernel[:5])
    assert by_pass[6:10].tolist() == [min(n, gpu.HEAD)] * 4
    assert by_pass[11] == pytest.approx(0.05, rel=0.15)
    assert table.sums.sum() == by_pass.sum(), "nobody else is told of"
    error = (alone - x).double()[: gpu.HEAD]
    size = x.double()[: gpu.HEAD].square().sum()
    assert by_pass[5].item() == pytest.approx((error.square().sum() / size).item(), rel=1e-4)
    injection.close()


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(32, 32)

    def forward(self, x):
        return self.one(x), self.one(x)


@torch.no_grad()
def test_every_call_of_a_module_has_its_own_noise_and_is_counted():
    injection = tabled(Twice())
    a, b = torch.compile(injection.models[0].model, backend="aot_eager")(data())
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=1, atol=1e-6)
    assert injection.ledger.forward == 2
    injection.close()
    _, ledger = shaken(times=USES)
    assert ledger.forward == 3 * 6 * USES
    _, ledger = shaken(times=USES + 1)
    assert ledger.forward == 3 * 6 * (USES + 1)


def test_a_broken_graph_is_counted_too():
    broken, ledger = shaken(breaks=True)
    assert ledger.forward == 3 * 6
    for a, b in zip(broken, shaken()[0], strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_two_plans_at_once():
    net = model()
    call = torch.compile(net, backend="aot_eager", fullgraph=True)
    clean = call(data())
    up = tabled(net, "relative_gaussian:0.05@module.up", seed=1)
    down = tabled(net, "relative_gaussian:0.01@module.down;absolute_gaussian:0.2@module.gate", seed=2)
    call(data()), call(data())
    assert (up.ledger.forward, [site.forward for site in down.ledger.sites]) == (4, [4, 4])
    found = [site.magnitude for site in (*up.ledger.sites, *down.ledger.sites)]
    assert found == pytest.approx([0.05, 0.01, 0.2], rel=0.06)
    up.disable()
    assert not torch.equal(call(data()), clean)
    assert (up.ledger.forward, [site.forward for site in down.ledger.sites]) == (4, [6, 6])
    down.disable()
    assert torch.equal(call(data()), clean)
    up.enable()
    assert not torch.equal(call(data()), clean)
    assert (up.ledger.forward, [site.forward for site in down.ledger.sites]) == (6, [6, 6])
    up.close()
    down.close()


@pytest.mark.parametrize("whole", [True, False])
@torch.no_grad()
def test_nothing_of_a_board_is_in_a_graph_that_is_traced_when_off(whole):
    """Neither its clock nor its tables; as a function that calls the model, and as the model, whose hooks are graphs of their own."""
    net, made = model(), []

    def record(graph, _):
        made.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    call = torch.compile((lambda x: net(x)) if whole else net, backend=record)
    clean = call(data())
    injection = tabled(net, seed=1).disable()
    assert torch.equal(call(data()), clean)
    assert made == [made[0]] * 2
    injection.enable()
    assert not torch.equal(call(data()), call(data())), "traced off before, it is alive"
    assert injection.ledger.forward == 2 * 6
    fires, count = injection.fires, len(made)
    injection.disable()
    assert torch.equal(call(data()), clean)
    assert (injection.fires, len(made)) == (fires, count)
    injection.close()
