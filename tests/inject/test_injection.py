"""An active plan, and what changes while it is."""

import json

import torch

import shaketable as st
from shaketable.inject.injection import Injection
from shaketable.plan import Plan


def test_what_was_counted_is_told_before_the_magnitude_changes(monkeypatch):
    """What a GPU has counted by then belongs to the magnitude of then."""
    injection, told = Injection(Plan.parse("gain:0.1@module.linear")), []
    monkeypatch.setattr(injection, "settle", lambda: told.append(injection.faults[0].magnitude))
    injection.set_magnitude(0.5)
    assert told[0] == 0.1 and injection.faults[0].magnitude == 0.5


def test_a_process_that_goes_on_keeps_the_statistic_that_a_fault_took_at_its_first_use():
    model = torch.nn.Linear(4, 4)
    first, second = torch.randn(8, 4), 10 * torch.randn(8, 4)
    begun = st.inject(model, "bias:0.5@module.linear")
    with begun:
        model(first)
        expected = model(second)
        counted = json.loads(json.dumps(begun.counted()))
    later, anew = (st.inject(model, "bias:0.5@module.linear", allow_inert=True) for _ in range(2))
    with later:
        later.go_on(counted)
        assert torch.equal(model(second), expected)
    with anew:
        assert not torch.equal(model(second), expected), "taken from this tensor, it is another one"
