"""Rare cases beside the record itself: git that hangs, accelerators, keys of unknown kinds, weights of every type."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from shaketable.errors import ShaketableError
from shaketable.faults.cpu import native
from shaketable.records import environment, signing
from shaketable.records.record import FILE
from shaketable.records.weight_hash import digest, weights_hash

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))

# ---- what a run was done with


@pytest.fixture
def no_git(monkeypatch):
    monkeypatch.setattr(environment, "_git", lambda folder, *words: None)


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("git", 5), FileNotFoundError("git"), PermissionError("git")])
def test_git_that_hangs_or_cannot_be_started_says_nothing(monkeypatch, error):
    def run(*args, **kwargs):
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert environment._git(None, "status") is None
    assert environment._revision(None) == {"revision": None, "dirty": None}


def test_git_is_waited_for_some_seconds_and_its_output_is_kept_off_the_screen(monkeypatch):
    asked = {}

    def run(command, **how):
        asked.update(how, command=command)
        return subprocess.CompletedProcess(command, 0, stdout="  abc\n", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert environment._git(Path("/x"), "rev-parse", "HEAD") == "abc"
    assert asked["command"] == ["git", "rev-parse", "HEAD"] and asked["cwd"] == Path("/x")
    assert 1 <= asked["timeout"] <= 30 and asked["capture_output"] is True


def test_what_git_says_in_no_unicode_is_read_all_the_same(tmp_path):
    (tmp_path / ".git").mkdir()
    found = environment._git(tmp_path, "-c", "alias.here=!printf 'a\\377b'", "--git-dir=.", "here")
    assert found == "a\ufffdb"


def test_the_commit_is_asked_for_and_then_whether_files_that_git_knows_differ(monkeypatch):
    asked = []
    monkeypatch.setattr(environment, "_git", lambda folder, *words: asked.append((folder, words)) or "abc")
    assert environment._revision(Path("/x")) == {"revision": "abc", "dirty": True}
    assert asked == [
        (Path("/x"), ("rev-parse", "--verify", "HEAD")),
        (Path("/x"), ("--no-optional-locks", "status", "--porcelain", "--untracked-files=no")),
    ]


def test_outside_of_a_repository_nothing_more_is_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(environment, "_git", lambda folder, *words: asked.append(words))
    environment._revision(None)
    assert len(asked) == 1


@pytest.mark.parametrize("device", ["cuda", "npu:3", "mps"])
def test_an_accelerator_is_named_where_there_is_one(monkeypatch, no_git, device):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    assert environment.gather()["device"] == device
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert environment.gather()["device"] == "cpu"


@pytest.mark.parametrize(("found", "name"), [(None, "none"), ("/usr/bin/g++-12", "g++-12"), ("cc", "cc")])
def test_the_compiler_is_told_without_its_folder(monkeypatch, no_git, found, name):
    monkeypatch.setattr(native, "compiler", lambda: found)
    assert environment.gather()["compiler"] == name


def test_the_facts_go_into_json_and_the_revision_of_the_package_is_its_own(monkeypatch):
    monkeypatch.setattr(environment, "_revision", lambda folder: {"revision": f"of {folder}", "dirty": folder is None})
    facts = environment.gather()
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["revision"], facts["dirty"]) == ("of None", True)
    assert facts["shaketable revision"].endswith("/shaketable")


# ---- signatures


@pytest.fixture
def record(tmp_path):
    (tmp_path / FILE).write_bytes(b"a record\n")
    return tmp_path


def test_without_the_library_the_way_to_it_is_told(monkeypatch):
    assert signing.need_library() is None
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ShaketableError) as refused:
        signing.need_library()
    assert str(refused.value) == "signatures need the cryptography library: pip install 'shaketable[sign]'"


@pytest.mark.parametrize("word", ["private", "public"])
@pytest.mark.parametrize("error", [UnsupportedAlgorithm("x"), ValueError("x"), TypeError("x")])
def test_a_key_that_the_library_cannot_read_is_no_key(tmp_path, monkeypatch, word, error):
    def load(data, **how):
        raise error

    monkeypatch.setattr(serialization, f"load_pem_{word}_key", load)
    (tmp_path / "key").write_text("x")
    with pytest.raises(
        ShaketableError, match=rf"key is no {word} ed25519 key in PEM without a password; make one with: openssl"
    ):
        getattr(signing, f"{word}_key")(tmp_path / "key")


def test_a_record_that_is_signed_again_has_the_last_signature_alone(record):
    signing.sign(record, KEY)
    (record / FILE).write_bytes(b"another record\n")
    signing.sign(record, OTHER)
    assert signing.problem(record, OTHER.public_key()) is None
    assert signing.problem(record, KEY.public_key()) == "it is signed with another key"
    assert sorted(p.name for p in record.iterdir()) == [FILE, "record.sig"]


def test_another_key_is_told_before_a_change(record):
    signing.sign(record, KEY)
    (record / FILE).write_bytes(b"changed\n")
    assert signing.problem(record, OTHER.public_key()) == "it is signed with another key"


def test_a_change_is_told_before_a_signature_that_does_not_fit(record):
    signing.sign(record, KEY)
    path = record / "record.sig"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"signature": "00" * 64}))
    (record / FILE).write_bytes(b"changed\n")
    assert signing.problem(record, KEY.public_key()) == "it was changed after it was signed"


def test_a_hash_that_was_changed_with_the_record_does_not_help(record):
    signing.sign(record, KEY)
    (record / FILE).write_bytes(b"changed\n")
    path = record / "record.sig"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sha256": hashlib.sha256(b"changed\n").hexdigest()}))
    assert signing.problem(record, KEY.public_key()) == "its signature does not fit"


def test_a_signature_file_is_one_line_of_json(record):
    signing.sign(record, KEY)
    text = (record / "record.sig").read_text()
    assert text.endswith("}\n") and text.count("\n") == 1
    assert json.loads(text)["key"] == KEY.public_key().public_bytes_raw().hex()


# ---- which weights these are


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2), (torch.int64, 8), (torch.uint8, 1), (torch.bool, 1)],
)
def test_weights_of_every_type_are_hashed_by_their_own_bytes(dtype, size):
    tensor = torch.tensor([1, 0, 1]).to(dtype)
    content = tensor.view(torch.uint8).numpy().tobytes()
    assert len(content) == 3 * size
    assert digest("", {"w": tensor}) == hashlib.sha256(f"\nw {dtype} (3,)\n".encode() + content).hexdigest()


def test_a_tensor_of_nothing_and_a_number_alone_count_by_name_and_shape():
    assert digest("", {"w": torch.zeros(0, 3)}) == hashlib.sha256(b"\nw torch.float32 (0, 3)\n").hexdigest()
    assert digest("t", {"w": torch.tensor(0.0)}) == hashlib.sha256(b"t\nw torch.float32 ()\n" + bytes(4)).hexdigest()
    assert digest("é", {}) == hashlib.sha256("é".encode()).hexdigest()


def test_minus_zero_and_a_part_of_a_tensor_are_what_their_bits_are():
    assert digest("", {"w": torch.tensor([0.0])}) != digest("", {"w": torch.tensor([-0.0])})
    whole = torch.arange(12.0).reshape(3, 4)
    assert digest("", {"w": whole[:, 1]}) == digest("", {"w": torch.tensor([1.0, 5.0, 9.0])})
    assert digest("", {"w": whole[1:]}) == digest("", {"w": torch.arange(4.0, 12.0).reshape(2, 4)})


def test_names_are_in_their_order_whatever_that_of_the_dict():
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert digest("", {"a": a, "b": b}) == digest("", {"b": b, "a": a}) != digest("", {"a": b, "b": a})


def test_weights_that_two_parts_share_are_hashed_once():
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    assert weights_hash(model) == digest("", {"embed.weight": model["embed"].weight.detach()})
    assert weights_hash(nn.Identity()) == hashlib.sha256(b"").hexdigest()
