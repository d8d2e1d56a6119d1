"""CUDA graphs: a plan that is captured goes on living.

A graph is a recording: Python does not run when it is replayed. The noise must still be another one each time, the switch and the
magnitude must still act, and the ledger must count what the device did and not what Python saw. The model is called clean and under
the plan before it is captured, as everybody does who captures graphs, so that no kernel has to be made during a capture.
"""

import gc

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import PlanError
from tests.gpu.shaken_device import every_dtype, ids, needs_cuda

pytestmark = needs_cuda


class Block(nn.Module):
    """Four products, a norm and an activation."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.q_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.up_proj, self.down_proj = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.o_proj(self.q_proj(self.norm(x)))
        return x + self.down_proj(nn.functional.silu(self.up_proj(x)))


class Tower(nn.Module):
    """Three blocks. A Llama would do, but where it looks at its inputs while it is captured is not what is tested here."""

    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def tower():
    torch.manual_seed(0)
    return Tower().cuda().eval()


def inputs(rows=8, dtype=torch.float32):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to("cuda", dtype)


def warm(function, x):
    """Call on a side stream, as torch's documentation wants it before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function(x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def captured(model, x):
    """A graph of the model, and where its output appears."""
    with torch.no_grad():
        warm(model, x)
        gc.collect()  # a graph of an earlier test that is freed by chance during a capture spoils it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
    return graph, out


def replay(graph, out, times=1):
    """The output of each of several replays."""
    found = []
    for _ in range(times):
        graph.replay()
        torch.cuda.synchronize()
        found.append(out.clone())
    return found


def all_different(results):
    return all(not torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


PLANS = {
    "relative_gaussian:0.05@module.linear": 12,
    "relative_gaussian:0.05@module.linear,point=input": 12,
    "relative_gaussian:0.05@module.linear,point=weight": 12,
    "relative_gaussian:0.05@layer.all": 3,
    "relative_gaussian:0.05@op.matmul": 12,
    "relative_gaussian:0.05,sparsity=0.5@module.linear": 12,
    "absolute_gaussian:0.05@module.linear": 12,
}


@every_dtype
@pytest.mark.parametrize("plan", PLANS)
def test_replays_are_fresh_counted_and_can_be_switched_off(tower, plan, dtype):
    model, x = tower.to(dtype), inputs(dtype=dtype)
    quiet, expected = captured(model, x)
    (clean,) = replay(quiet, expected)
    injection = st.inject(model, plan, seed=1)
    with injection as ledger:
        graph, out = captured(model, x)
        torch.cuda.synchronize()
        before = ledger.forward
        assert all_different([clean, *replay(graph, out, 4)])
        assert ledger.forward == before + 4 * PLANS[plan]
        injection.disable()
        assert all(torch.equal(y, clean) for y in replay(graph, out, 2))
        assert ledger.forward == before + 4 * PLANS[plan], "what is off does not count"
        injection.enable()
        assert not torch.equal(replay(graph, out)[0], clean)
        assert ledger.forward == before + 5 * PLANS[plan]
    assert torch.equal(replay(graph, out)[0], clean), "a graph that outlives its plan is clean"


def test_noise_that_no_kernel_reads_from_the_board_is_refused(tower):
    x = inputs()
    with st.inject(tower, "spike:4,rate=0.2@module.linear", allow_inert=True):
        with pytest.raises(PlanError, match=r"spike on .* cannot be captured into a CUDA graph"):
            captured(tower, x)
        torch.cuda.synchronize()
        tower(x)


def test_a_capture_is_not_a_fire(tower):
    x = inputs()
    with torch.no_grad(), st.inject(tower, "relative_gaussian:0.05@module.linear") as ledger:
        warm(tower, x)
        before = ledger.forward
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tower(x)
        torch.cuda.synchronize()
        assert ledger.forward == before == 2 * 12


@pytest.mark.parametrize("site", ["module.linear", "op.matmul"])
def test_the_magnitude_acts_in_the_next_replay(site):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 512).cuda(), inputs(256)
    (clean,) = replay(*captured(layer, x))
    injection = st.inject(layer, f"relative_gaussian:0.05@{site}")
    with injection:
        graph, out = captured(layer, x)
        for magnitude in (0.05, 0.2, 0.01, 0.05):
            injection.set_magnitude(magnitude)
            ratio = replay(graph, out)[0].double() / clean.double() - 1
            assert ratio.square().mean().sqrt().item() == pytest.approx(magnitude, rel=0.05)
        injection.set_magnitude(0)
        assert torch.equal(replay(graph, out)[0], clean)
        injection.set_magnitude(0.05)
        assert not torch.equal(replay(graph, out)[0], clean)


def test_what_replays_did_is_measured():
    """All that was hit before the capture is forgotten, so that only replays can have been measured."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 512).cuda(), inputs(256)
    with st.inject(layer, "relative_gaussian:0.05@module.linear", allow_inert=True) as ledger:
        graph, out = captured(layer, x)
        torch.cuda.synchronize()
        ledger.clear()
        replay(graph, out, 8)
        site = ledger.to_dict()["sites"][0]
    assert site["forward"] == 8
    assert site["measured_magnitude"] == pytest.approx(0.05, rel=0.05)
    assert site["changed_fraction"] > 0.9


@pytest.mark.parametrize("plan", list(PLANS)[:5])
def test_the_same_seed_gives_the_same_replays(tower, plan):
    x = inputs()

    def replays(seed):
        with st.inject(tower, plan, seed=seed):
            return replay(*captured(tower, x), 3)

    first, again, other = replays(1), replays(1), replays(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all_different([first[0], other[0]])


@pytest.mark.parametrize("fault", ["dead_zone:0.1,scope=token", "mxfp4", "systematic_bias:0.1", "truncation:3"])
def test_a_steady_fault_is_the_same_in_every_replay(fault):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64).cuda(), inputs()
    (clean,) = replay(*captured(layer, x))
    with st.inject(layer, f"{fault}@module.linear,point=output"):
        first, second = replay(*captured(layer, x), 2)
    unit = nn.Identity()
    with st.inject(unit, f"{fault}@module.Identity,point=output"):
        expected = unit(clean)
    assert torch.equal(first, second)
    assert torch.equal(first, expected)
    assert not torch.equal(first, clean)


def test_two_graphs_of_one_model_do_not_share_their_noise(tower):
    small, large = inputs(8), inputs(24)
    cleans = [replay(*captured(tower, x))[0] for x in (small, large)]
    injection = st.inject(tower, "relative_gaussian:0.05@module.linear", seed=1)
    with injection as ledger:
        graphs = [captured(tower, x) for x in (small, large)]
        torch.cuda.synchronize()
        before, found = ledger.forward, ([], [])
        for which in (0, 1, 1, 0, 0, 1):
            found[which].extend(replay(*graphs[which]))
        assert all_different([cleans[0], *found[0]])
        assert all_different([cleans[1], *found[1]])
        assert ledger.forward == before + 6 * 12
        injection.disable()
        for graph, clean in zip(graphs, cleans, strict=True):
            assert torch.equal(replay(*graph)[0], clean)


def test_graphs_of_two_models_and_two_plans(tower):
    torch.manual_seed(1)
    other, x = Tower().cuda().eval(), inputs()
    (clean,) = replay(*captured(other, x))
    with st.inject(tower, "relative_gaussian:0.05@module.linear") as ledger:
        inner = st.inject(other, "gain:0.5@layer.1")
        with inner as second:
            graphs = [captured(tower, x), captured(other, x)]
            torch.cuda.synchronize()
            before = ledger.forward, second.forward
            assert all_different(replay(*graphs[0], 2))
            loud = replay(*graphs[1], 3)
            assert torch.equal(loud[0], loud[2]) and not torch.equal(loud[0], clean)
            assert (ledger.forward, second.forward) == (before[0] + 2 * 12, before[1] + 3)
            inner.disable()
            assert torch.equal(replay(*graphs[1])[0], clean)
            assert all_different(replay(*graphs[0], 2))


def test_two_plans_on_one_model(tower):
    x = inputs()
    (clean,) = replay(*captured(tower, x))
    outer, inner = st.inject(tower, "relative_gaussian:0.05@module.linear", seed=1), st.inject(tower, "gain:0.5@layer.1")
    with outer as first, inner as second:
        graph, out = captured(tower, x)
        torch.cuda.synchronize()
        before = first.forward, second.forward
        assert all_different([clean, *replay(graph, out, 3)])
        assert (first.forward, second.forward) == (before[0] + 3 * 12, before[1] + 3)
        outer.disable()
        loud = replay(graph, out, 2)
        assert torch.equal(*loud) and not torch.equal(loud[0], clean)
        inner.disable()
        assert torch.equal(replay(graph, out)[0], clean)


def test_replays_count_in_the_phase_of_their_capture(tower):
    x = inputs()
    with st.inject(tower, "relative_gaussian:0.05@module.linear,phase=rollout") as ledger:
        with st.phase("rollout"):
            graph, out = captured(tower, x)
        torch.cuda.synchronize()
        before = ledger.forward
        replay(graph, out, 3)
        assert ledger.forward == before + 3 * 12
        assert set(ledger.sites[0].by("phase")) == {"rollout"}
        quiet, expected = captured(tower, x)
        assert torch.equal(*replay(quiet, expected, 2)), "captured outside of its phase, a plan is not in the graph"


def test_a_model_that_moved_after_it_was_injected_is_captured():
    torch.manual_seed(0)
    model, x = Tower().eval(), inputs()
    with st.inject(model, "relative_gaussian:0.05@module.linear") as ledger:
        graph, out = captured(model.cuda(), x)
        torch.cuda.synchronize()
        before = ledger.forward
        assert all_different(replay(graph, out, 3))
        assert ledger.forward == before + 3 * 12


def test_eager_calls_between_replays_have_noise_of_their_own(tower):
    x = inputs()
    with torch.no_grad(), st.inject(tower, "relative_gaussian:0.05@module.linear", seed=1) as ledger:
        graph, out = captured(tower, x)
        torch.cuda.synchronize()
        before, found = ledger.forward, []
        for _ in range(3):
            found += replay(graph, out)
            found.append(tower(x))
        assert all_different(found)
        assert ledger.forward == before + 6 * 12


GRADIENTS = 36
"""Of twelve products: input, weight and bias of each."""


@pytest.mark.parametrize("plan", ["relative_gaussian:0.05@op.matmul", "relative_gaussian:0.05@module.linear"])
def test_a_training_step_is_captured_with_its_backward(tower, plan):
    model, x = tower.train(), inputs()

    def train(x):
        for p in model.parameters():
            p.grad = None
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def capture():
        warm(train, x)
        for p in model.parameters():
            p.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = model(x).square().mean()
            loss.backward()
        return graph, [loss, *(p.grad for p in model.parameters())]

    def again(graph, outs):
        graph.replay()
        torch.cuda.synchronize()
        return [out.detach().clone() for out in outs]

    clean = again(*capture())
    injection = st.inject(model, plan, seed=1)
    with injection as ledger:
        graph, outs = capture()
        torch.cuda.synchronize()
        before = ledger.forward, ledger.backward
        first, second = again(graph, outs), again(graph, outs)
        assert all(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
        forward, backward = ledger.forward - before[0], ledger.backward - before[1]
        assert forward == 2 * 12
        assert backward == (2 * GRADIENTS if "op" in plan else 0)
        injection.disable()
        assert all(torch.equal(a, b) for a, b in zip(again(graph, outs), clean, strict=True))


def test_a_llama_is_captured(tiny_llama):
    model, x = tiny_llama.cuda(), ids()

    def logits(x):
        return model(x, use_cache=False).logits

    (clean,) = replay(*captured(logits, x))
    injection = st.inject(model, "relative_gaussian:0.05@op.all", seed=1)
    with injection as ledger:
        graph, out = captured(logits, x)
        torch.cuda.synchronize()
        before = ledger.forward
        assert all_different([clean, *replay(graph, out, 3)])
        assert ledger.forward == before + 3 * 45
        injection.disable()
        assert torch.equal(replay(graph, out)[0], clean)
