"""What a study found: all that its report says, as data. From records alone, so the same at any time and on any machine.

An undisturbed study and one that was killed and went on have the same scores and comparisons, to the bit, and the same
measured errors but for the rounding of sums: which fires are measured follows from the fires before, also those of another
process. Times differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shaketable.harden.config import HardenConfig
from shaketable.study.analysis.arms import measured, robustness
from shaketable.study.analysis.comparisons import at_steps, compare, planned_note, verdict
from shaketable.study.analysis.diagnoses import diagnosis
from shaketable.study.analysis.history import changes
from shaketable.study.analysis.recovered import recovered, told
from shaketable.study.analysis.results import (
    ArmResult,
    ConditionFacts,
    Environment,
    Findings,
    Primary,
    RunFacts,
    StudyFacts,
    StudyVerdict,
)
from shaketable.study.analysis.runs import Run
from shaketable.study.arm_config import Arm, Guide
from shaketable.study.cells import STEPS, cells_of
from shaketable.study.config import OWN, StudyConfig
from shaketable.study.verify import digest
from shaketable.train.config import TrainConfig

OWN_PLAN = "the plan and the noise of each arm"
MADE_OF = {"weights": "weights", "tests": "test problems"}


def findings(study: StudyConfig, folder: Path) -> Findings:
    """Everything about a study in its folder of the store."""
    cells = cells_of(study)
    runs = [Run.of(cell, folder / "runs") for cell in cells]
    done = {name: [r for r in runs if r.arm == name and r.is_done] for name in study.arms}
    unlike, late = _not_the_same(runs), changes(study, folder, runs)
    compared = compare(study.comparisons, study.compare.primary, runs)
    back = recovered(study.conditions, done)
    decided, came_back = verdict(compared, runs, unlike), told(back, study.compare.primary)
    if came_back:
        decided = decided.model_copy(update={"sentence": f"{decided.sentence}. {came_back}"})
    notes = [*_elsewhere(runs), *unlike, *late.notes, *_damage(runs), *_no_number(runs), *planned_note(compared)]
    return Findings(
        study=_study(study, late.named_before, digest(folder)),
        complete=all(run.is_done for run in runs),
        runs=tuple(run_facts(run) for run in runs),
        verdict=decided,
        arms=tuple(_arm(study, name, done[name]) for name in study.arms),
        comparisons=tuple(compared),
        at_steps=tuple(at_steps(study, runs)),
        recovered=tuple(back),
        robustness=tuple(robustness({n: plan for n, plan in study.conditions.items() if n != OWN}, done)),
        diagnoses=tuple(diagnosis(run, cells, runs) for run in runs if run.kind == "locate" and run.is_done),
        environments=tuple(environments(runs)),
        notes=tuple(notes),
    )


def run_findings(folder: Path) -> Findings:
    """A single training run, told as a study of one arm and one seed: what training changed."""
    run = Run.alone(folder)
    config = TrainConfig.checked(**run.config)
    conditions = {c["name"]: c["plan"] for c in (run.last("evaluation") or {"conditions": []})["conditions"]}
    name = str(run.arm or folder.name)
    sentence = "One run concludes nothing about a recipe: another seed may end elsewhere. This page tells what happened in it."
    return Findings(
        kind="run",
        study=StudyFacts(
            name=folder.name,
            model=config.model,
            task=config.task,
            seeds=(config.seed,),
            key=run.head["id"][:8],
            steps=config.steps,
            n=config.eval_n,
            conditions=tuple(ConditionFacts(name=n, plan=p) for n, p in conditions.items()),
        ),
        complete=run.is_done,
        runs=(run_facts(run).model_copy(update={"folder": "."}),),
        verdict=StudyVerdict(headline="One training run", sentence=sentence),
        arms=(
            ArmResult(
                name=name,
                kind="train",
                model=config.model,
                task=config.task,
                plan=config.plan,
                plan_in=config.plan_in,
                aqn=config.aqn,
                seeds=(config.seed,),
                **measured([run], conditions),
            ),
        ),
        recovered=tuple(recovered(conditions, {name: [run]})),
        robustness=tuple(robustness(conditions, {name: [run]})),
        environments=tuple(environments([run])),
    )


def _study(study: StudyConfig, named_before: bool, records: str) -> StudyFacts:
    return StudyFacts(
        name=study.study,
        question=study.question,
        origin=study.origin,
        model=study.model,
        task=study.task,
        seeds=study.seeds,
        steps=_steps(study),
        options=", ".join(f"{k} {v}" for k, v in study.train.items() if k != "steps"),
        n=study.evaluate.n,
        conditions=tuple(ConditionFacts(name=n, plan=p if n != OWN else OWN_PLAN) for n, p in study.conditions.items()),
        primary=None if study.compare.primary is None else Primary(**study.compare.primary.model_dump()),
        engine=study.engine.kind,
        command=f"shaketable study run {study.study}.yaml",
        key=cells_of(study)[-1].key if study.seeds else "",
        named_before=named_before,
        digest=records,
    )


def _steps(study: StudyConfig) -> int:
    """Of training; of hardening where nothing is trained; none where nothing is hardened either."""
    kinds = {arm.kind for arm in study.arms.values()}
    if "train" in kinds:
        return int(study.train.get("steps", STEPS))
    if "harden" not in kinds:
        return 0
    return int(study.harden.get("steps", HardenConfig.model_fields["steps"].default))


def _arm(study: StudyConfig, name: str, done: Sequence[Run]) -> ArmResult:
    arm = study.arms[name]
    return ArmResult(
        name=name,
        description=arm.description,
        kind=arm.kind,
        model=arm.model or study.model,
        task=arm.task or study.task,
        plan=study.plan_of(arm),
        plan_in=OWN if arm.kind == "evaluate" else arm.plan_in,
        aqn=_aqn(arm, done),
        guided=arm.aqn.guide if isinstance(arm.aqn, Guide) else None,
        settings=tuple(_settings(study, arm)),
        seeds=tuple(r.seed for r in done if r.seed is not None),
        **measured(done, study.conditions),
    )


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


def run_facts(run: Run) -> RunFacts:
    """One line of the table of runs."""
    times = [e["time"] for e in run.events if "time" in e]
    added = [f"made elsewhere: {e['how']}, {e['path']}" for e in run.of_kind("added")]
    return RunFacts(
        name=run.name,
        kind=run.kind,
        arm=run.arm,
        seed=run.seed,
        status=run.status,
        id=run.head.get("id"),
        sha=run.sha,
        folder=f"runs/{run.name}",
        attempts=len(run.of_kind("attempt")),
        resumed=len(run.of_kind("resumed")),
        seconds=times[-1] - times[0] if len(times) > 1 and times == sorted(times) else None,  # no clock that was set back
        error=run.error,
        warnings=(*added, *(e["text"] for e in run.of_kind("warning"))),
    )


def environments(runs: Sequence[Run]) -> list[Environment]:
    """The machines and versions that runs were done with, and how many by each."""
    every = [run.head["environment"] for run in runs if run.head]
    different = [facts for i, facts in enumerate(every) if facts not in every[:i]]
    return [Environment(runs=every.count(facts), facts=facts) for facts in different]


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
