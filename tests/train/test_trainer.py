"""GRPO with a sampler of our own: its meters, its randomness, and truncated importance sampling by the formula."""

import math

import pytest
import torch
from scipy.stats import norm

import shaketable as st
from shaketable.train.trainer import SamplerMismatch
from tests.train.training_runs import prepared

TEMPERATURE = 2.0


@pytest.fixture
def trainer(tmp_path):
    return prepared(tmp_path / "run", tis=1.5, temperature=TEMPERATURE).trainer


def ids(trainer, *questions):
    return [trainer.processing_class(q)["input_ids"] for q in questions]


def batch_under(trainer, plan):
    """A batch that was sampled under a plan, as TRL gives it to the loss."""
    trainer.model.train()
    rows = [row for row in trainer.train_dataset.select(range(4)) for _ in range(4)]
    with st.inject(trainer.model, f"{plan},phase=rollout"):
        return trainer._generate_and_score_completions(rows)


def trainer_logps(trainer, batch):
    """By a plain forward in float64, at the temperature of the sampling."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = trainer.model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits
    width = batch["completion_ids"].shape[1]
    logps = (logits[:, -width - 1 : -1].double() / TEMPERATURE).log_softmax(-1)
    return logps.gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2)


def gradient(trainer, loss):
    trainer.model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("cap", [1.5, None])
def test_truncated_importance_sampling_is_the_policy_gradient_with_capped_weights(trainer, cap):
    batch = batch_under(trainer, "relative_gaussian:0.5@module.linear")
    trainer.cap = cap
    batch["advantages"] = torch.linspace(-1, 1, 16)
    trainer.current_gradient_accumulation_steps = 1
    trainer.begin_step()
    loss = trainer._compute_loss(trainer.model, batch)
    found = gradient(trainer, loss)

    logps, mask = trainer_logps(trainer, batch), batch["completion_mask"].double()
    ratio = (logps.detach() - batch["sampling_per_token_logps"]).exp()
    assert float((ratio * mask).max()) > 1.5 > 0.9 > float(ratio.min()), "some are capped, some are not"
    weight = torch.ones_like(ratio) if cap is None else ratio.clamp(max=cap)
    own = (logps - logps.detach()).exp()
    expected = -(weight * batch["advantages"].unsqueeze(1) * own * mask).sum() / mask.sum()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    for name, grad in gradient(trainer, expected).items():
        assert torch.allclose(found[name], grad, rtol=1e-3, atol=1e-6), name


def test_the_meters_of_a_step_are_those_of_its_tokens(trainer):
    batch = batch_under(trainer, "relative_gaussian:0.5@module.linear")
    trainer.current_gradient_accumulation_steps = 1
    trainer.begin_step()
    trainer._compute_loss(trainer.model, batch)
    log_ratio = (trainer_logps(trainer, batch).detach() - batch["sampling_per_token_logps"])[batch["completion_mask"].bool()]
    found = trainer.mismatch.summary()
    assert found["kl_sampler_trainer"] == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).mean()), rel=1e-3)
    assert found["ratio_max"] == pytest.approx(float(log_ratio.exp().max()), rel=1e-3)
    assert found["ratio_tail"] == pytest.approx(float((log_ratio > math.log(2)).double().mean()))
    assert batch["advantages"].dim() == 1, "TRL's own batch is left alone"


def test_kl_is_estimated_without_bias():
    """Sampler N(0, 1), trainer N(0.3, 1): their KL is 0.3²/2, known exactly."""
    x = torch.randn(200_000, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    logs = torch.tensor(norm.logpdf(x.numpy(), 0.3) - norm.logpdf(x.numpy(), 0))
    found = SamplerMismatch([logs[:1000], logs[1000:]]).summary()
    assert found["kl_sampler_trainer"] == pytest.approx(0.045, rel=0.03)
    edge = (math.log(2) + 0.045) / 0.3
    assert found["ratio_tail"] == pytest.approx(norm.sf(edge), rel=0.1)
    assert found["ratio_p99"] == pytest.approx(math.exp(0.3 * norm.ppf(0.99) - 0.045), rel=0.02)
    assert SamplerMismatch().summary() == {}


def test_the_sampled_log_probabilities_are_those_under_the_fault(trainer):
    prompts = ids(trainer, "472+338=", "472+338=")
    trainer.model.eval()
    with st.inject(trainer.model, "gain:0.5@layer.3"):
        tokens, logps = trainer._generate_single_turn(prompts)
        with torch.no_grad():
            rows = trainer.model(torch.tensor([[*prompts[0], *tokens[0]]])).logits[0, 7:-1].double() / TEMPERATURE
    expected = rows.log_softmax(-1).gather(1, torch.tensor(tokens[0]).unsqueeze(1)).squeeze(1)
    assert logps[0] == pytest.approx(expected.tolist(), abs=1e-4)
