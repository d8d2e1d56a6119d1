"""Bugs that users met, each through the public API."""

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import PlanError

X = torch.linspace(-2, 2, 8).view(2, 4)


class InPlace(nn.Module):
    """Uses an activation for what it does to its input, not for what it returns."""

    def __init__(self):
        super().__init__()
        self.proj, self.act = nn.Linear(4, 4), nn.SiLU(inplace=True)

    def forward(self, x):
        h = self.proj(x)
        self.act(h)
        return h


@pytest.mark.parametrize(("direction", "grad"), [("forward", False), ("backward", True), ("both", True)])
def test_an_activation_in_place_is_left_alone_when_off_and_hit_in_place_when_on(direction, grad):
    model = InPlace()
    with torch.set_grad_enabled(grad):
        clean = model(X).detach()
        injection = st.inject(model, f"gain:1@op.silu,direction={direction}", allow_inert=True).enable()
        on = model(X)
        assert torch.allclose(on, clean if direction == "backward" else 2 * clean)
        if grad:
            on.sum().backward()
            assert injection.ledger.backward == (direction != "forward")
        injection.disable()
        assert torch.equal(model(X), clean)
        injection.enable().set_magnitude(0)
        assert torch.equal(model(X), clean)
        injection.close()


@pytest.mark.parametrize("clause", [1, 7])
def test_a_clause_that_is_not_there_or_has_no_magnitude_cannot_be_set(clause):
    injection = st.inject(nn.Linear(4, 4), "gain:1@module.linear;mxfp4@module.linear", allow_inert=True)
    with pytest.raises(PlanError, match=f"no clause {clause} with a magnitude"):
        injection.set_magnitude(0.1, clause=clause)


@pytest.mark.parametrize(
    ("plan", "magnitude", "message"),
    [
        ("mxfp4@module.linear", 0.1, "no clause with a magnitude in mxfp4"),
        ("gain:1@module.linear;bit_flip:0.1@module.linear", 2, "Input should be less than or equal to 1"),
    ],
)
def test_a_magnitude_that_cannot_be_set_changes_nothing(plan, magnitude, message):
    injection = st.inject(nn.Linear(4, 4), plan, allow_inert=True)
    before = list(injection.faults)
    with pytest.raises(PlanError, match=message):
        injection.set_magnitude(magnitude)
    assert injection.faults == before


def test_a_model_with_an_open_injection_is_named_when_it_is_injected_again():
    model = nn.Linear(4, 4)
    first = st.inject(model, "gain:1@module.linear").enable()
    with pytest.warns(RuntimeWarning, match=r"already has an open injection \(gain:1@module.linear\).*close\(\)"):
        second = st.inject(model, "gain:2@module.linear").enable()
    model(X)
    first.close(), second.close()
    st.inject(model, "gain:1@module.linear", allow_inert=True)


def test_the_ledger_names_a_magnitude_that_was_set_beside_the_one_of_the_plan():
    model = nn.Linear(4, 4)
    injection = st.inject(model, "gain:1@module.linear").enable()
    model(X), model(X)
    assert "now" not in str(injection.ledger)
    injection.set_magnitude(0.25)
    assert "gain:1, now 0.25" in str(injection.ledger) and "gain:1, now 0.25" in injection.ledger.sites[0].summary()
    assert "asked for 0.25, measured 1: the magnitude was changed in between" in str(injection.ledger)
    injection.close()


@pytest.mark.parametrize(
    "environments",
    [
        [{"SLURM_PROCID": "0", "LOCAL_RANK": "0"}, {"SLURM_PROCID": "0", "LOCAL_RANK": "1"}],
        [{"SLURM_PROCID": "1", "SHAKETABLE_PLACE": "5:Sampler#1"}, {"SLURM_PROCID": "1", "SHAKETABLE_PLACE": "6:Sampler#2"}],
    ],
    ids=["one slurm task", "ray under slurm"],
)
def test_ranks_of_a_launcher_that_makes_no_process_group_have_noise_of_their_own(monkeypatch, environments):
    monkeypatch.delenv("RANK", raising=False)
    found = []
    for environment in environments:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        with st.inject(model, "relative_gaussian:0.1@module.linear"):
            found.append(model(X))
    assert not torch.equal(*found)
