"""Another plan in the place of one that is there: everything counted, drawn and judged begins anew, and hooks stay."""

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.faults.rng import key_of
from shaketable.inject.injection import Injection
from shaketable.inject.other_plan import exchange, has_same_sites
from shaketable.plan import Plan

X = torch.arange(8.0).view(2, 4) + 1
FIRST = "bias:1@module.linear;gain:1@layer.1"
SECOND = "gain:2@module.linear;relative_gaussian:0.5@layer.1"


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def on(model, plan, seed=0, rank=0, step=0):
    injection = Injection(Plan.parse(plan, seed=seed), rank=rank, allow_inert=True, step=step)
    injection.attach(model)
    return injection.enable()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("gain:1@module.linear", "bias:1@module.linear", True),
        ("gain:1@module.linear", "gain:1@module.linear,phase=eval", True),
        ("gain:1@module.linear", "gain:1@module.linear,point=output", True),
        ("gain:1@module.linear", "mxfp4@module.linear", False),
        ("gain:1@module.linear,point=weight+input", "mxfp4@module.linear", True),
        ("gain:1@module.linear", "gain:1@module.linear,layers=0", False),
        ("gain:1@module.linear", "gain:1@module.linear,include=lm_head", False),
        ("gain:1@module.linear", "gain:1@layer.all", False),
        ("gain:1@module.linear", "gain:1@op.matmul", False),
        ("gain:1@layer.0;gain:1@layer.1", "gain:1@layer.1;gain:1@layer.0", False),
        ("gain:1@layer.0;gain:1@layer.1", "gain:1@layer.0", False),
        ("gain:1@layer.0;gain:1@layer.1", "gain:3@layer.0;gain:4@layer.1", True),
    ],
)
def test_plans_have_the_same_sites_if_they_hit_the_same_places_clause_by_clause(one, other, same):
    a, b = Plan.parse(one, seed=1), Plan.parse(other, seed=2)
    assert has_same_sites(a, b) is same is has_same_sites(b, a)


def test_a_plan_for_other_places_is_not_taken():
    injection = on(Two(), FIRST)
    with pytest.raises(AssertionError):
        exchange(injection, Plan.parse("gain:1@module.linear"), 0)
    assert injection.enabled
    injection.close()


def test_the_new_plan_does_what_it_does_on_a_fresh_model():
    model = Two()
    fresh = on(model, SECOND, seed=7, rank=3, step=2)
    wanted = [model(X), model(X)]
    told = fresh.ledger.to_dict()
    fresh.close()
    injection = on(model, FIRST, seed=1, step=2)
    model(X)
    hooks = list(injection.models[0].hooks)
    exchange(injection, Plan.parse(SECOND, seed=7), 3)
    assert injection.enabled is False and injection.models[0].hooks == hooks and injection.step == 2
    injection.enable()
    assert all(torch.equal(model(X), y) for y in wanted)
    assert injection.models[0].hooks == hooks
    now = injection.ledger.to_dict()
    for one, other in zip(now["sites"], told["sites"], strict=True):
        assert {k: one[k] for k in ("site", "fault", "asked", "matched", "forward", "layers", "phases")} == {
            k: other[k] for k in ("site", "fault", "asked", "matched", "forward", "layers", "phases")
        }
        assert one["measured_magnitude"] == other["measured_magnitude"]
    assert (now["plan"], now["seed"], now["kernel"]) == (told["plan"], 7, told["kernel"])
    injection.close()


def test_the_old_ledger_has_what_was_counted_and_nobody_writes_to_it_any_more():
    model = Two()
    injection = on(model, FIRST)
    model(X)
    old, settle = injection.ledger, injection.ledger.settle
    exchange(injection, Plan.parse(SECOND), 0)
    assert old.settle is None and old.forget is None and old.forward == 3 and old is not injection.ledger
    assert injection.sites is injection.ledger.sites and injection.ledger.settle == settle
    assert injection.ledger.forget == injection.forget and injection.ledger.forward == 0
    injection.enable()
    model(X)
    assert old.forward == 3 and injection.ledger.forward == 3
    injection.close()


def test_taps_have_the_keys_and_spots_of_the_new_plan_and_keep_their_numbers():
    model = Two()
    injection = on(model, FIRST)
    model(X)
    before = [(tap.name, tap.handle, tap.index, tap.spot.name, tap.spot.layer) for tap in injection.taps]
    assert injection.taps[0].references() != []
    plan = Plan.parse("gain:2@module.linear,phase=eval;gain:1@layer.1", seed=5)
    exchange(injection, plan, 4)
    assert [(tap.name, tap.handle, tap.index, tap.spot.name, tap.spot.layer) for tap in injection.taps] == before
    for tap in injection.taps:
        assert tap.keys[0] == key_of(5, tap.clause, tap.name, "output", "forward", 4) and tap.references() == []
        assert injection.sites[tap.clause].spots[tap.spot.name] is tap.spot and tap.spot.counts == {}
    assert injection.taps[0].site.phase == ("eval",) and injection.rank == 4 and injection.plan is plan
    assert [fault.text() for fault in injection.faults] == ["gain:2", "gain:1"]
    assert [list(s.spots) for s in injection.sites] == [["layers.0.0", "layers.1.0"], ["layers.1"]]
    assert injection.counters.saved() == [[0.0] * 16] * 6
    injection.close()


def test_spots_keep_the_names_by_which_they_are_shown():
    injection = on(Two(), "gain:1@module.linear,point=input+weight")
    names = list(injection.sites[0].spots)
    exchange(injection, Plan.parse("bias:1@module.linear,point=input+weight"), 0)
    assert (
        list(injection.sites[0].spots)
        == names
        == [
            "layers.0.0:input",
            "layers.0.0:weight",
            "layers.1.0:input",
            "layers.1.0:weight",
        ]
    )
    injection.close()


def test_what_was_known_of_the_old_plan_is_forgotten():
    model = Two()
    injection = on(model, FIRST)
    injection.references, injection.compiled_pass = {"x": 1.0}, object()
    model(X)
    check = injection.inert_check
    exchange(injection, Plan.parse(SECOND), 0)
    assert injection.references == {} and injection.compiled_pass is None
    assert injection.inert_check is not check and injection.inert_check.phases.total() == 0
    assert injection.calls._passes == {}
    injection.close()


def test_a_plan_that_changed_no_value_is_found_after_the_exchange_and_the_old_one_is_not_asked():
    model = Two()
    injection = st.inject(model, "gain:1@module.linear").enable()
    model(X)
    exchange(injection, Plan.parse("gain:1@module.linear,phase=eval"), 0)
    injection.enable()
    model(X)
    with pytest.raises(st.InertError, match=r"gain:1@module\.linear,phase=eval matched 2 spots and never fired"):
        injection.close()
