"""Rows of counters: which fires of many phases are measured, what several devices found, and what a spot is told of it."""

import pytest
import torch

from shaketable.faults import make_fault
from shaketable.faults import sums as s
from shaketable.inject import counters
from shaketable.inject.counters import Measurement, measure, tell
from shaketable.ledger.spot import Measured, Spot
from tests.inject.test_counters import Far, table, tap

GAIN = make_fault({"kind": "gain", "magnitude": 0.5})
NOISE = make_fault({"kind": "noise", "magnitude": 0.5})
FORMAT = make_fault({"kind": "mxfp4"})
CHANGE = [1.0, 0.25, 8.0, 4.0, 7.0, 6.0, 1.0, 0.5, 0.25]


class Farther(torch.Tensor):
    device = property(lambda self: torch.device("meta", 1))


def found(values, changed, kind=Far, magnitude=0.25):
    numbers = torch.zeros(12, dtype=torch.float64)
    numbers[s.VALUES], numbers[s.CHANGED] = values, changed
    return Measurement(NOISE, numbers.as_subclass(kind), None if magnitude is None else torch.tensor(magnitude))


def test_every_tap_has_a_row_for_each_direction():
    rows = table(3)
    assert rows.saved() == [[0.0] * 16] * 6
    rows.count(tap(1), True, "eval")
    rows.count(tap(2), False, "rollout")
    assert [[i for i, n in enumerate(row[:4]) if n] for row in rows.saved()] == [[], [], [], [2], [0], []]


def test_fires_of_all_phases_count_for_what_is_due():
    rows, one = table(), tap()
    rows.add_columns(one, False, CHANGE)
    phases = ["rollout", "train", "eval", "rollout", "rollout", "train", "eval", "eval", "train"]
    assert [rows.count(one, False, phase) for phase in phases] == [n in (1, 2, 4, 8) for n in range(1, 10)]
    rows.settle([one])
    assert one.spot.counts == {"rollout": [3, 0], "train": [3, 0], "eval": [3, 0]}


def test_the_other_direction_and_the_other_tap_have_marks_of_their_own():
    rows, one, other = table(), tap(0), tap(1)
    for who, backward in ((one, False), (one, True), (other, False)):
        rows.add_columns(who, backward, CHANGE)
        assert [rows.count(who, backward, "train") for _ in range(4)] == [True, True, False, True]


def test_what_a_cpu_measured_is_in_the_row_at_once_and_what_another_device_measured_is_not():
    rows, one = table(), tap()
    numbers = torch.zeros(12, dtype=torch.float64)
    numbers[s.VALUES], numbers[s.CHANGED] = 10, 4
    rows.add(one, True, Measurement(NOISE, numbers, None))
    assert rows.saved()[1][counters.VALUES : counters.ALIVE] == [10.0, 4.0] and rows.saved()[0] == [0.0] * 16
    rows.add(one, False, found(10, 4))
    assert rows.saved()[0] == [0.0] * 16
    rows.settle([one])
    assert rows.saved()[0][counters.CHANGED] == 4.0


def test_several_devices_are_asked_each_for_its_own_and_rows_do_not_mix():
    rows, one, other = table(), tap(0), tap(1)
    rows.add(one, False, found(10, 1))
    rows.add(other, True, found(20, 2, Farther))
    rows.add(one, False, found(30, 3, Farther, magnitude=0.5))
    rows.add(other, True, found(40, 4, magnitude=None))
    rows.settle([one, other])
    assert (one.spot.forward.values, one.spot.forward.changed, one.spot.forward.fires) == (40, 4, 2)
    assert (other.spot.backward.values, other.spot.backward.changed, other.spot.backward.fires) == (60, 6, 2)
    assert (one.spot.forward.magnitudes, one.spot.forward.magnitude) == (2, 0.75)
    assert one.spot.backward == Measured() == other.spot.forward


def test_a_device_is_not_asked_before_the_eighth_fire_however_often_others_fire(monkeypatch):
    asked = []
    all_columns = Measurement.all_columns.__func__
    monkeypatch.setattr(Measurement, "all_columns", classmethod(lambda cls, of: asked.append(len(of)) or all_columns(cls, of)))
    rows, one, other = table(), tap(0), tap(1)
    for _ in range(7):
        if rows.count(one, False, "train"):
            rows.add(one, False, found(10, 5))
        rows.count(other, False, "train")
    assert asked == []
    rows.count(one, False, "train")
    assert asked == [3], "once, for all that was measured"


def test_a_row_is_told_when_anything_of_it_is_new_and_else_not(monkeypatch):
    told = []
    monkeypatch.setattr(counters, "tell", lambda spot, backward, now, before: told.append((spot.name, backward)))
    rows, one, other = table(), tap(0), tap(1)
    rows.settle([one, other])
    assert told == []
    rows.count(one, True, "train")
    rows.settle([one, other])
    rows.spend(other, False, 0.5)
    rows.settle([one, other])
    rows.settle([one, other])
    assert told == [("tap 0", True), ("tap 1", False)]


def test_what_happens_after_the_ledger_was_told_is_told_the_next_time():
    rows, one = table(1), tap()
    for n in (1, 2, 3):
        rows.count(one, False, "train")
        rows.add_columns(one, False, CHANGE)
        rows.settle([one])
        assert one.spot.counts == {"train": [n, 0]} and one.spot.forward.fires == n and one.spot.forward.changed == 4 * n


def test_only_the_taps_that_are_named_are_told():
    rows, one, other = table(), tap(0), tap(1)
    rows.count(one, False, "train")
    rows.count(other, False, "train")
    rows.settle([other])
    assert one.spot.counts == {} and other.spot.counts == {"train": [1, 0]}
    rows.settle([one, other])
    assert one.spot.counts == {"train": [1, 0]} == other.spot.counts


def test_what_is_saved_is_a_copy_and_so_is_what_is_taken_up():
    rows, one = table(1), tap()
    rows.count(one, False, "train")
    kept = rows.saved()
    rows.count(one, False, "train")
    assert kept[0][1] == 1.0
    later = table(1)
    later.go_on(kept)
    kept[0][1] = 99.0
    assert later.saved()[0][1] == 1.0
    later.count(one, False, "train")
    assert later.saved()[0][1] == 2.0 and later._told[0][1] == 1.0


def test_rows_that_go_on_measure_the_fires_that_the_other_process_would_have():
    rows, one = table(1), tap()
    rows.add_columns(one, False, CHANGE)
    for _ in range(5):
        rows.count(one, False, "train")
    later = table(1)
    later.go_on(rows.saved())
    assert [later.count(one, False, "train") for _ in range(4)] == [False, False, True, False], "the eighth"


def test_forgetting_forgets_that_a_device_had_changed_nothing():
    rows, one = table(1), tap()
    for _ in range(8):
        if rows.count(one, False, "train"):
            rows.add(one, False, found(10, 0))
    assert rows._unchanged == {0}
    lock = rows._lock
    rows.forget()
    assert rows._unchanged == set() and rows._pending == {} and rows._lock is not lock
    due = []
    for n in range(1, 8):
        if rows.count(one, False, "train"):
            due.append(n)
            rows.add(one, False, found(10, 5))
    assert due == [1, 2, 4], "as at first"


# ---- what a spot is told


def reading(**columns):
    row = [0.0] * counters.WIDTH
    for name, value in columns.items():
        row[getattr(counters, name)] = value
    return row


@pytest.mark.parametrize("backward", [False, True])
def test_a_spot_is_told_differences(backward):
    spot, before, now = Spot("a", 0), reading(RECOMPUTED=1, SECONDS=1.0), reading(RECOMPUTED=3, SECONDS=1.5)
    before[:3], now[:3] = [1.0, 2.0, 0.0], [1.0, 5.0, 0.0]
    tell(spot, backward, now, before)
    assert spot.counts == {"train": [0, 3] if backward else [3, 0]}, "a phase without anything new is not there"
    assert spot.recomputed == 2 and spot.seconds == 0.5 and spot.forward == Measured() == spot.backward
    tell(spot, not backward, now, before)
    assert spot.counts == {"train": [3, 3]} and spot.recomputed == 4


def test_what_was_measured_is_added_to_its_direction():
    spot = Spot("a", 0)
    before, now = reading(MEASURED=1, VALUES=10, CHANGED=1), reading(MEASURED=3, VALUES=30, CHANGED=4, ERROR=0.5)
    tell(spot, True, now, before)
    assert (spot.backward.fires, spot.backward.values, spot.backward.changed, spot.backward.square) == (2, 20, 3, 0.5)
    assert spot.forward == Measured()


@pytest.mark.parametrize(
    ("before", "now", "values", "changed"),
    [
        ({}, {"SEEN": 1}, 11, 1),
        ({"SEEN": 1}, {"SEEN": 1}, 10, 0),
        ({}, {"SEEN": 1, "CHANGED": 2}, 10, 2),
        ({}, {}, 10, 0),
    ],
)
def test_a_change_that_was_only_seen_counts_once_as_one(before, now, values, changed):
    spot = Spot("a", 0)
    tell(spot, False, reading(MEASURED=1, VALUES=10, **now), reading(**before))
    assert (spot.forward.values, spot.forward.changed) == (values, changed)


# ---- measuring


def sums_of(**columns):
    numbers = torch.zeros(12, dtype=torch.float64)
    for name, value in columns.items():
        numbers[getattr(s, name)] = value
    return numbers


@pytest.mark.parametrize(
    ("magnitude", "told"),
    [(0.5, [1.0, 0.5, 0.25]), (float("nan"), [0.0] * 3), (float("inf"), [0.0] * 3), (0.0, [1.0, 0.0, 0.0])],
)
def test_a_magnitude_that_is_no_number_is_not_averaged(magnitude, told):
    columns = Measurement(
        NOISE, sums_of(VALUES=4, CHANGED=3, ALIVE=2, SURVIVED=1, ERROR=1, SIZE=4), torch.tensor(magnitude)
    ).columns()
    assert columns == [1.0, 0.25, 4.0, 3.0, 2.0, 1.0, *told]


def test_a_fault_without_a_magnitude_tells_none():
    assert Measurement(FORMAT, sums_of(VALUES=4, ERROR=1, SIZE=2), None).columns() == [1.0, 0.5, 4.0, *[0.0] * 6]


def test_an_error_beside_zeros_alone_is_no_relative_one():
    assert Measurement(FORMAT, sums_of(VALUES=4, ERROR=3), None).columns()[1] == 0.0


@pytest.mark.parametrize("kind", ["gain", "relative_gaussian", "noise"])
def test_where_the_sample_shows_no_change_all_of_a_tensor_is_looked_at(kind):
    fault = make_fault({"kind": kind, "magnitude": 0.5})
    clean = torch.ones(4096, 64)
    clean[1] = torch.arange(64) - 31.5
    faulty = clean.clone()
    faulty[1] *= 1.5
    columns = measure(fault, clean, faulty, None).columns()
    assert columns[2:4] == [clean.numel(), 64.0]


def test_a_sample_is_what_is_measured_of_a_large_tensor():
    clean = torch.ones(4096, 64)
    columns = measure(GAIN, clean, 1.5 * clean, None).columns()
    assert columns[2] == columns[3] == 2**14 and columns[7] == pytest.approx(0.5)


@pytest.mark.parametrize("rows", [False, True])
def test_faulty_channels_of_a_sample_are_those_of_the_tensor(rows):
    """Only the sixteenth row of sixteen is looked at, and only the faulty values tell the magnitude."""
    clean = torch.ones(4096, 64)
    lanes = (torch.arange(4096) % 2 == 0)[:, None] if rows else torch.arange(64) % 2 == 0
    found = measure(GAIN, clean, torch.where(lanes, 1.5 * clean, clean), lanes).columns()
    assert found[7] == pytest.approx(0.5)


def test_nothing_is_read_back_of_a_fault_without_a_magnitude_or_of_an_empty_tensor():
    clean = torch.linspace(1, 2, 64)
    assert measure(FORMAT, clean, clean + 1, None).magnitude is None
    assert measure(NOISE, clean[:0], clean[:0], None).magnitude is None
    assert measure(NOISE, clean, clean + 1, None).magnitude is not None
    assert measure(GAIN, clean, clean * 1.25, None).fault is GAIN
