"""Training under the fault, towards the clean model's own distribution.

Each step: sequences of its own, the plan that was drawn for it on in the forward pass, noise of its own, the gradient by the
fault's own formula, AdamW at a rate that falls to 0 in a line. Every `clean_every`-th step is without the fault: on nano under
a dead zone, all steps faulty end at 95 % under the fault and 92 % without it, every second one clean at 98 % and 99 %.

A step depends on its number alone (sequences, plan, noise), and weights and moments are saved without pickles: a killed run
resumes to the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shaketable.errors import InertError, ShaketableError
from shaketable.evaluate.reading import AT_A_TIME, Pair
from shaketable.faults.rng import key_of
from shaketable.harden.config import HardenConfig
from shaketable.harden.students import OwnCompletions, Students, faults_on
from shaketable.inject import Injection
from shaketable.sites.phases import phase

MOMENTS = "optimizer.safetensors"


@dataclass
class TrainingSteps:
    """The optimizer steps of a run, and what they need."""

    config: HardenConfig
    students: Students
    injections: Sequence[Injection]
    """One for each plan, switched off."""
    completions: OwnCompletions
    tell: Callable[[dict[str, Any]], None]
    """Called with what every step was."""
    seconds: float = 0.0
    checked: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.parameters = [p for p in self.students.model.parameters() if p.requires_grad]
        fused = self.students.model.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.parameters, lr=self.rate(0), weight_decay=0.0, fused=fused)

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        assert self.config.lr is not None
        return self.config.lr * (1 - step / self.config.steps)

    def plan_at(self, step: int) -> int | None:
        """Which plan acts in a step; None when it is a clean one."""
        every = self.config.clean_every
        if not self.injections or (every and step % every == every - 1):
            return None
        return key_of(self.config.seed, "plan", step) % len(self.injections)

    def do(self, step: int) -> None:
        """One step, by its number."""
        start = time.perf_counter()
        which = self.plan_at(step)
        injection = None if which is None else self.injections[which]
        self.optimizer.param_groups[0]["lr"] = self.rate(step)
        pairs = [pair for pair in self.completions.at(step) if pair[1]]
        if not pairs:
            raise ShaketableError(f"step {step}: the clean model writes nothing to any of its prompts; nothing to learn from")
        size, tokens = self.config.micro_batch or len(pairs), sum(len(c) for _, c in pairs)
        if injection is not None:
            injection.step = step
        losses = [self._backward(pairs[at : at + size], injection, tokens) for at in range(0, len(pairs), size)]
        loss, norm = torch.stack(losses).sum(), torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if injection is not None and which is not None and which not in self.checked:
            lines = list(injection.inert_check.inert(trained=True).values())
            lines += [f"{s.fault}@{s.site} never fired" for s in injection.ledger.sites if not s.forward]
            if lines:
                raise InertError(f"{lines[0]} in its first step; the run ends here")
            self.checked.add(which)
        facts = {"step": step + 1, "loss": float(loss), "grad_norm": float(norm), "plan": which}
        if not all(torch.isfinite(torch.tensor([facts["loss"], facts["grad_norm"]])).tolist()):
            raise ShaketableError(f"step {step}: loss or gradient is no longer finite; try a smaller --lr, or a smaller fault")
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.tell({**facts, "lr": self.rate(step), "seconds": seconds})

    def _backward(self, pairs: list[Pair], injection: Injection | None, tokens: int) -> Tensor:
        """Forward and backward of some sequences; the fault is there in both, for activations that are computed again."""
        with self.students.teacher() as clean:
            expected, _ = self.students.logits(clean, pairs)
        with phase("train"), faults_on(injection):
            with self.students.arithmetic():
                found, _ = self.students.logits(self.students.model, pairs)
            loss = forward_kl(found, expected, torch.full((len(found),), 1 / tokens, device=found.device))
            loss.backward()
        return loss.detach()

    # ---- going on after a kill

    def save(self, folder: Path) -> None:
        """The optimizer's moments."""
        tensors = {}
        for i, parameter in enumerate(self.parameters):
            for name, value in self.optimizer.state[parameter].items():
                tensors[f"{name}.{i}"] = value.detach().reshape(-1).contiguous()
        save_file(tensors, str(folder / MOMENTS))

    def load(self, folder: Path) -> None:
        """The moments that were saved there."""
        tensors = load_file(str(folder / MOMENTS), device=str(self.students.model.device))
        for i, parameter in enumerate(self.parameters):
            moments = {n: tensors[f"{n}.{i}"].view_as(parameter).clone() for n in ("exp_avg", "exp_avg_sq")}
            step = tensors[f"step.{i}"].reshape(()).clone()
            self.optimizer.state[parameter] = {"step": step if self.optimizer.defaults["fused"] else step.cpu(), **moments}


# ---- the loss


def forward_kl(student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Σ weights·KL(teacher‖student) over tokens, with gradient s − t by the student's logits.

    Values and gradient are made together, some tokens at a time, in float32; only the gradient is kept, in the logits' own
    dtype, since the softmaxes of a large vocabulary would not fit.

    Args:
        student: Logits (tokens, vocabulary), differentiable.
        teacher: Logits of the clean model, of the same shape.
        weights: One number for each token.
    """
    found: Tensor = _ForwardKL.apply(student, teacher, weights)  # type: ignore[no-untyped-call]
    return found


class _ForwardKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
        total = weights.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(student)
        rows = max(1, AT_A_TIME // student.shape[-1])
        for at in range(0, len(student), rows):
            s = student[at : at + rows].float().log_softmax(-1)
            t = teacher[at : at + rows].float().log_softmax(-1)
            w = weights[at : at + rows].float()
            p = t.exp()
            total += ((p * (t - s)).where(p > 0, 0.0).sum(-1) * w).sum()
            gradient[at : at + rows] = (s.exp() - p) * w[:, None]
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * g.to(gradient.dtype), None, None
