"""What a sweep may be asked: magnitudes, seeds, and how they meet the plan."""

import pytest

from shaketable.errors import ShaketableError
from shaketable.evaluate.sweep.config import SweepConfig

NOISE = "relative_gaussian@op.matmul"


def config(**fields):
    return SweepConfig.checked(
        **{"models": ("nano",), "task": "arithmetic", "plan": NOISE, "magnitudes": (0.1,), "n": 8} | fields
    )


def runs(made):
    return [(s.magnitude, s.seed, s.plan and s.plan.text()) for s in made.settings()]


def test_clean_comes_first_though_nobody_asked_for_it():
    assert runs(config(magnitudes=(0.1,), seeds=2, seed=5)) == [
        (0.0, 5, None),
        (0.1, 5, "relative_gaussian:0.1@op.matmul"),
        (0.1, 6, "relative_gaussian:0.1@op.matmul"),
    ]
    assert [s.plan.seed for s in config(seeds=2, seed=5).settings()[1:]] == [5, 6]
    assert [s.is_first for s in config(seeds=2, seed=5).settings()] == [True, True, False]


@pytest.mark.parametrize(
    ("plan", "magnitudes", "count"),
    [
        (NOISE, (0.1,), 3),
        ("gain@module.linear", (0.1,), 1),
        ("mxfp4,rounding=stochastic@module.linear", None, 3),
        ("gain@module.linear;relative_gaussian:0.1@layer.1", (0.1,), 3),
    ],
)
def test_a_plan_that_no_seed_changes_runs_once(plan, magnitudes, count):
    assert len(config(plan=plan, magnitudes=magnitudes, seeds=3).settings()) == 1 + count


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"magnitudes": (float("inf"),)}, "magnitudes.0: Input should be a finite number (got inf)"),
        ({"plan": "mxfp4@module.linear"}, "drop them"),
        ({"plan": NOISE + ",direction=backward"}, "no backward pass"),
        ({"magnitudes": (0.0,), "engine": "vllm"}, "engine vllm needs a magnitude above 0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(fields, message):
    with pytest.raises(ShaketableError) as caught:
        config(**fields)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_several_plans_are_points_of_one_sweep_with_the_plan_as_their_name():
    plans = ["mxfp4@module.linear", "gain@module.linear", "nvfp4@module.linear"]
    made = config(plan=plans, magnitudes=(0.0, 0.5), seeds=3)
    names = ["clean", plans[0], "gain:0.5@module.linear", plans[2]]
    assert [(s.name, s.magnitude) for s in made.settings()] == list(zip(names, (0.0, None, 0.5, None), strict=True))
    assert SweepConfig(**made.model_dump()) == made and made.model_dump()["plan"] == plans
    assert len(config(plan=plans[:1] * 2, magnitudes=None).settings()) == 2
