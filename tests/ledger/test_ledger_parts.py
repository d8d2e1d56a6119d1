"""The parts of a ledger by hand: when a magnitude is off, how sure it is, what is said in a line, what the table rounds."""

import math

import pytest

from shaketable.errors import InertError
from shaketable.ledger.ledger import Ledger, LiveLedger, SiteLedger
from shaketable.ledger.spot import Measured, Spot
from shaketable.ledger.table import _percent, build_table, remarks
from shaketable.plan import Plan


def site(*spots, fault="gain:1", asked=1.0, **more):
    return SiteLedger("layer.0", fault, asked, {spot.name: spot for spot in spots}, **more)


def read(*magnitudes, name="a", **more):
    """A spot that has read these magnitudes back."""
    sums = Measured(
        fires=len(magnitudes), values=10, changed=10, magnitudes=len(magnitudes), magnitude=sum(magnitudes),
        magnitude_square=sum(m * m for m in magnitudes),
    )  # fmt: skip
    return Spot(name, 0, {"train": [len(magnitudes), 0]}, forward=sums, **more)


@pytest.mark.parametrize("magnitudes", [(1.0, 2.0), (1.0, 1.0, 4.0), (3.0, 3.0)])
def test_the_uncertainty_is_the_standard_error_of_the_mean(magnitudes):
    n, mean = len(magnitudes), sum(magnitudes) / len(magnitudes)
    expected = math.sqrt(sum((m - mean) ** 2 for m in magnitudes) / (n - 1) / n)
    assert read(*magnitudes).forward.uncertainty == pytest.approx(expected, abs=1e-9)


def test_one_magnitude_or_none_is_not_sure_at_all():
    assert Measured().uncertainty == math.inf == read(1.0).forward.uncertainty
    assert Measured().error is None and Measured(fires=4, square=1.0).error == 0.5


@pytest.mark.parametrize(
    ("magnitudes", "asked", "told"),
    [
        ((1.099, 1.099), 1.0, False), ((1.101, 1.101), 1.0, True), ((0.901, 0.901), 1.0, False), ((0.899, 0.899), 1.0, True),
        ((1.5, 2.5), 1.0, False), ((1.9, 2.1), 1.0, True), ((5.0,), 1.0, False), ((5.0, 5.0), None, False), ((5.0, 5.0), 0.0, False),
        ((), 1.0, False), ((1.183, 1.317), 1.0, False), ((1.233, 1.367), 1.0, False), ((1.25, 1.38), 1.0, True),
    ],
)  # fmt: skip
def test_a_magnitude_is_off_by_a_tenth_and_by_more_than_chance(magnitudes, asked, told):
    found = site(read(*magnitudes), asked=asked).remark()
    mean = sum(magnitudes) / len(magnitudes) if magnitudes else 0
    why = f"asked for 1, measured {mean:.3g}: the tensor's own type rounds, or the fault is data-dependent"
    assert found == (why if told else None)


def test_magnitudes_of_all_spots_and_both_directions_are_averaged():
    back = Spot("b", 1, {"train": [0, 1]}, backward=Measured(fires=1, magnitudes=1, magnitude=4.0))
    found = site(read(1.0, 1.0), back)
    assert (found.magnitudes, found.magnitude) == (3, 2.0) and site(Spot("c", 0)).magnitude is None


@pytest.mark.parametrize(
    ("spots", "asked", "line"),
    [
        ((read(1.0),), 1.0, "gain:1@layer.0 fired 1 times at 1 site, 1 measured of 1 asked for"),
        ((read(1.0, 2.0), read(3.0, name="b")), 1.0, "gain:1@layer.0 fired 3 times at 2 sites, 2 measured of 1 asked for"),
        ((read(1.0),), None, "gain:1@layer.0 fired 1 times at 1 site"),
        ((Spot("a", 0),), 1.0, "gain:1@layer.0 fired 0 times at 1 site"),
        ((), 1.0, "gain:1@layer.0 fired 0 times at 0 sites"),
        ((Spot("a", 0, {"train": [900, 200]}),), 1.0, "gain:1@layer.0 fired 1,100 times at 1 site"),
    ],
)
def test_a_clause_is_told_in_a_line(spots, asked, line):
    assert site(*spots, asked=asked).summary() == line


def test_operators_that_were_not_met_are_not_there():
    found = site(Spot("met", 0, {"train": [1, 0]}), Spot("not met", 0), static=False)
    assert found.matched == 1 and list(found.to_dict()["spots"]) == ["met"] == list(found.copy().spots)
    known = site(Spot("met", 0, {"train": [1, 0]}), Spot("not met", 0))
    assert known.matched == 2 and len(known.to_dict()["spots"]) == 2 == len(known.copy().spots)


@pytest.mark.parametrize(
    ("mine", "theirs", "asked"),
    [((1.0,), (1.0, 1.0, 1.0), 1.75), ((), (1.0,), 2.0), ((1.0,), (), 1.0), ((), (), 1.0)],
)
def test_a_magnitude_that_changed_is_averaged_by_how_often_each_was_read(mine, theirs, asked):
    one = site(read(*mine), asked=1.0)
    one.add(site(read(*theirs), asked=2.0))
    assert one.asked == asked
    none = site(read(*mine), asked=None)
    none.add(site(read(*theirs), asked=2.0))
    assert none.asked is None


def test_a_spot_that_only_the_other_has_is_added_as_a_copy():
    one, other = site(read(1.0)), site(read(1.0, name="b"), notes=["why"], fused=2)
    one.add(other)
    one.add(other)
    assert one.forward == 3 and other.forward == 1 and (one.notes, one.fused) == (["why"], 4)
    one.spots["b"].counts["train"][0] = 99
    assert other.forward == 1


def test_an_empty_ledger_of_a_plan_says_what_is_asked_for():
    plan = Plan.parse("gain:0.5@layer.1;mxfp4@module.linear;gain:0.25@op.matmul", seed=7)
    found = Ledger.for_plan(plan, "native")
    assert (found.plan, found.seed, found.kernel, found.processes) == (plan.text(), 7, "native", 1)
    assert [(s.site, s.fault, s.asked, s.static) for s in found.sites] == [
        ("layer.1", "gain:0.5", 0.5, True),
        ("module.linear", "mxfp4", None, True),
        ("op.matmul", "gain:0.25", 0.25, False),
    ]


def test_a_plan_that_did_nothing_is_an_error_that_says_how_to_accept_it():
    ledger = Ledger("…", 0, [site(Spot("a", 0), notes=["one", "two"]), site(read(1.0)), SiteLedger("layer.2", "bias:1", 1.0)])
    with pytest.raises(InertError) as raised:
        ledger.check()
    lines = "gain:1@layer.0 matched 1 spots and never fired (one; two); bias:1@layer.2 matched 0 spots and never fired"
    assert str(raised.value) == f"{lines} (allow_inert=True accepts this)"
    Ledger("…", 0, [site(read(1.0))]).check()


def test_ledgers_of_other_plans_or_schemas_are_refused_by_name():
    with pytest.raises(ValueError, match=r"^ledgers of different plans do not merge: 'a' and 'b'$"):
        Ledger.merge([Ledger("a", 0, []), Ledger("b", 0, [])])
    with pytest.raises(ValueError, match="do not merge"):
        Ledger.merge([Ledger("a", 0, []), Ledger("a", 1, [])])
    with pytest.raises(ValueError, match=r"^this is not a ledger of schema 'shaketable\.ledger/1': None$"):
        Ledger.from_dict({})


def test_a_live_ledger_is_brought_up_to_date_whenever_somebody_looks():
    asked, forgotten = [], []
    live = LiveLedger("…", 0, [site(read(1.0))], settle=lambda: asked.append(1), forget=lambda: forgotten.append(1))
    assert live.forward == 1 and len(asked) == 1
    _ = live.backward, live.changed
    assert len(asked) == 3
    live.clear()
    assert forgotten == [1] and live.forward == 0
    live.settle = None
    assert live.sites[0].matched == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0.00%"), (0.25, "25.00%"), (1e-4, "0.01%"), (9.9e-5, "9.9e-05"), (1.0, "100.00%"), (1e-9, "1.0e-09")],
)
def test_shares_are_shown_in_percent_and_small_ones_as_they_are(value, text):
    assert _percent(value) == text


@pytest.mark.parametrize(("processes", "title"), [(1, "Ledger · seed 3 · noise by torch"), (2, "Ledger · seed 3 · noise by torch · 2 processes")])  # fmt: skip
def test_the_title_says_who_drew_and_how_many_processes_there_were(processes, title):
    table = build_table(Ledger("…", 3, [site(read(1.0))], processes=processes))
    assert table.title == title and [str(c.header) for c in table.columns][-2:] == ["changed", "time"]


def test_sites_that_never_fired_are_named_where_others_did():
    silent = [Spot(f"s{i}", 0) for i in range(5)]
    assert "layer.0: 5 of 6 sites never fired: s0, s1, s2, …" in remarks(Ledger("…", 0, [site(read(1.0), *silent)]))
    assert not any("of 5 sites" in line for line in remarks(Ledger("…", 0, [site(*silent)])))
    assert not any("never fired:" in line for line in remarks(Ledger("…", 0, [site(read(1.0), *silent, static=False)])))
    assert "layer.0: a note" in remarks(Ledger("…", 0, [site(read(1.0), notes=["a note"])]))


def test_numbers_that_are_counts_stay_whole_and_sums_do_not():
    found = Measured(fires=1, square=0.5)
    found.take([1.0, 0.25, 3.0, 2.0, 5.0, 4.0, 1.0, 0.5, 0.25])
    assert found == Measured(2, 0.75, 3, 2, 5, 4, 1, 0.5, 0.25)
    assert [type(v) for v in vars(found).values()] == [int, float, int, int, int, int, int, float, float]
    with pytest.raises(ValueError, match="zip"):
        found.take([1.0])


def test_a_spot_is_written_without_what_was_not_measured_and_read_back():
    spot = read(1.0, recomputed=2, seconds=0.5)
    told = spot.to_dict()
    assert list(told["measured"]) == ["forward"] and (told["layer"], told["recomputed"], told["seconds"]) == (0, 2, 0.5)
    assert Spot.from_dict("a", told) == spot and spot.copy() == spot and spot.copy().lock is not spot.lock
    assert (spot.fires(False), spot.fires(True)) == (1, 0)


def test_a_ledger_from_before_there_were_notes_is_read():
    told = Ledger("…", 0, [site(read(1.0), notes=["why"])]).to_dict()
    assert Ledger.from_dict(told).sites[0].notes == ["why"]
    del told["sites"][0]["notes"]
    assert Ledger.from_dict(told).sites[0].notes == []
