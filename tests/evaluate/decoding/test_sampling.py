"""Tokens from numbers that were drawn before: the right distribution, never a token of probability 0, nothing but u decides."""

import torch
from hypothesis import given
from hypothesis import strategies as some
from scipy import stats

from shaketable.evaluate.decoding.sampling import draw


def plainly(probabilities, u):
    """The first index whose running sum is above u, one row at a time, in float64."""
    found = []
    for row, number in zip(probabilities.double(), u.double(), strict=True):
        running = row.cumsum(0)
        found.append(int((running <= number * running[-1]).sum()))
    return found


@given(some.integers(1, 400), some.integers(0, 2**31))
def test_it_is_the_inverse_of_the_running_sum(size, seed):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(8, size, generator=generator).mul(3).softmax(-1)
    u = torch.rand(8, generator=generator)
    running = p.double().cumsum(1)
    near = ((running / running[:, -1:] - u.double().unsqueeze(1)).abs() < 1e-6).any(1)
    for found, expected, close in zip(draw(p, u).tolist(), plainly(p, u), near.tolist(), strict=True):
        assert found == expected or (close and abs(found - expected) <= 1)


@given(some.integers(2, 60), some.integers(0, 2**31), some.sampled_from([0.0, 1e-9, 0.5, 1 - 2**-24]))
def test_what_has_probability_0_is_never_drawn(size, seed, number):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(16, size, generator=generator) * (torch.rand(16, size, generator=generator) < 0.3)
    p[:, int(torch.randint(size, (1,), generator=generator))] += 1e-30
    drawn = draw(p, torch.full((16,), number))
    assert bool((p.gather(1, drawn.unsqueeze(1)) > 0).all())


def test_the_draws_follow_the_probabilities():
    p = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.0, 0.15, 0.1])
    n = 200_000
    u = torch.rand(n, generator=torch.Generator().manual_seed(0))
    counts = draw(p.expand(n, -1).contiguous(), u).bincount(minlength=7).double()
    held = p > 0
    assert stats.chisquare(counts[held], p[held].double() / p.double().sum() * n).pvalue > 1e-3


def test_rows_do_not_know_of_each_other():
    generator = torch.Generator().manual_seed(4)
    p, u = torch.rand(50, 99, generator=generator), torch.rand(50, generator=generator)
    together = draw(p, u)
    assert together.tolist() == [int(draw(p[i : i + 1], u[i : i + 1])) for i in range(50)]
    assert torch.equal(draw(p * 0.125, u), together), "a factor common to all changes nothing"


def test_a_large_vocabulary_reaches_its_rare_tokens():
    """49,152 equal tokens: the middle of each one's interval is that token, which a running sum in float32 would miss."""
    size = 49_152
    asked = torch.arange(0, size, 97)
    p = torch.full((1, size), 1 / size).expand(len(asked), -1).contiguous()
    assert torch.equal(draw(p, ((asked.double() + 0.5) / size).float()), asked)
