"""Rollouts as weights with held noise count them, and checksums of what was written, by themselves."""

import pytest
import torch

from shaketable.inject import weights_in_place
from shaketable.inject.weights import Rollouts
from shaketable.inject.weights_in_place import checksum
from shaketable.sites.phases import phase


def test_rollouts_are_numbered_within_a_step_and_counted_over_all():
    rollouts = Rollouts()
    assert (rollouts.number(), rollouts.total) == (0, 0), "none yet"
    for number in (0, 1):
        with phase("rollout"):
            assert [rollouts.number() for _ in range(3)] == [number] * 3
        assert rollouts.number() == number, "outside it is the newest one"
    assert rollouts.total == 2
    rollouts.begin_step()
    assert rollouts.number() == 0
    with phase("rollout"):
        assert rollouts.number() == 0
        rollouts.begin_step()
        assert rollouts.number() == 0
    assert rollouts.total == 3, "a rollout over two steps is one"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_checksum_is_the_sum_of_words_weighted_by_their_place(dtype, monkeypatch):
    x = torch.arange(1, 12).to(dtype)
    words = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).tolist()
    total = sum(word * ((i + 1) * 0x9E3779B1 | 1) for i, word in enumerate(words))
    wrapped = (total + 2**63) % 2**64 - 2**63
    assert checksum(x) == wrapped
    monkeypatch.setattr(weights_in_place, "_CHUNK", 4)
    assert checksum(x) == wrapped, "in pieces it is the same"
    assert checksum(x.flip(0)) != wrapped and checksum(x[:0]) == 0
