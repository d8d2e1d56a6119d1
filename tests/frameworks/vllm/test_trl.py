"""TRL's GRPO with its own vLLM, colocated and compiled, under a plan and AQN."""

from __future__ import annotations

import json
import sys

import pytest

from tests.frameworks.vllm.small_engines import NANO
from tests.frameworks.vllm.vllm_programs import FOLDER, printed, run

pytestmark = pytest.mark.covers("TRL + vLLM", "callback with colocated vLLM: module plan and AQN", "compiled")
STEPS = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("colocated")
    done = run(sys.executable, FOLDER / "trl_grpo.py", NANO, folder, "plan")
    assert done.returncode == 0, printed(done)[-3000:]
    return json.loads((folder / "found.json").read_text()) | {"merged": json.loads((folder / "ledger.json").read_text())}


def test_the_sampler_was_compiled_and_hit_in_rollouts_alone(found):
    (site,) = found["plan"]["sites"]
    assert found["mode"] > 0
    assert set(site["phases"]) == {"rollout"}
    assert site["phases"]["rollout"]["forward"] >= STEPS * 32
    assert site["measured_magnitude"] == pytest.approx(0.05, rel=0.05)


def test_every_step_has_noise_on_every_norm_after_its_weights_came(found):
    (site,) = found["aqn"]["sites"]
    assert site["phases"] == {"rollout": {"forward": STEPS * found["norms"], "backward": 0}}
    assert site["measured_magnitude"] == pytest.approx(0.1, rel=0.1)
    assert [row["shaketable/sigma"] for row in found["log"] if "loss" in row] == [0.1] * STEPS
    assert found["norms_are_the_trained_ones"], "after training the sampler holds no noise"


def test_the_merged_ledger_has_sampler_and_trainer(found):
    site = found["merged"]["sites"][0]
    assert site["phases"]["train"]["forward"] > 0
    assert site["phases"]["rollout"] == found["plan"]["sites"][0]["phases"]["rollout"]
