"""An engine's modules take hidden states and a residual, and their sum is what a fault acts on."""

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.inject.injection import Injection
from shaketable.plan import Plan


class Block(nn.Module):
    """As vLLM's decoder layers are called."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, hidden_states, residual):
        return hidden_states, residual


def test_a_fault_acts_on_the_sum_of_both():
    engine = type("Block", (Block,), {"__module__": "vllm.model_executor.models"})
    hidden, residual = torch.ones(2, 4), torch.full((2, 4), 3.0)
    for kind, total in ((Block, 2 * 1.0 + 3.0), (engine, 2 * (1.0 + 3.0))):
        model = nn.ModuleDict({"block": kind()})
        with st.inject(model, "gain:1@module.block") as ledger:
            found = model["block"](hidden, residual)
        assert torch.equal(sum(found), torch.full((2, 4), total)) and ledger.forward == 1


@pytest.mark.parametrize("order", ["before", "after"])
def test_noise_on_the_sum_comes_before_or_after_a_fault(order):
    """As in a sampler of vLLM: two injections on one layer, the plan hooked first; additive noise behind it leaves no zero."""
    engine = type("Block", (Block,), {"__module__": "vllm.model_executor.models"})
    model = nn.Module()
    model.layers = nn.ModuleList([engine(), engine()])
    plan = Injection(Plan.parse("dead_zone:0.5,scope=token@layer.1"), allow_inert=True, sampler=True)
    plan.attach(model)
    plan.enable()
    aqn = st.AQN.load(f"constant:0.01,form=output,layers=1,unit=absolute,order={order}")
    with aqn.attach(model, 1, allow_inert=True, sampler=True, plan=plan):
        found = sum(model.layers[1](torch.randn(4, 8), torch.randn(4, 8)))
    plan.close(check=False)
    assert bool((found == 0).any()) == (order == "before")
