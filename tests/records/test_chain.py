"""The chain, line by line: every kind of line at every place of a record, and files that take a few bytes at a time."""

import io
import json
from pathlib import Path

import pytest

from shaketable.errors import ShaketableError
from shaketable.records.chain import (
    SCHEMA,
    UNCHAINED,
    ChainReader,
    is_event,
    is_seal,
    last_lines,
    link,
    linked,
    object_of,
    parted,
)
from shaketable.records.record import FILE, SEAL, RunRecord

HEADS = {schema: {"schema": schema, "event": "run", "verb": "train"} for schema in (SCHEMA, UNCHAINED, "other/9")}
NO_EVENTS = [
    b"",
    b"[]",
    b"3",
    b'"event"',
    b"{",
    b'{"step": 1}',
    b'{"event": 3}',
    b'{"event": "a", "step": "1"}',
    b'{"event": "resumed"}',
]
EVENTS = [{"event": "step", "step": 1}, {"event": "resumed", "step": 0}, {"event": "note", "step": None, "text": "é"}]


def lines_of(schema, bodies):
    """A record whose chain is right, whatever is in its lines."""
    sha, found = "", []
    for body in bodies:
        sha = link(sha, body)
        found.append(linked(body, sha) if schema == SCHEMA and body.endswith(b"}") else body + b"\n")
    return found


def body(event):
    return json.dumps(event, ensure_ascii=False).encode()


@pytest.mark.parametrize("schema", HEADS)
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("line", NO_EVENTS)
def test_what_is_no_event_is_refused_at_every_place_behind_the_head(schema, at, line):
    bodies = [body(HEADS[schema]), *map(body, EVENTS)]
    bodies[at:at] = [line]
    reader, lines = ChainReader(Path("r.jsonl")), lines_of(schema, bodies)
    for good in lines[:at]:
        reader.take(good)
    with pytest.raises(ShaketableError, match=f"line {at + 1} is no event$"):
        reader.take(lines[at])


@pytest.mark.parametrize("schema", HEADS)
def test_events_come_back_as_they_were_and_the_reader_knows_how_far_it_is(schema):
    bodies = [body(HEADS[schema]), *map(body, EVENTS)]
    reader, lines = ChainReader(Path("r.jsonl")), lines_of(schema, bodies)
    for n, line in enumerate(lines):
        assert reader.take(line) == [HEADS[schema], *EVENTS][n]
        assert (reader.lines, reader.size) == (n + 1, sum(map(len, lines[: n + 1])))
    assert reader.chained is (schema == SCHEMA)
    sha = ""
    for one in bodies:
        sha = link(sha, one)
    assert reader.sha == sha


def test_a_head_that_is_no_event_is_refused_unless_it_is_of_another_schema():
    for schema in (SCHEMA, UNCHAINED):
        with pytest.raises(ShaketableError, match="line 1 is no event"):
            ChainReader(Path("r")).take(lines_of(schema, [body({"schema": schema})])[0])
    assert ChainReader(Path("r")).take(b'{"schema": "other/9"}\n') == {"schema": "other/9"}
    assert ChainReader(Path("r")).take(b"{}\n") == {}


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("name", ["lines", "bytes", "sha"])
def test_a_seal_must_agree_in_everything(name, more):
    reader = ChainReader(Path("r"), lines=4, size=100, sha="a" * 16)
    seal = {"lines": 4, "bytes": 100, "sha": "a" * 16, "attempts": 1}
    seal[name] = seal[name] + more if name != "sha" else "b" * 16 if more else seal["sha"]
    if not more:
        reader.check(seal)
        return
    why = "was truncated: it ends after line 4 of 4" if name == "bytes" and more > 0 else "was changed after it was finished"
    with pytest.raises(ShaketableError, match=why):
        reader.check(seal)


@pytest.mark.parametrize("torn", [0, 1, 10, 11])
def test_torn_bytes_count_as_what_is_there(torn):
    reader, seal = ChainReader(Path("r"), 4, 90, "a" * 16), {"lines": 4, "bytes": 100, "sha": "a" * 16}
    if torn == 10:
        reader.check(seal, torn)
        return
    with pytest.raises(ShaketableError, match="truncated" if torn < 10 else "changed after"):
        reader.check(seal, torn)


def test_a_seal_has_all_of_its_parts_and_each_of_its_kind():
    seal = {"lines": 1, "bytes": 2, "sha": "x", "attempts": None}
    assert is_seal(seal) and is_seal(seal | {"attempts": 3, "more": 1})
    for name in ("lines", "bytes", "sha"):
        assert not is_seal({k: v for k, v in seal.items() if k != name}) and not is_seal(seal | {name: None})
    assert not is_seal(seal | {"sha": 3}) and not is_seal(seal | {"lines": "1"}) and not is_seal(seal | {"attempts": "1"})


def test_an_event_has_a_kind_and_who_goes_on_a_step():
    assert is_event({"event": "a"}) and is_event({"event": "a", "step": 3}) and is_event({"event": "resumed", "step": 0})
    for wrong in ({}, {"event": None}, {"event": "a", "step": 1.5}, {"event": "resumed"}, {"event": "resumed", "step": "1"}):
        assert not is_event(wrong), wrong


def test_a_link_is_told_from_what_looks_like_one():
    line = linked(b'{"a": 1}', "0123456789abcdef")
    assert line == b'{"a": 1, "sha": "0123456789abcdef"}\n' and parted(line) == (b'{"a": 1}', "0123456789abcdef")
    for none in (
        b'{"a": 1, "sha": "0123456789ABCDEF"}\n',
        b'{"a": 1, "sha": "012"}\n',
        b'{"a": 1, "sha": "0123456789abcdef"} \n',
    ):
        assert parted(none) == (none[:-1], "")


@pytest.mark.parametrize("window", [1, 2, 5, 13, 64])
@pytest.mark.parametrize("torn", [b"", b"tor"])
def test_the_last_lines_are_whole_however_little_is_read(window, torn):
    lines = [b"one\n", b"three\n", b"\n", b"a longer line\n"]
    data = b"".join(lines) + torn
    found = last_lines(io.BytesIO(data), len(data), window)
    assert found and found == lines[-len(found) :]
    assert last_lines(io.BytesIO(b"only\n"), 5, window) == [b"only\n"] and last_lines(io.BytesIO(b""), 0, window) == []


def test_an_object_is_one_and_nothing_else_is():
    assert object_of(b'{"a": [1]}') == {"a": [1]}
    assert [object_of(text) for text in (b"[]", b"1", b"null", b"", b"{", b"[" * 100_000)] == [None] * 6


@pytest.mark.parametrize("most", [1, 7])
def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_all_of_them(tmp_path, monkeypatch, most):
    class Slow(io.FileIO):
        def write(self, data):
            return super().write(bytes(data)[:most])

    real = Path.open
    monkeypatch.setattr(Path, "open", lambda p, mode="r", *a, **k: Slow(p, "a") if mode == "ab" else real(p, mode, *a, **k))
    record = RunRecord.create(tmp_path / "run", "train", {}, {})
    record.append("step", step=1)
    record.append("finished", step=1)
    again = RunRecord.open(tmp_path / "run")
    assert [e["event"] for e in again.events()] == ["run", "step", "finished"] and again.sealed() == json.loads(
        (tmp_path / "run" / SEAL).read_text()
    )
    assert (tmp_path / "run" / FILE).read_bytes().count(b"\n") == again.sealed()["lines"] == 3
