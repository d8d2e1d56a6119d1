"""A store: every run as its record shows it now, through `study list`, `study status` and what they are made of."""

import json

import pytest

from shaketable.records.record import FILE, SEAL, RunRecord
from shaketable.study.cells import cells_of
from shaketable.study.store import progress, summaries
from tests.cli.command_server import shaketable
from tests.study.small_studies import study

ABOUT = {"study": "noise", "arm": "aqn", "seed": 3, "key": "abcd1234"}


def run_in(folder, steps=2, finished=True, about=None):
    record = RunRecord.create(folder, "train", {"steps": 9}, {}, about)
    record.append("attempt", number=1, pid=1, engine="local")
    for step in range(1, steps + 1):
        record.append("step", step=step)
    if finished:
        record.append("finished", step=steps)
    return record


def one(root):
    (found,) = summaries(root)
    return found


def test_a_listing_says_what_runs_are_and_how_studies_stand(tmp_path):
    store = tmp_path / "store"
    RunRecord.create(store / "noise" / "definition", "study", {}, {}, {"study": "noise"}).append("defined", config={})
    record = run_in(store / "noise" / "runs" / "aqn-3", about=ABOUT)
    run_in(store / "noise" / "runs" / "aqn-4", finished=False)
    run_in(store / "single")
    run_in(store / ".hidden")
    (record.folder / "reinforce").mkdir()
    (record.folder / "reinforce" / FILE).write_text("not looked at: it lies inside of a run")
    found = shaketable(tmp_path, "study", "list", "--store", "store", "--json", "out.json")
    assert found.code == 0 and "1 done, 1 partial" in found.stdout
    [noise] = json.loads((tmp_path / "out.json").read_text())["studies"]
    assert (noise["name"], noise["counts"]) == ("noise", {"done": 1, "partial": 1})
    runs = {run.folder: run for run in summaries(store)}
    assert list(runs) == ["noise/definition", "noise/runs/aqn-3", "noise/runs/aqn-4", "single"]
    facts = {"status": "done", "step": 2, "steps": 9, "attempts": 1, "error": None, "kind": "train", "id": record.head["id"]}
    assert facts | ABOUT == {key: getattr(runs["noise/runs/aqn-3"], key) for key in facts | ABOUT}
    missing = shaketable(tmp_path, "study", "list", "--store", "none")
    assert missing.code == 0 and "no study was run in none" in missing.stdout and not (tmp_path / "none").exists()


def test_running_is_who_holds_the_lock_and_nothing_else(tmp_path):
    record = run_in(tmp_path / "run", finished=False)
    assert one(tmp_path).status == "partial"
    with record.alone():
        assert one(tmp_path).status == "running"
    assert one(tmp_path).status == "partial", "nobody remembers a lock"
    record.append("failed", error="boom", exit=1)
    assert (one(tmp_path).status, one(tmp_path).error) == ("failed", "boom")
    with record.alone():
        assert (one(tmp_path).status, one(tmp_path).error) == ("running", None)


@pytest.mark.attack("tampered records")
def test_a_finished_record_cut_at_any_byte_is_damaged_and_without_its_seal_partial(tmp_path):
    record = run_in(tmp_path / "run")
    data = (record.folder / FILE).read_bytes()
    cuts = range(len(data))
    for end in cuts:
        (record.folder / FILE).write_bytes(data[:end])
        found = one(tmp_path)
        assert found.status == "damaged" and found.error.startswith(f"{FILE} was truncated: it ends after line"), end
    (record.folder / SEAL).unlink()
    for end in cuts:
        (record.folder / FILE).write_bytes(data[:end])
        assert (one(tmp_path).status, one(tmp_path).kind) == ("partial", "train" if b"\n" in data[:end] else ""), end


@pytest.mark.parametrize(("key", "status"), [(None, "damaged"), ("its own", "done")])
def test_a_run_with_the_key_of_another_is_damaged(tmp_path, key, status):
    asked = study(arms={"as it comes": {"train": False}}, seeds=1, compare={"primary": None, "against": None})
    (cell,) = cells_of(asked)
    run_in(tmp_path / "runs" / cell.name, about=ABOUT | {"key": cell.key if key == "its own" else key})
    (row,) = progress(asked, tmp_path)["runs"]
    assert row["status"] == status
    why = f"{tmp_path / 'runs' / cell.name} holds another run than its name says"
    assert row["error"] == (why if status == "damaged" else None)
