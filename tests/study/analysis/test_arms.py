"""Intervals of means, the proof of an arm from the ledgers of its runs, and the roughness of curves."""

import numpy as np
import pytest

from shaketable.study.analysis import arms
from shaketable.study.analysis.arms import roughness
from shaketable.study.runs import Run
from tests.study.small_studies import told


def told_of(what, *words):
    return told(getattr(arms, what)(*words))


SITE = {"fused": 0, "matched": 4, "static": True, "notes": []}


def ledger(fault, site, asked, changed=0.25, remark=None):
    counts = {"forward": 11, "backward": 7, "recomputed": 0, "seconds": 0.5}
    found = {"measured_magnitude": asked, "measured_error": 0.125, "changed_fraction": changed, "survival_rate": 0.75}
    return {"sites": [SITE | counts | found | {"fault": fault, "site": site, "asked": asked, "remark": remark}]}


def run(seed):
    plan, guided = ledger("gain:0.1", "layer.1", 0.1), ledger("relative_gaussian:0.05", "module.rmsnorm", 0.05)
    scored = ledger("dead_zone:0.2", "layer.2", 0.2)
    conditions = [{"name": "clean", "plan": None, "ledger": None}]
    conditions.append({"name": "hot", "plan": "dead_zone:0.2@layer.2", "ledger": scored})
    events = [{"event": "evaluation", "step": 3, "conditions": conditions}]
    events.append({"event": "finished", "time": 50.0 + seed, "ledgers": {"plan": plan, "aqn": guided}})
    facts = {"plan": "gain:0.1@layer.1", "aqn": "constant:0.05", "steps": 3}
    return Run(f"run{seed}", "train", "arm", seed, "done", {"config": facts}, events)


RUNS = [run(seed) for seed in (0, 1, 2)]


def test_proof_has_a_row_for_training_aqn_and_every_score_with_its_own_numbers():
    rows = told_of("proof", RUNS)
    expected = [
        ("training: plan", "gain:0.1", "layer.1", 0.1),
        ("training: AQN", "relative_gaussian:0.05", "module.rmsnorm", 0.05),
        ("scored: hot", "dead_zone:0.2", "layer.2", 0.2),
    ]
    assert [(r["where"], r["fault"], r["site"], r["asked"]) for r in rows] == expected
    for row in rows:
        assert row["measured"] == pytest.approx(row["asked"]) and row["verdict"] == "agrees" and row["remark"] is None
        assert (row["forward"], row["backward"]) == (33, 21), "of all three runs"
        assert (row["error"], row["changed"], row["survival"]) == pytest.approx((0.125, 0.25, 0.75))


@pytest.mark.parametrize(
    ("asked", "changed", "remark", "verdict"),
    [(0.1, 0.5, None, "agrees"), (0.1, 0.5, "why", "differs"), (None, 0.5, None, "proven"), (None, 0.0, None, "inert")],
)
def test_a_proof_says_whether_what_was_measured_is_what_was_asked_for(asked, changed, remark, verdict):
    facts = ledger("mxfp4", "layer.1", asked, changed, remark)
    one = Run("x", "train", "arm", 0, "done", {"config": {"plan": "p"}}, [{"event": "finished", "ledgers": {"plan": facts}}])
    [row] = told_of("proof", [one])
    assert (row["verdict"], row["remark"]) == (verdict, remark)


def test_a_run_without_its_ledger_makes_the_proof_inert():
    bare = [Run("x", "train", "arm", 9, "done", RUNS[0].head, [{"event": "finished", "ledgers": {}}])] * 2
    trained, noise, scored = told_of("proof", [RUNS[0], *bare])
    assert all(r["verdict"] == "inert" and r["remark"] == "2 of 3 runs have no ledger of it" for r in (trained, noise))
    assert scored["verdict"] == "agrees"


def test_roughness_is_the_distance_from_the_line_between_the_neighbours():
    steps = [0, 1, 2, 4, 8, 9]
    assert roughness([(n, 3.0 * n + 1) for n in steps]) == pytest.approx(0.0, abs=1e-12)
    assert roughness([(n, float(n % 2)) for n in range(7)]) == 1.0
    noise = np.random.default_rng(0).normal(0, 0.1, 4000)
    assert roughness([(n, 0.001 * n + v) for n, v in enumerate(noise)]) == pytest.approx(0.098, rel=0.03)
    assert roughness([(n, 1.0) for n in range(4)]) is None
