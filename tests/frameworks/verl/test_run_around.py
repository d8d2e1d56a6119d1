"""`shaketable run --plan` around verl, without our keys: what works with any release and any of its programs.

Everything that computes is shaken then, the reference policy and validations too where no phase is named.
"""

import json

import pytest

from tests.frameworks.verl.tiny_run import make_tiny, run_example

pytestmark = pytest.mark.covers("verl + vLLM", "`shaketable run` around a job without our keys", "eager, Ray, FSDP2")


def test_samplers_and_actors_are_shaken_and_proven(tmp_path):
    folder = make_tiny(tmp_path, train=8)
    around = f"python -m shaketable run --plan relative_gaussian:0.3@op.matmul --ledger {folder / 'ledger'} --"
    done = run_example("baseline.sh", folder, "trainer.val_before_train=False", RUN=around)
    assert done.exit == 0, done.text[-6000:]
    assert len(done.steps) == 2
    merged = json.loads((folder / "ledger" / "ledger.json").read_text())
    assert merged["forward"] > 0 and merged["backward"] > 0
    assert merged["sites"][0]["measured_magnitude"] == pytest.approx(0.3, rel=0.1)
    assert sum(1 for worker in merged["workers"] if worker["forward"]) >= 2, "a sampler and an actor"
    for step in done.steps:
        assert step["rollout_corr/k3_kl"] > 1e-4, "noise that is not the same on both sides"
