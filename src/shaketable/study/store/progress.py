"""How far a study is, and what lies in a store: from heads and tails of records, fast for thousands of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from shaketable.io.locks import is_held
from shaketable.study.cells import cells_of
from shaketable.study.config import StudyConfig
from shaketable.study.store.store import Store

SCHEMA = "shaketable.status/1"
SHOWN = ("status", "step", "steps", "attempts", "error", "updated", "id", "verified")


def progress(study: StudyConfig, folder: Path) -> dict[str, Any]:
    """Every run that the study asks for, with its status; and what lies there that it does not ask for."""
    known = {summary.name: summary.to_dict() for summary in Store(folder).summaries()}
    rows = []
    for cell in cells_of(study):
        found = known.pop(cell.name, None) or {"status": "missing"}
        if found["status"] != "missing" and found.get("key") not in (None, cell.key):
            found = {"status": "damaged", "error": "it holds another run than its name says"}
        if found["status"] == "missing" and is_held(folder / "runs", cell.name):
            found = {"status": "running"}
        place = {"name": cell.name, "kind": cell.kind, "arm": cell.arm, "seed": cell.seed, "title": cell.title}
        rows.append({**place, **{name: found.get(name) for name in SHOWN}})
    counts = dict(Counter(str(row["status"]) for row in rows))
    return {
        "schema": SCHEMA,
        "study": study.study,
        "folder": str(folder),
        "complete": counts.get("done", 0) == len(rows),
        "counts": counts,
        "runs": rows,
        "others": sorted(known),
    }


def listed(store: Path) -> dict[str, Any]:
    """The studies of a store and every run in it."""
    runs, studies = Store(store).all()
    facts = {"studies": [s.to_dict() for s in studies], "runs": [r.to_dict() for r in runs]}
    return {"schema": SCHEMA, "store": str(store), **facts}
