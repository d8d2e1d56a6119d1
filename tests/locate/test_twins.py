"""Twins: exact where they must be, and the layer is what it was before."""

from __future__ import annotations

import pytest
import torch

from shaketable.capture.recorder import same
from shaketable.capture.reference import Reference
from shaketable.capture.trace import record_layer, trace
from shaketable.locate import twins
from shaketable.locate.twins import circuit_of, gauged
from shaketable.sites.nested_tensors import tensors_of
from tests.locate.architectures import ARCHITECTURES, UNWIRED, build, tokens

WIRED = [name for name in ARCHITECTURES if name not in UNWIRED]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def prepared(name, dtype=torch.float32, attention="eager", seed=0):
    model = build(name, dtype, attention, seed)
    reference = Reference(model)
    calls = trace(model, tokens(seed), reference).calls
    return model, reference, [(c, circuit_of(reference.skeleton.get_submodule(c.name), model.config)) for c in calls]


def twin_of(call, circuit, reference, gauge):
    with gauged(call.module, circuit, gauge):
        return record_layer(call, reference, call.x * gauge.spaces["stream"].to(call.x))


@pytest.mark.parametrize("name", WIRED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gauge_changes_no_bit(name, dtype):
    """Signs everywhere, powers of two where the dtype has room for them."""
    _, reference, layers = prepared(name, dtype)
    for call, circuit in layers:
        original = record_layer(call, reference)
        for powers in (False, True) if dtype != torch.float16 else (False,):
            gauge = twins.draw_gauge(circuit, call.index, powers)
            twin = twin_of(call, circuit, reference, gauge)
            assert twins.first_difference(circuit, gauge, original, twin) is None
            factor = gauge.spaces["stream"].to(call.x)
            assert same(next(tensors_of(original.output)) * factor, next(tensors_of(twin.output)))


@pytest.mark.parametrize("name", WIRED)
def test_every_matrix_is_really_changed_by_a_gauge(name):
    """Else the twin would prove nothing."""
    _, _, layers = prepared(name)
    call, circuit = layers[0]
    before = {n: p.detach().clone() for n, p in call.module.named_parameters()}
    with gauged(call.module, circuit, twins.draw_gauge(circuit, 0, True)):
        changed = {n for n, p in call.module.named_parameters() if not torch.equal(p, before[n])}
    matrices = {m.parameter for m in circuit.maps}
    assert matrices <= changed
    assert {n: torch.equal(p, before[n]) for n, p in call.module.named_parameters()} == dict.fromkeys(before, True)


def test_a_parameter_that_the_wiring_does_not_explain_is_a_reason():
    model = build("llama")
    reference = Reference(model)
    layer = reference.skeleton.get_submodule("model.layers.0")
    layer.self_attn.extra = torch.nn.Linear(4, 4, device="meta")
    reason = circuit_of(layer, model.config)
    assert isinstance(reason, str)
    assert "self_attn.extra.weight is not explained" in reason
