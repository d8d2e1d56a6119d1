"""What is put on a model: hooks where a clause acts, and nowhere else."""

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import PlanError
from shaketable.inject.attach import Attached
from shaketable.inject.injection import Injection
from shaketable.plan import Plan


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


def attached(plan, model=None, owner=0, **options):
    injection = Injection(Plan.parse(plan), rank=0, allow_inert=True)
    return injection, Attached(injection, model or Small(), owner, **options)


@pytest.mark.parametrize(("owner", "number", "prefix"), [(0, None, ""), (2, None, "model2."), (2, 0, ""), (0, 3, "model3.")])
def test_the_spots_of_a_second_model_have_its_number_and_so_have_its_entries(owner, number, prefix):
    injection, found = attached("gain:1@module.linear;gain:1@layer.1,point=input", owner=owner, number=number)
    names = ["layers.0.0", "layers.1.0"]
    assert [tap.name for tap in injection.taps] == [f"{prefix}{n}" for n in (*names, "layers.1")]
    assert list(injection.sites[0].spots) == [f"{prefix}{n}" for n in names]
    assert list(injection.sites[1].spots) == [f"{prefix}layers.1:input"]
    base = (owner if number is None else number) << 16
    assert [(e.index, e.layer, e.owner) for e in found.entries.values()] == [
        (base + 1, 0, owner),
        (base + 2, 1, owner),
        (base + 3, 1, owner),
    ]


def test_clauses_without_a_match_are_an_error_unless_they_may_be_left_out():
    plan = "gain:1@module.none;gain:1@layer.7;gain:1@op.matmul,layers=9;gain:1@module.linear"
    with pytest.raises(st.NoMatchError, match=r"module\.none"):
        attached(plan)
    _, found = attached(plan, lenient=True)
    assert [line.partition(":")[0] for line in found.unmatched] == ["module.none", "layer.7", "op.matmul,layers=9"]
    assert len(found.points) == 2


def test_modules_of_another_model_are_not_hooked_again():
    model = Small()
    _, found = attached("gain:1@module.linear", model, skip={model.layers[0][0]})
    assert [module for module, _ in found.points.values()] == [model.layers[1][0]]


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
