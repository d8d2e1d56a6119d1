"""What a config of verl asks of us: read, checked, and turned into the orders of samplers and of actors. Imports no torch.

A clause that names no phase acts where `plan_in` says, and never in validation: an evaluation under faults is asked for, with
`phase=eval`, and is then a score that says so. Samplers are given the clauses that act in rollouts or validations, actors
those that act in training. AQN is the samplers'; one with `where=both` acts in the actors' forwards and backwards as well.
The reference policy and the critic are given nothing.

**Steps.** A schedule is stretched over the steps of the run. One by epochs follows verl's epochs instead: its e-th decay is the
e-th pass through the data, also in a run that is cut short. More epochs than it has decays are an error.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from shaketable.errors import ShaketableError, first_problem, nearest
from shaketable.harden.aqn import AQN
from shaketable.harden.schedules import EpochAware
from shaketable.integrations.orders import Orders
from shaketable.integrations.origin import translate
from shaketable.plan import Clause, Plan

PHASES = {"rollout": ("rollout",), "actor": ("train",), "both": ("rollout", "train")}


class Keys(BaseModel):
    """The group `shaketable` of a config, as the user wrote it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: str | None = None
    """A line of the plan language, or a YAML file."""
    aqn: str | None = None
    """A line that `AQN.load` reads, or a YAML file."""
    seed: int | None = None
    """Keys all noise; the plan's and AQN's own when left out."""
    plan_in: Literal["rollout", "actor", "both"] | None = None
    """Where clauses act that name no phase; both when left out."""
    ledger: str | None = None
    """A folder for this run's ledgers."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Keys:
        """The keys of a config, none of which it need have."""
        group = config.get("shaketable") or {}
        if not isinstance(group, Mapping):
            raise ShaketableError(f"shaketable is a group of keys ({', '.join(cls.model_fields)}), not {group!r}")
        for key in group:
            if key not in cls.model_fields:
                raise ShaketableError(f"shaketable.{key} is unknown; {nearest(str(key), cls.model_fields)}")
        try:
            return cls(**{str(key): value for key, value in group.items()})
        except ValidationError as error:
            raise ShaketableError(f"shaketable.{first_problem(error)}") from None


class Shaking(BaseModel):
    """What one run is to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: Plan | None
    aqn: AQN | None
    ledger: Path
    lines: tuple[str, ...] = ()
    """To print at the start."""

    def pinned(self) -> dict[str, Any]:
        """As plain data, which `shaking_of` reads back from the config whatever the environment is."""
        plan = None if self.plan is None else self.plan.text()
        seed = 0 if self.plan is None else self.plan.seed
        return {"plan": plan, "seed": seed, "aqn": None if self.aqn is None else self.aqn.text(), "ledger": str(self.ledger)}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Shaking:
        """The inverse of `pinned`."""
        plan = None if data["plan"] is None else Plan.parse(data["plan"], seed=data["seed"])
        aqn = None if data["aqn"] is None else AQN.load(data["aqn"])
        return cls(plan=plan, aqn=aqn, ledger=Path(data["ledger"]))

    def total_steps(self, steps: int, per_epoch: int) -> int:
        """The steps that schedules are stretched over, of a run with that many steps.

        Raises:
            ShaketableError: The run has more epochs than the schedule, or there would be no noise at any of its steps.
        """
        if self.aqn is None:
            return steps
        schedule, total = self.aqn.schedule, steps
        if isinstance(schedule, EpochAware):
            total = per_epoch * len(schedule.epochs)
            if steps > total:
                have = f"{steps} steps of {per_epoch} an epoch"
                raise ShaketableError(f"{schedule.text()} has {len(schedule.epochs)} epochs and the run {have}; add epochs")
        schedule.check(total)
        return total

    def orders(self, role: str, total_steps: int) -> Orders | None:
        """The orders of the samplers, or of the actors; None when they have none."""
        wanted = {"rollout", "eval"} if role == "sampler" else {"train"}
        clauses = [c for c in self.plan.clauses if wanted & set(c.site.phase)] if self.plan is not None else []
        plan = self.plan.model_copy(update={"clauses": tuple(clauses)}) if self.plan is not None and clauses else None
        aqn = self.aqn if self.aqn is not None and (role == "sampler" or self.aqn.where == "both") else None
        if plan is None and aqn is None:
            return None
        return Orders(
            plan=None if plan is None else plan.text(),
            aqn=None if aqn is None else aqn.text(),
            seed=0 if plan is None else plan.seed,
            total_steps=total_steps,
            ledger=str(self.ledger),
        )


def shaking_of(config: Mapping[str, Any], environ: Mapping[str, str]) -> Shaking | None:
    """What a whole config asks for; None when it has none of our keys, nor of the origin's.

    A config that verl's driver has checked carries the answer in `shaketable.resolved`.

    Raises:
        ShaketableError: A key is unknown or cannot be honoured.
    """
    group = config.get("shaketable")
    if isinstance(group, Mapping) and group.get("resolved"):
        return Shaking.read(group["resolved"])
    keys, origin = Keys.of(config), translate(config, environ)
    own = keys.plan is not None or keys.aqn is not None
    if own and (origin.plan is not None or origin.aqn is not None):
        raise ShaketableError(
            f"shaketable.* and the keys of {origin.lines[0].split()[0]} both ask for faults; say it in one place"
        )
    plan = Plan.load(keys.plan, seed=keys.seed) if keys.plan is not None else origin.plan
    aqn = AQN.load(keys.aqn) if keys.aqn is not None else origin.aqn
    if plan is None and aqn is None:
        if config.get("shaketable"):
            raise ShaketableError("shaketable has neither a plan nor an aqn; name one")
        return None
    if environ.get("SHAKETABLE_PLAN") or environ.get("SHAKETABLE_AQN"):
        raise ShaketableError(
            "the environment orders a plan or AQN too (shaketable run?); give it to verl alone: +shaketable.plan=…"
        )
    plan = None if plan is None else _placed(plan, keys)
    if aqn is not None and keys.seed is not None:
        aqn = aqn.model_copy(update={"seed": keys.seed})
    made = Shaking(plan=plan, aqn=aqn, ledger=_folder(config, keys))
    _check_verl(config, made)
    return made.model_copy(update={"lines": (*origin.lines, *_lines(made))})


def _placed(plan: Plan, keys: Keys) -> Plan:
    """The plan with a phase in each clause."""
    here = PHASES[keys.plan_in or "both"]
    clauses = []
    for clause in plan.clauses:
        if clause.site.phase and keys.plan_in and not set(clause.site.phase) <= {*here, "eval"}:
            raise ShaketableError(f"shaketable.plan_in={keys.plan_in}, and {clause.text()} names another phase; leave one out")
        clauses.append(clause if clause.site.phase else _during(clause, here))
    seed = plan.seed if keys.seed is None else keys.seed
    return plan.model_copy(update={"clauses": tuple(clauses), "seed": seed})


def _during(clause: Clause, phases: tuple[str, ...]) -> Clause:
    return clause.model_copy(update={"site": clause.site.model_copy(update={"phase": phases})})


def _folder(config: Mapping[str, Any], keys: Keys) -> Path:
    """An absolute path, because workers run in other folders."""
    if keys.ledger is not None:
        folder = Path(keys.ledger).expanduser().resolve()
        if any(folder.glob("*.json")):
            raise ShaketableError(f"{folder} holds the ledgers of another run; name another shaketable.ledger")
        return folder
    unique = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return Path(config["trainer"]["default_local_dir"]).expanduser().resolve() / "shaketable" / unique


def _check_verl(config: Mapping[str, Any], made: Shaking) -> None:
    """Refuse what our trainer cannot do, before anything is started."""
    trainer, model = config["trainer"], config["actor_rollout_ref"]
    mode = trainer["v1"]["trainer_mode"] if trainer["use_v1"] else "the trainer before v1"
    if mode != "sync":
        raise ShaketableError(f"shaketable works with trainer.v1.trainer_mode=sync, not with {mode}")
    if made.orders("sampler", 1) is not None and model["rollout"]["name"] != "vllm":
        raise ShaketableError(f"shaketable works with rollout.name=vllm, not with {model['rollout']['name']}")
    if made.orders("actor", 1) is not None and model["actor"]["strategy"] != "fsdp2":
        raise ShaketableError(f"faults in the actor need actor.strategy=fsdp2, not {model['actor']['strategy']}")


def _lines(made: Shaking) -> list[str]:
    """What will be done, by role."""
    lines = []
    for role, who in (("sampler", "samplers"), ("actor", "actors")):
        if (orders := made.orders(role, 1)) is not None:
            plan = [f"plan {orders.plan} (seed {orders.seed})"] if orders.plan else []
            lines.append(f"shaketable: {who}: {'; '.join([*plan, *([f'AQN {orders.aqn}'] if orders.aqn else [])])}")
    return [*lines, f"shaketable: ledgers in {made.ledger}"]
