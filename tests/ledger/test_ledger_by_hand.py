"""Ledgers by hand: the lines and numbers that people read, files of other versions, and live ledgers."""

import json

import pytest

from shaketable.errors import InertError
from shaketable.ledger.ledger import Ledger, Measured, SiteLedger, Spot
from shaketable.ledger.table import remarks


def clause(*spots, site="layer.0", fault="gain:1", asked=1.0, **more):
    return SiteLedger(site, fault, asked, {spot.name: spot for spot in spots}, **more)


def ledger(*sites, **more):
    return Ledger("plan", 0, list(sites), **more)


def read(*magnitudes, name="a", changed=10, **more):
    """A spot that has read these magnitudes back."""
    sums = Measured(
        fires=len(magnitudes), values=10, changed=changed, magnitudes=len(magnitudes), magnitude=sum(magnitudes),
        magnitude_square=sum(m * m for m in magnitudes),
    )  # fmt: skip
    return Spot(name, 0, {"train": [len(magnitudes), 0]}, forward=sums, **more)


# ---- magnitudes


@pytest.mark.parametrize(
    ("magnitudes", "asked", "said"),
    [
        ((1.101, 1.101), 1.0, "asked for 1, measured 1.1"),
        ((1.5, 2.5), 1.0, None),  # two that differ by that much may be chance
        ((1.9, 2.1), 1.0, "asked for 1, measured 2"),
        ((5.0,), 1.0, None),
        ((5.0, 5.0), 0.0, None),
        ((), 1.0, None),
    ],
)
def test_a_magnitude_is_off_by_a_tenth_and_by_more_than_chance(magnitudes, asked, said):
    why = ": the tensor's own type rounds, or the fault is data-dependent"
    found = clause(read(*magnitudes), fault=f"gain:{asked}", asked=asked)
    assert found.remark() == found.to_dict()["remark"] == (None if said is None else said + why)


@pytest.mark.parametrize(
    ("mine", "theirs", "asked"),
    [
        (((1.0,), 1.0), ((1.0, 1.0, 1.0), 2.0), 1.75),
        (((), 1.0), ((1.0,), 2.0), 2.0),
        (((1.0,), None), ((1.0,), 2.0), None),
    ],
)
def test_a_magnitude_that_changed_is_averaged_by_how_often_each_was_read(mine, theirs, asked):
    parts = [ledger(clause(read(*magnitudes), asked=wanted)) for magnitudes, wanted in (mine, theirs)]
    assert Ledger.merge(parts).sites[0].asked == asked
    assert parts[0].sites[0].asked == mine[1], "a merged ledger is left alone"


# ---- inert clauses


def test_a_plan_that_did_nothing_is_an_error_that_says_how_to_accept_it():
    idle = Spot("a", 0, {"train": [1, 2]}, forward=Measured(fires=1, values=5))
    found = ledger(
        clause(idle, notes=["not shown"]), clause(read(1.0)), clause(fault="bias:2", site="op.silu", notes=["x", "y"]), clause(Spot("a", 0), Spot("b", 0))
    )  # fmt: skip
    lines = [
        "gain:1@layer.0 fired 3 times and changed no value",
        "bias:2@op.silu matched 0 spots and never fired (x; y)",
        "gain:1@layer.0 matched 2 spots and never fired",
    ]
    assert found.inert() == lines
    with pytest.raises(InertError) as raised:
        found.check()
    assert str(raised.value) == f"{'; '.join(lines)} (allow_inert=True accepts this)"
    assert ledger(clause(read(1.0))).inert() == [] and ledger(clause(read(1.0))).check() is None


# ---- files


def test_a_file_is_read_back(tmp_path):
    found = ledger(clause(read(1.0), site="module.λ", notes=["n"]), kernel="native", processes=3)
    found.save(tmp_path / "ledger.json")
    assert json.loads((tmp_path / "ledger.json").read_text(encoding="utf-8")) == found.to_dict()
    assert Ledger.load(tmp_path / "ledger.json") == found


def test_ledgers_of_other_plans_or_schemas_are_refused_by_name():
    with pytest.raises(ValueError, match=r"^ledgers of different plans do not merge: 'a' and 'b'$"):
        Ledger.merge([Ledger("a", 0, []), Ledger("b", 0, [])])
    for schema in ("shaketable.ledger/2", None):
        with pytest.raises(ValueError, match=f"this is not a ledger of schema 'shaketable.ledger/1': {schema!r}"):
            Ledger.from_dict(ledger().to_dict() | {"schema": schema})


# ---- the table


def test_remarks_come_in_one_order():
    odd = clause(read(2.0, 2.0), *(Spot(f"s{i}", 0) for i in range(5)), fused=1, notes=["n1", "n2"])
    assert remarks(ledger(odd, clause(site="layer.1"))) == [
        "layer.0: asked for 1, measured 2: the tensor's own type rounds, or the fault is data-dependent",
        "layer.0: 1 fused attention calls; their inner products are not exposed",
        "layer.0: n1",
        "layer.0: n2",
        "layer.0: 5 of 6 sites never fired: s0, s1, s2, …",
        "gain:1@layer.1 matched 0 spots and never fired",
    ]
    assert remarks(ledger(clause(read(1.0), Spot("b", 0), static=False))) == [], "operators need not all be met"
