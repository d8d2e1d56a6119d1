"""verl's synchronous trainer, with instructions for its workers.

AQN needs no call after a weight sync: the sampler sees new weights arrive and writes the noise into those (`vllm/worker.py`).
Samplers are called only while they are awake: a sleeping one has given its weights away. The class is made on top of whatever
synchronous trainer the config chooses, so a user's own subclass keeps its ways.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.engine_workers import ActorRolloutRefWorker

from shaketable.errors import ShaketableError
from shaketable.integrations.common.instructions import Instructions
from shaketable.integrations.names import check, check_object
from shaketable.integrations.verl.settings import Shaking
from shaketable.integrations.verl.workers import VerlWorkers

check("verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync", "verl.trainer.ppo.utils:Role")
EXTENSION = "shaketable.integrations.verl.sampler.SamplerExtension"
"""Our extension of vLLM's workers."""
KL = "rollout_corr/k3_kl"
"""verl's estimate of KL(sampler‖trainer) per token, from what both sides say of the samples; the one that is never negative."""
FAULTY = "shaketable/faulty/"
"""Before the name of a score that was taken under the plan."""


class ShakenTrainer(PPOTrainerSync):  # type: ignore[misc]
    """A synchronous trainer that obeys a `Shaking`."""

    def __init__(self, config: DictConfig, shaking: Shaking) -> None:
        self.shaking = shaking
        self._mark = 0
        self._unproven: int | None = None
        """The step that has begun, until it is proven."""
        super().__init__(config=config)

    # ---- instructions

    def _init_resource_pool_mgr(self) -> None:
        """verl chooses its worker classes here, and knows the number of steps by now."""
        super()._init_resource_pool_mgr()
        total = self.shaking.total_steps(self.total_training_steps, self.steps_per_epoch, self.config.trainer.total_epochs)
        roles = {role: self.shaking.instructions(role, total) for role in ("sampler", "actor")}
        instructions = {role: found for role, found in roles.items() if found is not None}
        self.shaken = VerlWorkers(
            self.shaking.ledger, instructions, self.config.trainer.n_gpus_per_node * self.config.trainer.nnodes
        )
        if "sampler" in instructions:
            self._order_samplers(instructions["sampler"])
        if "actor" in instructions:
            from shaketable.integrations.verl.actor import ShakenWorker

            use_worker(self.role_worker_mapping, ShakenWorker, "faults in the actor need")

    def _order_samplers(self, instructions: Instructions) -> None:
        """Instructions travel to vLLM in its own config; both sides of the KL are wanted."""
        rollout = self.config.actor_rollout_ref.rollout
        with open_dict(rollout):
            kwargs = OmegaConf.to_container(rollout.engine_kwargs).get("vllm") or {}
            given = (kwargs.get("additional_config") or {}) | {"shaketable": instructions.model_dump(exclude_none=True)}
            extension = _extension(kwargs.get("worker_extension_cls"))
            rollout.engine_kwargs["vllm"] = kwargs | {"worker_extension_cls": extension, "additional_config": given}
            rollout.calculate_log_probs = True

    # ---- verl's hooks

    def on_init_end(self) -> None:
        """All workers are there."""
        check_object("verl trainer", self)
        if "actor" in self.shaken.instructions:
            self.actor_rollout_wg.shake(self.shaken.instructions["actor"].model_dump())
        super().on_init_end()
        self._refresh()
        self.shaken.check_in()
        print(f"shaketable: all workers act on their instructions ({self.shaken.folder})", flush=True)

    def on_step_begin(self) -> None:
        """A step begins with its rollouts."""
        super().on_step_begin()
        self._check_proven()
        self._unproven = self.global_steps
        step = self.global_steps - 1
        if "actor" in self.shaken.instructions:
            self.actor_rollout_wg.shake_step(step)
        self._tell("set_step", step, step=step, phase="rollout")

    def _validate(self) -> dict[str, Any]:
        """Validations as they were asked for, each with the proof that it was of the model it claims to be of."""
        if "sampler" not in self.shaken.instructions:
            return {**super()._validate(), "shaketable/validation_fires": 0.0}
        found: dict[str, Any] = {}
        for faulty in {"clean": (False,), "plan": (True,), "both": (False, True)}[self.shaking.validations]:
            self._begin_validation(faulty)
            with self._dumping_apart() if faulty else nullcontext():
                scores = super()._validate()
            self._refresh()
            proven = scores | {"shaketable/validation_fires": float(self.shaken.after_validation(faulty))}
            found |= {FAULTY + key.removeprefix("shaketable/"): value for key, value in proven.items()} if faulty else proven
        return found

    def _begin_validation(self, faulty: bool) -> None:
        """Tell samplers, which also empties vLLM's prefix cache. Faults of weights hit when they are written, which is now."""
        if self.shaking.validations != "clean":
            self._call("switch_plan", faulty)
        self._tell("set_phase", "eval", phase="eval")
        if not faulty:
            self.shaken.check_clean()
            self.shaken.begin()

    @contextmanager
    def _dumping_apart(self) -> Iterator[None]:
        """verl dumps the answers of a validation by its step: those under faults go to a folder of their own, to no table."""
        trainer = self.config.trainer
        was = trainer.get("validation_data_dir"), trainer.get("log_val_generations")
        with open_dict(trainer):
            trainer.validation_data_dir = str(Path(was[0]) / "faulty") if was[0] else was[0]
            trainer.log_val_generations = 0
            try:
                yield
            finally:
                trainer.validation_data_dir, trainer.log_val_generations = was

    def on_validate_end(self) -> None:
        """On. What is written into weights now belongs to no step; before the first one, to that: samplers are at step 0."""
        if self._tell("set_phase", "rollout", phase="rollout") and self.global_steps:
            self.shaken.begin()
        super().on_validate_end()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        """Rollouts and updates; verl's KL under our name."""
        batch = super().step(metrics, timing_raw)
        if KL in metrics:
            metrics["shaketable/kl"] = metrics[KL]
        return batch

    def _consume_sync_metrics(self) -> dict[str, Any]:
        """verl asks for metrics when the step is done and the samplers are awake again."""
        found = super()._consume_sync_metrics()
        self._refresh()
        ours = self.shaken.after_step(self._trained())
        self._unproven = None
        epoch = (self.global_steps - 1) // self.steps_per_epoch
        self.shaken.log({"step": self.global_steps, "epoch": epoch} | ours)
        return {**found, **ours}

    def _check_proven(self) -> None:
        """verl has changed if a step ended without a request for its metrics: that step may have been clean."""
        if self._unproven is not None:
            raise ShaketableError(
                f"step {self._unproven} has ended and verl did not ask for its metrics: nothing proves its faults"
            )

    def _trained(self) -> tuple[str, ...]:
        """Which ways the actors went in this step."""
        if self.config.trainer.critic_warmup <= self.global_steps:
            return ("forward", "backward")
        correction = self.config.algorithm.get("rollout_correction")
        return () if correction and correction.get("bypass_mode") else ("forward",)

    def fit(self, agent_loop_manager: Any) -> None:
        """Train; then merge the ledgers, and raise where nothing was hit."""
        super().fit(agent_loop_manager)
        self._check_proven()
        self._refresh()
        self.shaken.finish()
        print(f"shaketable: merged ledger in {self.shaken.folder}", flush=True)

    # ---- calls

    def _tell(self, call: str, value: Any, **then: Any) -> bool:
        """Call all samplers, and see that it has reached them; False when they have no instructions."""
        if "sampler" not in self.shaken.instructions:
            return False
        self._call(call, value)
        self._mark += 1
        self._call("write_report", self._mark)
        self.shaken.read(self._mark, "sampler")
        self.shaken.check_samplers(**then)
        return True

    def _call(self, method: str, *args: Any) -> None:
        servers = self.llm_server_manager.server_handles
        ray.get([server.collective_rpc.remote(method, args=args) for server in servers])

    def _refresh(self) -> None:
        """Have every worker bring its report up to date, and read it."""
        self._mark += 1
        if "sampler" in self.shaken.instructions:
            self._call("write_report", self._mark)
        if "actor" in self.shaken.instructions:
            self.actor_rollout_wg.write_report(self._mark)
        self.shaken.read(self._mark)


def _extension(chosen: str | None) -> str:
    """Our extension of vLLM's workers, or the user's own that is built on it."""
    if chosen is None:
        return EXTENSION
    from shaketable.integrations.verl.sampler import SamplerExtension

    if not issubclass(load_class_from_fqn(chosen), SamplerExtension):
        raise ShaketableError(f"worker_extension_cls={chosen} must be a subclass of {EXTENSION}")
    return chosen


# ---- our classes in the place of verl's


@functools.cache
def on_top_of(chosen: type, ours: type) -> type:
    """A trainer that is both: a user's own subclass of verl's keeps its ways."""
    if chosen is PPOTrainerSync:
        return ours
    if not issubclass(chosen, PPOTrainerSync):
        raise ShaketableError(f"shaketable works with verl's synchronous trainer, not with {chosen.__name__}")
    return type(f"Shaken{chosen.__name__}", (ours, chosen), {})


def use_worker(classes: dict[Any, Any], ours: type, what: str) -> None:
    """Have a trainer make its actors from our class. `what` needs it, for the line that says why it cannot be done."""
    for role in (Role.ActorRolloutRef, Role.ActorRollout):
        if (chosen := classes.get(role)) is not None:
            if (plain := chosen.__ray_actor_class__) is not ActorRolloutRefWorker:
                raise ShaketableError(f"{what} verl's own worker, not {plain.__name__}")
            classes[role] = ray.remote(ours)
