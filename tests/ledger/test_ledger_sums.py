"""Ledgers of any content: what they say is what their spots hold, adding adds, and nothing is shared with what was added."""

import copy
import json
import math

import pytest
from hypothesis import Phase, settings
from hypothesis import given as generated
from hypothesis import strategies as some

from shaketable.ledger.ledger import Ledger, SiteLedger
from shaketable.ledger.spot import Measured, Spot
from shaketable.ledger.table import build_table, ledger_table, remarks

COUNT, SHARE = some.integers(0, 50), some.floats(0, 4, width=16)
PHASES, DIRECTIONS = ("rollout", "train", "eval"), ("forward", "backward")
SOME = some.integers(1, 50)
SUMS = some.one_of(some.builds(Measured), some.builds(Measured, *([SOME, SHARE] + 5 * [COUNT] + 2 * [SHARE])))
PHASES_OF_A_SEARCH = (Phase.explicit, Phase.reuse, Phase.generate)
LAYER = some.one_of(some.none(), some.integers(0, 3))
FIRES = some.dictionaries(some.sampled_from(PHASES), some.tuples(COUNT, COUNT).map(list), min_size=1)
SPOTS = some.one_of(
    some.builds(Spot, some.just(""), LAYER), some.builds(Spot, some.just(""), LAYER, FIRES, COUNT, SHARE, SUMS, SUMS)
)
SITES = some.builds(
    SiteLedger,
    some.just("module.linear"),
    some.just("gain:0.5"),
    some.one_of(some.none(), SHARE),
    some.dictionaries(some.sampled_from("abc"), SPOTS),
    some.booleans(),
    COUNT,
    some.lists(some.sampled_from(("one", "two", "three")), unique=True),
)


def given(strategy):
    """A few examples: each has hundreds of numbers in it, and to make one that fails smaller takes minutes."""
    return lambda test: settings(max_examples=25, phases=PHASES_OF_A_SEARCH)(generated(strategy)(test))


def named(site):
    for name, spot in site.spots.items():
        spot.name = name
    return site


def ledgers(plan="gain:0.5@module.linear"):
    kernel = some.sampled_from(("torch", "native"))
    sites = some.lists(SITES.map(named), min_size=2, max_size=2)
    return some.builds(Ledger, some.just(plan), some.just(3), sites, kernel, some.integers(1, 4))


def total(spots, what):
    return sum(what(spot) for spot in spots)


def either(spot, name):
    return getattr(spot.forward, name) + getattr(spot.backward, name)


@given(SITES.map(named))
def test_what_a_clause_says_of_itself_is_what_its_spots_hold(site):
    said, spots = site.to_dict(), site.spots.values()
    assert (said["site"], said["fault"], said["asked"]) == ("module.linear", "gain:0.5", site.asked)
    for i, direction in enumerate(DIRECTIONS):
        assert said[direction] == total(spots, lambda s, i=i: sum(both[i] for both in s.counts.values()))
        for table, keys in (("phases", set(PHASES)), ("layers", {str(s.layer) for s in spots})):
            here = sum(row[direction] for key, row in said[table].items() if key in keys)
            assert here == said[direction] and said[table].keys() <= keys
    for phase, row in said["phases"].items():
        assert row["forward"] == total(spots, lambda s, phase=phase: s.counts.get(phase, [0, 0])[0])
    assert said["matched"] == (len(spots) if site.static else total(spots, lambda s: bool(s.counts)))
    assert said["recomputed"] == total(spots, lambda s: s.recomputed)
    assert said["seconds"] == pytest.approx(total(spots, lambda s: s.seconds))
    assert (said["fused"], said["static"], said["notes"]) == (site.fused, site.static, site.notes)


@given(SITES.map(named))
def test_what_was_measured_is_the_mean_over_what_was_measured(site):
    said, spots = site.to_dict(), site.spots.values()

    def mean(of, over, root=False):
        parts, whole = total(spots, of), total(spots, over)
        return None if not whole else pytest.approx(math.sqrt(parts / whole) if root else parts / whole)

    forward = mean(lambda s: s.forward.square, lambda s: s.forward.fires, root=True)
    backward = mean(lambda s: s.backward.square, lambda s: s.backward.fires, root=True)
    assert said["measured_error"] == (backward if forward is None else forward)
    assert said["measured_error_backward"] == backward
    assert said["changed_fraction"] == mean(lambda s: either(s, "changed"), lambda s: either(s, "values"))
    assert said["survival_rate"] == mean(lambda s: either(s, "survived"), lambda s: either(s, "alive"))
    assert said["measured_magnitude"] == mean(lambda s: either(s, "magnitude"), lambda s: either(s, "magnitudes"))


@given(ledgers())
def test_a_ledger_comes_back_from_json_and_what_it_says_is_its_own(ledger):
    said = ledger.to_dict()
    again = Ledger.from_dict(json.loads(json.dumps(said)))
    assert again.to_dict() == said
    assert (again.plan, again.seed, again.kernel, again.processes) == (ledger.plan, 3, ledger.kernel, ledger.processes)
    _spoil(said)
    assert again.to_dict() == ledger.to_dict(), "what was handed out is a copy"


def _spoil(value):
    """Change all that can be changed inside of nested lists and mappings."""
    for member in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _spoil(member)
    if isinstance(value, dict | list):
        value.clear()


@given(some.lists(ledgers(), min_size=1, max_size=3))
def test_merging_adds_everything_and_shares_nothing(parts):
    before = copy.deepcopy([p.to_dict() for p in parts])
    merged = Ledger.merge(parts)
    assert merged.processes == sum(p.processes for p in parts)
    assert merged.kernel == "+".join(sorted({p.kernel for p in parts}))
    for i, site in enumerate(merged.sites):
        own = [p.sites[i] for p in parts]
        for name in ("forward", "backward", "recomputed", "fused"):
            assert site.to_dict()[name] == sum(part.to_dict()[name] for part in own), name
        for direction in (*DIRECTIONS, None):
            sums = [vars(part.measured(direction)) for part in own]
            for name, number in vars(site.measured(direction)).items():
                assert number == pytest.approx(sum(s[name] for s in sums)), name
        assert set(site.notes) == {note for part in own for note in part.notes} and len(set(site.notes)) == len(site.notes)
        if len(parts) == 2 and all(part.asked is not None and part.magnitudes for part in own):
            weights = [part.magnitudes for part in own]
            mean = sum(w * part.asked for w, part in zip(weights, own, strict=True)) / sum(weights)
            assert site.asked == pytest.approx(mean)
    merged.clear()
    for site in merged.sites:
        site.notes.append("spoilt")
    assert [p.to_dict() for p in parts] == before, "what was merged is left alone"


@given(ledgers())
def test_a_ledger_that_is_cleared_keeps_its_spots_and_nothing_else(ledger):
    layers = [{name: spot.layer for name, spot in site.spots.items()} for site in ledger.sites]
    ledger.clear()
    assert [{name: spot.layer for name, spot in site.spots.items()} for site in ledger.sites] == layers
    assert (ledger.forward, ledger.backward, ledger.changed) == (0, 0, 0)
    for site in ledger.sites:
        assert (site.fused, site.notes, site.to_dict()["recomputed"], site.measured()) == (0, [], 0, Measured())


@pytest.mark.parametrize("forward", [0, 2])
@pytest.mark.parametrize("backward", [0, 3])
@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize("measured", DIRECTIONS)
def test_a_clause_is_inert_that_never_fired_or_changed_nothing_in_either_direction(forward, backward, changed, measured):
    spot = Spot("a", 0, {"train": [forward, backward]}, **{measured: Measured(fires=1, values=5, changed=changed)})
    idle = SiteLedger("layer.1", "gain:2", 2.0, {"b": Spot("b", 1), "c": Spot("c", 2)})
    ledger = Ledger("…", 0, [SiteLedger("layer.0", "gain:1", 1.0, {"a": spot}), idle])
    first = "never fired" if forward + backward == 0 else None if changed else f"fired {forward + backward} times and changed"
    lines = ledger.inert()
    assert lines[-1] == "gain:2@layer.1 matched 2 spots and never fired"
    assert len(lines) == 1 + (first is not None) and (
        first is None or f"gain:1@layer.0 {first}" in lines[0].replace("matched 1 spots and ", "")
    )
    assert ledger.changed == changed


def test_a_row_of_the_table_has_each_number_under_its_head():
    sums = Measured(fires=1, square=0.0625, values=1000, changed=125, alive=100, survived=50)
    spots = {"a": Spot("a", 0, {"train": [1234, 56]}, seconds=7.5, forward=sums), "b": Spot("b", 1, {"eval": [1, 0]})}
    ledger = Ledger("…", 0, [SiteLedger("layer.all", "dead_zone:0.1", None, spots), SiteLedger("op.sdpa", "gain:2", None)])
    table = build_table(ledger)
    rows = {str(column.header): [str(cell).strip() for cell in column.cells] for column in table.columns}
    assert list(rows) == ["plan", "sites", "forward", "backward", "error", "changed", "kept", "time"]
    shown = {name: cells[0] for name, cells in rows.items()}
    assert shown.pop("plan").split() == ["dead_zone:0.1", "@layer.all"]
    assert shown.pop("time") == "7.50 s" and [shown[k] for k in ("sites", "forward", "backward")] == ["2", "1,235", "56"]
    assert [float(shown[k].rstrip(" %")) for k in ("error", "changed", "kept")] == [25.0, 12.5, 50.0]
    assert rows["kept"][1] == "" and rows["forward"][1] == "0"


def test_every_clause_has_its_remarks():
    """Magnitudes that are not as asked, fused attention, spots without a fire, and what is inert; of all clauses."""
    off = Measured(fires=2, values=10, changed=10, magnitudes=2, magnitude=4.0, magnitude_square=8.0)

    def site(name):
        spots = {"a": Spot("a", 0, {"train": [1, 0]}, forward=copy.copy(off)), "b": Spot("b", 1)}
        return SiteLedger(name, "gain:1", 1.0, spots, fused=3)

    ledger = Ledger("…", 0, [site("layer.0"), site("layer.1"), SiteLedger("layer.2", "gain:1", 1.0)])
    said = remarks(ledger)
    for name in ("layer.0", "layer.1"):
        assert f"{name}: asked for 1, measured 2: the tensor's own type rounds, or the fault is data-dependent" in said
        assert f"{name}: 3 fused attention calls; their inner products are not exposed" in said
        assert f"{name}: 1 of 2 sites never fired: b, …" in said
    assert said[-1] == "gain:1@layer.2 matched 0 spots and never fired" and len(said) == 7
    assert all(f"  ! {line}" in ledger_table(ledger) for line in said)
