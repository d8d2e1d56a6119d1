"""The smallest difference that a comparison can see: at its level, with 80 % power.

**Paired, one run each.** With a share ψ of problems on which the arms disagree and a true difference δ, the number of such
problems is m ~ Binomial(n, ψ), and b wins each with θ = (1 + δ/ψ)/2. The power of the exact McNemar test is the sum over m
of its power given m: no normal approximation, which is too hopeful when few problems differ. δ cannot exceed ψ, so a
larger effect brings its own disagreement: ψ → max(ψ, δ). Hence even two arms that agreed on all of n = 200 problems
could have hidden 3.9 points: six problems must differ, all one way, before the test can reject at 5 %.

**Means over seeds.** With standard error se and f degrees of freedom, Student's t rejects with the probability that the
noncentral t gives; δ is the noncentrality at which that is 80 %, times se. Simulated at that δ, crossed seeds and problems
reach .74 to .81 with four seeds or more, and .63 to .83 with two or three, whose degrees of freedom are a guess.

**Before there are data.** ψ = 2·p(1−p)·(1−ρ), for two arms of score p whose problems correlate by ρ. The default, p = 0.5
and ρ = 0.5, is the cautious middle: ψ = 0.25. Same model, light noise: ρ nearer 0.8; two separate trainings: nearer 0.4. One
measured ψ is better than any of these.

In a finished comparison δ is computed from the measured spread and never from the measured difference ("observed power"
says nothing that p does not).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from shaketable.errors import ShaketableError
from shaketable.evaluate.stats.crossed_effects import MeanSquares

POWER = 0.8


def detectable(
    problems: int,
    *,
    discordance: float | None = None,
    seeds: int = 1,
    seed_sd: float = 0.0,
    shared: float = 0.5,
    level: float = 0.95,
    power: float = POWER,
) -> float | None:
    """The smallest difference a planned comparison would see; None when there is none.

    Args:
        problems: How many problems both arms answer.
        discordance: Share of problems on which two runs disagree; `expected_discordance()` when not given.
        seeds: Training seeds of each arm. One speaks of that one run only, and `seed_sd` does not enter.
        seed_sd: Standard deviation, over training seeds, of the true difference (0.01 is one point).
        shared: How much of the disagreement is on the same problems under every seed, and is not averaged away by more of
            them. With four seeds or more, 1 is the cautious end; 0 means that each seed disagrees anew.
        level: Of confidence.
        power: Wanted probability of seeing the difference.
    """
    share = expected_discordance() if discordance is None else discordance
    _check(problems, seeds, share=share, shared=shared, level=level, power=power)
    if seeds == 1:
        return mcnemar_detectable(problems, share, level=level, power=power)
    if problems == 1:
        return t_detectable(seed_sd / math.sqrt(seeds), seeds - 1, level=level, power=power)
    parts = {"seed": seed_sd**2, "problem": shared * share, "rest": (1 - shared) * share}
    squares = MeanSquares.expected(seeds, problems, **parts)
    if squares.variance == 0:
        raise ShaketableError("with no discordance and no spread between seeds any difference is seen; give one of them")
    return t_detectable(math.sqrt(squares.variance), squares.freedom, level=level, power=power)


def expected_discordance(rate: float = 0.5, correlation: float = 0.5) -> float:
    """Share of problems on which two arms of one score disagree, from that score and their correlation over problems."""
    if not (0 <= rate <= 1 and -1 <= correlation <= 1):
        raise ShaketableError(f"rate must be in 0 to 1 and correlation in −1 to 1, not {rate} and {correlation}")
    return min(2 * rate * (1 - rate) * (1 - correlation), 1.0)


def mcnemar_detectable(problems: int, discordance: float, *, level: float = 0.95, power: float = POWER) -> float | None:
    """The smallest difference that the exact McNemar test sees. None with fewer than six problems at 5 %."""

    def short(difference: float) -> float:
        return mcnemar_power(problems, max(discordance, difference), difference, level=level) - power

    return float(optimize.brentq(short, 0.0, 1.0, xtol=1e-6)) if short(1.0) >= 0 else None


def mcnemar_power(problems: int, discordance: float, difference: float, *, level: float = 0.95) -> float:
    """Probability that the exact two-sided McNemar test rejects."""
    if discordance < 1e-12:
        return 0.0
    m = np.arange(problems + 1)
    tail = (1 - level) / 2
    fewest = stats.binom.ppf(tail, m, 0.5)
    fewest = np.where(stats.binom.cdf(fewest, m, 0.5) > tail + 1e-12, fewest - 1, fewest)
    wins = (1 + difference / discordance) / 2
    rejects = stats.binom.cdf(fewest, m, 1 - wins) + stats.binom.cdf(fewest, m, wins)
    return float(np.sum(stats.binom.pmf(m, problems, discordance) * rejects))


def t_detectable(se: float, freedom: float, *, level: float = 0.95, power: float = POWER) -> float | None:
    """The smallest difference that a two-sided t-test of that standard error sees; None when it is beyond 100 points."""
    edge = stats.t.isf((1 - level) / 2, freedom)

    def short(noncentrality: float) -> float:
        return float(stats.nct.sf(edge, freedom, noncentrality)) - power

    found = se * float(optimize.brentq(short, 0.0, 10 * edge + 10, xtol=1e-6))
    return found if found <= 1 else None


def sign_flip_detectable(differences: NDArray[np.float64], *, level: float = 0.95, power: float = POWER) -> float | None:
    """The smallest mean difference that a sign-flip test sees, given the spread of the differences per problem.

    Student's t approximates it, too hopefully when few problems differ: a test of signs needs enough of them to reject at
    all. They are taken to differ by as much as those that did, or wholly when none did.
    """
    n, moved = len(differences), np.abs(differences[differences != 0])
    floor = mcnemar_detectable(n, 0.0, level=level, power=power)
    if floor is None:
        return None
    floor *= float(moved.mean()) if len(moved) else 1.0
    smooth = t_detectable(float(differences.std(ddof=1)) / math.sqrt(n), n - 1, level=level, power=power)
    return None if smooth is None else max(floor, smooth)


def _check(problems: int, seeds: int, **fractions: float) -> None:
    if problems < 1 or seeds < 1:
        raise ShaketableError(f"a comparison needs a problem and a seed, not {problems} and {seeds}")
    if bad := next((name for name, value in fractions.items() if not 0 <= value <= 1), None):
        raise ShaketableError(f"{bad} must be between 0 and 1, not {fractions[bad]}")
    if not 0 < 1 - fractions["level"] < fractions["power"] < 1:
        raise ShaketableError(f"power must be between 1 − level and 1, not {fractions['power']}")
