"""What came back, from runs made up so that no two numbers are alike."""

import pytest

from shaketable.evaluate.statistics import share_recovered
from shaketable.study.analysis.recovered import recovered, told
from shaketable.study.analysis.runs import Run
from shaketable.study.config import Comparing

BEFORE, AFTER = [0, 0, 0, 0, 0, 1, 0, 0], [1, 1, 0, 1, 0, 1, 0, 1]
CLEAN, CLEAN_AFTER = [1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0, 0]


def condition(name, correct):
    return {"name": name, "answers": [{"correct": bool(c)} for c in correct]}


def evaluation(step, hot, clean):
    return {"event": "evaluation", "step": step, "conditions": [condition("clean", clean), condition("hot", hot)]}


def hardened(before=BEFORE, after=AFTER, kind="harden", seconds=(3.0, 4.0), steps=(0, 5)):
    events = [{"event": "rung", "cost": {"seconds": s}} for s in seconds]
    middle = [evaluation(2, CLEAN, BEFORE)] if len(steps) > 1 else []
    ends = [evaluation(steps[0], before, CLEAN), *middle, evaluation(steps[-1], after, CLEAN_AFTER)]
    return Run("x", kind, "arm", 0, "done", {}, events + (ends if len(steps) > 1 else ends[:1]))


def test_each_number_of_a_row_is_its_own():
    runs = [hardened(), hardened(after=CLEAN, seconds=(1.0,))]
    [row] = recovered(["clean", "hot"], {"repaired": runs})
    share = share_recovered([BEFORE, BEFORE], [AFTER, CLEAN], [CLEAN, CLEAN])
    assert (row.arm, row.condition, row.seconds) == ("repaired", "hot", (7.0 + 1.0) / 2)
    assert (row.before, row.after, row.clean, row.clean_after) == (1 / 8, 12 / 16, 7 / 8, 6 / 8)
    assert row.share == share.share == (12 / 16 - 1 / 8) / (7 / 8 - 1 / 8)
    assert row.interval.model_dump() == share.interval.to_dict() and (row.taken, row.returned) == (0.75, 0.625)
    assert (row.seeds, row.problems, row.sentence) == (2, 8, share.sentence())


@pytest.mark.parametrize(
    "runs",
    [
        [], [hardened(kind="train")], [hardened(before=CLEAN)], [hardened(before=[1] * 8)], [hardened(steps=(1, 5))],
        [hardened(steps=(0,))],
    ],
)  # fmt: skip
def test_nothing_is_told_where_nothing_was_hardened_or_lost_or_scored_twice(runs):
    assert recovered(["clean", "hot"], {"arm": runs}) == []


def test_a_condition_that_was_not_scored_has_no_row_and_runs_that_were_not_do_not_count():
    assert recovered(["clean", "cold"], {"arm": [hardened()]}) == []
    [row] = recovered(["hot"], {"trained": [hardened(kind="train")], "repaired": [hardened(), hardened(steps=(0,))]})
    assert (row.arm, row.seeds) == ("repaired", 1)


def test_the_verdict_tells_of_the_arm_and_condition_of_the_primary_comparison():
    rows = recovered(["hot"], {"other": [hardened(after=BEFORE)], "repaired": [hardened()]})
    said = told(rows, Comparing(a="repaired", b="other", condition="hot"))
    sentence = rows[1].sentence
    assert said == f"O{sentence[1:]}; without the fault 87.5 → 75.0; 7 s a run."
    assert sentence.startswith("of the 75.0 points that the fault takes, 50.0 came back: 67 %")
    for primary in (None, Comparing(a="repaired", b="other", condition="clean"), Comparing(a="x", b="other", condition="hot")):
        assert told(rows, primary) == ""
