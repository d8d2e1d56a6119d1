"""Checkpoints that a kill or a full disk cannot spoil."""

import errno
import json
import os

import pytest
from safetensors import SafetensorError

from shaketable.errors import ShaketableError
from shaketable.records.record import RunRecord
from shaketable.train import checkpoints
from shaketable.train.checkpoints import check, drop_old, hashes, newest, seal, sealed, writing


def checkpoint(out, step, whole=True):
    folder = out / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    if whole:
        seal(folder, {"step": step})
    return folder


def names(out):
    return sorted(p.name for p in out.iterdir())


@pytest.mark.attack("tampered records")
def test_only_what_the_record_knows_is_resumed_from(tmp_path):
    record = RunRecord.create(tmp_path / "run", "train", {}, {})
    first, second = checkpoint(record.folder, 2), checkpoint(record.folder, 4)
    assert newest(record) is None
    record.append("checkpoint", step=2, files=hashes(first))
    assert newest(record) == first
    record.append("checkpoint", step=4, files=hashes(second))
    assert newest(record) == second
    record.resumed(2)
    assert newest(record) == first, "what was done after that step is void"


@pytest.mark.parametrize("fate", ["changed", "removed", "put there"])
@pytest.mark.attack("tampered records")
def test_a_checkpoint_that_is_not_what_was_saved_is_one_line(tmp_path, fate):
    folder = checkpoint(tmp_path, 2)
    (folder / "deep").mkdir()
    (folder / "deep" / "state.pt").write_bytes(b"state")
    files = hashes(folder)
    check(folder, files)
    if fate == "put there":
        (folder / "deep" / "more.pt").write_bytes(b"")
    elif fate == "changed":
        (folder / "deep" / "state.pt").write_bytes(b"State")
    else:
        (folder / "deep" / "state.pt").unlink()
    with pytest.raises(ShaketableError, match=rf"checkpoint-2 is not what this run saved: deep/\w+.pt was {fate}"):
        check(folder, files)


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.attack("kills")
def test_a_kill_while_sealing_leaves_no_seal(tmp_path, monkeypatch, call):
    folder = checkpoint(tmp_path, 3, whole=False)

    def killed(*_):
        raise SystemExit

    monkeypatch.setattr(os, call, killed)
    if call == "replace":
        monkeypatch.setattr(checkpoints.Path, "replace", killed)
    with pytest.raises(SystemExit):
        seal(folder, {})
    assert sealed(tmp_path) == []


def test_every_file_is_on_disk_before_the_seal(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path, 3, whole=False)
    (folder / "optimizer.pt").write_bytes(b"state")
    synced, replace = set(), checkpoints.Path.replace

    def note(descriptor):
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))

    def check(self, target):
        assert synced == {"model.safetensors", "optimizer.pt", f".shaketable.json.{os.getpid()}"}
        assert json.loads(self.read_text()) == {"a": 1}
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(checkpoints.Path, "replace", check)
    seal(folder, {"a": 1})
    assert sealed(tmp_path) == [folder]


def test_the_two_newest_whole_ones_stay_and_what_was_cut_off_before_them_goes(tmp_path):
    for step in (1, 2, 3, 4, 5, 6):
        checkpoint(tmp_path, step, whole=step not in (2, 6))
    (tmp_path / "record.jsonl").touch()
    drop_old(tmp_path)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-5", "checkpoint-6", "record.jsonl"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device"),
        RuntimeError("PytorchStreamWriter failed\nNo space left on device"),
    ],
)
@pytest.mark.attack("full disks")
def test_a_full_disk_is_one_line_that_says_how_to_go_on(tmp_path, error):
    with (
        pytest.raises(ShaketableError, match=rf"cannot write checkpoint-2 in .*--resume {tmp_path}") as caught,
        writing("checkpoint-2", tmp_path),
    ):
        raise error
    assert "No space" in str(caught.value) or "PytorchStreamWriter" in str(caught.value)
    assert "\n" not in str(caught.value)
