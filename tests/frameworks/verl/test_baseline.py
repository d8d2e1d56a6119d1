"""verl alone, with our plugin installed and none of our keys: it trains as if we were not there."""

import pytest

from tests.frameworks.verl.tiny_run import make_tiny, run_example

pytestmark = pytest.mark.covers("verl + vLLM", "installed and not asked: trains as ever", "eager, Ray, FSDP2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("baseline"), train=12)
    done = run_example("baseline.sh", folder, TEST_EVERY="3")
    assert done.exit == 0, done.text[-6000:]
    return done


def test_it_trains_and_validates(run):
    assert [step["step"] for step in run.steps] == [0, 1, 2, 3]
    assert "val-core/sums/acc/mean@1" in run.steps[0] and "val-core/sums/acc/mean@1" in run.steps[-1]


def test_nobody_hears_of_us(run):
    assert not any(key.startswith("shaketable/") for step in run.steps for key in step)
    assert "shaketable:" not in run.text
    assert not (run.folder / "out" / "shaketable").exists()


def test_sampler_and_trainer_agree(run):
    """What the other runs measure is measured as nothing here."""
    for step in run.steps[1:]:
        assert abs(step["rollout_corr/k3_kl"]) < 1e-6
        assert step["training/rollout_probs_diff_max"] < 1e-4
