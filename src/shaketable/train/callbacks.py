"""What happens around each step of a training run: randomness is set, meters are read, scores taken, checkpoints sealed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from shaketable.train import checkpoints

if TYPE_CHECKING:
    from shaketable.train.run import Training


class Steps(TrainerCallback):  # type: ignore[misc]
    """The callback of one run."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.started = 0.0
        self.facts: dict[str, float] = {}
        self.is_checked = False
        """Whether the first step of this process is over and has proven that the plan acts."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Everything random follows the step."""
        run = self.training
        run.trainer.begin_step()
        if run.injection is not None:
            run.injection.step = state.global_step
        if run.noise is not None:
            run.noise.step = state.global_step
        self.spent = run.seconds()
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Read the meters, then evaluate if it is time."""
        run, trainer = self.training, self.training.trainer
        seconds, spent = time.perf_counter() - self.started, run.seconds()
        run.check_weights(state.global_step)
        if not self.is_checked:
            self.is_checked = True
            run.check_first_step()
        self.facts = {
            "sigma": run.noise.sigma if run.noise is not None else 0.0,
            "seconds": seconds,
            "sampling_seconds": trainer.sampling_seconds,
            "tokens_per_second": trainer.sampled_tokens / max(trainer.sampling_seconds, 1e-9),
            "injection_seconds": spent[0] - self.spent[0],
            "aqn_seconds": spent[1] - self.spent[1],
            **trainer.mismatch.summary(),
        }
        metrics = trainer._metrics["train"]
        for name, value in self.facts.items():
            metrics[f"shaketable/{name}"].append(value)
        if run.config.evaluates_at(state.global_step):
            for found in run.evaluate(state.global_step):
                metrics[f"shaketable/accuracy/{found.condition.name}"].append(found.accuracy)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """One line of the record per step."""
        if not logs or "reward" not in logs:
            return
        shown = {"loss": "loss", "reward": "reward", "entropy": "entropy", "zero_variance": "frac_reward_zero_std"}
        facts = {name: logs[key] for name, key in (shown | {"grad_norm": "grad_norm"}).items() if key in logs}
        event = {"step": state.global_step, **facts, **self.facts}
        self.training.record.append("step", **event)
        self.training.tell("step", event)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The checkpoint is written: declare it whole, and let older ones go."""
        out, name = self.training.record.folder, f"checkpoint-{state.global_step}"
        with checkpoints.writing(name, out):
            checkpoints.seal(out / name, {**self.training.ledgers(), "counted": self.training.counted()})
            self.training.record.append("checkpoint", step=state.global_step, files=checkpoints.hashes(out / name))
            checkpoints.drop_old(out)
