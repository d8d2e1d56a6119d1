"""Whether the records of a store are what was written, and digests to compare.

The digest of a study is the SHA-256 of what `sha256sum` says of its records, so that anybody can take it without us:

    cd STORE/STUDY && find * -name record.jsonl | LC_ALL=C sort | xargs sha256sum | sha256sum

Published or signed when a study has ended, it makes every later change visible, also one with a new chain, and also a run that
was added, left out or done again. `asked` is the digest of the definition alone. It is known before the first run (`--dry-run`
prints it).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.records.record import FILE
from shaketable.study.config import StudyConfig
from shaketable.study.run_study import definitions, described
from shaketable.study.store import summaries

SCHEMA = "shaketable.verify/2"


def verify(root: Path) -> dict[str, Any]:
    """Every record of a store, or of a study's folder, with what is wrong with it; and the digests of its studies."""
    found = summaries(root)
    if not found:
        raise ShaketableError(f"there is no record in {root}")
    records = [
        {"path": one.path, "status": one.status, "problem": one.error if one.status == "damaged" else None} for one in found
    ]
    studies = [_study((root / one.path).parent, root) for one in found if one.defines]
    bad = sum(record["problem"] is not None for record in records)
    return {"schema": SCHEMA, "store": str(root), "records": records, "bad": bad, "studies": studies}


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
    lines = (f"{hashlib.sha256((folder / path).read_bytes()).hexdigest()}  {path}\n" for path in paths)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def asked_digest(study: StudyConfig | dict[str, Any]) -> str:
    """Of what a study asks for, as its definition holds it."""
    content = described(study) if isinstance(study, StudyConfig) else study
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
