"""The guided run: the same dead channels in sampler and actor, AQN from a file, real updates.

A dead zone is no noise: where sampler and actor have the same one, they agree to the last digits; where their masks differ,
or one of them has none, they do not. The first third of the schedule is silent, so the first step is about the dead zone
alone. The reference has no dead zone, so the policy's distance from it is not 0 although no update has been made.
"""

import json

import pytest

from shaketable.integrations.common.worker_report import read_reports
from tests.frameworks.verl.tiny_run import make_tiny, run_example

pytestmark = pytest.mark.covers("verl + vLLM", "dead zone in sampler and actor, guided AQN", "eager, Ray, FSDP2")

PLAN = "dead_zone:0.3,scope=token,sparsity=0.5@layer.3"
GUIDED = """aqn:
  enabled: true
  layer_specific: true
  schedule: global_decay:0.2-0.1,stages=3
  base_sigma: 0.2
  layer_sigmas: {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.3, 4: 0.2, 5: 0.2, 6: 0.2, 7: 0.2}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("dead_zone"), train=12)
    (folder / "aqn.yaml").write_text(GUIDED)
    more = [f"+shaketable.ledger={folder / 'ledger'}", "trainer.val_before_train=False"]
    done = run_example("srdd_guided.sh", folder, *more, PLAN=PLAN, AQN="aqn.yaml")
    assert done.exit == 0, done.text[-6000:]
    assert len(done.steps) == 3 and any(step["actor/grad_norm"] > 0 for step in done.steps)
    return done


def test_sampler_and_actor_have_the_same_dead_channels(run):
    first = run.steps[0]
    assert first["shaketable/sigma"] == 0
    assert first["shaketable/kl"] < 1e-6


def test_the_dead_zone_is_in_both_and_not_in_the_reference(run):
    merged = json.loads((run.folder / "ledger" / "ledger.json").read_text())["merged"]
    for role in ("sampler.plan", "actor.plan"):
        (site,) = merged[role]["sites"]
        assert list(site["spots"]) == ["model.layers.3"]
        assert 0.1 < site["changed_fraction"] < 0.5, "half of the channels are broken"
    losses = [step["actor/kl_loss"] for step in run.steps]
    assert min(losses) > 0
    assert max(losses) > 1e-5, "a step whose answers the model is sure of has next to none"
    assert sorted(report["role"] for report in read_reports(run.folder / "ledger")) == ["actor", "sampler"]


def test_guided_aqn_reaches_the_sampler_alone(run):
    lines = [json.loads(line) for line in (run.folder / "ledger" / "steps.jsonl").read_text().splitlines()]
    assert [line["shaketable/sigma"] for line in lines] == pytest.approx([0, 0.2, 0.1])
    (layers,) = lines[1]["sigmas"].values()
    assert (layers["3"], layers["4"]) == pytest.approx((0.3, 0.2))
    for step in run.steps[1:]:
        assert step["shaketable/kl"] > 1e-6, "noise that the trainer does not have"
