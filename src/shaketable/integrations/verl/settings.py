"""Our keys in a config of verl, turned into instructions for samplers and actors. Imports no torch.

A clause that names no phase acts where `plan_in` says, and not in validation. Samplers get the clauses that act in rollouts or
validations, actors those that act in training; a clause that neither could obey is an error. AQN is the samplers'; one with
`where=both` acts in the actors too. The reference policy and the critic get nothing.

A schedule is stretched over the steps of the run. One by epochs follows verl's epochs: its e-th decay is the e-th pass through
the data, also in a run that is cut short.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shaketable.aqn.schedules import EpochAware
from shaketable.aqn.spec import AQN
from shaketable.errors import ShaketableError
from shaketable.integrations.common.instructions import Instructions
from shaketable.integrations.common.keys import read_keys
from shaketable.integrations.origin_configs.translate import translate
from shaketable.integrations.verl.checks import check_mismatch, check_verl
from shaketable.plan import Clause, Plan
from shaketable.records.record import put_in_place

RECORD = "shaketable.json"
"""Beside checkpoints: the plan and the AQN that they were made under."""
ORDERS = "instructions.json"
"""The first file that our trainer writes into the folder of ledgers."""
Validate = Literal["clean", "plan", "both"]
PHASES = {"rollout": ("rollout",), "actor": ("train",), "both": ("rollout", "train")}


class MismatchKeys(BaseModel):
    """The group `shaketable.mismatch`: samplers against actors, in a training as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every: int = Field(ge=1)
    """Steps from one check to the next; the first step has one."""
    stop: bool = False
    """Whether weights that differ after a sync end the training."""


class ShaketableKeys(BaseModel):
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
    validate_: Validate | None = Field(default=None, alias="validate")
    """Validations without faults, under the plan, or both ways; when left out, under it where a clause names `eval`."""
    mismatch: MismatchKeys | None = None
    """Compare the weights of samplers and actors every so many steps; without plan and aqn."""
    ledger: str | None = None
    """A folder for this run's ledgers."""


class Shaking(BaseModel):
    """The faults, the noise and the measurements of one run, as text: the config takes it to the trainer's process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: str | None = None
    """Every clause names its phases."""
    seed: int = 0
    """Of the plan; AQN carries a seed of its own."""
    aqn: str | None = None
    mismatch: MismatchKeys | None = None
    ledger: Path
    validations: Validate = "clean"
    """Whether validations are clean, under the plan, or both."""
    lines: tuple[str, ...] = Field(default=(), exclude=True)
    """To print at the start."""

    def clauses(self, role: str) -> tuple[Clause, ...]:
        """The clauses of the samplers, or of the actors."""
        return () if self.plan is None else tuple(c for c in Plan.parse(self.plan).clauses if _is_for(c, role))

    def noise(self, role: str) -> AQN | None:
        """The AQN of the samplers, or of the actors."""
        aqn = None if self.aqn is None else AQN.load(self.aqn)
        return aqn if aqn is not None and (role == "sampler" or aqn.where == "both") else None

    def total_steps(self, most: int, per_epoch: int, epochs: int) -> int:
        """The steps that schedules are stretched over.

        Args:
            most: Steps after which verl ends the run.
            per_epoch: Steps of a pass through the data.
            epochs: Passes after which verl ends the run.

        Raises:
            ShaketableError: The run has more epochs than the schedule, or there would be no noise at any of its steps.
        """
        steps = total = min(most, per_epoch * epochs)
        if (aqn := self.noise("sampler")) is None:
            return steps
        if isinstance(schedule := aqn.schedule, EpochAware):
            total = per_epoch * len(schedule.epochs)
            if steps > total:
                have = f"{steps} steps of {per_epoch} an epoch"
                raise ShaketableError(f"{schedule.text()} has {len(schedule.epochs)} epochs and the run {have}; add epochs")
        schedule.check(total)
        return total

    def instructions(self, role: str, total_steps: int = 1) -> Instructions | None:
        """The instructions of the samplers, or of the actors; None when they have none."""
        clauses, aqn = self.clauses(role), self.noise(role)
        if not clauses and aqn is None:
            return None
        return Instructions(
            plan=Plan(clauses=clauses).text() if clauses else None,
            aqn=None if aqn is None else aqn.text(),
            seed=self.seed if clauses else 0,
            total_steps=total_steps,
            ledger=str(self.ledger),
        )


def shaking_of(config: Mapping[str, Any], environ: Mapping[str, str]) -> Shaking | None:
    """The faults that a whole config asks for; None without keys of ours or of the origin's.

    A config that verl's driver has checked carries the answer in `shaketable.resolved`.

    Raises:
        ShaketableError: A key is unknown or cannot be honoured.
    """
    group = config.get("shaketable")
    if isinstance(group, Mapping) and group.get("resolved"):
        return Shaking(**group["resolved"])
    keys, origin = read_keys(ShaketableKeys, "shaketable", group or {}), translate(config, environ)
    if (keys.plan or keys.aqn) and (origin.plan is not None or origin.aqn is not None):
        raise ShaketableError(
            f"shaketable.* and the keys of {origin.lines[0].split()[0]} both ask for faults; say it in one place"
        )
    plan = Plan.load(keys.plan, seed=keys.seed) if keys.plan is not None else origin.plan
    aqn = AQN.load(keys.aqn) if keys.aqn is not None else origin.aqn
    if keys.mismatch is not None:
        return _measuring(config, keys, keys.mismatch, plan is not None or aqn is not None)
    if plan is None and aqn is None:
        if group:
            raise ShaketableError("shaketable has neither a plan nor an aqn nor a mismatch; name one")
        return None
    if environ.get("SHAKETABLE_PLAN"):
        raise ShaketableError("the environment has a plan too (shaketable run?); give it to verl alone: +shaketable.plan=…")
    plan = None if plan is None else _placed(plan, keys)
    if aqn is not None and keys.seed is not None:
        aqn = replace(aqn, seed=keys.seed)
    made = Shaking(
        plan=None if plan is None else plan.text(),
        seed=0 if plan is None else plan.seed,
        aqn=None if aqn is None else aqn.text(),
        ledger=_folder(config, keys),
        validations=_validations(plan, keys),
    )
    check_verl(config, made)
    return made.model_copy(update={"lines": (*origin.lines, *_lines(made))})


def keep_record(config: Mapping[str, Any], made: Shaking | None) -> None:
    """Refuse to resume from checkpoints that were made under another plan or AQN; record those of this run.

    Raises:
        ShaketableError: What would be resumed, or overwritten, was made under something else.
    """
    trainer = config["trainer"]
    own = Path(trainer["default_local_dir"]).expanduser().resolve()
    path = trainer.get("resume_from_path") if trainer.get("resume_mode") == "resume_path" else None
    here: dict[str, Any] = {}
    if made is not None and made.mismatch is None:
        here = made.model_dump(include={"plan", "seed", "aqn"})
    if here.get("plan"):  # how validations are scored changes no checkpoint
        here["plan"] = here["plan"].replace("+eval", "")
    for folder in {own, *([Path(path).expanduser().resolve().parent] if path else [])}:
        there = json.loads((folder / RECORD).read_text(encoding="utf-8")) if (folder / RECORD).exists() else {}
        if any(folder.glob("global_step_*")) and there != here:
            raise ShaketableError(
                f"{folder} has checkpoints that were made under {_said(there)}, and this run has {_said(here)}: verl would mix "
                "them; name another trainer.default_local_dir, or start from their weights by actor_rollout_ref.model.path"
            )
    if here:
        own.mkdir(parents=True, exist_ok=True)
        put_in_place(own / RECORD, json.dumps(here, indent=2) + "\n")
    else:
        (own / RECORD).unlink(missing_ok=True)


def _said(found: Mapping[str, Any]) -> str:
    plan = [f"plan {found['plan']} (seed {found['seed']})"] if found.get("plan") else []
    return " and ".join([*plan, *([f"AQN {found['aqn']}"] if found.get("aqn") else [])]) or "no plan"


def _measuring(config: Mapping[str, Any], keys: ShaketableKeys, asked: MismatchKeys, shakes: bool) -> Shaking:
    """A training that is measured, and not changed."""
    others = [name for name in ("seed", "plan_in", "validate_") if getattr(keys, name) is not None]
    if shakes or others:
        raise ShaketableError("shaketable.mismatch measures a training as it is: only shaketable.ledger goes with it")
    made = Shaking(mismatch=asked, ledger=_folder(config, keys))
    check_mismatch(config)
    every = "step" if asked.every == 1 else f"{asked.every} steps"
    then = "; weights that differ after a sync end the training" if asked.stop else ""
    lines = f"shaketable: samplers against actors every {every}{then}", f"shaketable: what is found is in {made.ledger}"
    return made.model_copy(update={"lines": lines})


def _placed(plan: Plan, keys: ShaketableKeys) -> Plan:
    """The plan with a phase in each clause."""
    here: tuple[str, ...] = PHASES[keys.plan_in or "both"]
    if keys.validate_ in ("plan", "both") and "rollout" in here:
        here = (*here, "eval")
    clauses = []
    for clause in plan.clauses:
        if clause.site.phase and keys.plan_in and not set(clause.site.phase) <= {*here, "eval"}:
            raise ShaketableError(f"shaketable.plan_in={keys.plan_in}, and {clause.text()} names another phase; leave one out")
        placed = clause if clause.site.phase else _during(clause, here)
        if not any(_is_for(placed, role) for role in ("sampler", "actor")):
            raise ShaketableError(f"{placed.text()} would never act: a sampler has no backward; use phase=train")
        clauses.append(placed)
    seed = plan.seed if keys.seed is None else keys.seed
    return plan.model_copy(update={"clauses": tuple(clauses), "seed": seed})


def _validations(plan: Plan | None, keys: ShaketableKeys) -> Validate:
    """Whether validations are clean, under the plan, or both; refuses what the plan has no clause for."""
    named = [c for c in plan.clauses if "eval" in c.site.phase and _is_for(c, "sampler")] if plan is not None else []
    if keys.validate_ is None:
        return "plan" if named else "clean"
    if keys.validate_ == "clean" and named:
        raise ShaketableError(f"shaketable.validate=clean, and {named[0].text()} names eval; leave one out")
    if keys.validate_ != "clean" and not named:
        raise ShaketableError(f"shaketable.validate={keys.validate_} needs a clause that acts in samplers, and there is none")
    return keys.validate_


def _is_for(clause: Clause, role: str) -> bool:
    """Whether the workers of a role are to have a clause."""
    if role == "actor":
        return "train" in clause.site.phase
    return "forward" in clause.site.directions and bool({"rollout", "eval"} & set(clause.site.phase))


def _during(clause: Clause, phases: tuple[str, ...]) -> Clause:
    """The clause in those phases; one that acts backward alone has nothing to do in a rollout that is not its only phase."""
    if "forward" not in clause.site.directions and "train" in phases:
        phases = ("train",)
    return clause.model_copy(update={"site": clause.site.model_copy(update={"phase": phases})})


def _folder(config: Mapping[str, Any], keys: ShaketableKeys) -> Path:
    """An absolute path, because workers run in other folders."""
    if keys.ledger is not None:
        folder = Path(keys.ledger).expanduser().resolve()
        if any(folder.glob("*.json")):
            raise ShaketableError(f"{folder} holds the ledgers of another run; name another shaketable.ledger")
        return folder
    unique = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return Path(config["trainer"]["default_local_dir"]).expanduser().resolve() / "shaketable" / unique


def _lines(made: Shaking) -> list[str]:
    """The lines that say what will be done, by role."""
    told = [(role, made.instructions(role)) for role in ("sampler", "actor")]
    lines = [f"shaketable: {role}s: {_said(found.model_dump())}" for role, found in told if found is not None]
    faulty = {"clean": "clean", "plan": "under the plan", "both": "clean and under the plan"}[made.validations]
    return [*lines, f"shaketable: validations: {faulty}", f"shaketable: ledgers in {made.ledger}"]
