"""What a run is made of: where the plan acts, under which conditions it is scored, and what keys the noise."""

import pytest

from shaketable.errors import PlanError
from shaketable.train.plans import conditions_of, evaluation_plan, train_plan
from tests.train.configs import config

NOISE = "relative_gaussian:0.05@op.matmul"


def phases(plan):
    return [c.site.phase for c in plan.clauses]


@pytest.mark.parametrize(
    ("plan_in", "clause", "expected"),
    [
        ("both", NOISE, ("rollout", "train")),
        ("rollout", NOISE, ("rollout",)),
        ("loss", NOISE, ("train",)),
        ("both", f"{NOISE},phase=rollout+eval", ("rollout",)),
    ],
)
def test_the_plan_acts_where_the_run_and_the_clause_agree(plan_in, clause, expected):
    plan = train_plan(config(plan=f"{clause};gain:0.1@layer.0", plan_in=plan_in))
    assert phases(plan)[0] == expected
    assert plan.clauses[1].site.label == "layer.0", "every clause is there"


@pytest.mark.parametrize(("plan_in", "phase"), [("rollout", "train"), ("loss", "rollout"), ("both", "eval"), ("loss", "eval")])
def test_a_clause_for_phases_that_the_run_never_has_is_an_error(plan_in, phase):
    with pytest.raises(PlanError, match=rf"acts in {phase} only.*--plan-in {plan_in}.*drop phase={phase}"):
        train_plan(config(plan=f"{NOISE};{NOISE},phase={phase}", plan_in=plan_in))


def test_noise_in_training_follows_the_run_and_in_scores_the_evaluation():
    made = config(plan=NOISE, seed=3, eval_seed=7)
    assert (train_plan(made).seed, evaluation_plan(made).seed) == (3, 7)
    assert train_plan(config(plan=NOISE, seed=3, plan_seed=0)).seed == 0
    assert conditions_of(made)[1].plan.seed == 7


def test_conditions_are_clean_the_plan_and_what_was_asked_for():
    found = conditions_of(config(plan=f"{NOISE},phase=rollout", eval_plans=("mxfp4@module.linear,phase=eval",), eval_seed=2))
    assert [c.name for c in found] == ["clean", "plan", "mxfp4@module.linear,phase=eval"]
    assert found[0].plan is None
    assert [phases(c.plan) for c in found[1:]] == [[()], [()]], "a condition acts in evaluations whatever its clauses say"
    assert [c.plan.seed for c in found[1:]] == [2, 2]
    assert [c.name for c in conditions_of(config())] == ["clean"]


def test_what_acts_backward_only_is_in_no_score():
    back = f"{NOISE},direction=backward"
    assert [c.name for c in conditions_of(config(plan=back))] == ["clean"]
    mixed = conditions_of(config(plan=f"{back};gain:0.1@layer.0"))
    assert mixed[1].plan.text() == "gain:0.1@layer.0"
    assert train_plan(config(plan=back)).clauses[0].site.directions == ("backward",)
    with pytest.raises(PlanError, match="backward only"):
        conditions_of(config(eval_plans=(back,)))
