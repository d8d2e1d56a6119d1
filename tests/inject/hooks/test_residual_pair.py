"""An engine's modules take hidden states and a residual, and their sum is what a fault acts on."""

import torch
from torch import nn

import shaketable as st


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
