"""`shaketable sweep --engine vllm`: the scores of the Hugging Face engine, within sampling error, with proof."""

from __future__ import annotations

import json
import sys

import pytest

from shaketable.evaluate.statistics import mcnemar
from shaketable.records.record import RunRecord
from tests.frameworks.vllm.vllm_programs import printed, run

pytestmark = pytest.mark.covers("vLLM", "`shaketable sweep --engine vllm`: scores agree with Hugging Face's", "eager")
SWEEP = [
    "nano",
    "--task",
    "arithmetic,level=3",
    "--magnitudes",
    "0,0.3",
    "--limit",
    "150",
    "--seeds",
    "2",
    "--batch-size",
    "75",
]


def swept(folder, engine, plan, *more):
    command = [sys.executable, "-m", "shaketable", "sweep", *SWEEP, "--plan", plan, "--out", folder / "run", "--engine", engine]
    done = run(*command, "--json", folder / "points.json", *more)
    assert done.returncode == 0, printed(done)[-3000:]
    return json.loads((folder / "points.json").read_text()), RunRecord.open(folder / "run", "sweep").events("point")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    plan = "relative_gaussian@module.linear"
    hf = swept(tmp_path_factory.mktemp("hf"), "hf", plan)
    return hf, swept(tmp_path_factory.mktemp("vllm"), "vllm", plan, "--engine-args", '{"gpu_memory_utilization": 0.2}')


def test_clean_answers_are_the_same(both):
    texts = [[answer["text"] for answer in events[0]["answers"]] for _, events in both]
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 0.98 * len(texts[0])


def test_faulty_scores_agree_within_sampling_error(both):
    right = [[a["correct"] for event in events[1:] for a in event["answers"]] for _, events in both]
    assert mcnemar(*right) > 0.01
    clean = sum(a["correct"] for a in both[0][1][0]["answers"]) / 150
    assert sum(right[1]) / len(right[1]) < clean - 0.1


def test_every_faulty_point_is_proven_by_the_workers(both):
    (_, events) = both[1]
    assert events[0]["ledger"] is None
    for event in events[1:]:
        (site,) = event["ledger"]["sites"]
        assert set(site["phases"]) == {"eval"}
        assert site["measured_magnitude"] == pytest.approx(0.3, rel=0.05)
