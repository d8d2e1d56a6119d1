"""AQN in a Hugging Face trainer: TRL's GRPOTrainer, and any other that samples with `model.generate`.

    trainer = GRPOTrainer(model, ..., callbacks=[AQNCallback(AQN.load("global_decay:0.05-0.0005,stages=10"))])

No callback fires between generation and loss, so the callback only moves the step: what tells sampling from training is the
phase, and `generate` is a rollout by itself. The noise is on between the beginning and the end of a step and off outside of it,
where trainers evaluate and save: those sample with `generate` too, and must be clean.

A trainer that raises calls no callback. The noise then ends itself: at the next rollout it finds that the `train` it was
attached in is over, and leaves the model. `with AQNCallback(aqn) as callback:` does so at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, Self

from transformers import TrainerCallback

from shaketable.errors import ShaketableError
from shaketable.harden.aqn import AQN
from shaketable.harden.aqn_noise import AttachedAQN


class AQNCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches AQN when training begins, follows the trainer's step, and closes when training ends."""

    def __init__(self, aqn: AQN | str | Path, *, allow_inert: bool = False) -> None:
        self.aqn = AQN.load(aqn)
        self.allow_inert = allow_inert
        self.noise: AttachedAQN | None = None
        """The noise of this training, or of the last one: its ledger stays."""
        self._training: FrameType | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Attach to the model that is trained, for all of its steps."""
        self.close(check=False)
        total, step = state.max_steps, state.global_step
        self.noise = self.aqn.attach(more["model"], total, step=step, allow_inert=self.allow_inert)
        self.noise.enable().disable()
        self.noise.injection.rollouts.on_new = self._close_if_over
        self._training = _training_frame()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The noise of this step, on."""
        noise = self._attached()
        noise.step = state.global_step
        noise.enable()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Off, for evaluation, saving and whatever else comes between steps."""
        self._attached().disable()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        """σ beside the losses of the step."""
        if logs is not None and self.noise is not None and "loss" in logs:
            logs["aqn_sigma"] = state.log_history[-1]["aqn_sigma"] = self.noise.sigma

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Take the noise off; raises when it never was there."""
        self.close()

    def close(self, *, check: bool = True) -> None:
        """Take the noise off the model."""
        self._training = None
        if self.noise is not None:
            self.noise.close(check=check)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(check=False)

    def _attached(self) -> AttachedAQN:
        if self.noise is None:
            raise ShaketableError("AQNCallback was added after training began; give it to the trainer before train()")
        return self.noise

    def _close_if_over(self) -> None:
        if self._training is not None and not _is_running(self._training):
            self.close(check=False)


def _training_frame() -> FrameType:
    """The frame of the `train` that runs; of whoever called the callbacks where there is none."""
    frame = caller = sys._getframe(2)
    while frame.f_code.co_name != "train":
        if frame.f_back is None:
            return caller
        frame = frame.f_back
    return frame


def _is_running(frame: FrameType) -> bool:
    """Python refuses to clear a frame that is being executed, in whatever thread."""
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False
