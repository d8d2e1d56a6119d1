"""AQN in real trainers of TRL and Hugging Face, on a CPU, for a few steps."""

import pytest
import torch

import shaketable as st
from shaketable.integrations.trl import ShaketableCallback
from tests.integrations.hf.small_trainers import grpo, llama, sft

pytestmark = pytest.mark.covers("TRL", "callback: AQN in GRPO", "eager")


class Spy:
    """Notes whether the final norm of a model was noisy, at each of its calls, and what the model was doing."""

    def __init__(self, model):
        self.calls = []
        model.model.norm.register_forward_hook(self._look)

    def _look(self, module, args, output):
        clean = torch.nn.functional.rms_norm(args[0], args[0].shape[-1:], module._parameters["weight"], module.variance_epsilon)
        self.calls.append((torch.is_grad_enabled(), not torch.allclose(output, clean, atol=1e-6)))

    def noisy(self, training):
        return [noise for grad, noise in self.calls if grad == training]


def test_origin_03_the_trainers_step_reaches_the_noise(tmp_path):
    model = llama()
    callback = ShaketableCallback(aqn="global_decay:0.2-0.02,stages=3")
    spy = Spy(model)
    trainer = grpo(tmp_path, model, callback)
    trainer.train()
    logged = [row["shaketable/sigma"] for row in trainer.state.log_history if "shaketable/sigma" in row]
    assert logged == [0.0, 0.2, 0.02]
    noise = callback.noise
    assert (noise.rollouts, noise.ledger.forward) == (3, 10), "five norms, two rollouts with noise"
    assert noise.ledger.sites[0].asked == pytest.approx(0.11)
    assert noise.ledger.sites[0].magnitude == pytest.approx(0.11, rel=0.25)
    assert set(noise.ledger.sites[0].by("phase")) == {"rollout"}
    assert not any(spy.noisy(training=True)), "the trained policy is clean"
    assert any(spy.noisy(training=False)) and not all(spy.noisy(training=False)), "stage 0 is silent"


def test_origin_04_sigma_of_each_layer_reaches_the_sampler(tmp_path):
    file = tmp_path / "aqn.yaml"
    file.write_text(
        "aqn: {enabled: true, layer_specific: true, base_sigma: 0.1, layer_sigmas: {1: 0.3}, schedule: 'constant:0.1'}\n"
    )
    model, callback = llama(), ShaketableCallback(aqn=file)
    grpo(tmp_path, model, callback).train()
    assert callback.noise.sigmas == pytest.approx({1: 0.3})
    spots = callback.noise.ledger.sites[0].spots
    assert {s.layer for s in spots.values()} == {1} and len(spots) == 2
    assert all(s.counts == {"rollout": [3, 0]} for s in spots.values())
    assert callback.noise.ledger.sites[0].magnitude == pytest.approx(0.3, rel=0.25)


def test_a_trainer_that_never_samples_is_an_error(tmp_path):
    model = llama()
    with pytest.raises(st.InertError, match="no rollout"):
        sft(tmp_path, model, ShaketableCallback(aqn="constant:0.1")).train()
    assert "_shaketable_weights" not in model.model.norm.__dict__
