"""verl 0.9.0, the oldest release that reads our keys: two steps of real GRPO under a plan."""

import json

import pytest

from tests.frameworks.verl.tiny_run import make_tiny, run_example

pytestmark = pytest.mark.covers("verl + vLLM", "verl 0.9.0: operator noise in both, the plan's keys read", "eager, Ray, FSDP2")


def test_it_trains_under_the_plan(tmp_path):
    folder = make_tiny(tmp_path, train=8)
    settings = {"VALIDATE": "clean", "PLAN": "relative_gaussian:0.3@op.matmul"}
    more = [f"+shaketable.ledger={folder / 'ledger'}", "trainer.val_before_train=False"]
    done = run_example("operator_noise.sh", folder, *more, version="0.9.0", **settings)
    assert done.exit == 0, done.text[-6000:]
    assert [step["step"] for step in done.steps] == [1, 2]
    for step in done.steps:
        assert step["shaketable/sampler/forward"] > 0 and step["shaketable/actor/backward"] > 0
        assert step["shaketable/kl"] > 1e-4
    merged = json.loads((folder / "ledger" / "ledger.json").read_text())["merged"]
    for role in ("sampler.plan", "actor.plan"):
        assert merged[role]["sites"][0]["measured_magnitude"] == pytest.approx(0.3, rel=0.1)
