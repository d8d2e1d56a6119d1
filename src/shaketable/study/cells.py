"""The runs that a study consists of, each with a key that says what it is. Imports no torch.

A run is known by the hash of all that its numbers depend on: configuration, seed, threads, and the diagnosis it is guided by.
The hash is in the name of its folder. So a study that gets another seed or another arm does only what is new, a study whose
steps were changed does all anew beside what was there, and nothing is ever taken for something else. What the numbers do not
depend on (the engine, the question, the comparisons) is not in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from shaketable.errors import ShaketableError
from shaketable.harden.config import HardenConfig
from shaketable.study.config import Arm, Guide, StudyConfig
from shaketable.train.config import TrainConfig

STEPS = 60
NEWER: dict[str, Any] = {
    "warm_start": 0,
    "clean_loss": 0.02,
    "eval_loss": False,
    "order": "after",
    "unit": "relative",
}
"""Options added after stores had been written, each with the value that means what was done before there was such an option.
They count in a key only when they have another value: so old runs keep their names."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    kind: Literal["train", "harden", "evaluate", "locate", "added"]
    arm: str | None
    """None for a diagnosis, which serves every arm with its plan."""
    seed: int | None
    config: dict[str, Any]
    threads: int
    guide: dict[str, Any] | None = None
    needs: str | None = None
    """The name of the run that must be there first: a diagnosis, or the hardening that gives the model."""
    keep_weights: bool = True

    @property
    def key(self) -> str:
        """What the run is, in eight digits."""
        content = [self.kind, _known(self.config), self.threads, self.guide and _known(self.guide), self.needs]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """Of the run's folder."""
        words = ["diagnosis"] if self.arm is None else [_slug(self.arm), f"s{self.seed}"]
        return "-".join([*words, self.key])

    @property
    def title(self) -> str:
        """For people."""
        return f"diagnosis of {self.config['plan']}" if self.arm is None else f"{self.arm}, seed {self.seed}"

    def about(self, study: str) -> dict[str, Any]:
        """What the head of its record says of its place."""
        return {"study": study, "arm": self.arm, "seed": self.seed, "key": self.key, "threads": self.threads}


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """What a run's numbers depend on."""
    apart = ("report_to", "save_every")
    known = {k: v for k, v in options.items() if k not in apart and not (k in NEWER and NEWER[k] == v)}
    if "rungs" in known:  # the name that it had when published records were made
        known["rungs"] = ["regauge" if rung == "rescale" else rung for rung in known["rungs"]]
    return known


def cells_of(study: StudyConfig) -> list[Cell]:
    """All runs: diagnoses first, then seed by seed through the arms, so that an unfinished study has whole seeds."""
    _check_arms([_cell(study, name, 0) for name in study.arms])
    needed = [_diagnosis(study, arm) for arm in study.arms.values() if isinstance(arm.aqn, Guide)]
    needed += [_diagnosis(study, Arm(plan=name)) for name in study.diagnose.conditions]
    diagnoses = {cell.name: cell for cell in needed} if study.seeds else {}
    return [*diagnoses.values(), *(_cell(study, name, seed) for seed in study.seeds for name in study.arms)]


def own_cells(study: StudyConfig) -> list[Cell]:
    """The runs that this program does."""
    return [cell for cell in cells_of(study) if cell.kind != "added"]


def _check_arms(cells: list[Cell]) -> None:
    """Two arms that are the same once every default is filled in are the same, however they were written."""
    first: dict[str, str | None] = {}
    for cell in cells:
        if (other := first.setdefault(cell.key, cell.arm)) != cell.arm:
            what = f"the arms {other!r} and {cell.arm!r} are the same"
            raise ShaketableError(f"{what}; any difference between them would be chance")


def _cell(study: StudyConfig, name: str, seed: int) -> Cell:
    arm = study.arms[name]
    guide = arm.aqn.model_dump() if isinstance(arm.aqn, Guide) else None
    if arm.kind == "added":
        return Cell("added", name, seed, added_config(study, name, seed), study.engine.threads)
    made = {"train": train_config, "harden": harden_config, "evaluate": evaluate_config}[arm.kind]
    needs = _cell(study, arm.after, seed).name if arm.after else None if guide is None else _diagnosis(study, arm).name
    config = made(study, name, seed)
    return Cell(arm.kind, name, seed, config, study.engine.threads, guide, needs, study.keep == "weights")


def _diagnosis(study: StudyConfig, arm: Arm) -> Cell:
    where = {"model": arm.model or study.model, "device": study.device, "dtype": study.resolved_dtype}
    config = {**where, "plan": study.plan_of(arm), **study.diagnose.model_dump(exclude={"conditions"})}
    return Cell("locate", None, None, config, study.engine.threads)


def train_config(study: StudyConfig, name: str, seed: int) -> dict[str, Any]:
    """A trained run's configuration; a guided arm's AQN is filled in when its diagnosis is there."""
    arm = study.arms[name]
    try:
        config = TrainConfig.checked(
            **{"steps": STEPS} | study.train | arm.overrides | ({"warm_start": 0} if arm.after else {}),
            **_common(study, arm, seed),
            plan=study.plan_of(arm),
            plan_in=arm.plan_in,
            aqn=arm.aqn if isinstance(arm.aqn, str) else None,
            eval_every=study.evaluate.every,
            report_to=(),
        )
    except ShaketableError as error:
        raise ShaketableError(f"arm {name!r}: {error}") from None
    return config.model_dump(mode="json")


def harden_config(study: StudyConfig, name: str, seed: int) -> dict[str, Any]:
    """A hardened run's configuration. It begins where training would: after the study's warm start, and aims at no target."""
    arm = study.arms[name]
    begin = {"warm_start": study.train.get("warm_start", 0), "target": None}
    plan = study.plan_of(arm)
    try:
        config = HardenConfig.checked(
            **begin | study.harden | (arm.harden or {}), **_common(study, arm, seed), plans=() if plan is None else (plan,)
        )
    except ShaketableError as error:
        raise ShaketableError(f"arm {name!r}: {error}") from None
    return config.model_dump(mode="json")


def evaluate_config(study: StudyConfig, name: str, seed: int) -> dict[str, Any]:
    """The configuration of a run that is only scored: that of training, as far as there is none, and what is on in `own`."""
    arm = study.arms[name]
    aqn = arm.aqn if isinstance(arm.aqn, str) else None
    own = {"own": True, "plan": study.plan_of(arm), "aqn": aqn} if study.has_own else {}
    return _common(study, arm, seed) | own | ({"skip_layers": list(arm.skip_layers)} if arm.skip_layers else {})


def added_config(study: StudyConfig, name: str, seed: int) -> dict[str, Any]:
    """What a run that is made elsewhere must be: nothing of how."""
    arm = study.arms[name]
    what = {"arm": name, "model": arm.model or study.model, "task": arm.task or study.task, "seed": seed}
    return what | {"plan": study.plan_of(arm), "aqn": arm.aqn, "conditions": dict(study.evaluate.conditions)}


def _common(study: StudyConfig, arm: Arm, seed: int) -> dict[str, Any]:
    score = study.evaluate
    return {
        "model": arm.model or study.model,
        "task": arm.task or study.task,
        "seed": seed,
        "eval_n": score.n,
        "eval_seed": score.seed,
        "eval_batch": score.batch,
        **({"eval_loss": True} if score.loss else {}),
        "conditions": dict(score.conditions),
        "mechanism": score.mechanism,
        "device": study.device,
        "dtype": study.resolved_dtype,
    }


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:40] or "arm"
