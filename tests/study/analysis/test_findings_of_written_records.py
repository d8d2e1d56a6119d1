"""Findings of studies whose records were written by hand: what each part says, without a run that takes seconds."""

import json

import pytest

from shaketable.records.record import FILE, RunRecord
from shaketable.study.analysis import findings as found_of
from shaketable.study.analysis.results import SCHEMA, Findings
from shaketable.study.cells import cells_of
from shaketable.study.store import described, digest
from tests.study.small_studies import FAULTY, NOISE, data, findings, study


def run_findings(folder):
    return json.loads(found_of.run_findings(folder).to_json())


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
    assert (told["schema"], told["kind"], told["complete"], told["notes"]) == (SCHEMA, "study", True, [])
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


# ---- hardened and guided arms


def test_what_came_back_in_a_hardened_arm_is_told_with_the_verdict(tmp_path):
    before = evaluation(0, clean=[1] * 6, faulty=[0] * 6, noise=[0, 0, 0, 0, 0, 1])

    def events(cell):
        if cell.kind != "harden":
            return [MADE, evaluation(0, clean=[1] * 6, faulty=[0] * 6, noise=[0, 0, 0, 0, 0, 1]), END]
        after = evaluation(4, clean=[1, 1, 1, 1, 1, 0], faulty=[0] * 6, noise=[1, 1, 1, 1, cell.seed % 2, 1])
        return [MADE, before, after, ("rung", {"step": 4, "cost": {"seconds": 2.0 + 2 * cell.seed}}), END]

    arms = {"as it comes": {"train": False}, "fixed": {"harden": {"rungs": ["supervise"]}, "plan": "noise"}}
    asked = study(arms=arms, compare={"primary": {"a": "fixed", "b": "as it comes", "condition": "noise"}})
    written(tmp_path, asked, events)
    told = findings(asked, tmp_path)
    assert [(row["arm"], row["condition"]) for row in told["recovered"]] == [("fixed", "faulty"), ("fixed", "noise")]
    back, sentence = told["recovered"][1], told["comparisons"][0]["sentence"]
    assert (back["before"], back["after"], back["clean"], back["seconds"]) == (
        pytest.approx(1 / 6),
        pytest.approx(11 / 12),
        1.0,
        3.0,
    )
    assert told["verdict"]["sentence"] == (f"{sentence}. O{back['sentence'][1:]}; without the fault 100.0 → 83.3; 3 s a run.")
    assert told["study"]["steps"] > 0 and told["arms"][1]["settings"] == ["stages supervise"]
    assert told["arms"][1]["plan"] == NOISE and told["arms"][1]["plan_in"] == "both"


def diagnosed(layer):
    probes = [{"layer": n, "results": {"replay": {"status": "pass"}}, "statistics": None} for n in range(2)]
    return {"verdict": "FAULT", "sentence": "FAULT: …", "layer": layer, "probes": probes}


@pytest.mark.parametrize("status", ["done", "partial"])
def test_only_a_diagnosis_that_has_ended_is_shown(tmp_path, status):
    asked = two_arms(diagnose={"tokens": 32, "conditions": ["faulty", "noise"]})

    def events(cell):
        if cell.kind != "locate":
            return plain(cell)
        whole = cell.config["plan"] == FAULTY or status == "done"
        return [("diagnosis", {"diagnosis": diagnosed(3)}), *([("finished", {})] if whole else [])]

    written(tmp_path, asked, events)
    told = findings(asked, tmp_path)
    assert [d["plan"] for d in told["diagnoses"]] == ([FAULTY, NOISE] if status == "done" else [FAULTY])
    first = told["diagnoses"][0]
    assert (first["verdict"], first["layer"], first["model"], first["sigmas"]) == ("FAULT", 3, "nano", [])
    assert first["folder"].startswith("runs/diagnosis-") and told["complete"] is (status == "done")


def test_noise_is_that_of_the_first_run_and_a_guided_arm_names_its_guide(tmp_path):
    """Layer 1 was found; the runs had another noise than the rules of today give, each its own."""
    statistics = {"gain": 0.9, "kurtosis": 2.0, "instability": 0.0}
    located = diagnosed(1) | {"schema": 1, "kind": "diagnosis", "model": "nano", "device": "cpu", "date": "2026-01-01"}
    located |= {"num_layers": 2, "fault_class": "dead_zone"}
    located["probes"] = [probe | {"statistics": statistics} for probe in located["probes"]]

    def events(cell):
        if cell.kind == "locate":
            return [("diagnosis", {"diagnosis": located}), ("finished", {})]
        had = f"constant:0.05,layers=1,multipliers=1:{4 + cell.seed}" if cell.arm == "targeted" else cell.config.get("aqn")
        resolved = [("resolved", {"config": cell.config | {"aqn": had}})] if cell.kind == "train" else []
        return [MADE, *resolved, evaluation(4, **ROWS), END]

    written(tmp_path, study(), events)
    told = findings(study(), tmp_path)
    arms = {arm["name"]: arm for arm in told["arms"]}
    assert {name: (arm["guided"], arm["aqn"]) for name, arm in arms.items()} == {
        "noise": (None, None),
        "noise + AQN": (None, "global_decay:0.05-0.01,stages=3"),
        "targeted": ("fault", "constant:0.05,layers=1,multipliers=1:4"),
        "as it comes": (None, None),
    }
    sigma = {name: [curve for curve in arm["curves"] if curve["name"] == "σ of AQN"] for name, arm in arms.items()}
    assert [len(curves) for curves in sigma.values()] == [0, 1, 1, 0]
    assert [p["mean"] for p in sigma["targeted"][0]["points"]] == pytest.approx([0.2] * 4)
    [shown] = told["diagnoses"]
    assert [row["sigma"] for row in shown["sigmas"]] == [0.05, pytest.approx(0.25)], "the last of the runs that it guided"
    assert shown["sigmas"][1]["why"][0].startswith("the rules of that time; those of today give")
    assert shown["layers"][0] == {"layer": 0, "results": {"replay": "pass"}, "statistics": statistics}


# ---- a single run


CONFIG = next(cell.config for cell in cells_of(study()) if (cell.arm, cell.seed) == ("noise + AQN", 1))


def one_run(folder, *events, about=None, **changes):
    config = CONFIG | changes
    record = RunRecord.create(folder, "train", config, HERE, about)
    for kind, facts in events:
        record.append(kind, **facts)
    return run_findings(folder)


def test_a_single_run_has_its_scores_and_conditions_under_its_arm_or_its_folder(tmp_path):
    mine = one_run(tmp_path / "mine", MADE, evaluation(0, **ROWS), END, about={"arm": "noise + AQN"})
    told = one_run(tmp_path / "run", MADE, evaluation(0, **ROWS), END)
    assert [f["arms"][0]["name"] for f in (mine, told)] == ["noise + AQN", "run"]
    assert (told["kind"], told["schema"], told["complete"], told["notes"]) == ("run", SCHEMA, True, [])
    arm = told["arms"][0]
    assert (arm["aqn"], arm["plan"], arm["seeds"]) == (CONFIG["aqn"], NOISE, [1])
    assert [(c["name"], c["plan"]) for c in told["study"]["conditions"]] == [("clean", None), *PLANS.items()]
    assert [s["condition"] for s in arm["scores"]] == ["clean", "faulty", "noise"]
    assert (told["runs"][0]["folder"], told["runs"][0]["name"], told["runs"][0]["seed"]) == (".", "run", 1)
    assert told["verdict"]["headline"] == "One training run"


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


def test_the_steps_of_the_comparison_can_be_named(tmp_path):
    asked = two_trained(report={"steps": [4]})
    written(tmp_path, asked, trained_at([0, 2, 4, 6]))
    rows = findings(asked, tmp_path)["at_steps"]
    assert len(rows) == 4 and all([p["step"] for p in row["points"]] == [4] for row in rows)
