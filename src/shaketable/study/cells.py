"""The runs that a study consists of, each with a key that says what it is. Imports no torch.

A run is known by the hash of all that its numbers depend on: configuration, seed, threads, and the diagnosis it is guided by.
The hash is in the name of its folder, so nothing is ever taken for something else. What the numbers do not depend on (the
engine, the question, the comparisons) is not in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from shaketable.errors import ShaketableError
from shaketable.harden.config import REMOVED_OPTIONS, HardenConfig
from shaketable.study.config import Arm, Guide, StudyConfig
from shaketable.train.config import TrainConfig

STEPS = 60
NEWER: dict[str, Any] = {
    "warm_start": 0,
    "eval_loss": False,
    "order": "after",
    "unit": "relative",
}
"""Options added after stores had been written, each with the value that means what was done before there was such an option.
They count in a key only when they have another value: so old runs keep their names."""


@dataclass(frozen=True)
class Cell:
    kind: Literal["train", "harden", "evaluate", "locate", "added"]
    arm: str | None
    """None for a diagnosis, which serves every arm with its plan."""
    seed: int | None
    config: dict[str, Any]
    threads: int
    guide: dict[str, Any] | None = None
    needs: str | None = None
    """The name of the diagnosis that must be there first."""
    keep_weights: bool = True

    @property
    def key(self) -> str:
        """What the run is, in eight digits."""
        content = [self.kind, _known(self.config), self.threads, self.guide and _known(self.guide), self.needs]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        words = ["diagnosis"] if self.arm is None else [_slug(self.arm), f"s{self.seed}"]
        return "-".join([*words, self.key])

    @property
    def title(self) -> str:
        return f"diagnosis of {self.config['plan']}" if self.arm is None else f"{self.arm}, seed {self.seed}"

    def about(self, study: str) -> dict[str, Any]:
        return {"study": study, "arm": self.arm, "seed": self.seed, "key": self.key, "threads": self.threads}


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """What a run's numbers depend on."""
    apart = ("report_to", "save_every")
    known = {k: v for k, v in options.items() if k not in apart and not (k in NEWER and NEWER[k] == v)}
    return known | REMOVED_OPTIONS if "rungs" in known else known


def cells_of(study: StudyConfig) -> list[Cell]:
    """All runs: diagnoses first, then seed by seed through the arms, so that an unfinished study has whole seeds."""
    needed = [_diagnosis(study, arm) for arm in study.arms.values() if isinstance(arm.aqn, Guide)]
    needed += [_diagnosis(study, Arm(plan=name)) for name in study.diagnose.conditions]
    diagnoses = {cell.name: cell for cell in needed} if study.seeds else {}
    return [*diagnoses.values(), *(_cell(study, name, seed) for seed in study.seeds for name in study.arms)]


def own_cells(study: StudyConfig) -> list[Cell]:
    """The runs that this program does."""
    return [cell for cell in cells_of(study) if cell.kind != "added"]


def _diagnosis(study: StudyConfig, arm: Arm) -> Cell:
    where = {"model": arm.model or study.model, "device": study.device, "dtype": study.resolved_dtype}
    config = {**where, "plan": study.plan_of(arm), **study.diagnose.model_dump(exclude={"conditions"})}
    return Cell("locate", None, None, config, study.engine.threads)


def _cell(study: StudyConfig, name: str, seed: int) -> Cell:
    """A run of an arm. A guided arm's AQN is filled in when its diagnosis is there."""
    arm, threads = study.arms[name], study.engine.threads
    if arm.kind == "added":  # what a run that is made elsewhere must be, and nothing of how
        what = {"arm": name, "model": arm.model or study.model, "task": arm.task or study.task, "seed": seed}
        what |= {"plan": study.plan_of(arm), "aqn": arm.aqn, "conditions": dict(study.evaluate.conditions)}
        return Cell("added", name, seed, what, threads)
    guide = arm.aqn.model_dump() if isinstance(arm.aqn, Guide) else None
    needs = None if guide is None else _diagnosis(study, arm).name
    try:
        config = _config(study, arm, seed)
    except ShaketableError as error:
        raise ShaketableError(f"arm {name!r}: {error}") from None
    return Cell(arm.kind, name, seed, config, threads, guide, needs, study.keep == "weights")


def _config(study: StudyConfig, arm: Arm, seed: int) -> dict[str, Any]:
    score, plan = study.evaluate, study.plan_of(arm)
    aqn = arm.aqn if isinstance(arm.aqn, str) else None
    common: dict[str, Any] = {
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
    if arm.kind == "evaluate":
        own = {"own": True, "plan": plan, "aqn": aqn} if study.has_own else {}
        return common | own | ({"skip_layers": list(arm.skip_layers)} if arm.skip_layers else {})
    if arm.kind == "harden":  # it begins where training would, after the study's warm start
        options = {"warm_start": study.train.get("warm_start", 0)} | study.harden | (arm.harden or {})
        repair = HardenConfig.checked(**options, **common, plans=() if plan is None else (plan,))
        return repair.model_dump(mode="json")
    options = {"steps": STEPS} | study.train | arm.overrides
    options |= {"plan": plan, "plan_in": arm.plan_in, "aqn": aqn, "eval_every": score.every, "report_to": ()}
    return TrainConfig.checked(**options, **common).model_dump(mode="json")


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:40] or "arm"
