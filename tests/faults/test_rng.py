"""The generator: the same bits by C++ and by plain torch, and numbers that look random in every way we could think of.

Keys are fixed, so a test either always passes or always fails; the bounds are those of honest randomness (p > 0.001 or
five standard errors).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from shaketable.faults import Draw, make_fault
from shaketable.faults.cpu import native
from shaketable.faults.rng import key_of, lanes, mix64, normals, plain_normals, uniforms
from tests.tensors import same_bits as same

CPU = torch.device("cpu")
MILLION = 1_000_000
needs_kernel = pytest.mark.skipif(not native.available(), reason="no C++ compiler here")
SAMPLES = {
    "normals": lambda key, n=MILLION: normals(n, key, CPU).double().numpy(),
    "uniforms": lambda key, n=MILLION: uniforms(n, key, CPU).double().numpy() - 0.5,
}
each_sample = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In standard errors: a standard normal when `a` and `b` are unrelated."""
    return float(np.corrcoef(a, b)[0, 1] * len(a) ** 0.5)


# The same bits by both routes


@needs_kernel
def test_kernel_and_plain_torch_give_the_same_bits_over_millions():
    """Rare branches of the polynomials come up here: tails, octant borders, both signs."""
    assert same(native.normals(3 * MILLION, key_of("long")), plain_normals(3 * MILLION, key_of("long"), CPU))


@needs_kernel
@pytest.mark.parametrize("n", [1, 31, 32, 33, 1000, 100_003])
@pytest.mark.parametrize("kind", ["relative_gaussian", "absolute_gaussian"])
def test_fused_kernels_give_the_bits_of_the_formula_at_every_size(kind, n, monkeypatch):
    fault, draw = make_fault({"kind": kind, "magnitude": 0.05}), Draw(key_of("size", n))
    inputs = [torch.linspace(-3, 3, n, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    fused = [fault.apply(x, draw) for x in inputs]
    monkeypatch.setattr(native, "_library", lambda: None)
    assert all(same(y, fault.apply(x, draw)) for x, y in zip(inputs, fused, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("n", [1, 31, 32, 33, 1000, 3 * MILLION])
def test_an_accelerator_draws_the_same_bits(n):
    for key in (0, 2**64 - 1, key_of("accelerator")):
        for draw in (normals, uniforms):
            there = draw(n, key, torch.device("cuda"))
            assert there.device.type == "cuda"
            assert same(there.cpu(), draw(n, key, CPU))


def test_known_values():
    """Pinned: noise must not change between versions, or a committed run cannot be repeated."""
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert key_of(7, "layer", 3) == 11127795187796208922
    key = 0x0123456789ABCDEF
    assert normals(40, key, CPU)[[0, 2, 1, 32]].tolist() == [
        1.2348284721374512, -0.4851972162723541, 0.18942466378211975, 2.0660362243652344,
    ]  # fmt: skip
    assert uniforms(40, key, CPU)[:3].tolist() == [0.45824944972991943, 0.3533772826194763, 0.7111378312110901]


# Normals


def test_normals_are_normal():
    for key in map(key_of, ("a", "b", "c")):
        assert stats.kstest(SAMPLES["normals"](key), "norm").pvalue > 0.001


# Uniforms


def test_streams_of_a_draw_are_unrelated():
    x = torch.empty(MILLION)
    draw = Draw(key_of("streams"))
    first, second, z = (t.double().numpy() for t in (draw.uniform(x), draw.uniform(x, stream=1), draw.normal(x)))
    assert abs(correlation(first, second)) < 5
    assert abs(correlation(first, z)) < 5
    assert abs(correlation(first, z**2)) < 5


# No relation between elements, keys, channels


@each_sample
@pytest.mark.parametrize("lag", [1, 16])
def test_neighbours_are_unrelated(sample, lag):
    z = sample(key_of("lag"))
    for f in (lambda v: v, np.square, np.sign):
        assert abs(correlation(f(z[lag:]), f(z[:-lag]))) < 5


@each_sample
def test_consecutive_keys_are_unrelated(sample):
    drawn = [sample(key, 100_000) for key in range(40)]
    for a, b in pairwise(drawn):
        assert abs(correlation(a, b)) < 5
        assert abs(correlation(a**2, b**2)) < 5
    first = np.array([d[0] for d in drawn])
    assert len(set(first.tolist())) == len(first)


# Lanes


def test_lanes_are_a_random_set_that_depends_on_the_key():
    masks = torch.stack([lanes(64, 0.25, key_of("lanes", i)) for i in range(2000)])
    assert len({tuple(m.tolist()) for m in masks}) == 2000
    counts = masks.sum(0).double()
    error = (2000 * 0.25 * 0.75) ** 0.5
    assert ((counts - 500).abs() < 5 * error).all()
