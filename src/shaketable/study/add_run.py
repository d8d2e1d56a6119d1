"""Runs that were made elsewhere, read as events of a run record: a record of `shaketable`, or what a verl run leaves behind.

    a folder with record.jsonl          a run of `shaketable train`, or of another study
    a folder with instructions.json     the ledgers of a verl run (`shaketable.ledger`), with ledger.json and steps.jsonl
    any other folder                    a run without Shaketable: for arms without a plan and AQN, with nothing to prove

The first has its scores in it. The others need a file of scores for each condition: a line of JSON for every problem, such as
verl writes with `trainer.validation_data_dir` (`input`, `output`, `gts`, `score`), or with `id` and `correct`. A problem is
known by its `id`, or by the hash of its `input`; problems are put into the order of these, so that all runs have one order.

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
from shaketable.records.record import FILE, RunRecord
from shaketable.study.cells import Cell, cells_of
from shaketable.study.config import CLEAN, StudyConfig
from shaketable.study.runs import Run
from shaketable.study.store import define

Events = list[tuple[str, dict[str, Any]]]
KEPT = ("resolved", "made_of", "examples", "step", "mechanism", "aqn_check", "warning")
"""Events of a record that are taken over as they are."""
METRICS = {
    "reward": "critic/score/mean",
    "loss": "actor/pg_loss",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "seconds": "timing_s/step",
    "kl_sampler_trainer": "shaketable/kl",
}
"""What verl calls the columns of a step (`trainer.logger` with `file`)."""


@dataclass(frozen=True)
class ForeignRun:
    """A run as it will be written down."""

    how: str
    """What it is: a run record, or a run of verl."""
    config: dict[str, Any]
    environment: dict[str, Any]
    ended: float
    """When it ended, in seconds since 1970."""
    events: Events
    ledgers: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every file that it was read from."""
    proven: bool = True
    """Whether ledgers say what acted in it."""


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
    if arm not in study.arms:
        raise ShaketableError(f"{study.study} has no arm {arm!r}; {nearest(arm, study.arms)}")
    if not study.arms[arm].elsewhere:
        raise ShaketableError(f"the runs of {arm} are done by `study run`; write elsewhere: true in the arm to add them")
    if seed not in study.seeds:
        raise ShaketableError(f"{study.study} has no seed {seed}; its seeds are {', '.join(map(str, study.seeds))}")
    cells = cells_of(study)
    cell = next(cell for cell in cells if (cell.arm, cell.seed) == (arm, seed))
    found = _read(folder, cell, scores, metrics)
    define(study, store)
    runs = store / study.study / "runs"
    with held(runs, cell.name) as ours:
        if not ours or (runs / cell.name).exists():
            raise ShaketableError(f"{cell.title} is there already, in {runs / cell.name}; nothing is overwritten")
        tests = next((body["tests"] for kind, body in found.events if kind == "made_of" and "tests" in body), None)
        for run in (Run.of(other, runs) for other in cells):
            theirs = (run.last("made_of") or {}).get("tests") if run.is_done else None
            if tests and theirs and tests != theirs and run.config.get("task") == found.config["task"]:
                raise ShaketableError(f"{folder} was scored on other problems than {run.name}; they cannot be compared")
        _write(found, cell, study.study, runs, folder)
    return cell


def _write(found: ForeignRun, cell: Cell, study: str, runs: Path, folder: Path) -> None:
    draft = runs / f".adding-{cell.name}"
    if draft.exists():
        shutil.rmtree(draft)
    record = RunRecord.create(draft, "added", found.config, found.environment, about=cell.about(study))
    facts = {"how": found.how, "path": str(folder), "files": found.files, "ended": found.ended, "ledger": found.proven}
    record.append("added", **facts, on=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    for kind, body in found.events:
        record.append(kind, **body)
    last = max((body["step"] for kind, body in found.events if kind == "step"), default=0)
    record.append("finished", step=last, ledgers=found.ledgers)
    draft.rename(runs / cell.name)


def _read(folder: Path, cell: Cell, scores: Mapping[str, Path], metrics: Path | None) -> ForeignRun:
    """The run in a folder as that of a cell; raises in one line when it is another, or not whole."""
    if not folder.is_dir():
        raise ShaketableError(f"there is no run in {folder}: it is not a folder")
    if (folder / FILE).is_file():
        if scores or metrics:
            raise ShaketableError(f"{folder} is a run record and has its own scores; drop --scores and --metrics")
        return _from_record(folder, cell)
    if (folder / ORDERS).is_file() and "mismatch" not in _json(folder / ORDERS):  # one that was only measured has no ledger
        return _with_scores(_from_verl(folder, cell), cell, scores, metrics)
    if cell.config["plan"] or cell.config["aqn"]:
        lacks = f"{folder} has neither {FILE} nor a plan or AQN in {ORDERS}"
        raise ShaketableError(f"{lacks}: nothing says that the {'plan' if cell.config['plan'] else 'AQN'} of {cell.arm} acted")
    how, ended = "a run without a ledger", folder.stat().st_mtime
    bare = ForeignRun(how, dict(cell.config), {"made": "elsewhere"}, ended, [], proven=False)
    return _with_scores(bare, cell, scores, metrics)


# ---- run records


def _from_record(folder: Path, cell: Cell) -> ForeignRun:
    record = RunRecord.open(folder)
    finished = record.events("finished")
    if record.head["verb"] not in ("train", "harden", "evaluate") or not finished:
        raise ShaketableError(f"{folder} is not a finished run of train, harden or a study")
    config = record.config
    plans = [config["plan"]] if config.get("plan") else list(config.get("plans", ()))
    had = {name: config.get(name) for name in ("model", "task", "seed")} | {"plan": ";".join(plans) or None}
    _check_same(had | {"aqn": config.get("aqn")}, cell, folder)
    events: Events = []
    for event in record.events(*KEPT, "evaluation"):
        body = {key: value for key, value in event.items() if key not in ("event", "time")}
        if event["event"] == "evaluation":  # with the study's names: conditions are found by their plan
            have, wanted = {c["plan"]: c for c in body["conditions"]}, {CLEAN: None, **cell.config["conditions"]}
            if missing := [name for name, plan in wanted.items() if plan not in have]:
                what = f"{missing[0]} ({wanted[missing[0]]})"
                raise ShaketableError(f"{folder} was not scored under {what}, which the study asks for")
            body["conditions"] = [have[plan] | {"name": name} for name, plan in wanted.items()]
        events.append((event["event"], body))
    ledgers, ended = finished[-1]["ledgers"], finished[-1]["time"]
    return ForeignRun("a run record", config, record.head["environment"], ended, events, ledgers, {FILE: _sha(folder / FILE)})


# ---- verl


def _from_verl(folder: Path, cell: Cell) -> ForeignRun:
    orders = []
    for role, body in _json(folder / ORDERS).items():
        if not isinstance(body, dict):
            raise ShaketableError(f"{folder / ORDERS}: {role} must hold an object, not {type(body).__name__}")
        orders.append(Instructions.from_mapping({key: value for key, value in body.items() if key != "digest"}))
    # As an arm writes them: verl puts a phase into every clause that has none, and each run's noise has a seed of its own.
    plans = [in_phases(Plan.parse(order.plan), ()) for order in orders if order.plan]
    clauses = dict.fromkeys(clause.text() for plan in plans for clause in plan.clauses)
    noises = [replace(AQN.load(order.aqn), seed=0) for order in orders if order.aqn]
    aqn = noises[0].text() if noises else None
    _check_same({"plan": ";".join(clauses) or None, "aqn": aqn}, cell, folder)
    ledgers = _ledgers(folder / LEDGER)
    if lost := [what for what, there in (("plan", clauses), ("aqn", aqn)) if there and what not in ledgers]:
        raise ShaketableError(f"{folder / LEDGER} has no ledger of the {lost[0]}: nothing says that it acted")
    rows = read_rows(folder / STEPS)
    if bad := next((number for number, row in rows if not isinstance(row.get("step"), int)), None):
        raise ShaketableError(f"{folder / STEPS}: line {bad} has no step")
    steps: Events = [("step", {"step": row["step"], **_columns(row)}) for _, row in rows]
    config = cell.config | {"steps": rows[-1][1]["step"]}
    files = {name: _sha(folder / name) for name in (ORDERS, LEDGER, STEPS)}
    ended = (folder / LEDGER).stat().st_mtime
    return ForeignRun("verl", config, {"made": "elsewhere, by verl"}, ended, steps, ledgers, files)


def _ledgers(path: Path) -> dict[str, Any]:
    """Of plan and AQN, samplers and actors together: merged where they had the same clauses, else side by side."""
    merged, found = _json(path).get("merged", {}), {}
    try:
        for what in ("plan", "aqn"):
            read = [Ledger.from_dict(merged[key]) for key in merged if key.endswith(f".{what}")]
            if read:
                alike = len({ledger.plan for ledger in read}) == 1
                sites = [site for ledger in read for site in ledger.sites]
                found[what] = (Ledger.merge(read) if alike else replace(read[0], sites=sites)).to_dict()
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ShaketableError(f"{path} holds no ledgers that can be read: {type(error).__name__} {error}") from None
    return found


def _columns(row: Mapping[str, Any]) -> dict[str, float]:
    """What is known of a step, in the words of run records."""
    return {ours: row[theirs] for ours, theirs in METRICS.items() if isinstance(row.get(theirs), int | float)}


# ---- scores and metrics in files


def _with_scores(run: ForeignRun, cell: Cell, scores: Mapping[str, Path], metrics: Path | None) -> ForeignRun:
    wanted = {CLEAN: None, **cell.config["conditions"]}
    for name in scores:
        if name not in wanted:
            raise ShaketableError(f"--scores {name}=…: there is no such condition; {nearest(name, wanted)}")
    if missing := [name for name in wanted if name not in scores]:
        raise ShaketableError(f"no scores under {missing[0]}: give --scores {missing[0]}=FILE, one line of JSON a problem")
    tables = {name: _problems(path) for name, path in scores.items()}
    first = next(iter(tables.values()))
    if other := next((name for name, t in tables.items() if t.keys() != first.keys()), None):
        raise ShaketableError(f"{scores[other]} and {next(iter(scores.values()))} are not of the same problems")
    steps = _measured(run, metrics)
    last = max((body["step"] for kind, body in steps if kind == "step"), default=0)
    conditions = [_condition(name, plan, tables[name], run) for name, plan in wanted.items()]
    problems = [Problem(id, row["input"], row["gts"]) for id, row in first.items()]
    made: Events = [("made_of", {"tests": digest(problems)}), ("examples", {"problems": examples(problems)})]
    evaluation: Events = [("evaluation", {"step": last, "conditions": conditions})]
    files = run.files | {path.name: _sha(path) for path in (*scores.values(), *([metrics] if metrics else []))}
    return replace(run, events=[*made, *steps, *evaluation], files=files)


def _problems(path: Path) -> dict[str, dict[str, Any]]:
    """Problems by id, in the order of their ids."""
    rows, found = read_rows(path), dict[str, dict[str, Any]]()
    key = next((name for name in ("correct", "acc", "score") if name in rows[0][1]), None)
    if key is None:
        raise ShaketableError(f"{path}: line {rows[0][0]} has no correct, acc or score")
    for number, row in rows:
        value = row.get(key)
        if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
            raise ShaketableError(f"{path}: line {number}: {key} must be a number from 0 to 1, not {value!r}")
        if "id" not in row and "input" not in row:
            raise ShaketableError(f"{path}: line {number} has neither id nor input: nothing says which problem it is")
        known = str(row.get("id") or hashlib.sha256(str(row.get("input", "")).encode()).hexdigest()[:16])
        if known in found:
            raise ShaketableError(f"{path}: line {number} is the second answer to {known}; one answer a problem is compared")
        text = {name: str(row.get(name) or "") for name in ("input", "output", "gts")}
        found[known] = {**text, "correct": value, "formatted": bool(row.get("formatted", True))}
    return dict(sorted(found.items()))


def _condition(name: str, plan: str | None, table: Mapping[str, dict[str, Any]], run: ForeignRun) -> dict[str, Any]:
    answers = [{"id": i, "text": r["output"], "correct": r["correct"], "formatted": r["formatted"]} for i, r in table.items()]
    n = len(answers)
    accuracy = sum(a["correct"] for a in answers) / n
    ends, formatted = wilson(accuracy, n), sum(a["formatted"] for a in answers) / n
    ledger = _in_validation(name, run) if plan is not None else None
    facts = {"name": name, "plan": plan, "plan_seed": None, "accuracy": accuracy, "ci_low": ends.low, "ci_high": ends.high}
    rest = {"n": n, "formatted": formatted, "seconds": 0.0, "answers": answers, "ledger": ledger}
    return facts | rest


def _in_validation(name: str, run: ForeignRun) -> dict[str, Any]:
    """The ledger of a plan that acted while the run was validated; a score under faults that never fired is a clean one."""
    ledger = run.ledgers.get("plan")
    sites = ledger["sites"] if ledger else ()
    fires = [sum(spot["counts"].get("eval", [0, 0])) for site in sites for spot in site["spots"].values()]
    if not sum(fires):
        raise ShaketableError(f"--scores {name}=…: no fault fired in a validation of this run, so its scores are clean ones")
    assert ledger is not None
    return dict(ledger)


def _measured(run: ForeignRun, metrics: Path | None) -> Events:
    """The steps, with verl's own columns where its file of metrics is given."""
    known = {body["step"]: body for kind, body in run.events if kind == "step"}
    for number, row in read_rows(metrics) if metrics else ():
        data = row.get("data")
        if not isinstance(row.get("step"), int) or not isinstance(data, dict):
            raise ShaketableError(
                f'{metrics}: line {number} is not {{"step": …, "data": {{…}}}}, as verl\'s file logger writes'
            )
        if columns := _columns(data):
            known[row["step"]] = known.get(row["step"], {"step": row["step"]}) | columns
    return [("step", known[step]) for step in sorted(known)]


# ---- what all have


def _check_same(had: Mapping[str, Any], cell: Cell, folder: Path) -> None:
    """Refuse a run that is not what the arm says."""
    for what, found in had.items():
        if found != cell.config[what]:
            raise ShaketableError(f"{folder} had the {what} {found}, and the arm {cell.arm} has {cell.config[what]}")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ShaketableError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ShaketableError(f"{path} must hold an object, not {type(found).__name__}")
    return found


def _sha(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ShaketableError(f"cannot read {path}: {error.strerror or error}") from None
