"""Records in rare states: what errors say word for word, torn and empty files, seals, locks, names that nobody has."""

import hashlib
import io
import json
import os
import time
from pathlib import Path

import pytest

from shaketable.errors import ShaketableError
from shaketable.records.chain import SCHEMA, UNCHAINED, ChainReader, is_event, is_seal, last_lines, link, linked, parted
from shaketable.records.record import FILE, SEAL, UNVERIFIED, RunRecord, check_new, put_in_place, unique_folder

HEAD = {"schema": SCHEMA, "event": "run", "verb": "train", "config": {}}


def body(event):
    return json.dumps(event).encode()


def old_lines(*events, head=None):
    """A record as it was written before there was a chain."""
    lines = [HEAD | {"schema": UNCHAINED} | (head or {}), *events]
    return b"".join(body(event) + b"\n" for event in lines)


def old_record(folder, *events):
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_bytes(old_lines(*events))
    return RunRecord.open(folder)


def new_record(folder, **config):
    return RunRecord.create(folder, "train", config, {})


def said(call, *args, **kwargs):
    with pytest.raises(ShaketableError) as refused:
        call(*args, **kwargs)
    return str(refused.value)


# ---- the chain


def after_head(schema=SCHEMA):
    """A reader behind a whole first line, and the sha of that line."""
    reader, first = ChainReader(Path("r.jsonl")), body(HEAD | {"schema": schema})
    sha = link("", first)
    reader.take(linked(first, sha) if schema == SCHEMA else first + b"\n")
    return reader, sha


def test_a_line_whose_link_is_right_and_that_is_no_event_is_damaged():
    reader, sha = after_head()
    line = body({"step": 1})
    assert said(reader.take, linked(line, link(sha, line))) == "r.jsonl is damaged: line 2 is no event"


def test_a_line_whose_link_is_wrong_and_that_is_no_event_was_changed():
    reader, _ = after_head()
    assert said(reader.take, linked(body({"step": 1}), "0" * 16)) == "r.jsonl was changed at line 2: line 2 is no event"
    reader, _ = after_head()
    assert said(reader.take, b"{\n") == "r.jsonl was changed at line 2: line 2 is no event"


def test_a_line_of_an_old_record_that_is_no_event_is_damaged():
    reader, _ = after_head(UNCHAINED)
    assert said(reader.take, b"{\n") == "r.jsonl is damaged: line 2 is no event"


def test_an_event_with_a_wrong_link_or_none_was_changed():
    for line in (linked(body({"event": "step"}), "0" * 16), body({"event": "step"}) + b"\n"):
        reader, _ = after_head()
        assert said(reader.take, line) == "r.jsonl was changed at line 2"


def test_a_link_is_of_the_line_before_it_and_of_its_own_bytes():
    assert link("", b'{"a": 1}') == hashlib.sha256(b'{"a": 1}').hexdigest()[:16]
    assert link("abc", b'{"a": 1}') == hashlib.sha256(b'abc{"a": 1}').hexdigest()[:16]


def test_a_head_with_a_link_is_of_a_chain_whatever_schema_it_names():
    first = body(HEAD | {"schema": UNCHAINED})
    reader = ChainReader(Path("r"))
    reader.take(linked(first, link("", first)))
    assert reader.chained, "somebody gave a new record the schema of an old one"
    assert said(reader.take, body({"event": "step"}) + b"\n") == "r was changed at line 2"


def test_a_head_without_a_link_of_the_new_schema_was_changed():
    assert said(ChainReader(Path("r")).take, body(HEAD) + b"\n") == "r was changed at line 1"


def test_a_line_in_the_middle_that_names_another_schema_is_no_head():
    reader, sha = after_head()
    line = body({"schema": "other/9"})
    assert said(reader.take, linked(line, link(sha, line))) == "r.jsonl is damaged: line 2 is no event"


def test_links_in_an_old_record_are_taken_off_and_not_checked():
    reader, _ = after_head(UNCHAINED)
    assert reader.take(linked(body({"event": "step", "step": 1}), "0" * 16)) == {"event": "step", "step": 1}


def test_what_was_read_and_what_is_missing_are_named_by_the_seal():
    reader = ChainReader(Path("x/r.jsonl"), lines=3, size=70, sha="a" * 16)
    assert said(reader.check, {"lines": 5, "bytes": 100, "sha": "b" * 16}) == (
        "x/r.jsonl was truncated: it ends after line 3 of 5"
    )
    assert said(reader.check, {"lines": 2, "bytes": 60, "sha": "b" * 16}) == "x/r.jsonl was changed after it was finished"
    assert reader.check({"lines": 3, "bytes": 70, "sha": "a" * 16}) is None


@pytest.mark.parametrize("kind", ["step", "finished", "note"])
def test_a_step_may_be_missing_in_all_but_who_goes_on(kind):
    assert is_event({"event": kind}) and is_event({"event": kind, "step": None}) and is_event({"event": kind, "step": -1})
    assert not is_event({"event": kind, "step": "3"}) and not is_event({"step": 3})


def test_a_seal_from_before_attempts_were_counted_is_one():
    assert is_seal({"lines": 1, "bytes": 2, "sha": "x"})
    assert not is_seal({"lines": 1, "bytes": 2.5, "sha": "x"}) and not is_seal({})


def test_a_line_shorter_than_a_link_carries_none():
    assert parted(b"{}\n") == (b"{}", "") and parted(b"\n") == (b"", "")
    assert parted(b'{"a": 1}') == (b'{"a": 1}', "")


def test_only_the_last_link_of_a_line_is_its_own():
    inner = b'{"event": "model", "sha": "0123456789abcdef"}'
    line = linked(inner, "f" * 16)
    assert line == b'{"event": "model", "sha": "0123456789abcdef", "sha": "ffffffffffffffff"}\n'
    assert parted(line) == (inner, "f" * 16)


def test_the_last_lines_are_those_of_the_window_and_no_half_one():
    lines = [b"%04d\n" % i for i in range(100)]
    data = b"".join(lines)
    for window in (5, 6, 9, 10, 11, 23):
        found = last_lines(io.BytesIO(data), len(data), window)
        assert found == lines[-len(found) :] and all(len(line) == 5 for line in found)
    assert last_lines(io.BytesIO(data), len(data), 500) == lines and last_lines(io.BytesIO(data), len(data), 9999) == lines
    assert last_lines(io.BytesIO(data), len(data)) == lines


def test_reading_the_end_of_a_large_file_does_not_read_all_of_it():
    class Counted(io.BytesIO):
        most = 0

        def read(self, n=-1):
            Counted.most = max(Counted.most, n)
            return super().read(n)

    data = b"x" * 99 + b"\n"
    file = Counted(10_000 * data)
    assert last_lines(file, 10_000 * len(data))[-1] == data
    assert Counted.most == 1 << 16
    Counted.most = 0
    assert last_lines(file, 10_000 * len(data), 64)[-1] == data
    assert Counted.most == 4 * 64, "as far as a whole line needs, and no farther"


# ---- beginning and opening


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    assert said(new_record, tmp_path / "file") == f"cannot make the run folder {tmp_path / 'file'}: Not a directory"
    below = tmp_path / "file" / "below"
    assert said(new_record, below) == f"cannot make the run folder {below}: Not a directory"
    assert said(check_new, tmp_path / "file") == f"cannot make the run folder {tmp_path / 'file'}: Not a directory"


def test_a_folder_that_is_taken_says_what_can_be_done(tmp_path):
    (tmp_path / ".hidden").touch()
    assert said(check_new, tmp_path) == (
        f"{tmp_path} is not empty and nothing is overwritten; choose another --out, or --resume it"
    )
    assert check_new(tmp_path / "none") is None
    (tmp_path / "empty").mkdir()
    assert check_new(tmp_path / "empty") is None and not (tmp_path / "none").exists()


def test_what_holds_no_run_says_of_which_verb_it_was_asked(tmp_path):
    assert said(RunRecord.open, tmp_path) == f"there is no run to resume in {tmp_path}: it has no record.jsonl"
    (tmp_path / FILE).write_text('{"schema": "shaketable.run/9", "verb": "train"}\n')
    assert said(RunRecord.open, tmp_path) == f"{tmp_path} holds no run that this version can resume"
    assert (
        said(RunRecord.open, tmp_path, "train") == f"{tmp_path} holds no run of `shaketable train` that this version can resume"
    )


def test_a_record_whose_first_line_is_torn_holds_no_run(tmp_path):
    (tmp_path / FILE).write_text('{"schema": "shaketable.run/2"')
    assert said(RunRecord.open, tmp_path).endswith("holds no run that this version can resume")
    (tmp_path / FILE).write_text("")
    assert said(RunRecord.open, tmp_path).endswith("holds no run that this version can resume")


def test_a_folder_in_the_place_of_the_file_is_no_run(tmp_path):
    (tmp_path / FILE).mkdir()
    assert "it has no record.jsonl" in said(RunRecord.open, tmp_path)


def test_the_head_has_all_that_was_given_and_an_id(tmp_path):
    record = RunRecord.create(tmp_path / "run", "sweep", {"a": 1}, {"python": "3"}, {"study": "s"})
    assert list(record.head) == ["schema", "event", "id", "verb", "started", "about", "config", "environment"]
    assert len(record.head["id"]) == 32 and int(record.head["id"], 16)
    assert (record.head["verb"], record.head["about"], record.config) == ("sweep", {"study": "s"}, {"a": 1})
    assert record.folder == tmp_path / "run" == RunRecord.open(tmp_path / "run").folder


def test_a_change_of_the_configuration_that_was_handed_out_changes_no_record(tmp_path):
    record = new_record(tmp_path / "run", steps=3)
    record.config["steps"] = 9
    assert record.config == {"steps": 3}


def test_an_old_record_is_called_unverified_and_a_new_one_verified(tmp_path):
    assert old_record(tmp_path / "old").verified is False
    assert new_record(tmp_path / "new").verified is True is RunRecord.open(tmp_path / "new").verified
    assert UNVERIFIED == "unverified: the record has no chain, and nobody can say whether its numbers were changed"


# ---- writing


def test_text_is_written_as_people_read_it(tmp_path):
    record = new_record(tmp_path / "run", name="é → ∞")
    assert '"é → ∞"' in (tmp_path / "run" / FILE).read_text(encoding="utf-8")
    assert RunRecord.open(tmp_path / "run").config == record.config == {"name": "é → ∞"}


def test_times_are_to_the_millisecond(tmp_path, monkeypatch):
    record = new_record(tmp_path / "run")
    monkeypatch.setattr(time, "time", lambda: 1234.56789)
    record.append("note")
    assert record.events("note")[0] == {"event": "note", "time": 1234.568}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_null_and_what_stands_beside_it_stays(tmp_path, value):
    record = RunRecord.create(tmp_path / "run", "train", {"lr": value, "on": True}, {"deep": [{"x": (value, 1)}]})
    record.append("step", step=0, loss=value, reward=0.5, text="nan", none=None, count=10**20, on=False)
    head, event = RunRecord.open(tmp_path / "run").events()
    assert head["config"] == {"lr": None, "on": True} and head["environment"] == {"deep": [{"x": [None, 1]}]}
    del event["time"]
    facts = {"loss": None, "reward": 0.5, "text": "nan", "none": None, "count": 10**20, "on": False}
    assert event == {"event": "step", "step": 0} | facts


def test_who_comes_from_another_process_finds_that_the_run_is_finished(tmp_path):
    record, early = new_record(tmp_path / "run"), None
    early = RunRecord.open(tmp_path / "run")
    record.append("finished")
    (tmp_path / "run" / SEAL).unlink()
    wanted = f"the run in {tmp_path / 'run'} is finished: nothing is added to its record"
    assert said(early.append, "step", step=1) == wanted == said(record.append, "step", step=1)
    assert said(early.resumed, 0) == wanted


def test_an_old_record_that_is_finished_takes_nothing_more(tmp_path):
    record = old_record(tmp_path / "run", {"event": "finished"})
    assert said(record.append, "note").endswith("is finished: nothing is added to its record")


def test_an_event_named_in_another_one_ends_no_run(tmp_path):
    record = new_record(tmp_path / "run")
    record.append("note", text="finished", of={"event": "finished"})
    again = RunRecord.open(tmp_path / "run")
    again.append("step", step=1)
    assert not (tmp_path / "run" / SEAL).exists() and [e["event"] for e in again.events()] == ["run", "note", "step"]


def test_an_error_of_the_disk_says_that_nothing_was_lost(tmp_path):
    record = new_record(tmp_path / "run")
    (tmp_path / "run" / FILE).unlink()
    (tmp_path / "run" / FILE).mkdir()
    where = tmp_path / "run" / FILE
    assert said(record.append, "note") == f"cannot write {where}: Is a directory; what it held before is kept"


def test_a_file_that_is_gone_is_not_made_anew_by_the_next_event(tmp_path):
    record = new_record(tmp_path / "run")
    (tmp_path / "run" / FILE).unlink()
    assert said(record.append, "note").startswith(f"cannot write {tmp_path / 'run' / FILE}: No such file")
    assert not (tmp_path / "run" / FILE).exists()
    assert said(record.events) == f"cannot read {tmp_path / 'run' / FILE}: No such file or directory"


def test_a_file_of_nothing_but_a_torn_line_is_empty_before_the_next_one(tmp_path):
    (tmp_path / FILE).write_bytes(b'{"torn')
    RunRecord(tmp_path, HEAD).append("note")
    data = (tmp_path / FILE).read_bytes()
    assert data.startswith(b'{"event": "note"') and data.count(b"\n") == 1
    text, sha = parted(data)
    assert sha == link("", text)


def test_a_line_that_is_torn_after_many_is_cut_and_the_chain_goes_on(tmp_path):
    record = new_record(tmp_path / "run")
    for step in range(3):
        record.append("step", step=step)
    whole = (tmp_path / "run" / FILE).read_bytes()
    for torn in (b"{", b'{"event": "step"}', whole.splitlines()[-1]):
        (tmp_path / "run" / FILE).write_bytes(whole + torn)
        RunRecord.open(tmp_path / "run").append("step", step=3)
        data = (tmp_path / "run" / FILE).read_bytes()
        assert data.startswith(whole) and data.count(b"\n") == 5
        assert [e["step"] for e in RunRecord.open(tmp_path / "run").events("step")] == [0, 1, 2, 3]


def test_a_record_that_another_hand_cut_back_goes_on_from_the_line_that_is_there(tmp_path):
    record = new_record(tmp_path / "run")
    record.append("step", step=1)
    whole = (tmp_path / "run" / FILE).read_bytes()
    record.append("step", step=2)
    (tmp_path / "run" / FILE).write_bytes(whole)
    record.append("step", step=3)
    assert [e["step"] for e in RunRecord.open(tmp_path / "run").events("step")] == [1, 3]


def test_events_whose_name_only_begins_like_the_end_end_nothing(tmp_path):
    record = new_record(tmp_path / "run")
    record.append("finished_rung")
    record.append("unfinished")
    assert record.sealed() is None and RunRecord.open(tmp_path / "run").events("finished") == []
    RunRecord.open(tmp_path / "run").append("finished")
    assert record.sealed()["lines"] == 4


def test_an_old_record_goes_on_without_links(tmp_path):
    record = old_record(tmp_path / "run", {"event": "step", "step": 1})
    record.append("step", step=2)
    RunRecord.open(tmp_path / "run").append("note")
    assert b'"sha"' not in (tmp_path / "run" / FILE).read_bytes()
    assert [e["event"] for e in RunRecord.open(tmp_path / "run").events()] == ["run", "step", "step", "note"]


def test_what_an_interrupted_write_left_is_taken_back(tmp_path, monkeypatch):
    record = new_record(tmp_path / "run")
    before = (tmp_path / "run" / FILE).read_bytes()

    def broken(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    assert "Input/output error" in said(record.append, "step", step=1)
    assert (tmp_path / "run" / FILE).read_bytes() == before


# ---- the seal


def test_a_seal_says_how_often_the_run_was_tried(tmp_path):
    record = new_record(tmp_path / "run")
    for number in (1, 2):
        record.append("attempt", number=number)
    record.append("attempts")
    record.append("finished")
    data = (tmp_path / "run" / FILE).read_bytes()
    assert record.sealed() == {"lines": 5, "bytes": len(data), "sha": parted(data.splitlines(True)[-1])[1], "attempts": 2}


def test_attempts_before_a_resume_count_in_the_seal_too(tmp_path):
    record = new_record(tmp_path / "run")
    record.append("attempt", step=5)
    record.resumed(-1)
    record.append("attempt", step=0)
    record.append("finished")
    assert record.sealed()["attempts"] == 2 and len(record.events("attempt")) == 1


def test_a_record_that_goes_on_after_its_end_is_not_sealed(tmp_path):
    record = old_record(tmp_path / "run", {"event": "finished"}, {"event": "note"})
    assert said(record.seal) == f"the run in {tmp_path / 'run'} is not finished: its record cannot be sealed"
    assert record.sealed() is None and not (tmp_path / "run" / SEAL).exists()


def test_an_old_record_is_sealed_by_its_bytes(tmp_path):
    record = old_record(tmp_path / "run", {"event": "attempt"}, {"event": "finished"})
    record.seal()
    data = old_lines({"event": "attempt"}, {"event": "finished"})
    found = record.sealed()
    assert (found["lines"], found["bytes"], found["attempts"]) == (3, len(data), 1)
    (tmp_path / "run" / FILE).write_bytes(data.replace(b'"attempt"', b'"attempT"'))
    assert said(record.events).endswith("was changed after it was finished")


def test_a_seal_that_is_there_is_left_as_it_is(tmp_path):
    record = new_record(tmp_path / "run")
    record.append("finished")
    path = tmp_path / "run" / SEAL
    path.write_text(json.dumps(json.loads(path.read_text()) | {"more": 1}))
    before = path.read_bytes()
    record.seal()
    assert path.read_bytes() == before


def test_a_seal_that_cannot_be_read_is_an_error_and_not_none(tmp_path):
    record = new_record(tmp_path / "run")
    (tmp_path / "run" / SEAL).mkdir()
    wanted = f"cannot read {tmp_path / 'run' / SEAL}: Is a directory"
    assert said(record.sealed) == wanted == said(record.events) == said(RunRecord.open, tmp_path / "run")


@pytest.mark.parametrize("text", ["", "null", "[]", '{"lines": 1, "bytes": 1, "sha": 5}'])
def test_what_is_no_seal_is_damaged_and_named(tmp_path, text):
    record = new_record(tmp_path / "run")
    (tmp_path / "run" / SEAL).write_text(text)
    assert said(record.sealed) == f"{tmp_path / 'run' / SEAL} is damaged: it is no seal"


def test_without_a_seal_there_is_none(tmp_path):
    assert new_record(tmp_path / "run").sealed() is None


def test_a_seal_beside_a_record_that_was_begun_anew_is_found(tmp_path):
    record = new_record(tmp_path / "run")
    record.append("finished")
    seal = (tmp_path / "run" / SEAL).read_bytes()
    other = new_record(tmp_path / "other")
    (tmp_path / "other" / SEAL).write_bytes(seal)
    assert "was truncated: it ends after line 1 of 2" in said(other.events)


# ---- reading


def test_a_resume_voids_what_is_later_than_its_step_whatever_its_kind(tmp_path):
    record = new_record(tmp_path / "run")
    for kind, step in (("step", 1), ("evaluation", 2), ("step", 3), ("warning", 4)):
        record.append(kind, step=step)
    record.append("note")
    record.resumed(2)
    record.append("step", step=3)
    record.resumed(3)
    found = [(e["event"], e.get("step")) for e in record.events()]
    assert found == [
        ("run", None), ("step", 1), ("evaluation", 2), ("note", None), ("resumed", 2), ("step", 3), ("resumed", 3),
    ]  # fmt: skip
    record.resumed(0)
    assert [(e["event"], e.get("step")) for e in record.events()] == [("run", None), ("note", None), ("resumed", 0)]
    assert record.events("step") == []


def test_events_of_a_kind_that_did_not_happen_are_none(tmp_path):
    record = new_record(tmp_path / "run")
    assert record.events("step") == [] and record.events("run", "step") == [record.head]


def test_a_run_that_ended_twice_in_an_old_record_ended_the_last_time(tmp_path):
    record = old_record(tmp_path / "run", {"event": "finished", "score": 1}, {"event": "finished", "score": 2})
    assert record.finished()["score"] == 2


# ---- one process at a time


def test_the_lock_is_given_back_after_an_error(tmp_path):
    record = new_record(tmp_path / "run")
    with pytest.raises(KeyError), record.alone():
        assert record.busy()
        raise KeyError
    assert not record.busy()
    with RunRecord.open(tmp_path / "run").alone():
        assert record.busy()


def test_who_comes_second_is_told_where_somebody_works(tmp_path, monkeypatch):
    record = new_record(tmp_path / "run")
    monkeypatch.setattr("shaketable.records.record._PATIENCE", 0.0)
    with record.alone():
        other = RunRecord.open(tmp_path / "run")
        with pytest.raises(ShaketableError) as refused, other.alone():
            raise AssertionError("two were let in")
        assert str(refused.value) == f"another process is working on the run in {tmp_path / 'run'}"
        assert record.busy()


# ---- files and names


def test_what_is_put_in_place_is_utf_8_and_replaces_what_was_there(tmp_path):
    path = tmp_path / "seal"
    path.write_text("before, and longer than what comes")
    put_in_place(path, "é\n")
    assert path.read_bytes() == b"\xc3\xa9\n" and [p.name for p in tmp_path.iterdir()] == ["seal"]


def test_a_new_name_has_the_time_and_then_a_number_from_two_on(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: form)
    names = []
    for _ in range(3):
        folder = unique_folder(tmp_path, "train-qwen2.5")
        folder.mkdir()
        names.append(folder.name)
    stem = "train-qwen2.5-%Y%m%d-%H%M%S"
    assert names == [stem, f"{stem}-2", f"{stem}-3"]
    assert unique_folder(tmp_path / "none", "x") == tmp_path / "none" / "x-%Y%m%d-%H%M%S"


def test_a_new_name_is_not_that_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    (tmp_path / "x-now").touch()
    assert unique_folder(tmp_path, "x").name == "x-now-2"
