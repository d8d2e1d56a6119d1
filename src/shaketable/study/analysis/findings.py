"""What a study found: everything that its report shows, as data. From records alone, so the same at any time, on any machine.

The primary comparison must have been fixed before anybody could know its result: its arms, the seeds, how they are trained,
how they are scored. They may be changed later, but the report says so and no longer calls the comparison named before the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.records.record import FILE
from shaketable.study.analysis import arms
from shaketable.study.analysis.comparisons import at_steps, compare, recovered, verdict
from shaketable.study.analysis.results import (
    ArmResult,
    ConditionFacts,
    DiagnosisResult,
    Environment,
    Findings,
    LayerStatistics,
    StudyFacts,
)
from shaketable.study.cells import Cell, cells_of
from shaketable.study.config import OWN, Arm, Guide, StudyConfig
from shaketable.study.file import parse_study
from shaketable.study.runs import Run
from shaketable.study.store import definitions, described, digest

OWN_PLAN = "the plan and the noise of each arm"
DECIDES = ("model", "task", "seeds", "train", "harden", "evaluate", "diagnose", "device", "dtype")


def findings(study: StudyConfig, folder: Path) -> Findings:
    cells = cells_of(study)
    runs = [Run.of(cell, folder / "runs") for cell in cells]
    done = {name: [r for r in runs if r.arm == name and r.is_done] for name in study.arms}
    unlike, (named_before, late) = _not_the_same(runs), changes(study, folder, runs)
    compared = compare(study.comparisons, study.compare.primary, runs)
    return Findings(
        study=_study(study, cells, named_before, digest(folder)),
        complete=all(run.is_done for run in runs),
        runs=tuple(run.facts(f"runs/{run.name}") for run in runs),
        verdict=verdict(compared, runs, unlike),
        arms=tuple(_arm(study, name, done[name]) for name in study.arms),
        comparisons=tuple(compared),
        at_steps=tuple(at_steps(study, runs)),
        recovered=tuple(recovered(study.conditions, done)),
        diagnoses=tuple(_diagnosis(run) for run in runs if run.kind == "locate" and run.is_done),
        environments=tuple(_environments(runs)),
        notes=(*_elsewhere(runs), *unlike, *late, *_left_out(runs)),
    )


def _study(study: StudyConfig, cells: Sequence[Cell], named_before: bool, records: str) -> StudyFacts:
    return StudyFacts(
        name=study.study,
        question=study.question,
        origin=study.origin,
        model=study.model,
        task=study.task,
        seeds=study.seeds,
        steps=max((cell.config.get("steps", 0) for cell in cells), default=0),
        options=", ".join(f"{k} {v}" for k, v in study.train.items() if k != "steps"),
        n=study.evaluate.n,
        conditions=tuple(_conditions(study.conditions)),
        engine=study.engine.kind,
        command=f"shaketable study run {study.study}.yaml",
        key=cells[-1].key if cells else "",
        named_before=named_before,
        digest=records,
    )


def _conditions(plans: Mapping[str, str | None]) -> list[ConditionFacts]:
    """Every condition with its plan; under `own` each arm has another."""
    places = arms.magnitudes({name: plan for name, plan in plans.items() if name != OWN})
    return [ConditionFacts(name=n, plan=OWN_PLAN if n == OWN else p, magnitude=places.get(n)) for n, p in plans.items()]


def _arm(study: StudyConfig, name: str, done: Sequence[Run]) -> ArmResult:
    arm = study.arms[name]
    aqn = arm.aqn if isinstance(arm.aqn, str) else None
    return ArmResult(
        name=name,
        description=arm.description,
        kind=arm.kind,
        model=arm.model or study.model,
        task=arm.task or study.task,
        plan=study.plan_of(arm),
        plan_in=OWN if arm.kind == "evaluate" else arm.plan_in,
        aqn=next((str(r.config["aqn"]) for r in done if r.config.get("aqn")), aqn),  # as it was, for a guided arm too
        guided=arm.aqn.guide if isinstance(arm.aqn, Guide) else None,
        settings=tuple(_settings(study, arm)),
        seeds=tuple(r.seed for r in done if r.seed is not None),
        scores=(*arms.scores(done, study.conditions), *arms.scores(done, study.conditions, "loss")),
        curves=(*arms.curves(done, study.conditions), *arms.sigma_curve(done)),
        proof=tuple(arms.proof(done)),
        mechanism=tuple(arms.mechanism(done)),
        cost=arms.cost(done),
        samples=tuple(arms.samples(done)),
    )


def _settings(study: StudyConfig, arm: Arm) -> list[str]:
    """The options of an arm that are not the study's, in words."""
    found = {"both": [], "rollout": ["faults in rollouts only"], "loss": ["faults in the loss only"]}[arm.plan_in]
    if arm.skip_layers:
        found.append(f"layer {', '.join(map(str, arm.skip_layers))} not run")
    for name, value in {**arm.overrides, **(arm.harden or {})}.items():
        shown = (" + ".join(map(str, value)) or "none") if isinstance(value, list | tuple) else value
        found.append(f"{'stages' if name == 'rungs' else name} {shown}")
    if arm.model not in (None, study.model):
        found.append(f"model {arm.model}")
    if arm.task not in (None, study.task):
        found.append(f"task {arm.task}")
    return found


def _environments(runs: Sequence[Run]) -> list[Environment]:
    """The machines and versions that runs were done with, and how many by each."""
    every = [run.head["environment"] for run in runs if run.head]
    different = [facts for i, facts in enumerate(every) if facts not in every[:i]]
    return [Environment(runs=every.count(facts), facts=facts) for facts in different]


# ---- diagnoses


def _diagnosis(run: Run) -> DiagnosisResult:
    """The diagnosis of a finished `locate` run."""
    found = run.of_kind("diagnosis")[-1]["diagnosis"]
    return DiagnosisResult(
        plan=run.config["plan"],
        model=run.config["model"],
        verdict=found["verdict"],
        sentence=found["sentence"],
        layer=found["layer"],
        layers=tuple(
            LayerStatistics(layer=row["layer"], statistics=row["statistics"] or {})
            for row in found["probes"]
            if row["layer"] is not None
        ),
        folder=f"runs/{run.name}",
    )


# ---- what was decided when


def changes(study: StudyConfig, folder: Path, runs: Sequence[Run]) -> tuple[bool, list[str]]:
    """Whether all that the primary comparison depends on was fixed when the first run ended; and a note where it was not.

    The study as it is reported is compared with the version that was in force by then.
    """
    unknown = "nothing says that the comparison was named before the results"
    try:
        versions = [v | {"config": described(parse_study(v["config"]))} for v in definitions(folder)]
    except ShaketableError as error:
        return False, [f"{unknown}: {error}"]
    if not _any_has_ended(folder, runs):
        return True, []
    older = any(e["ended"] < versions[0]["time"] for run in runs for e in run.of_kind("added"))
    if older or versions[0].get("after_results"):
        return False, [f"{unknown}: there were results before the study was written down"]
    before = [v for v in versions if v.get("after_results") is False] or versions[:1]  # the oldest do not say
    now = described(study)
    changed = _decisive_differences(now, before[-1]["config"])
    if not changed:
        return True, []
    same = [v["time"] for v in versions if v["config"] == now]
    when = datetime.fromtimestamp(same[0], UTC).strftime("on %Y-%m-%d at %H:%M UTC") if same else "in this report only"
    late = f"changed {when}, after the first run had ended"
    return False, [f"{late}: {', '.join(changed)}; read the primary comparison as exploratory"]


def _any_has_ended(folder: Path, runs: Sequence[Run]) -> bool:
    """Whether there is a finished run, of this version of the study or another."""
    every = (folder / "runs").glob(f"[!.]*/{FILE}")
    return any(run.last("finished") for run in runs) or any(Run.read(path.parent).last("finished") for path in every)


def _decisive_differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """What the primary comparison depends on and is not what it was."""
    found = [name for name in DECIDES if now.get(name) != then.get(name)]
    primary = now["compare"]["primary"]
    if primary != then["compare"]["primary"]:
        found.append("the primary comparison")
    for name in () if primary is None else (primary["a"], primary["b"]):
        a, b = ((config["arms"].get(name) or {}) | {"description": ""} for config in (now, then))
        if a != b:
            found.append(f"the arm {name!r}")
    return found


# ---- notes


def _not_the_same(runs: Sequence[Run]) -> list[str]:
    """Runs that were to begin with the same weights, or solve the same problems, and did not."""
    found: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        made = run.last("made_of") or {}
        for name, what, of in (("weights", "weights", "model"), ("tests", "test problems", "task")):
            if name in made:
                found.setdefault((what, str(run.config[of])), set()).add(made[name])
    return [
        f"the {what} of {name} were not the same in all runs: their differences mean nothing"
        for (what, name), hashes in found.items()
        if len(hashes) > 1
    ]


def _elsewhere(runs: Sequence[Run]) -> list[str]:
    """Runs that were made elsewhere: their numbers are those of the files that were added."""
    added = {run.name: run.of_kind("added")[0]["ledger"] for run in runs if run.of_kind("added")}
    notes = [f"{len(added)} of {len(runs)} runs were made elsewhere and added: {', '.join(added)}"] if added else []
    if bare := [name for name, ledger in added.items() if not ledger]:
        notes.append(f"{', '.join(bare)} have no ledger: nothing but the word of who added them says that no fault acted")
    return notes


def _left_out(runs: Sequence[Run]) -> list[str]:
    """Damaged runs, and runs whose loss is not finite: a broken model may foresee a token with a chance of exactly 0."""
    advice = "move its folder away to have it done again"
    damaged = [f"{run.name} is left out: {run.error}; {advice}" for run in runs if run.status == "damaged"]
    return damaged + [
        f"{run.name} is left out of comparisons of loss under {c['name']}: its loss is not finite"
        for run in runs
        if run.is_done and (evaluation := run.last("evaluation"))
        for c in evaluation["conditions"]
        if "loss" in c and c["loss"] is None
    ]
