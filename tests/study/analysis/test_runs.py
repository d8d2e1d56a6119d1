"""A run as its record tells it: its status, its numbers, and what is not believed."""

import pytest

from shaketable.records.record import FILE, SEAL, RunRecord
from shaketable.study.analysis.runs import Run, _status
from shaketable.study.cells import cells_of
from tests.study.small_studies import study

CELL = next(c for c in cells_of(study()) if c.arm == "noise + AQN" and c.seed == 1)


def run(*events, head=None):
    return Run("x", "train", "arm", 3, "done", head or {}, [*events])


def made(folder, *events):
    record = RunRecord.create(folder / CELL.name, "train", CELL.config, {}, CELL.about("small"))
    for event in events:
        record.append(event, **({"error": "it broke"} if event == "failed" else {}))
    return record


@pytest.mark.parametrize(
    ("kinds", "working", "status"),
    [
        ([], False, "partial"), ([], True, "running"), (["attempt"], False, "partial"), (["attempt"], True, "running"),
        (["attempt", "failed"], False, "failed"), (["attempt", "failed"], True, "running"),
        (["attempt", "failed", "attempt"], False, "partial"), (["attempt", "failed", "attempt", "failed"], False, "failed"),
        (["attempt", "finished"], False, "done"), (["attempt", "finished"], True, "done"),
        (["failed", "finished", "step"], False, "done"), (["failed", "step"], False, "failed"), (["step"], False, "partial"),
    ],
)  # fmt: skip
def test_the_status_is_that_of_the_last_attempt(kinds, working, status):
    events = [{"event": kind, "error": f"error {i}"} for i, kind in enumerate(kinds)]
    last = max((i for i, kind in enumerate(kinds) if kind == "failed"), default=None)
    assert _status(events, working) == (status, f"error {last}" if status == "failed" else None)


def test_a_run_of_a_cell_says_all_that_its_record_says(tmp_path):
    record = made(tmp_path, "attempt", "finished")
    found = Run.of(CELL, tmp_path)
    assert (found.name, found.kind, found.arm, found.seed) == (CELL.name, "train", "noise + AQN", 1)
    assert (found.status, found.error, found.is_done) == ("done", None, True)
    assert (found.head, found.sha) == (record.head, record.sealed()["sha"])
    assert [e["event"] for e in found.events] == ["run", "attempt", "finished"] and found.config == CELL.config


def test_a_run_alone_says_the_same_and_takes_its_seed_from_its_config(tmp_path):
    made(tmp_path, "attempt", "failed")
    found = Run.alone(tmp_path / CELL.name)
    assert (found.name, found.kind, found.arm, found.seed) == (CELL.name, "train", "noise + AQN", 1)
    assert (found.status, found.error, found.sha, found.is_done) == ("failed", "it broke", None, False)
    RunRecord.create(tmp_path / "other", "train", {"seed": 7}, {})
    assert (Run.alone(tmp_path / "other").arm, Run.alone(tmp_path / "other").seed) == (None, 7)


def test_a_run_without_a_record_is_missing_and_one_whose_record_is_gone_is_damaged(tmp_path):
    missing = Run.of(CELL, tmp_path)
    assert (missing.status, missing.head, missing.events, missing.error) == ("missing", {}, [], None)
    made(tmp_path, "attempt", "finished")
    (tmp_path / CELL.name / FILE).unlink()
    assert Run.of(CELL, tmp_path).status == "damaged", "its seal is still there"
    (tmp_path / CELL.name / SEAL).unlink()
    assert Run.of(CELL, tmp_path).status == "missing"


def test_none_of_a_changed_record_is_believed(tmp_path):
    made(tmp_path, "attempt", "finished")
    path = tmp_path / CELL.name / FILE
    path.write_text(path.read_text().replace("attempt", "Attempt"))
    found = Run.of(CELL, tmp_path)
    assert (found.status, found.head, found.events) == ("damaged", {}, []) and "was changed at line 2" in found.error


def test_events_are_found_by_their_kind_and_the_last_one_counts():
    events = [{"event": "step", "step": 0}, {"event": "other"}, {"event": "step", "step": 1}]
    found = run(*events)
    assert found.of_kind("step") == [events[0], events[2]] and found.last("step") == events[2]
    assert found.of_kind("none") == [] and found.last("none") is None


def test_a_configuration_that_was_resolved_wins_over_the_one_it_began_with():
    head = {"config": {"aqn": "a guide"}}
    assert run(head=head).config == {"aqn": "a guide"} and run().config == {}
    assert run({"event": "resolved", "config": {"aqn": "constant:0.1"}}, head=head).config == {"aqn": "constant:0.1"}


def test_scores_are_those_of_the_last_evaluation_under_the_condition():
    def evaluation(*answers):
        rows = [{"correct": c, "formatted": f, "loss": n} for c, f, n in answers]
        other = [{"correct": False, "formatted": False, "loss": 9.0}]
        return {"event": "evaluation", "conditions": [{"name": "other", "answers": other}, {"name": "hot", "answers": rows}]}

    found = run(evaluation((False, False, 5.0)), evaluation((True, False, 0.5), (False, True, None)))
    assert found.scores("hot", "accuracy") == [1.0, 0.0] and found.scores("hot", "formatted") == [0.0, 1.0]
    assert found.scores("hot", "loss") == [], "one of them is no number"
    assert found.scores("none", "accuracy") == [] == run().scores("hot", "accuracy")
    assert found.condition("none") is None and run().condition("hot") is None


@pytest.mark.parametrize(("steps", "tail"), [(1, 1), (4, 1), (14, 1), (16, 2), (24, 2), (40, 4)])
def test_the_final_reward_is_of_the_last_tenth_of_the_steps_and_of_one_at_least(steps, tail):
    found = run(*({"event": "step", "reward": float(n * n)} for n in range(steps)))
    assert found.value("reward") == sum(float(n * n) for n in range(steps - tail, steps)) / tail


def test_steps_that_lack_what_an_endpoint_needs_are_left_out():
    steps = [{"event": "step", "reward": 1.0}, {"event": "step", "seconds": 4.0}]
    steps += [{"event": "step", "seconds": s, "aqn_seconds": 1.0} for s in (1.0, 3.0)]
    found = run(*steps)
    assert (found.value("reward"), found.value("seconds_per_step"), found.value("aqn_share")) == (1.0, 3.0, 0.5)
    assert [run(steps[0]).value(name) for name in ("seconds_per_step", "aqn_share")] == [None, None]
    assert run(steps[1]).value("reward") is None
