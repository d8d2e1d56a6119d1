"""The first thing a report says, word for word."""

import pytest

from shaketable.study.analysis.runs import Run
from shaketable.study.analysis.verdict import verdict


def compared(**changes):
    facts = {"a": "AQN", "b": "none", "condition": "hot", "endpoint": "accuracy", "unit": "points", "scale": 100.0}
    facts |= {"difference": 0.1234, "seeds": 5, "primary": True, "verdict": "shown", "sentence": "The whole sentence."}
    return facts | changes


def run(status="done"):
    return Run("x", "train", "AQN", 0, status, {}, [])


HEADLINES = [
    ({}, "Shown: AQN is 12.3 points above none in hot accuracy"),
    ({"difference": -0.05}, "Shown: AQN is 5 points below none in hot accuracy"),
    (
        {"condition": None, "endpoint": "seconds_per_step", "unit": "s", "scale": 1.0},
        "Shown: AQN is 0.123 s above none in seconds per step",
    ),
    ({"condition": None, "endpoint": "reward", "unit": "", "scale": 1.0}, "Shown: AQN is 0.123 above none in reward"),
    (
        {"verdict": "not shown"},
        "Not shown: no difference between AQN and none in hot accuracy could be told from chance",
    ),
    ({"verdict": "nothing", "seeds": 0}, "Nothing can be concluded: no seed is finished in both arms"),
    ({"verdict": "nothing", "seeds": 1}, "Nothing can be concluded: there is one seed"),
]


@pytest.mark.parametrize(("changes", "headline"), HEADLINES)
def test_the_headline_says_what_was_shown_and_where(changes, headline):
    primary = compared(**changes)
    said = verdict([compared(primary=False, sentence="Another."), primary], [run()], [])
    assert said == {"kind": primary["verdict"], "headline": headline, "sentence": "The whole sentence."}


def test_runs_that_are_missing_are_said():
    found = verdict([compared()], [run(), run("failed"), run("missing")], [])["headline"]
    assert found.startswith("So far (2 of 3 runs are missing): shown: AQN is")


def test_runs_that_cannot_be_compared_decide_nothing():
    said = verdict([compared()], [run("missing")], ["other weights", "other tests"])
    wanted = {"kind": "nothing", "headline": "Nothing can be concluded: other weights", "sentence": "The whole sentence."}
    assert said == wanted


def test_without_a_primary_comparison_there_is_nothing_to_decide():
    wanted = {"kind": "nothing", "headline": "No comparison was named", "sentence": "There is nothing to decide."}
    assert verdict([compared(primary=False)], [run()], ["other weights"]) == wanted
