"""verl alone, with our plugin installed and none of our keys: it trains as if we were not there."""

import pytest

from tests.frameworks.verl.tiny_run import make_tiny, run_example

pytestmark = pytest.mark.covers("verl + vLLM", "installed and not asked: trains as ever", "eager, Ray, FSDP2")


def test_it_trains_and_validates_and_nobody_hears_of_us(tmp_path):
    folder = make_tiny(tmp_path, train=12)
    done = run_example("baseline.sh", folder, TEST_EVERY="3")
    assert done.exit == 0, done.text[-6000:]
    assert [step["step"] for step in done.steps] == [0, 1, 2, 3]
    assert "val-core/sums/acc/mean@1" in done.steps[0] and "val-core/sums/acc/mean@1" in done.steps[-1]
    assert not any(key.startswith("shaketable/") for step in done.steps for key in step)
    assert "shaketable:" not in done.text
    assert not (folder / "out" / "shaketable").exists()
    for step in done.steps[1:]:  # what the other runs measure is measured as nothing here
        assert abs(step["rollout_corr/k3_kl"]) < 1e-6
        assert step["training/rollout_probs_diff_max"] < 1e-4
