"""Runs of verl, added to a study as run records.

    a folder with instructions.json     the ledgers of a verl run (`shaketable.ledger`), with ledger.json and steps.jsonl
    any other folder                    a run without Shaketable: for arms without a plan and AQN, with nothing to prove

Each condition needs verl's dump of a validation (`trainer.validation_data_dir`): a line of JSON with `input`, `output`, `gts`
and `score` for every problem. A problem is known by the hash of its `input`, and problems are put into the order of these, so
that all runs have one order.

Everything is read and checked before a line is written. Plan and AQN come from the instructions, never from a file's name; that
they acted comes from the merged ledger.

A run is written in a folder beside the runs and moved to its place when it is whole. It is chained and sealed from now on. The
chain cannot vouch for the time before: its `added` event says where the run came from, when it had ended, and the
SHA-256 of every file that was read, and the report names each such run.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shaketable.aqn.spec import AQN
from shaketable.errors import ShaketableError, nearest
from shaketable.evaluate.score import in_phases
from shaketable.evaluate.statistics import wilson
from shaketable.evaluate.tasks import Problem, digest, examples
from shaketable.evaluate.tasks.files import read_rows, read_text
from shaketable.integrations.common.instructions import Instructions
from shaketable.integrations.verl.settings import ORDERS
from shaketable.integrations.verl.workers import LEDGER, STEPS
from shaketable.io.locks import held
from shaketable.ledger.ledger import Ledger
from shaketable.plan import Plan
from shaketable.records.record import RunRecord
from shaketable.study.cells import Cell, cells_of
from shaketable.study.config import CLEAN, StudyConfig
from shaketable.study.runs import Run
from shaketable.study.store import define

METRICS = {
    "reward": "critic/score/mean",
    "loss": "actor/pg_loss",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "seconds": "timing_s/step",
    "kl_sampler_trainer": "shaketable/kl",
}
"""What verl calls the columns of a step (`trainer.logger` with `file`)."""
Answers = dict[str, dict[str, Any]]
"""By problem, in the order of their ids."""


@dataclass(frozen=True)
class OtherRun:
    how: str
    """`verl`, or that there is no ledger."""
    ended: float
    """In seconds since 1970."""
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    """By their number, in the words of run records."""
    ledgers: dict[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    """That it was read from."""


def add_run(
    study: StudyConfig,
    store: Path,
    folder: Path,
    *,
    arm: str,
    seed: int,
    scores: Mapping[str, Path],
    metrics: Path | None = None,
) -> Cell:
    """Add the run in a folder as one arm and seed of a study; the cell that it became.

    Raises:
        ShaketableError: It is another run than the arm's, not whole, there already, or was scored on other problems.
    """
    cells = cells_of(study)
    cell = next((cell for cell in cells if (cell.kind, cell.arm, cell.seed) == ("added", arm, seed)), None)
    if cell is None:
        raise ShaketableError(f"{study.study} has no arm {arm!r} with `elsewhere: true` and the seed {seed}")
    conditions = {CLEAN: None, **cell.config["conditions"]}
    found = _read(folder, cell)
    if metrics is not None:
        found = replace(found, steps=_with_metrics(found.steps, metrics), files=(*found.files, metrics))
    answers = _answers(conditions, scores)
    problems = [Problem(id, row["input"], row["gts"]) for id, row in answers[CLEAN].items()]
    evaluation = [_condition(name, plan, answers[name], found) for name, plan in conditions.items()]
    last, tests = max(found.steps, default=0), digest(problems)
    files = {path.name: _sha(path) for path in found.files} | {f"scores, {c}": _sha(path) for c, path in scores.items()}
    define(study, store)
    runs = store / study.study / "runs"
    with held(runs, cell.name) as ours:
        if not ours or (runs / cell.name).exists():
            raise ShaketableError(f"{cell.title} is there already, in {runs / cell.name}; nothing is overwritten")
        for run in (Run.of(other, runs) for other in cells):
            theirs = (run.last("made_of") or {}).get("tests") if run.is_done else None
            if theirs not in (None, tests) and run.config.get("task") == cell.config["task"]:
                raise ShaketableError(f"{folder} was scored on other problems than {run.name}; they cannot be compared")
        draft = runs / f".adding-{cell.name}"
        if draft.exists():
            shutil.rmtree(draft)
        config = cell.config | ({"steps": last} if found.steps else {})
        record = RunRecord.create(draft, "added", config, {"made": "elsewhere"}, about=cell.about(study.study))
        facts = {"how": found.how, "path": str(folder), "files": files, "ended": found.ended, "ledger": found.how == "verl"}
        record.append("added", **facts, on=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
        record.append("made_of", tests=tests)
        record.append("examples", problems=examples(problems))
        for step, columns in sorted(found.steps.items()):
            record.append("step", step=step, **columns)
        record.append("evaluation", step=last, conditions=evaluation)
        record.append("finished", step=last, ledgers=found.ledgers)
        draft.rename(runs / cell.name)
    return cell


# ---- what the run left behind


def _read(folder: Path, cell: Cell) -> OtherRun:
    """The run in a folder as that of a cell; raises in one line when it is another, or not whole."""
    if not folder.is_dir():
        raise ShaketableError(f"there is no run in {folder}: it is not a folder")
    try:
        orders = json.loads(read_text(folder / ORDERS)) if (folder / ORDERS).is_file() else {"mismatch": {}}
        if "mismatch" not in orders:  # a run that was only measured has no ledger
            return _from_verl(folder, orders, cell)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ShaketableError(f"{folder} is no whole run of verl: {type(error).__name__}: {error}") from None
    if what := next((what for what in ("plan", "aqn") if cell.config[what]), None):
        lacks = f"{folder} has no plan or AQN in {ORDERS}"
        raise ShaketableError(f"{lacks}: nothing says that the {what} of {cell.arm} acted")
    return OtherRun("a run without a ledger", folder.stat().st_mtime)


def _from_verl(folder: Path, orders: Mapping[str, Any], cell: Cell) -> OtherRun:
    told = [Instructions.from_mapping({k: v for k, v in body.items() if k != "digest"}) for body in orders.values()]
    # As an arm writes them: verl puts a phase into every clause that has none, and each run's noise has a seed of its own.
    plans = [in_phases(Plan.parse(one.plan), ()) for one in told if one.plan]
    clauses = dict.fromkeys(clause.text() for plan in plans for clause in plan.clauses)
    noise = next((replace(AQN.load(one.aqn), seed=0).text() for one in told if one.aqn), None)
    ledgers = _ledgers(folder / LEDGER)
    for what, had in (("plan", ";".join(clauses) or None), ("aqn", noise)):
        if had != cell.config[what]:
            raise ShaketableError(f"{folder} had the {what} {had}, and the arm {cell.arm} has {cell.config[what]}")
        if had and what not in ledgers:
            raise ShaketableError(f"{folder / LEDGER} has no ledger of the {what}: nothing says that it acted")
    steps = {row["step"]: _columns(row) for _, row in read_rows(folder / STEPS)}
    files = tuple(folder / name for name in (ORDERS, LEDGER, STEPS))
    return OtherRun("verl", (folder / LEDGER).stat().st_mtime, steps, ledgers, files)


def _ledgers(path: Path) -> dict[str, Any]:
    """Of plan and AQN, samplers and actors together: merged where they had the same clauses, else side by side."""
    merged, found = json.loads(read_text(path))["merged"], dict[str, Any]()
    for what in ("plan", "aqn"):
        read = [Ledger.from_dict(merged[key]) for key in merged if key.endswith(f".{what}")]
        if read:
            alike = len({ledger.plan for ledger in read}) == 1
            sites = [site for ledger in read for site in ledger.sites]
            found[what] = (Ledger.merge(read) if alike else replace(read[0], sites=sites)).to_dict()
    return found


def _with_metrics(steps: dict[int, dict[str, float]], metrics: Path) -> dict[int, dict[str, float]]:
    """The steps with the columns of verl's own file of metrics."""
    found = dict(steps)
    for number, row in read_rows(metrics):
        if not isinstance(row.get("step"), int) or not isinstance(row.get("data"), dict):
            form = '{"step": …, "data": {…}}, as verl\'s file logger writes'
            raise ShaketableError(f"{metrics}: line {number} is not {form}")
        if columns := _columns(row["data"]):
            found[row["step"]] = found.get(row["step"], {}) | columns
    return found


def _columns(row: Mapping[str, Any]) -> dict[str, float]:
    """What is known of a step, in the words of run records."""
    return {ours: row[theirs] for ours, theirs in METRICS.items() if isinstance(row.get(theirs), int | float)}


# ---- its scores


def _answers(conditions: Mapping[str, str | None], scores: Mapping[str, Path]) -> dict[str, Answers]:
    """The answers under each condition, all to the same problems."""
    for name in scores:
        if name not in conditions:
            raise ShaketableError(f"--scores {name}=…: there is no such condition; {nearest(name, conditions)}")
    if missing := [name for name in conditions if name not in scores]:
        raise ShaketableError(f"no scores under {missing[0]}: give --scores {missing[0]}=FILE, one line of JSON a problem")
    found = {name: _problems(path) for name, path in scores.items()}
    for name, answers in found.items():
        if answers.keys() != found[CLEAN].keys():
            raise ShaketableError(f"{scores[name]} and {scores[CLEAN]} are not of the same problems")
    return found


def _problems(path: Path) -> Answers:
    found = Answers()
    for number, row in read_rows(path, "input"):
        right = row.get("acc", row.get("score"))
        if not isinstance(right, int | float) or not 0 <= right <= 1:
            raise ShaketableError(f"{path}: line {number}: acc or score must be a number from 0 to 1, not {right!r}")
        known = hashlib.sha256(str(row["input"]).encode()).hexdigest()[:16]
        if known in found:
            raise ShaketableError(f"{path}: line {number} is a second answer to one problem; one answer a problem is compared")
        found[known] = {**{name: str(row.get(name) or "") for name in ("input", "output", "gts")}, "correct": right}
    return dict(sorted(found.items()))


def _condition(name: str, plan: str | None, table: Answers, run: OtherRun) -> dict[str, Any]:
    ledger = None if plan is None else run.ledgers.get("plan")
    if plan is not None:
        spots = [spot for site in (ledger["sites"] if ledger else ()) for spot in site["spots"].values()]
        if not any(sum(spot["counts"].get("eval", [0, 0])) for spot in spots):
            why = "no fault fired in a validation of this run, so its scores are clean ones"
            raise ShaketableError(f"--scores {name}=…: {why}")
    answers = [{"id": i, "text": r["output"], "correct": r["correct"], "formatted": True} for i, r in table.items()]
    n = len(answers)
    accuracy = sum(a["correct"] for a in answers) / n
    ends = wilson(accuracy, n)
    facts = {"name": name, "plan": plan, "plan_seed": None, "accuracy": accuracy, "ci_low": ends.low, "ci_high": ends.high}
    return facts | {"n": n, "formatted": 1.0, "seconds": 0.0, "answers": answers, "ledger": ledger}


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
