"""The vLLM that samples for a TRL trainer (`use_vllm=True`), as its callback sees it.

AQN, and what a plan does in rollouts, must then act in vLLM. In mode `colocate` it lives in this process and answers our calls
(`integrations/vllm`). In mode `server` TRL's client can only ask it to generate: there AQN is refused, and of a plan all that
is not said to be for training. Transformers' continuous batching is refused in the same way.

That vLLM compiles when the trainer is made. So the callback prepares the plan when it is made itself: vLLM compiles its taps
in, and they wait for the training to begin.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from shaketable.aqn.spec import AQN
from shaketable.errors import PlanError
from shaketable.inject.injection import this_rank
from shaketable.integrations.common.instructions import Instructions
from shaketable.integrations.common.worker_report import merged
from shaketable.integrations.names import check_object
from shaketable.integrations.vllm import connect
from shaketable.integrations.vllm.refusals import can_act
from shaketable.ledger.ledger import Ledger
from shaketable.plan import Plan


def prepare_colocated(plan: Plan | None) -> None:
    """A vLLM that is made in this process from now on has the taps of the plan, which do nothing yet; None ends that."""
    if find_spec("vllm") is not None:
        from shaketable.integrations.vllm.worker import prepare

        os.environ["SHAKETABLE_RANK"] = str(this_rank())
        prepare(None if plan is None or not can_act(plan) else Instructions(plan=plan.text(), seed=plan.seed))


class Colocated:
    """The vLLM of this process, with the plan and the AQN on it."""

    def __init__(self, llm: Any, plan: Plan | None, aqn: AQN | None, total_steps: int, step: int) -> None:
        if getattr(llm, "_shaketable_held", False):
            raise PlanError("another callback has its plan or AQN on this vLLM; give both to one callback")
        llm._shaketable_held = True
        self._llm = llm
        self.plan = plan if plan is not None and can_act(plan) else None
        self.aqn = aqn
        self.total_steps = total_steps
        self._engine = connect(llm)
        self._reports: list[dict[str, Any]] | None = None
        if self.plan is not None:
            self._engine.set_plan(self.plan.text(), self.plan.seed)
        if aqn is not None:
            self._engine.set_aqn(aqn.text(), total_steps, step)
        self.set_step(step)
        self.set_phase("rollout")

    def set_step(self, step: int) -> None:
        """Begin a training step: it keys the noise, and σ follows."""
        self.step = step
        self._engine.set_step(step)

    def set_phase(self, phase: str) -> None:
        """rollout, or eval while the trainer evaluates."""
        self._engine.set_phase(phase)

    @property
    def sigma(self) -> float:
        """The schedule's σ now."""
        return 0.0 if self.aqn is None else self.aqn.schedule.sigma(self.step, self.total_steps)

    def ledgers(self) -> list[Ledger]:
        """The ledgers of plan and AQN in the workers."""
        reports = self._engine.ledger() if self._reports is None else self._reports
        own = [what for what in ("plan", "aqn") if getattr(self, what) is not None]
        return [found for what in own if (found := merged(reports, what)) is not None]

    def close(self) -> None:
        """Make vLLM's weights and rollouts clean again; what was counted stays."""
        if self._reports is None:
            self._reports = self._engine.ledger()
            self._llm._shaketable_held = False
            self._engine.clear()


def sampler_of(trainer: Any, plan: Plan | None, aqn: AQN | None, total_steps: int, step: int) -> Colocated | None:
    """The trainer's own vLLM with plan and AQN on it; None when it samples with the model that it trains, or not at all.

    Raises:
        PlanError: What is asked for cannot reach the sampler.
    """
    if getattr(trainer, "use_transformers_continuous_batching", False):
        _refuse_rollouts(plan, aqn, "continuous batching samples in a thread of its own, whose passes cannot be told apart")
        return None
    if not samples_with_vllm(trainer):
        return None
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None:
        raise PlanError(f"{type(trainer).__name__} samples with a vLLM that cannot be reached from here; set use_vllm=False")
    if generation.mode == "server":
        _refuse_rollouts(plan, aqn, "rollouts happen in the vLLM server, which is not reached from here")
        return None
    if generation.enable_sleep_mode:
        raise PlanError("vLLM's sleep mode throws away what is written into its weights; set vllm_enable_sleep_mode=False")
    if aqn is not None and aqn.where == "both":
        raise PlanError("AQN where=both needs one policy for sampling and training, and vLLM is another one; use where=rollout")
    if generation.tensor_parallel_size > 1:
        raise PlanError("a colocated vLLM that is tensor-parallel has one copy of the model on several ranks; use a size of 1")
    return Colocated(generation.llm, plan, aqn, total_steps, step)


def samples_with_vllm(trainer: Any) -> bool:
    """Whether vLLM samples, by the trainer's arguments; a trainer that has a vLLM and no such argument is refused."""
    if not hasattr(trainer.args, "use_vllm") and getattr(trainer, "vllm_generation", None) is not None:
        check_object("trl trainer", trainer.args, "use_vllm")
    return bool(getattr(trainer.args, "use_vllm", False))


def _refuse_rollouts(plan: Plan | None, aqn: AQN | None, why: str) -> None:
    """Raise when anything is to act in rollouts that are out of reach."""
    hit = [] if aqn is None else [aqn.text()]
    hit += [] if plan is None else [clause.text() for clause in plan.clauses if "rollout" in clause.site.phase]
    if hit:
        raise PlanError(
            f"{hit[0]}: {why}; sample with the model itself or with vllm_mode='colocate', or write phase=train for faults "
            "that act in training only"
        )
