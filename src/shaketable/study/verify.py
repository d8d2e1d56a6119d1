"""Whether the records of a store are what was written: every line of every one, their signatures, and digests to compare.

The digest of a study is the SHA-256 of what `sha256sum` says of its records, so that anybody can take it without us:

    cd STORE/STUDY && find * -name record.jsonl | LC_ALL=C sort | xargs sha256sum | sha256sum

Published when a study has ended, it makes every later change visible, also one with a new chain, and also a run that was added,
left out or done again. `asked` is the digest of the definition alone. It is known before the first run (`--dry-run` prints it).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaketable.errors import ShaketableError
from shaketable.records import signing
from shaketable.records.record import FILE, UNVERIFIED, RunRecord
from shaketable.study.config import StudyConfig
from shaketable.study.run_study import DEFINITION, definitions, described
from shaketable.study.store.store import Store, look

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SCHEMA = "shaketable.verify/1"


def verify(root: Path, key: Ed25519PublicKey | None = None) -> dict[str, Any]:
    """Every record of a store, or of a study's folder, with what is wrong with it; and the digests of its studies.

    Args:
        root: The store, or a study's folder.
        key: Every finished run, and every definition, must be signed with it.
    """
    records = [_checked(root, path, key) for path in Store(root).paths()]
    if not records:
        raise ShaketableError(f"there is no record in {root}")
    folders = [root / r["path"] for r in records if Path(r["path"]).name == DEFINITION]
    return {
        "schema": SCHEMA,
        "store": str(root),
        "signatures": key is not None,
        "records": records,
        "bad": sum(r["problem"] is not None for r in records),
        "studies": [_study(folder.parent, root) for folder in folders],
    }


def _checked(root: Path, path: str, key: Ed25519PublicKey | None) -> dict[str, Any]:
    folder = root / path
    facts = look(folder)
    signed = (folder / signing.SIGNATURE).is_file()
    return {"path": path, "status": facts["status"], "problem": _problem(folder, facts, key), "signed": signed}


def _problem(folder: Path, facts: dict[str, Any], key: Ed25519PublicKey | None) -> str | None:
    if facts["status"] == "partial" and "verb" not in facts:
        return None  # it has no first line yet
    try:
        record = RunRecord.open(folder)
    except ShaketableError as error:
        return str(error).replace(f"{folder}{os.sep}", "")
    if not record.verified:
        return UNVERIFIED
    is_whole = facts["status"] == "done" or folder.name == DEFINITION
    return signing.problem(folder, key) if key is not None and is_whole else None


def _study(folder: Path, root: Path) -> dict[str, Any]:
    try:
        asked = asked_digest(definitions(folder)[-1]["config"])
    except (ShaketableError, LookupError):
        asked = None
    name = os.path.relpath(folder, root)
    return {"study": folder.resolve().name if name == "." else name, "digest": digest(folder), "asked": asked}


def digest(folder: Path) -> str:
    """Of all records of a study, also those of a run within a run, in the order in which `find` and `sort` have them."""
    found = (os.path.relpath(file, folder) for file in folder.rglob(FILE) if file.is_file())
    paths = sorted((path for path in found if not path.startswith(".")), key=os.fsencode)
    lines = (f"{signing.sha256_of((folder / path).parent)}  {path}\n" for path in paths)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def asked_digest(study: StudyConfig | dict[str, Any]) -> str:
    """Of what a study asks for, as its definition holds it."""
    content = described(study) if isinstance(study, StudyConfig) else study
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sign_study(folder: Path, key: Ed25519PrivateKey) -> tuple[int, list[str]]:
    """Sign the definition and every finished run that is not signed; how many, and what is wrong with the others."""
    public, signed, wrong = key.public_key(), 0, []
    for path in Store(folder).paths():
        facts = look(folder / path)
        if facts["status"] != "done" and path != DEFINITION:
            continue
        bad = _problem(folder / path, facts, None)
        if bad is None and ((folder / path / signing.SIGNATURE).is_file() and path != DEFINITION):
            bad = signing.problem(folder / path, public)
        elif bad is None:
            signing.sign(folder / path, key)
            signed += 1
        wrong += [f"{path} was not signed: {bad}"] if bad is not None else []
    return signed, wrong
