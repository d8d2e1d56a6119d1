"""The run record: append-only, whole lines, nothing overwritten, also when the disk is full or the process is killed."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shaketable.errors import ShaketableError
from shaketable.io import replacing
from shaketable.records.environment import gather
from shaketable.records.record import FILE, SCHEMA, SEAL, RunRecord, put_in_place


def record_in(folder, **config):
    return RunRecord.create(folder, "train", config, {"python": "3"})


def finished_in(folder, steps=2):
    record = record_in(folder)
    for step in range(steps):
        record.append("step", step=step, text="é\n")
    record.append("finished", step=steps)
    return record


def content(record):
    return (record.folder / FILE).read_bytes()


def test_the_first_line_says_what_the_run_is(tmp_path):
    record = record_in(tmp_path / "deep" / "run", steps=3, name="é")
    head = json.loads(content(record))
    assert (head["schema"], head["event"], head["verb"]) == (SCHEMA, "run", "train")
    assert head["config"] == {"steps": 3, "name": "é"} == record.config
    assert head["environment"] == {"python": "3"}
    assert head["about"] == {} and len(head.pop("sha")) == 16
    assert RunRecord.open(record.folder, "train").head == head == record.head


def test_an_event_is_on_disk_when_append_returns(tmp_path, monkeypatch):
    record, synced = record_in(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    record.append("step", step=1)
    assert synced == [len(content(record))]


@pytest.mark.parametrize("torn", [b'{"event": "st', '{"event": "é'.encode()[:-1]])
@pytest.mark.attack("kills")
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
    record.append("note", step=None)
    for step in (0, 1, 2, 3):
        record.append("step", step=step, first=True)
    record.append("evaluation", step=3)
    record.resumed(2)
    record.append("step", step=3, first=False)
    assert [(e["step"], e["first"]) for e in record.events("step")] == [(0, True), (1, True), (2, True), (3, False)]
    assert record.events("evaluation") == []
    assert [e["event"] for e in record.events("run", "resolved", "note", "resumed")] == ["run", "resolved", "note", "resumed"]
    assert content(record).count(b'"event": "step"') == 5, "voided lines stay in the file"


def test_origin_18_a_run_is_never_put_over_another(tmp_path):
    first = record_in(tmp_path / "run", steps=1)
    before = content(first)
    with pytest.raises(ShaketableError, match=r"not empty and nothing is overwritten.*--resume"):
        record_in(tmp_path / "run", steps=2)
    assert content(first) == before


@pytest.mark.attack("two processes on one study")
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


@pytest.mark.parametrize(
    ("lines", "why"),
    [(None, "no run to resume"), ("", "no run of"), ('{"schema": "shaketable.run/0", "verb": "train"}\n', "another version")],
)
@pytest.mark.attack("tampered records")
def test_what_is_not_a_run_cannot_be_resumed(tmp_path, lines, why):
    if lines is not None:
        (tmp_path / FILE).write_text(lines)
    with pytest.raises(ShaketableError, match=why):
        RunRecord.open(tmp_path, "train")


# --- the chain ------------------------------------------------------------------------------------------------------------


def lines_in(data):
    return data.count(b"\n")


def line_of(folder):
    """The one line that reading a record ends in; opening it says the same."""
    with pytest.raises(ShaketableError, match=FILE) as read:
        RunRecord(folder, {}).events()
    with pytest.raises(ShaketableError) as opened:
        RunRecord.open(folder, "train")
    assert str(opened.value) == str(read.value) and "\n" not in str(read.value)
    return str(read.value)


def test_the_chain_is_sha256_as_anybody_can_compute_it(tmp_path):
    previous = ""
    for line in content(finished_in(tmp_path)).decode().splitlines():
        body, _, sha = line.removesuffix('"}').rpartition(', "sha": "')
        previous = hashlib.sha256((previous + body + "}").encode()).hexdigest()[:16]
        assert sha == previous
    assert json.loads((tmp_path / SEAL).read_text())["sha"] == previous


@pytest.mark.attack("tampered records")
def test_any_byte_of_a_finished_record_that_is_changed_is_found_and_its_line_named(tmp_path):
    data = content(finished_in(tmp_path))
    for place, byte in enumerate(data):
        line = lines_in(data[:place]) + 1
        for other in {byte ^ 1, byte ^ 0x80, byte ^ 3, ord("\n"), ord(" ")} - {byte}:
            (tmp_path / FILE).write_bytes(data[:place] + bytes([other]) + data[place + 1 :])
            message = line_of(tmp_path)
            last = place == len(data) - 1  # without its end it is no line
            assert f"{FILE} was changed after it was finished" in message if last else f"line {line}" in message, (place, other)


@pytest.mark.attack("tampered records")
def test_a_finished_record_cut_at_any_byte_or_with_more_after_its_end_is_found(tmp_path):
    data = content(finished_in(tmp_path))
    for more in (b"{", b"\n", data.splitlines(keepends=True)[-1]):
        (tmp_path / FILE).write_bytes(data + more)
        assert "was changed" in line_of(tmp_path)
    for end in range(len(data)):
        (tmp_path / FILE).write_bytes(data[:end])
        assert line_of(tmp_path).endswith(f"{FILE} was truncated: it ends after line {lines_in(data[:end])} of 4")


@pytest.mark.attack("tampered records")
def test_lines_that_were_dropped_swapped_or_put_in_are_found(tmp_path):
    lines = content(finished_in(tmp_path, steps=3)).splitlines(keepends=True)
    (tmp_path / SEAL).unlink()
    a, b, c, d, e = lines
    for changed, line in [((a, b, d, e), 3), ((a, c, b, d, e), 2), ((a, b, b, c, d, e), 3), ((b, c, d, e), 1)]:
        (tmp_path / FILE).write_bytes(b"".join(changed))
        assert f"was changed at line {line}" in line_of(tmp_path)


@pytest.mark.attack("tampered records")
def test_a_changed_record_is_not_gone_on_with(tmp_path):
    record = record_in(tmp_path)
    record.append("step", step=1, reward=0.1)
    data = content(record)
    (tmp_path / FILE).write_bytes(data.replace(b"0.1", b"0.9"))
    with pytest.raises(ShaketableError, match="was changed at line 2"):
        RunRecord.open(tmp_path, "train")
    (tmp_path / FILE).write_bytes(data.replace(b'"sha"', b'"shb"'))
    with pytest.raises(ShaketableError, match="was changed at line 1"):
        RunRecord(tmp_path, record.head).append("step", step=2)


@pytest.mark.attack("two processes on one study")
def test_two_hands_on_one_record_make_one_chain(tmp_path):
    """A worker writes what happens, and who started it writes that it died."""
    one = record_in(tmp_path)
    other = RunRecord.open(tmp_path, "train")
    one.append("attempt", number=1)
    other.append("step", step=1)
    one.append("failed", error="killed")
    other.append("step", step=2, text="x" * 200_000)
    one.append("step", step=3)
    assert [e["event"] for e in RunRecord.open(tmp_path).events()] == ["run", "attempt", "step", "failed", "step", "step"]


# --- the seal -------------------------------------------------------------------------------------------------------------


def test_a_finished_record_is_sealed_and_nothing_is_added(tmp_path):
    record = finished_in(tmp_path)
    seal = json.loads((tmp_path / SEAL).read_text())
    assert (seal["lines"], seal["bytes"], seal["attempts"]) == (4, len(content(record)), 0)
    before = content(record)
    for hand in (record, RunRecord.open(tmp_path, "train")):
        for event in ("step", "resumed", "finished"):
            with pytest.raises(ShaketableError, match="is finished: nothing is added"):
                hand.append(event, step=1)
    assert content(record) == before and sorted(p.name for p in tmp_path.iterdir()) == [FILE, SEAL]


@pytest.mark.parametrize("torn", [b"", b'{"ev'])
@pytest.mark.attack("kills")
def test_a_kill_between_the_last_line_and_the_seal_is_made_up_for(tmp_path, torn):
    record = finished_in(tmp_path)
    seal, data = (tmp_path / SEAL).read_bytes(), content(record)
    (tmp_path / SEAL).unlink()
    (tmp_path / FILE).write_bytes(data + torn)
    again = RunRecord.open(tmp_path, "train")
    assert again.events("finished")
    again.seal()
    again.seal()
    assert (tmp_path / SEAL).read_bytes() == seal and content(again) == data


@pytest.mark.attack("tampered records")
def test_only_what_is_finished_and_unchanged_is_sealed(tmp_path):
    record = record_in(tmp_path)
    record.append("step", step=1)
    (tmp_path / FILE).write_bytes(content(record) + b'{"event": "st')  # somebody is writing
    before = content(record)
    with pytest.raises(ShaketableError, match="is not finished"):
        record.seal()
    assert content(record) == before and not (tmp_path / SEAL).exists()
    record.append("finished")
    (tmp_path / SEAL).unlink()
    (tmp_path / FILE).write_bytes(content(record).replace(b'"step": 1', b'"step": 7'))
    with pytest.raises(ShaketableError, match="was changed at line 2"):
        record.seal()


@pytest.mark.attack("full disks")
def test_a_disk_that_is_full_at_the_seal_leaves_a_finished_record(tmp_path, monkeypatch):
    record = record_in(tmp_path)

    def full(self, to):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(ShaketableError, match=r"cannot write .*record.seal: No space left"):
            record.append("finished")
    assert [p.name for p in tmp_path.iterdir()] == [FILE]
    RunRecord.open(tmp_path, "train").seal()
    assert record.sealed()["lines"] == 2


# --- one process at a time ------------------------------------------------------------------------------------------------


@pytest.mark.attack("two processes on one study")
def test_busy_sees_who_works_and_harms_nobody(tmp_path):
    record, other = record_in(tmp_path), RunRecord.open(tmp_path)
    assert not other.busy() and [p.name for p in tmp_path.iterdir()] == [FILE]
    with record.alone():
        assert other.busy() and other.busy()
        with pytest.raises(ShaketableError, match="another process is working"), other.alone():
            pass
    assert not other.busy()


@pytest.mark.attack("read-only folders")
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    record = record_in(tmp_path / "run")
    (tmp_path / "run" / ".lock").mkdir()
    with pytest.raises(ShaketableError, match=rf"cannot write in {tmp_path / 'run'}"), record.alone():
        pass
    (tmp_path / "run" / FILE).unlink()
    (tmp_path / "run" / FILE).mkdir()
    with pytest.raises(ShaketableError, match=rf"cannot write {tmp_path / 'run' / FILE}: Is a directory"):
        record.append("step", step=1)
    with pytest.raises(ShaketableError, match=rf"cannot read {tmp_path / 'run' / FILE}: Is a directory"):
        record.events()


@pytest.mark.parametrize("torn", [b"", b'{"event": "st'])
@pytest.mark.attack("full disks")
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


@pytest.mark.attack("full disks")
def test_a_disk_that_takes_half_a_line_leaves_the_record_whole(tmp_path):
    """The kernel itself cuts the write short: a limit on the file's size stands for the disk."""
    code = (
        "import resource, sys; from pathlib import Path; from shaketable.records.record import RunRecord\n"
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


# --- the revision in a record's environment -------------------------------------------------------------------------------


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_environment_names_versions_the_revision_and_whether_it_is_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    facts = gather()
    assert (facts["revision"], facts["dirty"]) == (None, None), "outside of a repository"
    assert {"shaketable", "python", "torch", "device", "noise kernels", "compiler"} <= facts.keys()
    git(tmp_path, "init")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "one")
    (tmp_path / "new").touch()
    facts = gather()
    assert (facts["revision"], facts["dirty"]) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "file").write_text("b")
    assert gather()["dirty"] is True
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (gather()["revision"], gather()["dirty"]) == (None, None), "without git"


def test_what_is_put_in_place_survives_a_power_cut(tmp_path, monkeypatch):
    """The disk has the content before the name, and the name before the call returns."""
    synced = []
    monkeypatch.setattr(replacing, "sync", lambda path: synced.append((path, (tmp_path / "seal").exists())))
    put_in_place(tmp_path / "seal", "{}")
    assert [there for _, there in synced] == [False, True] and synced[1][0] == tmp_path
    assert (tmp_path / "seal").read_text() == "{}"
