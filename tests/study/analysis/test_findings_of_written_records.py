"""Findings of studies whose records were written by hand: what each part says, without a run that takes seconds."""

import json

import pytest

from shaketable.records.record import FILE, RunRecord
from shaketable.study.analysis.results import SCHEMA, Findings
from shaketable.study.cells import cells_of
from shaketable.study.store import described, digest
from tests.study.small_studies import FAULTY, NOISE, data, findings, study

HERE = {"python": "3.11"}
PLANS = {"faulty": FAULTY, "noise": NOISE}


def written(folder, study, events, *, skip=(), others=None):
    """A study's folder: its definition, and a record of every cell with the events that `events` gives for it."""
    definition = RunRecord.create(folder / "definition", "study", described(study), {}, {"study": study.study})
    definition.append("defined", config=described(study), after_results=False)
    for cell in cells_of(study):
        place = (cell.arm, cell.seed)
        if place in skip:
            continue
        told = [("attempt", {"number": 1}), *events(cell)]
        environment = (others or {}).get(place, HERE)
        record = RunRecord.create(folder / "runs" / cell.name, cell.kind, cell.config, environment, cell.about(study.study))
        for kind, facts in told:
            record.append(kind, **facts)
    return folder


def answers(correct, loss=None):
    more = {} if loss is None else {"loss": loss}
    return [{"id": f"p{i}", "text": "t", "correct": bool(c), "formatted": True, **more} for i, c in enumerate(correct)]


def evaluation(step, **conditions):
    rows = [
        {"name": name, "plan": PLANS.get(name), "ledger": None, "seconds": 1.0, "accuracy": sum(c) / len(c)}
        | {"answers": answers(c)}
        for name, c in conditions.items()
    ]
    return ("evaluation", {"step": step, "conditions": rows})


END = ("finished", {"ledgers": {}})
MADE = ("made_of", {"weights": "w", "tests": "t"})
ROWS = {"clean": [1, 1, 1, 1, 1, 0], "faulty": [0, 0, 1, 0, 0, 0], "noise": [1, 0, 1, 0, 1, 0]}


def plain(cell):
    """An arm that is only scored: the second arm is better under noise."""
    rows = dict(ROWS)
    if cell.arm == "better":
        rows["noise"] = [1, 1, 1, 1, 1, cell.seed % 2]
    return [MADE, evaluation(0, **rows), END]


def two_arms(**replaced):
    arms = {"as it comes": {"train": False, "description": "the model"}, "better": {"train": False, "skip_layers": [2]}}
    compare = {"primary": {"a": "better", "b": "as it comes", "condition": "noise"}}
    return study(**{"arms": arms, "compare": compare, "seeds": 3} | replaced)


# ---- a whole study


def test_a_study_is_told_with_its_arms_scores_verdict_and_runs(tmp_path):
    there = {"python": "3.12"}
    told = findings(two_arms(), written(tmp_path, two_arms(), plain, others={("better", 1): there}))
    assert (told["schema"], told["complete"], told["notes"]) == (SCHEMA, True, [])
    assert json.loads(Findings.model_validate(told).to_json()) == told
    assert (told["study"]["named_before"], told["study"]["digest"]) == (True, digest(tmp_path))
    model, better = told["arms"]
    assert (model["description"], model["settings"], better["settings"]) == ("the model", [], ["layer 2 not run"])
    assert [(s["condition"], s["mean"]) for s in model["scores"]] == [
        ("clean", pytest.approx(5 / 6)), ("faulty", pytest.approx(1 / 6)), ("noise", 0.5),
    ]  # fmt: skip
    [primary] = told["comparisons"]
    assert primary["difference"] == pytest.approx(8 / 18 - 1 / 18) and primary["seeds"] == 3
    assert told["verdict"]["sentence"] == primary["sentence"] and told["verdict"]["kind"] == primary["verdict"]
    assert [run["folder"] for run in told["runs"]] == [f"runs/{cell.name}" for cell in cells_of(two_arms())]
    assert told["environments"] == [{"runs": 5, "facts": HERE}, {"runs": 1, "facts": there}]


# ---- what is missing, old or damaged


def test_a_run_that_failed_or_never_was_makes_the_study_partial(tmp_path):
    def events(cell):
        if (cell.arm, cell.seed) == ("better", 2):
            return [("failed", {"error": "it broke"})]
        return plain(cell)

    written(tmp_path, two_arms(), events, skip=[("as it comes", 1)])
    told = findings(two_arms(), tmp_path)
    assert not told["complete"] and told["notes"] == []
    assert [run["status"] for run in told["runs"]] == ["done", "done", "missing", "done", "done", "failed"]
    assert told["runs"][-1]["error"] == "it broke"
    assert told["verdict"]["headline"].startswith(
        "So far (2 of 6 runs are missing): nothing can be concluded: there is one seed"
    )
    assert [arm["seeds"] for arm in told["arms"]] == [[0, 2], [0, 1]]
    assert told["environments"] == [{"runs": 5, "facts": HERE}], "a run that failed was done somewhere too"


def test_notes_are_in_their_order_and_a_changed_record_is_left_out(tmp_path):
    def events(cell):
        weights = "other" if cell.seed == 1 else "w"
        broken = evaluation(0, **ROWS)
        if cell.seed == 2:
            broken[1]["conditions"][1]["loss"] = None
        return [("made_of", {"weights": weights, "tests": "t"}), broken, END]

    written(tmp_path, two_arms(), events)
    cell = next(c for c in cells_of(two_arms()) if (c.arm, c.seed) == ("as it comes", 0))
    path = tmp_path / "runs" / cell.name / FILE
    path.write_text(path.read_text().replace('"number": 1', '"number": 2'))
    changed = two_arms(seeds=4)
    told = findings(changed, tmp_path)
    starts = [
        "the weights of nano were not the same", "changed in this report only",
        f"{cell.name} is left out: {path} was changed at line 2; move its folder away to have it done again",
        "as-it-comes-s2-", "better-s2-",
    ]  # fmt: skip
    assert len(told["notes"]) == len(starts)
    assert all(note.startswith(start) for note, start in zip(told["notes"], starts, strict=True)), told["notes"]
    assert told["notes"][-1].endswith("is left out of comparisons of loss under faulty: its loss is not finite")
    assert not told["study"]["named_before"]
    assert told["verdict"]["kind"] == "nothing" and "the weights of nano" in told["verdict"]["headline"]


# ---- step by step


def trained_at(steps):
    """Two trained arms scored at steps: the second is better by a problem from step 4 on, and has a higher reward."""

    def events(cell):
        better = cell.arm == "better"
        rows = []
        for step in steps:
            if step:
                rows.append(("step", {"step": step, "reward": 0.1 * step + 0.5 * better + 0.01 * cell.seed}))
            now = [1, 1, 0, 0, 0, int(better and step >= 4)]
            rows.append(evaluation(step, clean=now, faulty=now, noise=now))
        return [MADE, *rows, END]

    return events


def two_trained(**replaced):
    arms = {"plain": {"plan": "noise"}, "better": {"plan": "noise", "aqn": "constant:0.01"}}
    compare = {"primary": {"a": "better", "b": "plain", "condition": "noise"}}
    train = data()["train"] | {"steps": 6}
    return study(**{"arms": arms, "compare": compare, "train": train, "seeds": 3} | replaced)


def test_arms_are_compared_with_the_baseline_at_every_step_that_was_scored(tmp_path):
    written(tmp_path, two_trained(), trained_at([0, 2, 4, 6]))
    rows = {row["curve"]: row for row in findings(two_trained(), tmp_path)["at_steps"]}
    assert set(rows) == {"accuracy, clean", "accuracy, faulty", "accuracy, noise", "reward"}
    noise = rows["accuracy, noise"]
    assert (noise["a"], noise["b"], noise["unit"]) == ("better", "plain", "points")
    assert [(p["step"], p["difference"]) for p in noise["points"]] == [
        (0, 0.0), (2, 0.0), (4, pytest.approx(1 / 6)), (6, pytest.approx(1 / 6)),
    ]  # fmt: skip
    assert all(p["ci_low"] < p["difference"] < p["ci_high"] and p["seeds"] == 3 for p in noise["points"])
    assert [(p["step"], p["difference"]) for p in rows["reward"]["points"]] == [(n, pytest.approx(0.5)) for n in (2, 4, 6)]
