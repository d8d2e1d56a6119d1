"""Faults in verl's actor: in its forwards and backwards in training, and in nothing else that lives in the same worker.

The plan is attached to the policy after it was built (and sharded, by FSDP2), and is on while log probabilities are computed
or the policy is updated. Where the reference is the same model without its adapter, verl says so, and it stays clean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from shaketable.aqn.spec import AQN
from shaketable.inject.injection import Injection, this_rank
from shaketable.integrations.common.instructions import Instructions
from shaketable.integrations.common.worker_report import WorkerReport
from shaketable.integrations.names import check, check_object
from shaketable.plan import Plan
from shaketable.sites.phases import phase

check(
    "verl.workers.engine_workers:TrainingWorker",
    "verl.workers.engine_workers:ActorRolloutRefWorker",
    "verl.single_controller.base.decorator:",
    "verl.utils.tensordict_utils:",
)


class ActorFaults:
    """The instructions of one actor, on its model."""

    def __init__(self, instructions: Instructions, model: Any) -> None:
        self.instructions = instructions
        self.plan: Injection | None = None
        self.noise = None
        self.updates = 0
        """Updates of the policy that came by here."""
        if instructions.plan is not None:
            self.plan = Injection(Plan.parse(instructions.plan, seed=instructions.seed), allow_inert=True)
            self.plan.attach(model)
        if instructions.aqn is not None:
            aqn = AQN.load(instructions.aqn)
            self.noise = aqn.attach(model, instructions.total_steps, allow_inert=True, plan=self.plan)
        self.file = WorkerReport(Path(instructions.ledger or "."), "actor", self.report)

    @property
    def injections(self) -> list[Injection]:
        """The injections of plan and AQN."""
        noise = None if self.noise is None else self.noise.injection
        return [found for found in (self.plan, noise) if found is not None]

    def set_step(self, step: int) -> None:
        """Begin a training step."""
        if self.plan is not None:
            self.plan.step = step
        if self.noise is not None:
            self.noise.step = step

    @contextmanager
    def training(self) -> Iterator[None]:
        """Everything inside is training. The operator mode belongs to a thread, and is left to the model's own calls."""
        for injection in self.injections:
            injection.enable().drop_mode()
        try:
            with phase("train"):
                yield
        finally:
            for injection in self.injections:
                injection.disable()

    def report(self) -> dict[str, Any]:
        """The report of this worker, as plain data."""
        return {
            "rank": this_rank(),
            "instructions": self.instructions.digest(),
            "config": self.instructions.model_dump(),
            "step": self.injections[0].step,
            "updates": self.updates,
            "plan": self.plan.ledger.to_dict() if self.plan is not None else None,
            "aqn": self.noise.ledger.to_dict() if self.noise is not None else None,
            "sigma": self.noise.sigma if self.noise is not None else 0.0,
            "sigmas": {str(k): v for k, v in self.noise.sigmas.items()} if self.noise is not None else {},
        }


class ShakenActor(TrainingWorker):  # type: ignore[misc]
    """verl's actor, with faults in its passes."""

    faults: ActorFaults | None = None

    def infer_batch(self, data: Any) -> Any:
        """Log probabilities: of the policy, or of the reference that shares its weights."""
        is_reference = tensordict_utils.get(data, key="no_lora_adapter", default=False)
        with nullcontext() if is_reference else self._training():
            return super().infer_batch(data)

    def train_mini_batch(self, data: Any) -> Any:
        """An update."""
        if self.faults is not None:
            self.faults.updates += 1
        with self._training():
            return super().train_mini_batch(data)

    def _training(self) -> Any:
        return nullcontext() if self.faults is None else self.faults.training()


class ShakenWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker, whose actor takes instructions. The reference policy is verl's own."""

    actor_worker_cls = ShakenActor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def shake(self, instructions: Mapping[str, Any]) -> None:
        """Attach instructions to the actor's model."""
        assert self.actor.faults is None
        check_object("verl actor", self.actor)
        self.actor.faults = ActorFaults(Instructions.from_mapping(instructions), self.actor.engine.module)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def shake_step(self, step: int) -> None:
        """Begin a training step."""
        self.actor.faults.set_step(step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def write_report(self, mark: int) -> None:
        """Bring the report on disk up to date; the mark in it says so."""
        self.actor.faults.file.flush(mark)
