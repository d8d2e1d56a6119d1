"""An engine's modules take hidden states and a residual, and their sum is what a fault acts on."""

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.inject.injection import Injection
from shaketable.plan import Plan


def engine(kind):
    return type(kind.__name__, (kind,), {"__module__": "vllm.model_executor.models"})()


class Layer(nn.Module):
    """A decoder layer of an engine: it takes and returns a pair, and here something more."""

    def __init__(self):
        super().__init__()
        self.part = nn.Identity()

    def forward(self, positions, hidden_states, residual):
        self.seen = hidden_states, residual
        return hidden_states, residual, positions


class FusedNorm(nn.Module):
    """A norm that adds the residual first, and hands the sum on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward_native(self, x, residual=None):
        total = x if residual is None else x + residual
        normed = total / total.abs().max()
        return normed if residual is None else (normed, total)

    def forward(self, *args, **kwargs):
        return self.forward_native(*args, **kwargs)


H, R, POSITIONS = torch.full((1, 4), 2.0), torch.full((1, 4), 3.0), torch.arange(1)


def model_of(block):
    model = nn.Module()
    model.block = block
    model.forward = block.__call__
    return model


@pytest.mark.parametrize("call", ["positional", "by name"])
@pytest.mark.parametrize("point", ["input", "output"])
def test_a_layer_takes_or_returns_the_faulty_sum_and_whatever_else_it_returns_stays(point, call):
    model = model_of(block := engine(Layer))
    with st.inject(model, f"gain:1@module.block,point={point}") as ledger:
        found = block(POSITIONS, H, R) if call == "positional" else block(POSITIONS, hidden_states=H, residual=R)
    assert torch.equal(found[0], 2 * (H + R)) and torch.equal(found[1], torch.zeros_like(R)) and found[2] is POSITIONS
    taken = block.seen
    assert torch.equal(taken[0], 2 * (H + R) if point == "input" else H) and torch.equal(
        taken[1], 0 * R if point == "input" else R
    )
    assert ledger.forward == 1 and ledger.sites[0].magnitude == pytest.approx(1)


def test_a_layer_that_is_no_engines_returns_a_fault_on_its_first_value_alone():
    model = model_of(block := Layer())
    with st.inject(model, "gain:1@module.block"):
        found = block(POSITIONS, H, R)
    assert torch.equal(found[0], 2 * H) and torch.equal(found[1], R)


@pytest.mark.parametrize("order", ["before", "after"])
def test_noise_on_the_sum_comes_before_or_after_a_fault(order):
    """As in a sampler of vLLM: two injections on one layer, the plan hooked first; additive noise behind it leaves no zero."""
    model = nn.Module()
    model.layers = nn.ModuleList([engine(Layer), engine(Layer)])
    plan = Injection(Plan.parse("dead_zone:0.5,scope=token@layer.1"), allow_inert=True, sampler=True)
    plan.attach(model)
    plan.enable()
    aqn = st.AQN.load(f"constant:0.01,form=output,layers=1,unit=absolute,order={order}")
    with aqn.attach(model, 1, allow_inert=True, sampler=True, plan=plan):
        hidden, residual, _ = model.layers[1](POSITIONS, torch.randn(4, 8), torch.randn(4, 8))
    plan.close(check=False)
    assert bool((hidden + residual == 0).any()) == (order == "before")


@pytest.mark.parametrize("point", ["input", "output"])
def test_a_pair_passes_untouched_where_no_fault_acts(point):
    model = model_of(block := engine(Layer))
    with st.inject(model, f"gain:1@module.block,point={point},phase=rollout", allow_inert=True) as ledger:
        found = block(POSITIONS, H, R)
    assert found[0] is H and found[1] is R and ledger.forward == 0


def test_a_norm_reads_the_faulty_sum_and_hands_on_the_clean_one():
    model = model_of(norm := engine(FusedNorm))
    with st.inject(model, "bias:1@module.block,point=input") as ledger:
        x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        normed, stream = norm(x, R)
    faulty = x + R + (x + R).std(correction=0)
    assert torch.allclose(normed, faulty / faulty.max()) and torch.equal(stream, x + R) and ledger.forward == 1


def test_a_norm_without_a_residual_is_a_module_like_any_other():
    model = model_of(norm := engine(FusedNorm))
    with st.inject(model, "systematic_bias:1@module.block,point=input") as ledger:
        found = norm(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert torch.equal(found, torch.tensor([[2.0, 3.0, 4.0, 5.0]]) / 5) and ledger.forward == 1


def test_the_output_of_a_norm_is_what_it_normed_and_not_the_stream():
    model = model_of(norm := engine(FusedNorm))
    with st.inject(model, "gain:1@module.block,point=output") as ledger:
        normed, stream = norm(H, R)
    assert torch.equal(normed, 2 * torch.ones(1, 4)) and torch.equal(stream, H + R) and ledger.forward == 1


def test_two_clauses_act_on_the_sum_one_after_the_other():
    model = model_of(block := engine(Layer))
    with st.inject(model, "gain:1@module.block;systematic_bias:1@module.block") as ledger:
        found = block(POSITIONS, H, R)
    assert torch.equal(found[0], 2 * (H + R) + 1) and [site.forward for site in ledger.sites] == [1, 1]
