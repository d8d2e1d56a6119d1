"""What is put on a model: hooks where a clause acts, and nowhere else."""

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import PlanError


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


class Small(nn.Module):
    """Two layers and a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.lm_head = nn.Linear(4, 8)

    def forward(self, x, head=True):
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x) if head else x


@pytest.mark.parametrize("head", [True, False])
def test_a_head_that_nobody_called_in_passes_of_its_phase_is_named(head):
    model = Small()
    with st.inject(model, "gain:1@module.lm_head,phase=eval;gain:1@module.linear", allow_inert=True) as ledger:
        model(torch.ones(1, 4), head=head)
        assert ledger.sites[0].notes == [], "no pass of its phase yet"
        model.eval()(torch.ones(1, 4), head=head)
        note = "lm_head was never called: its product, if there was one, is not covered"
        assert ledger.sites[0].notes == ([] if head else [note]) and ledger.sites[1].notes == []
        model(torch.ones(1, 4))
        assert ledger.sites[0].notes == [], "once it is called there is nothing to say"


def test_what_is_no_model_or_cannot_be_hooked_is_refused():
    with pytest.raises(PlanError, match=r"^inject needs a torch\.nn\.Module, not dict$"):
        st.inject({}, "gain:1@module.linear")
    scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    for model, name in ((scripted, "0"), (scripted[0], "RecursiveScriptModule")):
        with pytest.raises(PlanError, match=f"^{name} is TorchScript, in which hooks do not fire; inject before scripting$"):
            st.inject(model, "gain:1@module.linear")
