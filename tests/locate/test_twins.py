"""Twins: every weight takes part, and the layer is what it was before. That they are exact shows in HEALTHY models."""

from __future__ import annotations

import pytest
import torch

from shaketable.capture.reference import Reference
from shaketable.capture.trace import trace
from shaketable.locate import twins
from shaketable.locate.twins import circuit_of, gauged
from tests.locate.architectures import build, tokens


@pytest.mark.parametrize("name", twins.ARCHITECTURES)
def test_every_matrix_is_really_changed_by_a_gauge(name):
    """Else the twin would prove nothing."""
    model = build(name, attention="eager")
    reference = Reference(model)
    call = trace(model, tokens(), reference).calls[0]
    circuit = circuit_of(reference.expected[call.name], model.config)
    before = {n: p.detach().clone() for n, p in call.module.named_parameters()}
    with gauged(call.module, twins.draw_gauge(circuit, 0, True)):
        changed = {n for n, p in call.module.named_parameters() if not torch.equal(p, before[n])}
    matrices = {f"{path}.weight" for path in twins.MAPS}
    assert matrices <= changed
    assert {n: torch.equal(p, before[n]) for n, p in call.module.named_parameters()} == dict.fromkeys(before, True)
