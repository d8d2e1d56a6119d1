"""What a study found: all that its report says, as data. From records alone, so the same at any time and on any machine.

An undisturbed study and one that was killed and went on have the same scores and comparisons, to the bit, and the same
measured errors but for the rounding of sums: which fires are measured follows from the fires before, also those of another
process. Times differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shaketable.harden.config import HardenConfig
from shaketable.plan import Plan
from shaketable.study.analysis import arms
from shaketable.study.analysis.comparisons import compare
from shaketable.study.analysis.diagnoses import diagnosis
from shaketable.study.analysis.history import changes
from shaketable.study.analysis.recovered import recovered, told
from shaketable.study.analysis.runs import Run
from shaketable.study.analysis.verdict import verdict
from shaketable.study.arm_config import Arm, Guide
from shaketable.study.cells import STEPS, cells_of
from shaketable.study.config import OWN, StudyConfig
from shaketable.study.verify import digest
from shaketable.train.config import TrainConfig

SCHEMA = "shaketable.study/1"
OWN_PLAN = "the plan and the noise of each arm"
MADE_OF = {"weights": "weights", "tests": "test problems"}


def findings(study: StudyConfig, folder: Path) -> dict[str, Any]:
    """Everything about a study in its folder of the store."""
    cells = cells_of(study)
    runs = [Run.of(cell, folder / "runs") for cell in cells]
    unlike, late = _not_the_same(runs), changes(study, folder, runs)
    unverified = [run for run in runs if run.is_done and not run.verified]
    compared = [_marked(c, unverified) for c in compare(study.comparisons, study.compare.primary, runs)]
    complete = all(run.is_done for run in runs)
    back = recovered(study.conditions, {name: _done(runs, name) for name in study.arms})
    decided = verdict(compared, runs, unlike)
    shared = {name: plan for name, plan in study.conditions.items() if name != OWN}
    came_back = told(back, study.compare.primary)
    return {
        "schema": SCHEMA,
        "kind": "study",
        "study": {**_study(study), "named_before": late.named_before, "digest": digest(folder)},
        "complete": complete,
        "runs": [run_facts(run) for run in runs],
        "unverified": [run.name for run in unverified],
        "verdict": decided | {"sentence": f"{decided['sentence']}. {came_back}" if came_back else decided["sentence"]},
        "arms": [_arm(study, name, runs) for name in study.arms],
        "comparisons": compared,
        "recovered": back,
        "robustness": robustness(shared, {name: _done(runs, name) for name in study.arms}),
        "diagnoses": [diagnosis(run, cells, runs) for run in runs if run.kind == "locate" and run.is_done],
        "environments": environments(runs),
        "notes": [*_elsewhere(runs), *_unverified(unverified, runs), *unlike, *late.notes, *_damage(runs), *_no_number(runs)],
    }


def run_findings(folder: Path) -> dict[str, Any]:
    """A single training run, told as a study of one arm and one seed: what training changed."""
    run = Run.alone(folder)
    config = TrainConfig.checked(**run.config)
    conditions = {c["name"]: c["plan"] for c in (run.last("evaluation") or {"conditions": []})["conditions"]}
    name = str(run.arm or folder.name)
    facts: dict[str, Any] = {
        "name": name,
        "description": "",
        "settings": [],
        "kind": "train",
        "plan": config.plan,
        "plan_in": config.plan_in,
    }
    own = {"aqn": config.aqn, "guided": None, "model": config.model, "task": config.task, "seeds": [config.seed]}
    sentence = "One run concludes nothing about a recipe: another seed may end elsewhere. This page tells what happened in it."
    return {
        "schema": SCHEMA,
        "kind": "run",
        "study": {
            "name": folder.name, "question": "", "origin": "", "model": config.model, "task": config.task,
            "seeds": [config.seed], "key": run.head["id"][:8], "steps": config.steps, "n": config.eval_n,
            "conditions": [{"name": n, "plan": p} for n, p in conditions.items()], "primary": None, "engine": "",
            "command": "", "named_before": False,
        },
        "complete": run.is_done,
        "runs": [run_facts(run) | {"folder": "."}],
        "unverified": [] if run.verified else [run.name],
        "verdict": {"kind": "nothing", "headline": "One training run", "sentence": sentence},
        "arms": [{**facts, **own, **_measured([run], conditions)}],
        "comparisons": [],
        "recovered": recovered(conditions, {name: [run]}),
        "robustness": robustness(conditions, {name: [run]}),
        "diagnoses": [],
        "environments": environments([run]),
        "notes": _unverified([] if run.verified else [run], [run]),
    }  # fmt: skip


def _study(study: StudyConfig) -> dict[str, Any]:
    primary = study.compare.primary
    return {
        "name": study.study,
        "question": study.question,
        "origin": study.origin,
        "model": study.model,
        "task": study.task,
        "seeds": list(study.seeds),
        "steps": _steps(study),
        "options": ", ".join(f"{k} {v}" for k, v in study.train.items() if k != "steps"),
        "n": study.evaluate.n,
        "conditions": [{"name": n, "plan": p if n != OWN else OWN_PLAN} for n, p in study.conditions.items()],
        "primary": None if primary is None else primary.model_dump(),
        "engine": study.engine.kind,
        "command": f"shaketable study run {study.study}.yaml",
        "key": cells_of(study)[-1].key if study.seeds else "",
    }


def _steps(study: StudyConfig) -> int:
    """Of training; of hardening where nothing is trained; none where nothing is hardened either."""
    kinds = {arm.kind for arm in study.arms.values()}
    if "train" in kinds:
        return int(study.train.get("steps", STEPS))
    if "harden" not in kinds:
        return 0
    return int(study.harden.get("steps", HardenConfig.model_fields["steps"].default))


def _done(runs: Sequence[Run], arm: str) -> list[Run]:
    return [r for r in runs if r.arm == arm and r.is_done]


def _arm(study: StudyConfig, name: str, runs: Sequence[Run]) -> dict[str, Any]:
    arm, done = study.arms[name], _done(runs, name)
    return {
        "name": name,
        "description": arm.description,
        "kind": arm.kind,
        "model": arm.model or study.model,
        "task": arm.task or study.task,
        "plan": study.plan_of(arm),
        "plan_in": OWN if arm.kind == "evaluate" else arm.plan_in,
        "aqn": _aqn(arm, done),
        "guided": arm.aqn.guide if isinstance(arm.aqn, Guide) else None,
        "settings": _settings(study, arm),
        "seeds": [r.seed for r in done],
        **_measured(done, study.conditions),
    }


def _settings(study: StudyConfig, arm: Arm) -> list[str]:
    """What an arm has that is not the study's, in words."""
    where = {"both": [], "rollout": ["faults in rollouts only"], "loss": ["faults in the loss only"]}
    own = {"model": (arm.model, study.model), "task": (arm.task, study.task)}
    others = [f"{name} {mine}" for name, (mine, whole) in own.items() if mine not in (None, whole)]
    own_options = {**arm.overrides, **(arm.harden or {}), **({"after": arm.after} if arm.after else {})}
    skipped = [f"layer {', '.join(map(str, arm.skip_layers))} not run"] if arm.skip_layers else []
    return [*where[arm.plan_in], *skipped, *(f"{name} {_shown(value)}" for name, value in own_options.items()), *others]


def _shown(value: Any) -> str:
    return (" + ".join(map(str, value)) or "none") if isinstance(value, list | tuple) else str(value)


def _aqn(arm: Arm, done: Sequence[Run]) -> str | None:
    """The noise as it was, for a guided arm too."""
    return next((str(r.config["aqn"]) for r in done if r.config.get("aqn")), arm.aqn if isinstance(arm.aqn, str) else None)


def _measured(done: Sequence[Run], conditions: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "unverified": any(not run.verified for run in done),
        "scores": [*arms.scores(done, conditions), *arms.scores(done, conditions, "loss")],
        "curves": arms.curves(done, conditions),
        "sigma": arms.sigmas(done[0]) if done else [],
        "proof": arms.proof(done),
        "mechanism": arms.mechanism(done),
        "cost": arms.cost(done),
        "samples": arms.samples(done),
    }


def run_facts(run: Run) -> dict[str, Any]:
    """One line of the table of runs."""
    times = [e["time"] for e in run.events if "time" in e]
    return {
        "name": run.name,
        "kind": run.kind,
        "arm": run.arm,
        "seed": run.seed,
        "status": run.status,
        "id": run.head.get("id"),
        "sha": run.sha,
        "verified": run.verified,
        "folder": f"runs/{run.name}",
        "attempts": len(run.of_kind("attempt")),
        "resumed": len(run.of_kind("resumed")),
        "seconds": times[-1] - times[0] if len(times) > 1 and times == sorted(times) else None,  # no clock that was set back
        "error": run.error,
        "warnings": [*(f"made elsewhere: {e['how']}, {e['path']}" for e in run.of_kind("added")), *_warnings(run)],
    }


def _warnings(run: Run) -> list[str]:
    return [e["text"] for e in run.of_kind("warning")]


def robustness(conditions: Mapping[str, str | None], done: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """Scores over conditions: along a magnitude where they differ in nothing else, side by side where they do."""
    places = magnitudes(conditions)
    found: list[dict[str, Any]] = []
    for name, runs in done.items():
        rows = {s["condition"]: s for s in arms.scores(runs, conditions)}
        points: list[dict[str, Any]] = [
            {"label": c, "x": places[c], "condition": c, "mean": s["mean"], "low": s["ci_low"], "high": s["ci_high"]}
            for c, s in rows.items()
        ]
        found.append({"arm": name, "points": sorted(points, key=lambda p: (p["x"] is None, p["x"] or 0.0))})
    return [row for row in found if len(row["points"]) > 1]


def magnitudes(conditions: Mapping[str, str | None]) -> dict[str, float | None]:
    """The magnitude of each condition, clean being 0; None for all when their plans differ in anything else."""
    found: dict[str, float | None] = {}
    shapes = set()
    for name, text in conditions.items():
        clauses = () if text is None else Plan.parse(text).clauses
        fault = clauses[0].fault.model_dump() if len(clauses) == 1 else {}
        found[name] = 0.0 if text is None else fault.pop("magnitude", None)
        if text is not None:
            shapes.add(f"{fault} {clauses[0].site}" if len(clauses) == 1 else text)
    alike = len(shapes) == 1 and len(found) > 2 and None not in found.values()
    return found if alike else dict.fromkeys(conditions)


def environments(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The machines and versions that runs were done with, and how many by each."""
    found: list[dict[str, Any]] = []
    for facts in (r.head["environment"] for r in runs if r.head):
        known = next((row for row in found if row["facts"] == facts), None)
        if known is None:
            found.append({"runs": 1, "facts": facts})
        else:
            known["runs"] += 1
    return found


def _not_the_same(runs: Sequence[Run]) -> list[str]:
    """Runs that were to begin with the same weights, or solve the same problems, and did not."""
    found: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        made = run.last("made_of")
        if made is not None:
            for name, what in (("weights", "model"), ("tests", "task")):
                if name in made:
                    found.setdefault((MADE_OF[name], str(run.config[what])), set()).add(made[name])
    return [
        f"the {what} of {name} were not the same in all runs: their differences mean nothing"
        for (what, name), hashes in found.items()
        if len(hashes) > 1
    ]


def _marked(comparison: dict[str, Any], unverified: Sequence[Run]) -> dict[str, Any]:
    """A comparison whose sentence says that records without a chain are in it."""
    if not {comparison["a"], comparison["b"]} & {run.arm for run in unverified}:
        return comparison
    return comparison | {"sentence": f"{comparison['sentence']} (From unverified records.)"}


def _unverified(found: Sequence[Run], runs: Sequence[Run]) -> list[str]:
    some = ", ".join(run.name for run in found[:12]) + (f", and {len(found) - 12} more" if len(found) > 12 else "")
    why = "their records have no chain, and nobody can say whether their numbers were changed"
    return [f"{len(found)} of {len(runs)} runs are unverified, {why}: {some}"] if found else []


def _elsewhere(runs: Sequence[Run]) -> list[str]:
    """Runs that somebody else made: their numbers are those of files that were brought in."""
    added = [(run.name, e) for run in runs for e in run.of_kind("added")]
    bare = [name for name, e in added if not e["ledger"]]
    found = (
        [f"{len(added)} of {len(runs)} runs were made elsewhere and added: {', '.join(n for n, _ in added)}"] if added else []
    )
    why = "have no ledger: nothing but the one who added them says that no fault acted in them"
    return found + ([f"{', '.join(bare)} {why}"] if bare else [])


def _damage(runs: Sequence[Run]) -> list[str]:
    advice = "move its folder away to have it done again"
    return [f"{run.name} is left out: {run.error}; {advice}" for run in runs if run.status == "damaged"]


def _no_number(runs: Sequence[Run]) -> list[str]:
    """Runs whose loss cannot be compared: a model that a fault has broken may foresee a token with a chance of exactly 0."""
    return [
        f"{run.name} is left out of comparisons of loss under {c['name']}: its loss is not finite"
        for run in runs
        if run.is_done and (evaluation := run.last("evaluation"))
        for c in evaluation["conditions"]
        if "loss" in c and c["loss"] is None
    ]
