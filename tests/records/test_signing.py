"""Signatures of records, against the library itself: what is signed, and what is told of a record that is not."""

import hashlib
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from shaketable.errors import ShaketableError
from shaketable.records.record import FILE
from shaketable.records.signing import SIGNATURE, private_key, problem, public_key, sha256_of, sign

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))


@pytest.fixture
def record(tmp_path):
    (tmp_path / FILE).write_bytes(b'{"event": "run"}\n')
    sign(tmp_path, KEY)
    return tmp_path


def told(folder):
    return json.loads((folder / SIGNATURE).read_text())


def written(folder, **changes):
    (folder / SIGNATURE).write_text(json.dumps(told(folder) | changes))


def pem(path, key, *, encryption=None):
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption()))
    return path


def public_pem(path, key):
    path.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


def test_a_signature_is_of_the_sha256_of_the_record_and_anybody_can_check_it(record):
    sha = hashlib.sha256(b'{"event": "run"}\n').hexdigest()
    assert (told(record)["sha256"], sha256_of(record)) == (sha, sha)
    theirs = Ed25519PublicKey.from_public_bytes(bytes.fromhex(told(record)["key"]))
    theirs.verify(bytes.fromhex(told(record)["signature"]), f"shaketable record sha256 {sha}".encode())
    assert told(record).keys() == {"sha256", "key", "signature"}


def test_a_record_that_is_signed_with_a_key_has_no_problem_with_it(record):
    assert problem(record, KEY.public_key()) is None


def test_another_key_and_a_changed_record_are_told(record):
    assert problem(record, OTHER.public_key()) == "it is signed with another key"
    (record / FILE).write_bytes(b'{"event": "other"}\n')
    assert problem(record, KEY.public_key()) == "it was changed after it was signed"


def test_a_record_without_a_signature_or_with_one_that_cannot_be_read_is_told(record):
    (record / SIGNATURE).unlink()
    assert problem(record, KEY.public_key()) == "it is not signed"
    (record / SIGNATURE).mkdir()
    assert problem(record, KEY.public_key()) == "cannot read record.sig: Is a directory"


@pytest.mark.parametrize("text", ["", "[]", "{}", "no json", '{"key": 5}'])
def test_what_is_no_signature_is_damaged(record, text):
    (record / SIGNATURE).write_text(text)
    assert problem(record, KEY.public_key()) == "record.sig is damaged"


@pytest.mark.parametrize("signature", ["00" * 64, "", "no hex", None])
def test_a_signature_that_somebody_made_up_does_not_fit(record, signature):
    written(record, signature=signature)
    assert problem(record, KEY.public_key()) == "its signature does not fit"


def test_a_signature_of_the_bare_hash_is_none_of_a_record(record):
    """Signed for something else, by the same key."""
    written(record, signature=KEY.sign(told(record)["sha256"].encode()).hex())
    assert problem(record, KEY.public_key()) == "its signature does not fit"


def test_keys_are_read_from_pem(tmp_path):
    assert private_key(pem(tmp_path / "key", KEY)).private_bytes_raw() == bytes(range(32))
    assert public_key(public_pem(tmp_path / "pub", KEY)).public_bytes_raw() == KEY.public_key().public_bytes_raw()


@pytest.mark.parametrize(("read", "word"), [(private_key, "private"), (public_key, "public")])
def test_a_key_that_is_not_there_is_told_in_one_line(tmp_path, read, word):
    with pytest.raises(ShaketableError) as refused:
        read(tmp_path / "none")
    assert str(refused.value) == f"cannot read the {word} key {tmp_path / 'none'}: No such file or directory"


def test_keys_of_another_kind_are_refused_with_the_command_that_makes_one(tmp_path):
    private, public = pem(tmp_path / "key", KEY), public_pem(tmp_path / "pub", KEY)
    locked = pem(tmp_path / "locked", KEY, encryption=BestAvailableEncryption(b"word"))
    other = pem(tmp_path / "other", X25519PrivateKey.generate())
    (tmp_path / "text").write_text("no key")
    for path in (public, locked, other, tmp_path / "text"):
        with pytest.raises(ShaketableError) as refused:
            private_key(path)
        wanted = f"{path} is no private ed25519 key in PEM without a password; make one with: "
        assert str(refused.value) == wanted + f"openssl genpkey -algorithm ed25519 -out {path}"
    for path in (private, other, tmp_path / "text"):
        with pytest.raises(ShaketableError, match=r"is no public ed25519 key .*: openssl pkey -in KEY -pubout$"):
            public_key(path)
