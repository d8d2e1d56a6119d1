"""Plans inside torch.compile: in the graph, fresh at every call, changed live; what is off is in `test_off.py`."""

import pytest
import torch

import shaketable as st
from shaketable.inject import op
from tests import slow
from tests.tensors import ids
from tests.tensors import step_logits as step

PLANS = {
    "relative_gaussian:0.05@module.linear,direction=both": (14, 14),
    "relative_gaussian:0.05@module.rmsnorm,point=weight": (5, 0),
    "dead_zone:0.1,scope=token@layer.all": (2, 0),
    # 14 linears, 2 attentions, 2 SiLUs and 5 norms; gradients of 28, 6, 2 and 10 inputs
    "relative_gaussian:0.05@op.all": (23, 46),
}


def graphs():
    """Graphs since the counters were cleared."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("plan", [plan if "direction=both" in plan else slow(plan) for plan in PLANS])
def test_the_plan_is_in_the_graph_forward_and_backward(tinier_llama, fresh_graphs, plan):
    compiled = torch.compile(tinier_llama, backend="aot_eager", fullgraph=True)
    clean = step(compiled, tinier_llama)
    injection = st.inject(tinier_llama, plan)
    with injection as ledger:
        first = step(compiled, tinier_llama)
        assert (ledger.forward, ledger.backward) == PLANS[plan]
        made = graphs()
        second = step(compiled, tinier_llama)
        if "dead_zone" not in plan:
            assert not torch.equal(first, second), "fresh noise at every call"
        injection.set_magnitude(1e-4)
        assert (step(compiled, tinier_llama) - clean).abs().max() < (first - clean).abs().max()
        assert graphs() == made, "nothing was compiled again"
        injection.disable()
        assert torch.equal(step(compiled, tinier_llama), clean)
        assert ledger.forward == 3 * PLANS[plan][0], "nothing has fired"
        injection.enable()
        step(compiled, tinier_llama)
        assert (ledger.forward, ledger.backward) == tuple(4 * n for n in PLANS[plan])
        injection.set_magnitude(0)
        assert torch.equal(step(compiled, tinier_llama), clean)
        injection.set_magnitude(0.1)
        assert not torch.equal(step(compiled, tinier_llama), clean)
        assert graphs() == made + 1, "one graph more, for when it is off"
        assert not torch._dynamo.utils.counters["graph_break"]
    assert torch.equal(step(compiled, tinier_llama), clean)
    assert not torch.equal(first, clean)


def test_the_gradient_in_a_compiled_graph_is_the_fault_s_own(fresh_graphs):
    layer = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager")
    with st.inject(layer, "dead_zone:0.5@module.linear"):
        y = compiled(x)
        y.sum().backward()
    alive = (y != 0).float()
    assert torch.allclose(x.grad, alive @ layer.weight)
    x.grad = None
    with st.inject(layer, "relative_gaussian:0.5@module.linear", seed=1):
        y = compiled(x)
        y.sum().backward()
    factor = y / (x @ layer.weight.t())
    assert torch.allclose(x.grad, factor.detach() @ layer.weight, atol=1e-4)


def test_phases_are_read_at_run_time(tinier_llama, fresh_graphs):
    compiled = torch.compile(tinier_llama, backend="aot_eager")
    with torch.no_grad(), st.inject(tinier_llama, "gain:0.5@module.linear,phase=rollout") as ledger:
        clean = compiled(input_ids=ids()).logits
        with st.phase("rollout"):
            assert not torch.equal(compiled(input_ids=ids()).logits, clean)
        assert torch.equal(compiled(input_ids=ids()).logits, clean)
    assert set(ledger.sites[0].by("phase")) == {"rollout"}


@pytest.mark.parametrize("site", ["module.linear", "op.matmul"])
def test_activation_checkpointing_in_a_compiled_graph_sees_the_same_noise(tinier_llama, fresh_graphs, site, monkeypatch):
    blows = []
    apply = op.apply

    def watched(x, what):
        blows.append((what.recomputing, what.backward, what.tap.name, what.key, x.sum().item()))
        return apply(x, what)

    monkeypatch.setattr(op, "apply", watched)
    tinier_llama.train()
    tinier_llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    compiled = torch.compile(tinier_llama, backend="aot_eager")
    with st.inject(tinier_llama, f"relative_gaussian:0.2@{site},direction=forward", seed=1) as ledger:
        step(compiled, tinier_llama)
    assert ledger.forward == 14
    first = {b[2:] for b in blows if not b[0]}
    again = {b[2:] for b in blows if b[0]}
    assert len(first) == 14
    assert again, "something was recomputed"
    assert again <= first
