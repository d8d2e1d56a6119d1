"""Rollouts as weights with held noise count them, and checksums of what was written, by themselves."""

import pytest
import torch

from shaketable.faults.rng import key_of, mix64
from shaketable.inject.injection import Injection
from shaketable.inject.weights import in_place
from shaketable.inject.weights.held_noise import Rollouts
from shaketable.inject.weights.in_place import checksum
from shaketable.plan import Plan
from shaketable.sites.phases import phase


def test_rollouts_are_numbered_within_a_step_and_counted_over_all():
    rollouts, news = Rollouts(), []
    rollouts.on_new = lambda: news.append(rollouts.total)
    assert (rollouts.number(), rollouts.total) == (0, 0), "none yet"
    for number in (0, 1):
        with phase("rollout"):
            assert [rollouts.number() for _ in range(3)] == [number] * 3
        assert rollouts.number() == number, "outside it is the newest one"
    assert (rollouts.total, news) == (2, [1, 2])
    rollouts.begin_step()
    assert rollouts.number() == 0
    with phase("rollout"):
        assert rollouts.number() == 0
        rollouts.begin_step()
        assert rollouts.number() == 0
    assert (rollouts.total, news) == (3, [1, 2, 3]), "a rollout over two steps is one"


def held(**options):
    injection = Injection(
        Plan.parse("gain:1@module.linear,point=weight", seed=4), rank=2, allow_inert=True, hold=True, **options
    )
    return injection, injection.make_tap(0, "a.weight", "weight", None)


def test_the_key_of_a_draw_is_of_seed_place_rank_step_and_rollout():
    _, tap = held(step=5)
    assert tap.place == key_of(4, "held", "a.weight", 2) and tap.moment() == mix64(mix64(5) + 0)
    for number in (0, 1):
        with phase("rollout"):
            assert tap.moment() == mix64(mix64(5) + number)
            assert tap.key(None, False, 7) == mix64(tap.place ^ mix64(mix64(5) + number)) == tap.key_at(tap.moment())


def test_a_draw_is_counted_once_for_each_phase_key_and_fault():
    injection, tap = held()
    fault = injection.faults[0]
    assert not tap.is_counted("rollout", 1, fault)
    assert tap.count("rollout", 1, fault) is True
    assert tap.is_counted("rollout", 1, fault)
    other = fault.with_magnitude(2)
    for phase_, key, what in (("train", 1, fault), ("rollout", 2, fault), ("rollout", 1, other)):
        assert not tap.is_counted(phase_, key, what)
    tap.forget()
    assert not tap.is_counted("rollout", 1, fault)


def test_a_noisy_weight_is_kept_for_its_moment_its_fault_and_the_weight_it_was_made_from():
    injection, tap = held()
    value, origin = torch.ones(2), (1, 0, False)
    before = injection.rollouts.changes
    assert tap.keep(5, origin, value) is value and injection.rollouts.changes == before + 1
    assert tap.kept_for(origin, 5) is value
    for other, moment in (((2, 0, False), 5), ((1, 1, False), 5), ((1, 0, True), 5), (origin, 6)):
        assert tap.kept_for(other, moment) is None
    injection.set_magnitude(0.5)
    assert tap.kept_for(origin, 5) is None
    tap._let_go()
    tap._let_go()
    assert injection.rollouts.changes == before + 2


def test_a_place_for_a_noisy_weight_is_made_once_for_a_shape_and_type():
    _, tap = held()
    x = torch.ones(2, 3)
    home = tap.home(x)
    assert home.shape == x.shape and home is tap.home(2 * x)
    assert tap.home(x.bfloat16()) is not home and tap.home(torch.ones(3, 2)).shape == (3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_checksum_is_the_sum_of_words_weighted_by_their_place(dtype, monkeypatch):
    x = torch.arange(1, 12).to(dtype)
    words = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).tolist()
    total = sum(word * ((i + 1) * 0x9E3779B1 | 1) for i, word in enumerate(words))
    wrapped = (total + 2**63) % 2**64 - 2**63
    assert checksum(x) == wrapped
    monkeypatch.setattr(in_place, "_CHUNK", 4)
    assert checksum(x) == wrapped, "in pieces it is the same"
    assert checksum(x.flip(0)) != wrapped and checksum(x[:0]) == 0
