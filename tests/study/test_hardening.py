"""Arms that are hardened: beside trained ones, on the same problems, with what came back in the report."""

import pytest

from shaketable.report.study_html import page
from shaketable.report.study_markdown import markdown
from shaketable.study.analysis.results import Findings
from shaketable.study.cells import cells_of
from shaketable.study.file import parse_study
from shaketable.study.run_cell import do
from tests.study.small_studies import data, findings

HURTS = "dead_zone:0.7,scope=token@layer.3"


def hardening(**replaced):
    small = data(
        study="hardening",
        train={"steps": 2, "prompts": 2, "samples": 4},
        harden={"steps": 20, "batch": 24, "rungs": ["distil"]},
        evaluate={"n": 60, "mechanism": False, "conditions": {"faulty": HURTS}},
        arms={
            "nothing": {"harden": {"rungs": []}},
            "hardened": {"plan": "faulty", "harden": {}},
            "trained": {"plan": "faulty"},
        },
        compare={"primary": {"a": "hardened", "b": "nothing", "condition": "faulty"}, "against": "nothing"},
        seeds=2,
    )
    return small | replaced


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    study = parse_study(hardening())
    for cell in cells_of(study):
        assert do(cell, study.study, store / "hardening" / "runs", "here") == "done"
    return study, store / "hardening"


def test_the_share_that_came_back_is_in_findings_page_and_markdown(done):
    found = findings(*done)
    assert found["complete"]
    shares = {r["arm"]: r for r in found["recovered"]}
    assert set(shares) == {"hardened"}, "an arm that is trained learns, with the fault and without"
    assert shares["hardened"]["share"] > 0.1
    assert shares["hardened"]["seeds"] == 2
    assert shares["hardened"]["after"] > shares["hardened"]["before"]
    html, text = page(Findings.model_validate(found)), markdown(Findings.model_validate(found))
    assert '<h2 id="h-recovered">Recovered' in html
    assert "## Recovered" in text
    assert {row["where"] for arm in found["arms"] for row in arm["proof"]} >= {"hardening: plan", "scored: faulty"}


def test_records_alone_are_kept(tmp_path):
    arms = {"hardened": {"plan": "faulty", "harden": {"rungs": ["distil"], "steps": 1, "batch": 4}}}
    evaluate = {"n": 4, "mechanism": False, "conditions": {"faulty": HURTS}}
    study = parse_study(hardening(arms=arms, compare={}, keep="records", seeds=1, evaluate=evaluate))
    [cell] = cells_of(study)
    assert do(cell, study.study, tmp_path, "here") == "done"
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("checkpoint-*"))
