"""The run record: append-only, whole lines, nothing overwritten, also when the disk is full or the process is killed."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shaketable.errors import ShaketableError
from shaketable.record import FILE, SCHEMA, RunRecord, unique_folder


def record_in(folder, **config):
    return RunRecord.create(folder, "train", config, {"python": "3"})


def content(record):
    return (record.folder / FILE).read_bytes()


def test_the_first_line_says_what_the_run_is(tmp_path):
    record = record_in(tmp_path / "deep" / "run", steps=3, name="é")
    head = json.loads(content(record))
    assert (head["schema"], head["event"], head["verb"]) == (SCHEMA, "run", "train")
    assert head["config"] == {"steps": 3, "name": "é"} == record.config
    assert head["environment"] == {"python": "3"}
    assert RunRecord.open(record.folder, "train").head == head


def test_ids_are_unique(tmp_path):
    assert record_in(tmp_path / "a").head["id"] != record_in(tmp_path / "b").head["id"]


def test_every_event_is_appended_and_nothing_before_it_changes(tmp_path):
    record = record_in(tmp_path)
    states = [content(record)]
    for step in range(3):
        record.append("step", step=step, loss=0.5)
        states.append(content(record))
        assert states[-1].startswith(states[-2]) and states[-1].endswith(b"\n")
    assert [e["step"] for e in record.events("step")] == [0, 1, 2]
    assert [e["event"] for e in record.events()] == ["run", "step", "step", "step"]
    assert [e["event"] for e in record.events("run", "evaluation")] == ["run"]


def test_an_event_is_on_disk_when_append_returns(tmp_path, monkeypatch):
    record, synced = record_in(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    record.append("step", step=1)
    assert synced == [len(content(record))]


@pytest.mark.parametrize("torn", [b'{"event": "st', b"{", '{"event": "é'.encode()[:-1]])
def test_a_torn_line_was_never_an_event(tmp_path, torn):
    record = record_in(tmp_path)
    record.append("step", step=1)
    whole = content(record)
    (tmp_path / FILE).write_bytes(whole + torn)
    again = RunRecord.open(tmp_path, "train")
    assert [e["step"] for e in again.events("step")] == [1]
    again.append("step", step=2)
    assert content(again).startswith(whole + b'{"event": "step"')
    assert [e["step"] for e in again.events("step")] == [1, 2]


def test_a_resumed_run_voids_what_it_does_again_and_nothing_else(tmp_path):
    record = record_in(tmp_path)
    record.append("resolved", config={})
    for step in (0, 1, 2, 3):
        record.append("step", step=step, first=True)
    record.append("evaluation", step=3)
    record.resumed(2)
    record.append("step", step=3, first=False)
    assert [(e["step"], e["first"]) for e in record.events("step")] == [(0, True), (1, True), (2, True), (3, False)]
    assert record.events("evaluation") == []
    assert [e["event"] for e in record.events("run", "resolved", "resumed")] == ["run", "resolved", "resumed"]
    assert content(record).count(b'"event": "step"') == 5, "voided lines stay in the file"


def test_a_run_resumed_before_its_first_step_does_all_of_it_again(tmp_path):
    record = record_in(tmp_path)
    record.append("evaluation", step=0)
    record.append("warning", step=0, text="…")
    record.resumed(-1)
    record.resumed(-1)
    assert [e["event"] for e in record.events()] == ["run", "resumed", "resumed"]


def test_origin_18_a_run_is_never_put_over_another(tmp_path):
    first = record_in(tmp_path / "run", steps=1)
    before = content(first)
    with pytest.raises(ShaketableError, match=r"not empty and nothing is overwritten.*--resume"):
        record_in(tmp_path / "run", steps=2)
    assert content(first) == before


def test_a_folder_with_anything_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ShaketableError, match="not empty"):
        record_in(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_of_two_runs_that_find_the_folder_empty_one_gets_it(tmp_path, monkeypatch):
    together, made, refused = threading.Barrier(2), [], []
    touch = Path.touch
    monkeypatch.setattr(Path, "touch", lambda self, **how: (together.wait(10), touch(self, **how)))

    def begin(n):
        try:
            made.append(record_in(tmp_path / "run", n=n))
        except ShaketableError as error:
            refused.append(str(error))

    both = [threading.Thread(target=begin, args=(n,)) for n in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(made) == len(refused) == 1 and "\n" not in refused[0]
    assert [e["config"] for e in made[0].events("run")] == [made[0].config]


def test_a_file_is_no_run_folder(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ShaketableError, match="cannot make the run folder"):
            record_in(folder)


@pytest.mark.parametrize(
    ("lines", "why"),
    [(None, "no run to resume"), ("", "no run of"), ('{"schema": "shaketable.run/0", "verb": "train"}\n', "no run of")],
)
def test_what_is_not_a_run_cannot_be_resumed(tmp_path, lines, why):
    if lines is not None:
        (tmp_path / FILE).write_text(lines)
    with pytest.raises(ShaketableError, match=why):
        RunRecord.open(tmp_path, "train")


def test_a_run_of_another_verb_cannot_be_resumed(tmp_path):
    record_in(tmp_path)
    with pytest.raises(ShaketableError, match="no run of `shaketable sweep`"):
        RunRecord.open(tmp_path, "sweep")


@pytest.mark.parametrize("torn", [b"", b'{"event": "st'])
def test_a_disk_that_is_full_when_synced_is_one_line_and_loses_nothing(tmp_path, monkeypatch, torn):
    record = record_in(tmp_path)
    record.append("step", step=1)
    before = content(record)
    (tmp_path / FILE).write_bytes(before + torn)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ShaketableError, match=r"cannot write .*record.jsonl: No space left on device") as caught:
            record.append("step", step=2)
    assert "\n" not in str(caught.value)
    assert content(record) == before
    record.append("step", step=2)
    assert [e["step"] for e in record.events("step")] == [1, 2]


def test_a_disk_that_takes_half_a_line_leaves_the_record_whole(tmp_path):
    """The kernel itself cuts the write short: a limit on the file's size stands for the disk."""
    code = (
        "import resource, sys; from pathlib import Path; from shaketable.record import RunRecord\n"
        "record = RunRecord.create(Path(sys.argv[1]), 'train', {}, {}); record.append('step', step=1)\n"
        "size = (record.folder / 'record.jsonl').stat().st_size + 2000\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))\n"
        "try: record.append('answers', step=2, text='x' * 3000)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "record.append('step', step=3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ShaketableError cannot write") and "File too large" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert [(e["event"], e.get("step")) for e in lines] == [("run", None), ("step", 1), ("step", 3)]


def test_a_new_name_is_one_that_nobody_has_used(tmp_path):
    names = []
    for _ in range(4):
        folder = unique_folder(tmp_path, "train-nano")
        assert not folder.exists() and folder.parent == tmp_path and folder.name.startswith("train-nano-")
        folder.mkdir()
        names.append(folder.name)
    assert len(set(names)) == 4


def test_the_record_imports_no_torch():
    code = "import sys, shaketable.record; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False"]
