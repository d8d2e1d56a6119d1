"""The store: every run as its record shows it, with an index that may be anything and an answer that may not."""

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading

import pytest

from shaketable.errors import ShaketableError
from shaketable.records.record import FILE, SEAL, RunRecord
from shaketable.study.cells import cells_of
from shaketable.study.store import index as index_module
from shaketable.study.store import store as store_module
from shaketable.study.store.progress import progress
from shaketable.study.store.store import Store
from tests import ROOT
from tests.study.small_studies import study

INDEX = index_module.FILE
ABOUT = {"study": "noise", "arm": "aqn", "seed": 3, "key": "abcd1234"}


def run_in(folder, steps=2, finished=True, about=None, wide=0):
    """A run; `wide` bytes of answers with every step."""
    record = RunRecord.create(folder, "train", {"steps": 9}, {}, about)
    record.append("attempt", number=1, pid=1, engine="local")
    for step in range(1, steps + 1):
        record.append("step", step=step, text="x" * wide)
    if finished:
        record.append("finished", step=steps)
    return record


@pytest.fixture(autouse=True)
def remembered(monkeypatch):
    """Files are as if written long ago, unless a test says otherwise."""
    monkeypatch.setattr(store_module, "FRESH", -1e9)


def listed(root):
    """The answer, which must be the same from the index, without one, and once more."""
    found = Store(root).summaries()
    assert Store(root).summaries() == found
    return {summary.path: summary for summary in found}


def one(root):
    (found,) = listed(root).values()
    return found


def count_looks(monkeypatch):
    looks, look = [], store_module.look
    monkeypatch.setattr(store_module, "look", lambda folder: (looks.append(folder.name), look(folder))[1])
    return looks


def test_a_summary_says_what_the_run_is_and_where_it_stands(tmp_path):
    record = run_in(tmp_path / "noise-abcd1234" / "runs" / "aqn-3", about=ABOUT)
    found = one(tmp_path)
    assert (found.path, found.name) == ("noise-abcd1234/runs/aqn-3", "aqn-3")
    assert (found.study, found.arm, found.seed, found.key) == ("noise", "aqn", 3, "abcd1234")
    assert (found.id, found.verb, found.started) == (record.head["id"], "train", record.head["started"])
    assert (found.status, found.step, found.steps, found.attempts, found.error) == ("done", 2, 9, 1, None)
    assert found.updated == (record.folder / FILE).stat().st_mtime
    assert json.loads(json.dumps(found.to_dict()))["arm"] == "aqn"


def test_runs_lie_in_studies_and_beside_them_in_the_order_of_their_paths(tmp_path):
    for path in ("b", "a", "s-1/runs/y", "s-1/runs/x", "a/inner", ".hidden"):
        run_in(tmp_path / path) if path != "a/inner" else (tmp_path / path).mkdir()
    (tmp_path / "a" / "inner" / FILE).write_text("no run: it lies inside of one")
    assert list(listed(tmp_path)) == ["a", "b", "s-1/runs/x", "s-1/runs/y"]
    assert [s.path for s in Store(tmp_path).summaries(tmp_path / "s-1")] == ["s-1/runs/x", "s-1/runs/y"]
    assert list(listed(tmp_path)) == ["a", "b", "s-1/runs/x", "s-1/runs/y"], "a part of a listing forgets nothing else"
    with pytest.raises(ShaketableError, match="is not in the store"):
        Store(tmp_path / "s-1").summaries(tmp_path / "a")


def test_a_store_that_is_not_there_is_empty_and_is_not_made(tmp_path):
    assert Store(tmp_path / "none").summaries() == Store(tmp_path / "none").studies() == []
    assert Store(tmp_path).summaries() == []
    assert list(tmp_path.iterdir()) == []


# --- status ---------------------------------------------------------------------------------------------------------------


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


@pytest.mark.attack("kills")
def test_a_killed_worker_leaves_a_partial_run(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from shaketable.records.record import RunRecord\n"
        "record = RunRecord.create(Path(sys.argv[1]), 'train', {}, {})\n"
        "with record.alone(): record.append('step', step=1); print('up', flush=True); sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout.readline() == b"up\n"
        assert one(tmp_path).status == "running"
        worker.kill()
    assert one(tmp_path).status == "partial"


def test_failed_holds_until_the_next_attempt(tmp_path):
    record = run_in(tmp_path / "run", finished=False)
    for number in (2, 3):
        record.append("failed", error=f"attempt {number - 1}", exit=1)
        assert (one(tmp_path).status, one(tmp_path).error) == ("failed", f"attempt {number - 1}")
        record.append("attempt", number=number, pid=1, engine="local")
        assert (one(tmp_path).status, one(tmp_path).attempts) == ("partial", number)
    record.append("failed", error="again", exit=1)
    record.resumed(1)
    assert (one(tmp_path).status, one(tmp_path).step) == ("partial", 1), "somebody resumed it by hand"
    record.append("finished")
    assert (one(tmp_path).status, one(tmp_path).error, one(tmp_path).attempts) == ("done", None, 3)


@pytest.mark.parametrize("wide", [0, 3000, 70_000])
@pytest.mark.attack("tampered records")
def test_a_finished_record_cut_at_any_byte_is_damaged_and_without_its_seal_partial(tmp_path, wide):
    record = run_in(tmp_path / "run", steps=30 if wide == 3000 else 2, wide=wide)
    data = (record.folder / FILE).read_bytes()
    some = [e + d for e in (data.find(b"\n"), data.rfind(b"\n", 0, -1)) for d in (-1, 0, 1, 2)]
    cuts = range(len(data)) if not wide else [0, 1, *some, len(data) // 2, len(data) - 1]
    for end in cuts:
        (record.folder / FILE).write_bytes(data[:end])
        found = one(tmp_path)
        assert found.status == "damaged" and found.error.startswith(f"{FILE} was truncated: it ends after line"), end
    (record.folder / SEAL).unlink()
    for end in cuts:
        (record.folder / FILE).write_bytes(data[:end])
        assert (one(tmp_path).status, one(tmp_path).verb) == ("partial", "train" if b"\n" in data[:end] else None), end


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.attack("tampered records")
def test_any_changed_byte_of_a_short_record_is_damage(tmp_path, sealed):
    record = run_in(tmp_path / "run")
    if not sealed:
        (record.folder / SEAL).unlink()
    data = (record.folder / FILE).read_bytes()
    for place in range(len(data) - (not sealed)):
        (record.folder / FILE).write_bytes(data[:place] + bytes([data[place] ^ 3]) + data[place + 1 :])
        found = Store(tmp_path).summaries()[0]
        assert found.status == "damaged" and found.error.startswith(FILE), place


@pytest.mark.attack("tampered records")
def test_of_a_long_record_the_ends_are_checked_and_the_line_is_named(tmp_path):
    record = run_in(tmp_path / "run", steps=50, wide=3000)
    data = (record.folder / FILE).read_bytes()
    for place, line in ((5, 1), (len(data) - 9000, 50), (len(data) - 200, 52), (len(data) - 20, 53)):
        (record.folder / FILE).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert one(tmp_path).error.startswith(f"{FILE} was changed at line {line}")
    (record.folder / FILE).write_bytes(data)
    assert one(tmp_path).status == "done"


def test_of_a_long_record_only_the_ends_are_read(tmp_path, monkeypatch):
    run_in(tmp_path / "run", steps=100, wide=3000)
    monkeypatch.setattr(RunRecord, "events", lambda self: pytest.fail("all of it was read"))
    assert (one(tmp_path).status, one(tmp_path).step, one(tmp_path).attempts) == ("done", 100, 1)


def test_what_only_the_unread_middle_could_tell_is_not_made_up(tmp_path):
    record = run_in(tmp_path / "run", steps=100, wide=3000, finished=False)
    assert (one(tmp_path).step, one(tmp_path).attempts) == (100, None)
    record.append("attempt", number=2)
    assert one(tmp_path).attempts == 2


def test_a_last_line_longer_than_the_window_is_read(tmp_path):
    record = run_in(tmp_path / "run", finished=False)
    record.append("failed", error="x" * 300_000)
    assert one(tmp_path).status == "failed" and len(one(tmp_path).error) == 300_000


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"garbage\n", "line 1 is no event"), (b'{"schema": "other/9", "verb": "x"}\n', "another version: schema 'other/9'")],
)
@pytest.mark.attack("tampered records")
def test_what_is_no_record_is_damaged(tmp_path, content, why):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE).write_bytes(content)
    assert one(tmp_path).status == "damaged" and why in one(tmp_path).error


def test_a_record_that_cannot_be_read_or_is_gone_or_has_no_seal_worth_the_name(tmp_path):
    for name in ("folder", "gone", "seal"):
        run_in(tmp_path / name)
    (tmp_path / "folder" / FILE).unlink()
    (tmp_path / "folder" / FILE).mkdir()
    (tmp_path / "gone" / FILE).unlink()
    (tmp_path / "seal" / SEAL).write_text("{")
    found = {path: (s.status, s.error) for path, s in listed(tmp_path).items()}
    assert found == {
        "folder": ("damaged", f"cannot read {FILE}: Is a directory"),
        "gone": ("damaged", f"cannot read {FILE}: No such file or directory"),
        "seal": ("damaged", f"{SEAL} is damaged: it is no seal"),
    }


def test_published_records_without_a_chain_are_listed(tmp_path):
    shutil.unpack_archive(ROOT / "results" / "harden" / "records.tar.gz", tmp_path, filter="data")
    found = listed(tmp_path).values()
    assert {(s.status, s.step, s.steps, s.verb) for s in found} == {("done", 60, 60, "train")} and len(found) == 25


# --- the index ------------------------------------------------------------------------------------------------------------


def test_what_was_read_is_remembered_and_what_changed_is_read_again(tmp_path, monkeypatch):
    records = [run_in(tmp_path / name, finished=False) for name in ("a", "b", "c")]
    looks = count_looks(monkeypatch)
    Store(tmp_path).summaries()
    Store(tmp_path).summaries()
    assert sorted(looks) == ["a", "b", "c"]
    records[1].append("step", step=7)
    assert [s.step for s in Store(tmp_path).summaries()] == [2, 7, 2] and looks[3:] == ["b"]
    records[2].append("finished")
    assert [s.status for s in Store(tmp_path).summaries()] == ["partial", "partial", "done"] and looks[4:] == ["c"]
    (tmp_path / "c" / SEAL).write_text("{}")
    assert Store(tmp_path).summaries()[2].status == "damaged" and looks[5:] == ["c"]


@pytest.mark.attack("tampered records")
def test_an_edit_that_puts_size_and_time_back_is_seen(tmp_path):
    record = run_in(tmp_path / "run")
    assert one(tmp_path).status == "done"
    path, before = record.folder / FILE, (record.folder / FILE).stat()
    edited = path.read_bytes().replace(b'"steps": 9', b'"steps": 8')
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # a file system's clock ticks every few milliseconds
        path.write_bytes(edited)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_size == before.st_size
    assert one(tmp_path).error == f"{FILE} was changed at line 1"


def test_what_was_written_a_moment_ago_is_not_remembered(tmp_path, monkeypatch):
    run_in(tmp_path / "run")
    looks = count_looks(monkeypatch)
    monkeypatch.setattr(store_module, "FRESH", 60.0)
    Store(tmp_path).summaries()
    Store(tmp_path).summaries()
    assert looks == ["run", "run"]


def test_a_deleted_run_is_gone_from_the_answer_and_from_the_index(tmp_path):
    for path in ("s/runs/a", "s/runs/b", "s2/runs/a"):
        run_in(tmp_path / path)
    listed(tmp_path)
    shutil.rmtree(tmp_path / "s" / "runs" / "a")
    assert [s.path for s in Store(tmp_path).summaries(tmp_path / "s")] == ["s/runs/b"]
    assert set(index_module.Index(tmp_path).read()) == {"s/runs/b", "s2/runs/a"}
    shutil.rmtree(tmp_path / "s2")
    assert list(listed(tmp_path)) == ["s/runs/b"]


def test_a_store_that_was_moved_tells_no_old_paths(tmp_path):
    record = run_in(tmp_path / "one" / "run")
    (record.folder / FILE).write_bytes(b"garbage\n")
    before = one(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    assert one(tmp_path / "two") == before and "one" not in before.error


def spoil(path, how):
    if how == "garbage":
        path.write_bytes(b"no database at all" * 100)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "missing":
        path.unlink()
    elif how == "folder":
        path.unlink()
        path.mkdir()
    else:
        with sqlite3.connect(path) as db:
            db.executescript({"version": "PRAGMA user_version = 99; DROP TABLE runs", "table": "DROP TABLE runs"}[how])
        db.close()


@pytest.mark.parametrize("how", ["garbage", "cut", "empty", "missing", "folder", "version", "table"])
@pytest.mark.attack("tampered records")
def test_a_spoilt_index_changes_no_answer_and_is_made_anew(tmp_path, monkeypatch, how):
    for n in range(40):
        run_in(tmp_path / f"run{n:02}", steps=1)
    before = listed(tmp_path)
    spoil(tmp_path / INDEX, how)
    assert listed(tmp_path) == before
    looks = count_looks(monkeypatch)
    assert listed(tmp_path) == before
    assert bool(looks) == (how == "folder"), "it works again, where it can"


@pytest.mark.attack("tampered records")
def test_rows_of_another_version_mean_nothing(tmp_path, monkeypatch):
    run_in(tmp_path / "run")
    before = listed(tmp_path)
    ((path, (stamp, facts)),) = index_module.Index(tmp_path).read().items()
    monkeypatch.setattr(index_module, "VERSION", 99)
    index_module.Index(tmp_path).write([(path, stamp, facts.replace(b"done", b"gone"))], [])
    assert listed(tmp_path)["run"].status == "gone", "this is how it would lie"
    monkeypatch.setattr(index_module, "VERSION", 1)
    assert listed(tmp_path) == before


@pytest.mark.attack("tampered records")
def test_no_flipped_byte_in_the_index_makes_a_wrong_answer(tmp_path):
    for n in range(3):
        run_in(tmp_path / f"run{n}", steps=n)
    before, path = listed(tmp_path), tmp_path / INDEX
    data, draw = path.read_bytes(), random.Random(0)
    used = [i for i, byte in enumerate(data) if byte]
    assert b'"done"' in data
    for place in [data.find(b'"done"') + 2, *draw.sample(used, 250)]:
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :])
        assert {s.path: s for s in Store(tmp_path).summaries()} == before, place


@pytest.mark.attack("two processes on one study")
def test_an_index_that_others_lock_is_done_without(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "_WAIT", 0.01)
    run_in(tmp_path / "a")
    before = listed(tmp_path)
    db = sqlite3.connect(tmp_path / INDEX, isolation_level=None)
    db.execute("BEGIN EXCLUSIVE")
    assert listed(tmp_path) == before
    run_in(tmp_path / "b")
    assert list(listed(tmp_path)) == ["a", "b"]
    db.execute("ROLLBACK")
    db.close()
    assert list(listed(tmp_path)) == ["a", "b"]


@pytest.mark.attack("read-only folders")
def test_a_disk_that_cannot_be_written_is_done_without_an_index(tmp_path, monkeypatch):
    run_in(tmp_path / "a")
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, **how: connect(f"file:{path}?mode=ro", uri=True, **how))
    assert list(listed(tmp_path)) == ["a"] and not (tmp_path / INDEX).exists()
    monkeypatch.undo()
    monkeypatch.setattr(store_module, "FRESH", -1e9)
    before = listed(tmp_path)
    monkeypatch.setattr(sqlite3, "connect", lambda path, **how: connect(f"file:{path}?mode=ro", uri=True, **how))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found = listed(tmp_path)
    assert list(found) == ["a", "b"] and found["a"] == before["a"]
    assert set(index_module.Index(tmp_path).read()) == {"a"}, "what it knew is used, and kept"


@pytest.mark.attack("two processes on one study")
def test_many_at_once_agree_while_runs_come_and_go(tmp_path):
    for n in range(20):
        run_in(tmp_path / f"old{n}", steps=1)
    code = (
        "import sys; from shaketable.study.store import store; store.FRESH = -1e9\n"
        "for _ in range(15):\n"
        "    found = store.Store(sys.argv[1]).summaries()\n"
        "    assert sum(s.path.startswith('old') and s.status == 'done' for s in found) == 20, found\n"
        "    assert all(s.status in ('done', 'partial') for s in found), found\n"
    )
    words = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    readers = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    n = 0
    while any(reader.poll() is None for reader in readers):
        n += 1
        run_in(tmp_path / f"new{n}", steps=1)
        if n % 2:
            (tmp_path / f"new{n}").rename(tmp_path / f".gone{n}")
        if n % 5 == 0:
            (tmp_path / INDEX).unlink(missing_ok=True)
    for reader in readers:
        assert reader.wait() == 0, reader.stderr.read()
        reader.stderr.close()
    assert {s.status for s in Store(tmp_path).summaries()} == {"done"}


@pytest.mark.attack("two processes on one study")
def test_a_run_that_is_being_written_is_never_damaged(tmp_path):
    seen, over = set(), threading.Event()

    def look():
        while not over.is_set():
            seen.update(
                (s.status, s.error) for s in Store(tmp_path).summaries() if s.error is None or "first line" not in s.error
            )

    reader = threading.Thread(target=look)
    reader.start()
    for n in range(25):
        run_in(tmp_path / f"run{n}", steps=4)
    over.set()
    reader.join()
    assert {status for status, _ in seen} <= {"partial", "done"}, seen


# --- studies --------------------------------------------------------------------------------------------------------------


def test_studies_count_their_runs(tmp_path):
    folder = tmp_path / "noise-abcd1234"
    run_in(folder / "runs" / "a", about=ABOUT)
    run_in(folder / "runs" / "b", about=ABOUT)
    last = run_in(folder / "runs" / "c", about=ABOUT, finished=False)
    run_in(tmp_path / "single")
    (folder / "study.json").write_text(json.dumps({"name": "noise", "key": "abcd1234ffff", "runs": [1, 2, 3, 4]}))
    (tmp_path / "broken-1").mkdir()
    (tmp_path / "broken-1" / "study.json").write_text("{")
    broken, noise = Store(tmp_path).studies()
    assert (noise.name, noise.key, noise.folder) == ("noise", "abcd1234ffff", "noise-abcd1234")
    assert (noise.counts, noise.wanted, noise.error) == ({"done": 2, "partial": 1}, 4, None)
    assert noise.updated == (last.folder / FILE).stat().st_mtime and noise.started
    assert (broken.folder, broken.counts, broken.wanted, broken.error) == ("broken-1", {}, None, "study.json cannot be read")
    json.dumps([s.to_dict() for s in (broken, noise)])


def test_a_study_known_by_the_record_of_its_definition(tmp_path):
    RunRecord.create(tmp_path / "noise" / "definition", "study", {}, {}, {"study": "noise"}).append("defined", config={})
    run_in(tmp_path / "noise" / "runs" / "a", about=ABOUT)
    (study,) = Store(tmp_path).studies()
    assert (study.name, study.folder, study.counts) == ("noise", "noise", {"done": 1})
    assert list(listed(tmp_path)) == list(listed(tmp_path)) == ["noise/runs/a"], "a definition is no run"
    assert list(listed(tmp_path / "noise")) == ["runs/a"]


def test_the_store_imports_no_torch():
    code = "import sys, shaketable.study.store.store; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False"]


@pytest.mark.parametrize(("key", "status"), [("0badc0de", "damaged"), (None, "done"), ("its own", "done")])
def test_a_run_with_the_key_of_another_is_damaged(tmp_path, key, status):
    asked = study(arms={"as it comes": {"train": False}}, seeds=1, compare={"primary": None, "against": None})
    (cell,) = cells_of(asked)
    run_in(tmp_path / "runs" / cell.name, about=ABOUT | {"key": cell.key if key == "its own" else key})
    (row,) = progress(asked, tmp_path)["runs"]
    assert row["status"] == status
    assert row["error"] == ("it holds another run than its name says" if status == "damaged" else None)
