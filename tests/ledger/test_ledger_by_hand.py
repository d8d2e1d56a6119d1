"""Ledgers by hand: sums that are added and shared with nobody, rounding of counts, files, live ledgers, and the table."""

import itertools
import json
import math

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import InertError
from shaketable.ledger.ledger import Ledger, LiveLedger, SiteLedger
from shaketable.ledger.spot import Measured, Spot
from shaketable.ledger.table import _percent, build_table, ledger_table, remarks
from shaketable.plan import Plan

NAMES = ("fires", "square", "values", "changed", "alive", "survived", "magnitudes", "magnitude", "magnitude_square")
COUNTS = ("fires", "values", "changed", "alive", "survived", "magnitudes")


def sums(first=1):
    """Nine numbers that differ."""
    return Measured(*(first + i for i in range(9)))


def fired(name="a", layer=0, forward=1, backward=0, phase="train", **more):
    return Spot(name, layer, {phase: [forward, backward]}, **more)


def clause(*spots, site="layer.0", fault="gain:1", asked=1.0, **more):
    return SiteLedger(site, fault, asked, {spot.name: spot for spot in spots}, **more)


def ledger(*sites, **more):
    return Ledger("plan", 0, list(sites), **more)


# Sums of one spot


@pytest.mark.parametrize("name", NAMES)
def test_every_sum_is_added_to_itself(name):
    found, other = sums(1), sums(100)
    found.add(other)
    assert getattr(found, name) == getattr(sums(1), name) + getattr(sums(100), name)
    assert other == sums(100), "what was added is left alone"


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_taken_in_the_order_of_the_fields(name):
    found = Measured(square=0.0)
    found.take([float(i) for i in range(1, 10)])
    assert getattr(found, name) == 1 + NAMES.index(name)


@pytest.mark.parametrize(("number", "count"), [(2.9999999, 3), (3.0000001, 3), (0.0, 0), (1e15, 10**15)])
def test_counts_that_come_as_floats_are_rounded(number, count):
    found = Measured()
    found.take([number] * 9)
    for name in NAMES:
        value = getattr(found, name)
        assert (value, type(value)) == ((count, int) if name in COUNTS else (number, float))


@pytest.mark.parametrize("wrong", [[], [1.0] * 8, [1.0] * 10])
def test_more_or_fewer_numbers_than_there_are_sums_are_refused(wrong):
    with pytest.raises(ValueError, match="zip"):
        Measured().take(wrong)


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e-9, 123.456])
@pytest.mark.parametrize("times", [2, 3, 7])
def test_equal_magnitudes_are_certain_though_sums_round(value, times):
    total = square = 0.0
    for _ in range(times):
        total, square = total + value, square + value * value
    found = Measured(magnitudes=times, magnitude=total, magnitude_square=square).uncertainty
    assert found == pytest.approx(0.0, abs=1e-6 * value)
    lower = Measured(magnitudes=times, magnitude=total, magnitude_square=math.nextafter(square, 0) * (1 - 1e-15))
    assert lower.uncertainty == 0.0, "a mean of squares that rounded to less than the square of the mean"


@pytest.mark.parametrize(("fires", "square", "error"), [(1, 0.25, 0.5), (4, 1.0, 0.5), (2, 0.0, 0.0), (0, 0.0, None)])
def test_the_error_is_the_root_of_the_mean_square(fires, square, error):
    assert Measured(fires=fires, square=square).error == error


# Spots


def test_fires_are_counted_in_one_direction_over_all_phases():
    spot = Spot("a", 0, {"train": [5, 3], "eval": [2, 0], "rollout": [10, 1]})
    assert (spot.fires(False), spot.fires(True), Spot("a", 0).fires(False)) == (17, 4, 0)


def test_spots_are_added_phase_by_phase_and_share_nothing():
    one = Spot("a", 0, {"train": [1, 2]}, 3, 0.5, sums(1), sums(10))
    two = Spot("a", 0, {"train": [10, 20], "eval": [4, 0]}, 4, 0.25, sums(100), sums(1000))
    one.add(two)
    assert one.counts == {"train": [11, 22], "eval": [4, 0]} and (one.recomputed, one.seconds) == (7, 0.75)
    forward, backward = sums(1), sums(10)
    forward.add(sums(100))
    backward.add(sums(1000))
    assert (one.forward, one.backward) == (forward, backward)
    one.counts["eval"][0] += 90
    one.forward.fires += 90
    assert two.counts == {"train": [10, 20], "eval": [4, 0]} and two.forward == sums(100) and two.backward == sums(1000)


def test_a_copy_of_a_spot_has_all_of_it_and_shares_nothing():
    one = Spot("a", 3, {"train": [1, 2]}, 3, 0.5, sums(1), sums(10))
    two = one.copy()
    assert two == one and two.lock is not one.lock
    two.counts["train"][0], two.forward.fires, two.backward.values = 99, 99, 99
    two.counts["eval"] = [1, 1]
    assert one == Spot("a", 3, {"train": [1, 2]}, 3, 0.5, sums(1), sums(10))


@pytest.mark.parametrize(("forward", "backward"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_spot_comes_back_from_what_it_writes(forward, backward):
    spot = Spot("a", 3, {"train": [1, 2], "eval": [3, 4]}, 5, 0.5)
    spot.forward, spot.backward = sums(1) if forward else Measured(), sums(10) if backward else Measured()
    told = spot.to_dict()
    assert list(told["measured"]) == ["forward"] * forward + ["backward"] * backward
    again = Spot.from_dict("a", json.loads(json.dumps(told)))
    assert again == spot and again.name == "a" and again.layer == 3
    told["counts"]["train"][0] = 99
    for part in told["measured"].values():
        part["fires"] = 99
    assert again == spot, "what is written is a copy"


def test_a_spot_without_a_layer_says_none_and_locks_are_no_part_of_it():
    assert (
        Spot("a", None).to_dict()["layer"] is None and Spot("a", None) == Spot("a", None) and "lock" not in repr(Spot("a", 0))
    )
    assert Spot("a", 0) != Spot("a", 1) and Spot("a", 0) != Spot("b", 0)


# Clauses


def test_fires_by_phase_and_by_layer():
    found = clause(
        Spot("a", 1, {"train": [1, 2], "eval": [3, 0]}), Spot("b", 1, {"train": [10, 20]}), Spot("c", None, {"rollout": [5, 6]}), Spot("d", 7)
    )  # fmt: skip
    assert found.by("phase") == {
        "train": {"forward": 11, "backward": 22}, "eval": {"forward": 3, "backward": 0}, "rollout": {"forward": 5, "backward": 6},
    }  # fmt: skip
    assert found.by("layer") == {"1": {"forward": 14, "backward": 22}, "None": {"forward": 5, "backward": 6}}
    assert (found.forward, found.backward, found.matched) == (19, 28, 4)


@pytest.mark.parametrize("direction", [None, "forward", "backward"])
def test_what_was_measured_is_summed_over_spots_in_the_direction_that_is_asked_for(direction):
    spots = [Spot("a", 0, forward=sums(1), backward=sums(10)), Spot("b", 0, forward=sums(100), backward=sums(1000))]
    found, wanted = clause(*spots).measured(direction), Measured()
    for spot in spots:
        for name in ("forward", "backward"):
            if direction in (None, name):
                wanted.add(getattr(spot, name))
    assert found == wanted
    found.fires += 5
    assert spots[0].forward == sums(1), "a sum of its own"


def reading(*magnitudes):
    return Measured(
        fires=len(magnitudes), values=10, changed=10, magnitudes=len(magnitudes), magnitude=sum(magnitudes),
        magnitude_square=sum(m * m for m in magnitudes),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "magnitudes", "said"),
    [
        (0.05, (0.0612345, 0.0612345), "asked for 0.05, measured 0.0612"),
        (0.123456789, (1.0, 1.0), "asked for 0.123457, measured 1"),
        (2.0, (1000.0, 1000.0), "asked for 2, measured 1e+03"),
        (1.0, (0.5, 0.5), "asked for 1, measured 0.5"),
        (0.0, (0.5, 0.5), None),
        (None, (0.5, 0.5), None),
    ],
)
def test_a_magnitude_that_is_off_is_told_with_what_was_asked_for(asked, magnitudes, said):
    found = clause(fired(forward=2), asked=asked)
    found.spots["a"].forward = reading(*magnitudes)
    why = ": the tensor's own type rounds, or the fault is data-dependent"
    assert found.remark() == (None if said is None else said + why) == found.to_dict()["remark"]


def test_how_sure_a_magnitude_is_counts_over_all_spots():
    """Each spot alone is sure of its own; together they are not."""
    found = clause(fired("a"), fired("b"))
    found.spots["a"].forward, found.spots["b"].forward = reading(1.0, 1.0), reading(3.0, 3.0)
    assert found.magnitude == 2.0 and found.remark() is None


def test_a_summary_rounds_what_was_asked_and_measured():
    found = clause(fired(forward=1200, backward=34), asked=0.123456)
    found.spots["a"].backward = reading(0.654321)
    assert found.summary() == "gain:1, now 0.123456@layer.0 fired 1,234 times at 1 site, 0.654 measured of 0.123 asked for"
    many = clause(*(fired(f"s{i}") for i in range(1001)), asked=None)
    assert many.summary() == "gain:1@layer.0 fired 1,001 times at 1,001 sites"


def test_a_magnitude_of_zero_is_one():
    found = clause(fired(), asked=0.0)
    found.spots["a"].forward = reading(0.0, 0.0)
    assert found.magnitude == 0.0 and found.summary().endswith("0 measured of 0 asked for")
    assert found.to_dict()["measured_magnitude"] == 0.0 and found.to_dict()["asked"] == 0.0


@pytest.mark.parametrize(
    ("mine", "theirs", "asked"), [(0.0, 2.0, 1.0), (2.0, 0.0, 1.0), (0.0, 0.0, 0.0), (None, 2.0, None), (2.0, None, 2.0)]
)
def test_magnitudes_that_were_asked_for_are_averaged_also_where_one_is_zero(mine, theirs, asked):
    one, two = clause(fired(forward=1), asked=mine), clause(fired(forward=1), asked=theirs)
    one.spots["a"].forward, two.spots["a"].backward = reading(5.0), reading(6.0)
    one.add(two)
    assert (one.asked, two.asked) == (asked, theirs)


def test_notes_are_added_once_and_in_their_order():
    one = clause(notes=["b", "a"], fused=1)
    one.add(clause(notes=["d", "a", "c"], fused=2))
    assert (one.notes, one.fused) == (["b", "a", "d", "c"], 3)


def test_a_copy_of_a_clause_shares_nothing():
    one = clause(fired(), notes=["a"], fused=2, static=False, asked=0.5)
    two = one.copy()
    assert two == one
    two.notes.append("b")
    two.spots["a"].counts["train"][0] = 9
    two.spots["z"] = Spot("z", 0)
    assert one == clause(fired(), notes=["a"], fused=2, static=False, asked=0.5)


@pytest.mark.parametrize("static", [True, False])
def test_a_clause_comes_back_from_what_it_writes(static):
    one = clause(Spot("a", 1, {"eval": [1, 0]}, forward=sums(3)), Spot("b", 2), notes=["n"], fused=4, static=static)
    told = json.loads(json.dumps(one.to_dict()))
    again = SiteLedger.from_dict(told)
    assert again == one.copy() and list(again.spots) == (["a", "b"] if static else ["a"])
    again.notes.append("more")
    assert told["notes"] == ["n"]


def test_errors_of_both_directions_are_told_apart():
    found = clause(
        Spot("a", 0, {"train": [4, 1]}, forward=Measured(fires=4, square=1.0), backward=Measured(fires=1, square=4.0))
    )
    told = found.to_dict()
    assert (told["measured_error"], told["measured_error_backward"]) == (0.5, 2.0)
    only = clause(Spot("a", 0, {"train": [0, 1]}, backward=Measured(fires=1, square=4.0))).to_dict()
    assert (only["measured_error"], only["measured_error_backward"]) == (2.0, 2.0)
    nothing = clause(Spot("a", 0)).to_dict()
    assert [nothing[k] for k in ("measured_error", "measured_error_backward", "changed_fraction", "survival_rate")] == [
        None
    ] * 4


# Ledgers


def changed(forward=1, values=5):
    """A spot that has fired and changed something."""
    return Spot("a", 0, {"train": [forward, 0]}, forward=Measured(fires=1, values=values, changed=values))


def test_inert_clauses_are_told_in_full():
    idle = Spot("a", 0, {"train": [1, 2]}, forward=Measured(fires=1, values=5))
    found = ledger(
        clause(idle, notes=["not told"]), clause(changed()), clause(fault="bias:2", site="op.silu", notes=["x", "y"]), clause(Spot("a", 0), Spot("b", 0))
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
    assert ledger(clause(changed())).inert() == [] and ledger(clause(changed())).check() is None


def test_fires_and_changes_are_summed_over_clauses():
    found = ledger(clause(changed(3, values=7)), clause(fired("b", forward=2, backward=5)), clause())
    assert (found.forward, found.backward, found.changed) == (5, 5, 7)


def test_an_empty_ledger_has_spots_for_nobody():
    found = Ledger.for_plan(Plan.parse("gain:0.5@layer.1,phase=eval;mxfp4@module.a+b"), "torch")
    assert [site.spots for site in found.sites] == [{}, {}] and found.sites[0].spots is not found.sites[1].spots
    assert [site.site for site in found.sites] == ["layer.1,phase=eval", "module.a+b"]
    assert (found.settle, found.forget, found.seed, Ledger("p", 1, []).kernel, Ledger("p", 1, []).processes) == (
        None,
        None,
        0,
        "torch",
        1,
    )


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_a_file_is_json_that_people_can_read(tmp_path, kind):
    found = ledger(clause(changed(), site="module.λ"), kernel="native", processes=3)
    path = kind(tmp_path / "ledger.json")
    found.save(path)
    text = (tmp_path / "ledger.json").read_text(encoding="utf-8")
    assert text.endswith("}\n") and '\n  "plan": "plan",\n' in text and json.loads(text) == found.to_dict()
    assert list(json.loads(text)) == ["schema", "plan", "seed", "kernel", "processes", "forward", "backward", "sites"]
    again = Ledger.load(path)
    assert again == found and (again.kernel, again.processes) == ("native", 3)


@pytest.mark.parametrize("schema", ["shaketable.ledger/2", "", None, 1])
def test_another_schema_is_refused_by_what_it_is(schema):
    told = ledger(clause(changed())).to_dict() | {"schema": schema}
    with pytest.raises(ValueError, match="this is not a ledger of schema") as raised:
        Ledger.from_dict(told)
    assert str(raised.value) == f"this is not a ledger of schema 'shaketable.ledger/1': {schema!r}"


@pytest.mark.parametrize("kernels", list(itertools.permutations(("torch", "native", "torch"))))
def test_merged_ledgers_name_each_kernel_once(kernels):
    merged = Ledger.merge(ledger(clause(changed()), kernel=kernel, processes=i + 1) for i, kernel in enumerate(kernels))
    assert (merged.kernel, merged.processes, merged.forward) == ("native+torch", 6, 3)
    assert (merged.plan, merged.seed) == ("plan", 0)
    assert (
        Ledger.merge([merged, merged, *[ledger(clause(changed()), kernel=kernel) for kernel in kernels]]).kernel
        == "native+torch"
    )


def test_clauses_are_merged_one_by_one():
    merged = Ledger.merge(
        [ledger(clause(changed(1)), clause(changed(10))), ledger(clause(changed(100)), clause(changed(1000)))]
    )
    assert [site.forward for site in merged.sites] == [101, 1010]


def test_ledgers_of_other_numbers_of_clauses_are_not_merged():
    for one, two in itertools.permutations([ledger(clause(changed())), ledger(clause(changed()), clause(changed()))]):
        with pytest.raises(ValueError, match="zip"):
            Ledger.merge([one, two])


def test_one_ledger_merged_is_a_copy_of_its_own():
    one = ledger(clause(changed(), Spot("b", 1)), kernel="native", processes=2)
    merged = Ledger.merge([one])
    assert merged == one and merged is not one
    merged.sites[0].spots["a"].counts["train"][0] = 99
    assert one.forward == 1


def test_ledgers_are_equal_by_what_they_say_and_do_not_show_who_feeds_them():
    one, two = ledger(clause(changed()), settle=print), ledger(clause(changed()), forget=print)
    assert one == two and "settle" not in repr(one) and "forget" not in repr(two)
    assert one != ledger(clause(changed()), processes=2)


def test_what_is_merged_of_live_ledgers_is_fed_by_nobody():
    fed = []
    live = LiveLedger("plan", 0, [clause(changed())], settle=lambda: fed.append(1), forget=lambda: fed.append(2))
    merged = Ledger.merge([live, live])
    assert fed and merged.settle is None is merged.forget and merged.forward == 2
    merged.clear()
    assert 2 not in fed and live.forward == 1


@pytest.mark.parametrize("look", [str, Ledger.to_dict, Ledger.inert, lambda live: live.forward, lambda live: live.sites, lambda live: Ledger.merge([live])])  # fmt: skip
def test_whoever_looks_at_a_live_ledger_sees_what_was_counted_until_then(look):
    spot = changed()
    live = LiveLedger("plan", 0, [clause(spot)], settle=lambda: spot.counts.update(train=[spot.counts["train"][0] + 1, 0]))
    look(live)
    assert spot.counts["train"][0] > 1
    count = spot.counts["train"][0]
    assert live.forward == count + 1


def test_counters_are_forgotten_before_they_could_be_brought_again():
    """Else what was counted on a device would come back into the ledger that was just cleared."""
    order, spot = [], changed()
    live = LiveLedger("plan", 0, [clause(spot)], settle=lambda: order.append("settle"), forget=lambda: order.append("forget"))
    live.clear()
    assert order[0] == "forget" and spot.counts == {}


def test_what_is_cleared_stays_the_same_spot_with_its_name_and_layer():
    spot = Spot("a", 3, {"train": [1, 2]}, 3, 0.5, sums(1), sums(10))
    found = ledger(clause(spot, notes=["n"], fused=3, asked=0.5))
    found.clear()
    assert found.sites[0].spots["a"] is spot == Spot("a", 3)
    assert (found.sites[0].notes, found.sites[0].fused, found.sites[0].asked, found.plan) == ([], 0, 0.5, "plan")


# The table


def cells(found):
    table = build_table(found)
    return {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}


@pytest.mark.parametrize(
    ("faults", "heads"),
    [
        (["gain:1"], ["plan", "sites", "forward", "backward", "error", "changed", "time"]),
        (["gain:1", "dead_zone:0.5"], ["plan", "sites", "forward", "backward", "error", "changed", "kept", "time"]),
        (["dead_zone:0.5,scope=token"], ["plan", "sites", "forward", "backward", "error", "changed", "kept", "time"]),
    ],
)
def test_what_is_kept_is_shown_where_a_dead_zone_is(faults, heads):
    assert list(cells(ledger(*(clause(changed(), fault=fault) for fault in faults)))) == heads


def test_a_clause_that_was_never_measured_shows_so():
    found = cells(ledger(clause(fired(forward=12345, seconds=0.005), fault="dead_zone:1")))
    assert {head: column[0] for head, column in found.items()} == {
        "plan": "dead_zone:1\n  @layer.0", "sites": "1", "forward": "12,345", "backward": "0", "error": "–", "changed": "–", "kept": "–",
        "time": "0.01 s",
    }  # fmt: skip


def test_every_number_stands_in_the_row_of_its_clause():
    one = clause(Spot("a", 0, {"train": [1, 2]}, seconds=1.0, forward=Measured(1, 0.01, 100, 50, 100, 25)), fault="dead_zone:1")
    two = clause(Spot("a", 0, {"train": [3, 4]}, seconds=2.0, forward=Measured(1, 0.0, 100, 0, 100, 100)), site="op.silu")
    found = cells(ledger(one, two))
    assert found["plan"] == ["dead_zone:1\n  @layer.0", "gain:1\n  @op.silu"]
    assert [found[h] for h in ("forward", "backward", "time")] == [["1", "3"], ["2", "4"], ["1.00 s", "2.00 s"]]
    assert [found[h] for h in ("error", "changed", "kept")] == [["10.00%", "0.00%"], ["50.00%", "0.00%"], ["25.00%", ""]]


def test_the_text_is_as_wide_as_a_page_whatever_the_terminal_and_loses_nothing_of_a_plan(monkeypatch):
    names = [f"name_{i}" for i in range(40)]
    for columns in ("20", "300"):
        monkeypatch.setenv("COLUMNS", columns)
        text = ledger_table(ledger(clause(changed(), site=f"module.{'+'.join(names)}"), clause(site="op.silu")))
        table, remark = text.split("\n  ! ")
        assert 90 < max(map(len, table.splitlines())) <= 110 and table == table.rstrip() and "\x1b" not in text
        assert "+".join(names) in "".join(table.split()), "a long plan goes on in the next lines"
        assert remark == "gain:1@op.silu matched 0 spots and never fired"


def test_a_ledger_prints_as_its_table():
    found = ledger(clause(changed()))
    assert str(found) == ledger_table(found) and "Ledger · seed 0 · noise by torch" in str(found)
    assert "!" not in str(found), "nothing to remark"


def test_remarks_come_in_one_order():
    odd = clause(Spot("a", 0, {"train": [1, 0]}, forward=reading(2.0, 2.0)), Spot("b", 0), fused=1, notes=["n1", "n2"])
    assert remarks(ledger(odd, clause(site="layer.1"))) == [
        "layer.0: asked for 1, measured 2: the tensor's own type rounds, or the fault is data-dependent",
        "layer.0: 1 fused attention calls; their inner products are not exposed",
        "layer.0: n1",
        "layer.0: n2",
        "layer.0: 1 of 2 sites never fired: b, …",
        "gain:1@layer.1 matched 0 spots and never fired",
    ]


def test_spots_that_never_fired_are_named_only_beside_some_that_did():
    assert remarks(ledger(clause(changed(), Spot("b", 0), static=False))) == []
    assert remarks(ledger(clause(changed()))) == []
    assert remarks(ledger(clause(Spot("a", 0), Spot("b", 0)))) == ["gain:1@layer.0 matched 2 spots and never fired"]


def test_the_error_of_the_table_is_the_measured_error_of_the_file():
    layer, x = nn.Linear(8, 8), torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    with st.inject(layer, "dead_zone:0.5@module.linear,direction=both,point=output", seed=1) as ledger:
        layer(x).pow(3).sum().backward()
    (site,) = ledger.to_dict()["sites"]
    assert site["forward"] == site["backward"] == 1
    both = ledger.sites[0].measured().error
    assert f"{both:.4f}" != f"{site['measured_error']:.4f}", "errors of values and gradients are unlike"
    assert _percent(site["measured_error"]) in str(ledger) and _percent(both) not in str(ledger)
