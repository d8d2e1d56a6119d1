"""The ledger: counts, measures, table, JSON, merging."""

import json

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.faults import make_fault
from shaketable.faults.cpu import native
from shaketable.faults.sums import SAMPLE
from shaketable.inject.counters import Measurement, measure
from shaketable.ledger.ledger import Ledger


def shaken(seed=0, plan="relative_gaussian:0.05@module.linear;dead_zone:0.5@module.linear", calls=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with st.inject(model, plan, seed=seed) as ledger:
        for _ in range(calls):
            model(torch.ones(8, 16)).sum().backward()
    return ledger


def test_merging_keeps_directions_phases_and_what_was_measured_apart():
    """Ledgers of processes that did unlike things: forward here, backward there, in other phases."""

    def did(passes, trains):
        model = nn.Linear(4, 4)
        with st.inject(model, "gain:0.5@module.linear,direction=both") as ledger:
            for i in range(passes):
                y = model(torch.ones(1, 4))
                if i < trains:
                    y.sum().backward()
            with st.phase("eval"):
                model(torch.ones(1, 4))
        return ledger

    one, two = did(3, 1), did(2, 2)
    merged = st.Ledger.merge([one, two])
    assert (merged.forward, merged.backward) == (7, 3)
    assert merged.sites[0].by("phase") == {"train": {"forward": 5, "backward": 3}, "eval": {"forward": 2, "backward": 0}}
    again = st.Ledger.from_dict(merged.to_dict())
    assert (again.forward, again.backward) == (7, 3) and again.sites[0].by("layer") == merged.sites[0].by("layer")
    sums = [x.sites[0].measured("backward").fires for x in (one, two, merged)]
    assert sums[2] == sums[0] + sums[1] > 0


def test_measuring_thins_out_but_counting_does_not():
    ledger = shaken(plan="relative_gaussian:0.05@module.linear", calls=100)
    assert ledger.forward == 200
    assert ledger.sites[0].measured().fires == 2 * len([1, 2, 4, 8, 16, 32, 64])


@pytest.mark.parametrize("plan", ["relative_gaussian:0.05@module.linear", "gain:0.1@op.matmul"])
def test_a_process_that_goes_on_measures_what_one_alone_would_have(plan):
    def part(steps, counted=None):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        injection = st.inject(net, plan, seed=1).enable()
        if counted is not None:
            injection.go_on(json.loads(json.dumps(counted)))
        for step in steps:
            injection.step = step
            net(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).sum().backward()
        counted = injection.counted()
        injection.close(check=False)
        return injection.ledger, counted

    def told(ledger):
        return [(s.forward, s.backward, s.measured().fires, f"{s.measured().error:.9g}") for s in ledger.sites]

    whole, _ = part(range(20))
    first, counted = part(range(7))
    second, counted = part(range(7, 9), counted)
    third, _ = part(range(9, 20), counted)
    assert told(Ledger.merge([first, second, third])) == told(whole)
    assert told(Ledger.merge([first, part(range(7, 20))[0]])) != told(whole), "the counters make the difference"


def test_noise_without_a_compiler_is_the_same_noise_and_the_ledger_says_who_drew_it(monkeypatch):
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(8, 16)
    outputs = []
    for library, name in ((native._library, native.name()), (lambda: None, "torch")):
        monkeypatch.setattr(native, "_library", library)
        with st.inject(layer, "relative_gaussian:0.05@module.linear", seed=0) as ledger:
            outputs.append(layer(x))
        assert ledger.kernel == name
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("fault", "part"),
    [("relative_gaussian:0.05", True), ("mxfp4", True), ("gain:1.5", True), ("dead_zone:0.01", False), ("noise:0.1", False)],
)
def test_a_large_tensor_is_measured_by_a_bounded_sample_where_that_tells_as_much(fault, part):
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 1024, bias=False), torch.randn(4096, 16)
    with torch.no_grad(), st.inject(layer, f"{fault}@module.linear,point=output") as ledger:
        layer(x)
    site = ledger.sites[0]
    assert site.measured().values == (SAMPLE if part else 4096 * 1024)
    assert site.asked is None or site.magnitude == pytest.approx(site.asked, rel=0.03)


def test_a_tensor_whose_sample_is_all_zero_is_measured_whole():
    """Gradients of a prompt's tokens are zero; every fourth row is one of them here, and all that the sample looks at."""
    clean = torch.ones(4096, 1024)
    clean[::4] = 0
    measured = measure(make_fault({"kind": "relative_gaussian", "magnitude": 0.1}), clean, clean * 1.1, None)
    (found,) = Measurement.all_columns([measured])
    assert found[2:4] == [clean.numel(), clean.numel() * 3 // 4]
    assert found[7] == pytest.approx(0.1, rel=1e-4)
