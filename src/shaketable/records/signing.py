"""Signatures of records: ed25519, by the `cryptography` library (`pip install 'shaketable[sign]'`).

    openssl genpkey -algorithm ed25519 -out key.pem         the private key, for `study run --sign`
    openssl pkey -in key.pem -pubout -out key.pub           the public one, for `study verify --public-key`

The chain of a record finds quiet edits; whoever writes a whole new chain is found only by something that he cannot write. A
signature lies beside the record in `record.sig`, and is of the SHA-256 of the whole file. It says that the owner of the key had
this very record, and nothing about how it came to be. Keys are made by openssl: a command of ours would add nothing.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaketable.errors import ShaketableError
from shaketable.records.chain import object_of
from shaketable.records.record import FILE, put_in_place

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE = "record.sig"
_ABOUT = "shaketable record sha256 "
"""Goes before the hash, so that a signature made for something else is none of a record."""


def private_key(path: Path) -> Ed25519PrivateKey:
    """The key of a PEM file, to sign with."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return _key(path, Ed25519PrivateKey, "private")  # type: ignore[no-any-return]


def public_key(path: Path) -> Ed25519PublicKey:
    """The key of a PEM file, to check with."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return _key(path, Ed25519PublicKey, "public")  # type: ignore[no-any-return]


def need_library() -> None:
    """Raise in one line where the library is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ShaketableError("signatures need the cryptography library: pip install 'shaketable[sign]'") from None


def _key(path: Path, kind: type, word: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

    try:
        data = path.read_bytes()
        found = load_pem_private_key(data, password=None) if word == "private" else load_pem_public_key(data)
    except OSError as error:
        raise ShaketableError(f"cannot read the {word} key {path}: {error.strerror or error}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        found = None
    if not isinstance(found, kind):
        made = f"openssl genpkey -algorithm ed25519 -out {path}" if word == "private" else "openssl pkey -in KEY -pubout"
        raise ShaketableError(f"{path} is no {word} ed25519 key in PEM without a password; make one with: {made}")
    return found


def sha256_of(folder: Path) -> str:
    """The SHA-256 of a run's record."""
    with (folder / FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sign(folder: Path, key: Ed25519PrivateKey) -> None:
    """Put a signature beside a record."""
    sha = sha256_of(folder)
    facts = {"sha256": sha, "key": _hex(key.public_key()), "signature": key.sign(f"{_ABOUT}{sha}".encode()).hex()}
    put_in_place(folder / SIGNATURE, json.dumps(facts) + "\n")


def problem(folder: Path, key: Ed25519PublicKey) -> str | None:
    """Why a record is not signed with this key; None when it is."""
    from cryptography.exceptions import InvalidSignature

    try:
        found = object_of((folder / SIGNATURE).read_bytes()) or {}
    except FileNotFoundError:
        return "it is not signed"
    except OSError as error:
        return f"cannot read {SIGNATURE}: {error.strerror or error}"
    if found.get("key") != _hex(key):
        return "it is signed with another key" if isinstance(found.get("key"), str) else f"{SIGNATURE} is damaged"
    if found.get("sha256") != (sha := sha256_of(folder)):
        return "it was changed after it was signed"
    try:
        key.verify(bytes.fromhex(str(found.get("signature"))), f"{_ABOUT}{sha}".encode())
    except (ValueError, InvalidSignature):
        return "its signature does not fit"
    return None


def _hex(key: Ed25519PublicKey) -> str:
    return key.public_bytes_raw().hex()
