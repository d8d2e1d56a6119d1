"""What is counted and measured of a tap: which fires are due, what waits on another device, what the ledger is told and when."""

from types import SimpleNamespace

import pytest
import torch

from shaketable.faults import make_fault
from shaketable.faults import sums as s
from shaketable.inject import counters
from shaketable.inject.counters import HostTable, Measurement, is_due, measure, tell
from shaketable.ledger.spot import Measured, Spot

GAIN = make_fault({"kind": "gain", "magnitude": 0.5})
NOISE = make_fault({"kind": "noise", "magnitude": 0.5})


class Far(torch.Tensor):
    """A tensor that says it is on another device."""

    device = property(lambda self: torch.device("meta"))


def tap(index=0, is_held=False):
    return SimpleNamespace(index=index, is_held=is_held, spot=Spot(f"tap {index}", index))


def table(taps=2):
    made = HostTable()
    for _ in range(taps):
        made.add_tap()
    return made


def far(values, changed):
    """What a fire on another device measured."""
    numbers = torch.zeros(12, dtype=torch.float64)
    numbers[s.VALUES], numbers[s.CHANGED] = values, changed
    return Measurement(NOISE, numbers.as_subclass(Far), torch.tensor(0.25))


def counted(of, one, fires, backward=False, phase="train"):
    """Which of so many fires are to be measured, counted from one."""
    return [n for n in range(1, fires + 1) if of.count(one, backward, phase)]


@pytest.mark.parametrize(
    ("fires", "changed", "mark", "due"), [(5, 0, 9, True), (8, 1, 9, False), (9, 1, 9, True), (10, 1, 9, True)]
)
def test_a_fire_is_due_at_its_mark_and_as_long_as_nothing_has_changed(fires, changed, mark, due):
    assert is_due(fires, changed, mark) is due


def test_sums_that_are_read_together_are_those_that_are_read_alone_to_the_last_bit():
    """A tensor of more than 16 million values has counts that float32 does not hold."""
    numbers = [2.0**24 + 1, 2.0**24 - 1, 3.0, 2.0, 2.0**24 + 1, 7.0, 0.1, 0.3, 0.7, 0.01, 0.2, 0.9]
    told = Measurement(GAIN, torch.tensor(numbers, dtype=torch.float64), None)
    read = Measurement(NOISE, torch.tensor(numbers[::-1], dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64))
    assert Measurement.all_columns([told, read, told]) == [told.columns(), read.columns(), told.columns()]
    assert Measurement.all_columns([told]) == [told.columns()]
    assert told.columns() == [1.0, 0.1 / 0.3, *numbers[:4], 1.0, 0.9 / 0.7, (0.9 / 0.7) ** 2]
    assert read.columns()[-3:] == [1.0, 0.1, 0.1 * 0.1]


def test_an_error_of_nothing_is_none_and_a_magnitude_that_is_no_number_is_not_counted():
    found = Measurement(GAIN, torch.zeros(12, dtype=torch.float64), None).columns()
    assert found == [1.0, 0.0, *[0.0] * 4, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("phase", ["rollout", "train", "eval"])
@pytest.mark.parametrize("backward", [False, True])
def test_fires_are_told_once_under_their_phase_and_direction(phase, backward):
    rows, one, other = table(), tap(0), tap(1)
    rows.count(other, backward, phase)
    rows.add_columns(other, backward, [1.0, 0.25, 8.0, 4.0, 7.0, 6.0, 1.0, 0.5, 0.25])
    rows.spend(other, backward, 1.5)
    for _ in range(2):
        rows.settle([one, other])
    assert one.spot == Spot("tap 0", 0)
    assert other.spot.counts == {phase: [int(not backward), int(backward)]} and other.spot.seconds == 1.5
    hit, left = (other.spot.backward, other.spot.forward)[:: 1 if backward else -1]
    assert hit == Measured(1, 0.25, 8, 4, 7, 6, 1, 0.5, 0.25) and left == Measured()


def test_a_fire_that_is_repeated_is_told_as_that_and_is_no_fire():
    rows, one, other = table(), tap(0), tap(1)
    rows.count_recomputed(other)
    rows.settle([one, other])
    assert (other.spot.recomputed, other.spot.counts, one.spot.recomputed) == (1, {}, 0)


def test_measuring_thins_out_once_something_has_changed_and_starts_anew_in_each_direction():
    rows, one = table(), tap(1)
    assert counted(rows, one, 5) == [1, 2, 3, 4, 5], "nothing has changed yet"
    rows.add_columns(one, False, [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert counted(rows, one, 20) == [5, 15], "the 10th and the 20th fire"
    assert counted(rows, one, 1, backward=True) == [1]


def test_noise_that_is_held_is_measured_at_every_draw():
    rows, one = table(), tap(0, is_held=True)
    rows.add_columns(one, False, [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert counted(rows, one, 20) == list(range(1, 21))


def test_another_device_is_asked_at_the_eighth_fire_and_its_sums_wait_until_then():
    rows, one, other = table(), tap(0), tap(1)
    due = []
    for n in range(1, 17):
        if rows.count(one, False, "train"):
            due.append(n)
            rows.add(one, False, far(10, 5))
        assert (rows.saved()[0][counters.CHANGED] > 0) == (n >= 8), n
    assert due == [1, 2, 4, 8, 16]
    rows.settle([one, other])
    assert (one.spot.forward.fires, one.spot.forward.changed, one.spot.forward.magnitude) == (5, 25, 5 * 0.25)
    assert other.spot.forward == Measured()


def test_another_device_that_has_changed_nothing_is_asked_at_every_fire_from_then_on():
    rows, one = table(), tap(0)

    def fire(changed):
        due = rows.count(one, False, "train")
        if due:
            rows.add(one, False, far(10, changed))
        return due

    assert [n for n in range(1, 13) if fire(0)] == [1, 2, 4, 8, 9, 10, 11, 12]
    assert fire(3) and not fire(0), "one that changes something ends it"


def test_rows_that_go_on_are_not_told_again_and_are_nobodys_but_their_own():
    rows, one = table(1), tap(0)
    for _ in range(3):
        rows.count(one, False, "eval")
    kept = rows.saved()
    later, after = table(1), tap(0)
    later.go_on(kept)
    later.count(after, False, "eval")
    later.settle([after])
    assert after.spot.counts == {"eval": [1, 0]} and rows.saved() == kept != later.saved()
    later.forget()
    assert later.saved() == [[0.0] * counters.WIDTH] * 2
    later.count(after, False, "eval")
    later.settle([after])
    assert after.spot.counts == {"eval": [2, 0]}


def test_what_waits_on_a_device_is_forgotten_too():
    rows, one = table(1), tap(0)
    rows.count(one, False, "train")
    rows.add(one, False, far(10, 5))
    rows.forget()
    rows.settle([one])
    assert one.spot == Spot("tap 0", 0)


@pytest.mark.parametrize(("measured", "values", "changed"), [(0, 101, 1), (4, 100, 4)])
def test_a_change_that_a_gpu_saw_beside_what_it_measured_is_one_value_of_one_more(measured, values, changed):
    spot, now = Spot("a", 0), [0.0] * counters.WIDTH
    now[counters.MEASURED], now[counters.VALUES], now[counters.CHANGED], now[counters.SEEN] = 2.0, 100.0, measured, 1.0
    tell(spot, False, now, [0.0] * counters.WIDTH)
    assert (spot.forward.fires, spot.forward.values, spot.forward.changed) == (2, values, changed)


def test_a_fault_whose_sums_tell_its_magnitude_is_not_read_back_and_another_is():
    clean = torch.linspace(1, 2, 64)
    assert measure(GAIN, clean, clean * 1.5, None).magnitude is None
    assert measure(GAIN, clean, clean * 1.5, None).columns()[-2] == pytest.approx(0.5, rel=1e-6)
    shifted = measure(NOISE, clean, clean + 0.25 * clean.std(correction=0), None)
    assert float(shifted.magnitude) == pytest.approx(0.25, rel=1e-5)
    assert measure(NOISE, clean[:0], clean[:0], None).magnitude is None
    assert measure(make_fault({"kind": "mxfp4"}), clean, clean + 1, None).magnitude is None


def test_only_the_faulty_channels_tell_the_magnitude():
    clean, lanes = torch.ones(4, 8), torch.arange(8) < 2
    found = measure(GAIN, clean, torch.where(lanes, clean * 1.5, clean), lanes).columns()
    assert found[2:4] == [32.0, 8.0] and found[-2] == pytest.approx(0.5)
    assert found[1] == pytest.approx(8 * 0.25 / 32)
