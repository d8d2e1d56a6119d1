"""Simulated studies, judged by the project's own statistics: how often it cries wolf, and how often its intervals hold the
truth.

A study is drawn: problems with a difficulty of their own, training seeds that move a whole run, problems on which one arm
is better; a record's worth of 0/1 answers comes out, and `study.comparisons.compare` judges it as it judges a real one.
Without a true difference every "shown" is a false positive; with one, the interval should hold the difference that the
drawing was made with. The truth is a mean over all seeds and problems that could have been drawn, and is found from very
many of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import expit

from shaketable.evaluate.statistics import paired, wilson
from shaketable.study.analysis.comparisons import compare
from shaketable.study.config import Comparing
from shaketable.study.runs import Run

LEVEL = 0.05
STUDIES = 2000
PROBLEMS = 120
CASES = {
    # name: seeds, effect of a seed, effect of a problem and arm, logits by which the arm is better, arms against one
    "equal arms, 5 seeds": (5, 0.2, 0.4, 0.0, 1),
    "equal arms, 3 seeds": (3, 0.2, 0.4, 0.0, 1),
    "equal arms, 5 seeds that differ much": (5, 0.6, 0.2, 0.0, 1),
    "equal arms, seeds do not matter": (5, 0.0, 0.4, 0.0, 1),
    "4 equal arms, one family": (5, 0.2, 0.4, 0.0, 4),
    "better by half a logit, 5 seeds": (5, 0.2, 0.4, 0.5, 1),
    "better by half a logit, 3 seeds": (3, 0.2, 0.4, 0.5, 1),
}
MOST_FALSE, LEAST_COVERED = 0.06, 0.925
"""What the page promises of five seeds or more; three are worth a little less (`evaluate/statistics.py`)."""


def simulate(studies: int = STUDIES, seed: int = 0) -> list[dict[str, Any]]:
    """One row for every case."""
    rng = np.random.default_rng(seed)
    return [*(_case(name, *case, rng, studies) for name, case in CASES.items()), *_one_run(rng, studies)]


def _case(
    name: str, seeds: int, by_seed: float, own: float, better: float, arms: int, rng: np.random.Generator, studies: int
) -> dict[str, Any]:
    truth = _truth(by_seed, own, better) if better else 0.0
    asked = [Comparing(a=f"arm {i}", b="base", condition="faulty") for i in range(arms)]
    primary = asked[0] if arms == 1 else None
    shown = covered = 0
    for _ in range(studies):
        hard = rng.normal(0.5, 1.5, PROBLEMS)
        runs = _runs("base", hard, seeds, by_seed, own, 0.0, rng)
        for i in range(arms):
            runs += _runs(f"arm {i}", hard, seeds, by_seed, own, better, rng)
        found = compare(asked, primary, runs)
        shown += any(c.verdict == "shown" for c in found)
        covered += all(c.ci_low <= truth <= c.ci_high for c in found[:1])
    return _row(name, studies, shown, covered, truth, seeds)


def _runs(
    arm: str, hard: np.ndarray, seeds: int, by_seed: float, own: float, better: float, rng: np.random.Generator
) -> list[Run]:
    """The runs of one arm, as their records would tell them."""
    level = hard + rng.normal(better, own, len(hard))
    logits = level + rng.normal(0, by_seed, (seeds, 1)) if by_seed else np.repeat(level[None], seeds, 0)
    tables = rng.random(logits.shape) < expit(logits)
    return [_run(arm, s, row) for s, row in enumerate(tables)]


def _run(arm: str, seed: int, right: np.ndarray) -> Run:
    answers = [{"correct": bool(r), "formatted": True} for r in right]
    events = [{"event": "evaluation", "step": 1, "conditions": [{"name": "faulty", "answers": answers}]}]
    return Run(f"{arm}-{seed}", "train", arm, seed, "done", {}, events)


def _truth(by_seed: float, own: float, better: float) -> float:
    rng = np.random.default_rng(1)
    level = rng.normal(0.5, 1.5, 500_000) + rng.normal(0, np.hypot(by_seed, own), 500_000)
    return float(expit(level + better).mean() - expit(level).mean())


def _one_run(rng: np.random.Generator, studies: int) -> list[dict[str, Any]]:
    """Two conditions on the same problems (a sweep), and the interval of one rate."""
    equal, rates = [], []
    for _ in range(studies):
        hard = rng.normal(0.5, 1.5, PROBLEMS)
        a, b = (rng.random(PROBLEMS) < expit(hard) for _ in range(2))
        equal.append(paired(a, b))
        rates.append(0.4 in wilson(float((rng.random(PROBLEMS) < 0.4).mean()), PROBLEMS))
    covered = sum(0.0 in c.interval for c in equal)
    return [
        _row("two equal conditions of a sweep", studies, sum(c.distinguishable for c in equal), covered, 0.0, 1),
        _row("one rate of 0.4, Wilson", studies, None, sum(rates), 0.4, 1),
    ]


def _row(name: str, studies: int, shown: int | None, covered: int, truth: float, seeds: int) -> dict[str, Any]:
    false = shown if truth == 0 else None
    fails = []
    if seeds != 3:  # a chance of simulating is allowed for: the end of the rate's interval decides
        if false is not None and wilson(false / studies, studies).low > MOST_FALSE:
            fails.append(f"{false} false positives in {studies}")
        if wilson(covered / studies, studies).high < LEAST_COVERED:
            fails.append(f"covered in {covered} of {studies}")
    shown_rate = None if shown is None else shown / studies
    return {
        "name": name, "studies": studies, "truth": round(truth, 4), "false": None if false is None else false / studies,
        "seen": None if false is not None else shown_rate, "covered": covered / studies, "fails": fails,
    }  # fmt: skip
