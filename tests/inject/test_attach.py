"""What is put on a model: hooks where a clause acts, and nowhere else."""

import pytest
import torch
from torch import nn

import shaketable as st


@pytest.mark.parametrize(("family", "hooked"), [("matmul", False), ("rms_norm", True), ("all", True)])
def test_a_norm_is_hooked_only_by_a_plan_on_norms(tiny_llama, family, hooked):
    norm = tiny_llama.model.norm
    with st.inject(tiny_llama, f"gain:0.1@op.{family}", allow_inert=True):
        assert bool(norm._forward_hooks or norm._forward_pre_hooks) == hooked
    assert not norm._forward_hooks and not norm._forward_pre_hooks


class Adapted(nn.Module):
    """A product with a low-rank one beside it, as PEFT makes it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4)})

    def forward(self, x):
        return self.base(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize(("include", "fires"), [("", 1), (",include=lora", 3)])
def test_products_of_adapters_are_left_out_unless_they_are_asked_for(include, fires):
    model = nn.Sequential(Adapted())
    with st.inject(model, f"gain:0.1@op.matmul{include}") as ledger:
        model(torch.ones(2, 4))
    assert ledger.forward == fires
