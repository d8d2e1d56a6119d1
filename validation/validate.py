"""Validate Shaketable on every architecture, by attacks and by simulated studies, and write docs/validation.md (`make
validate`).

    python validation/validate.py [--sample N] [--only zoo|statistics|attacks] [--name TEXT] [--again] [--out FILE]

`--only attacks --name kills` runs the suites of attacks whose names have that text; whatever else the page has stays, each part
with the date of its own.

All of it takes about half an hour on one core, which is why a row is written to docs/validation.json as soon as it is
there: a run that was stopped goes on where it was, as long as the package, the checks and the versions are the same. A row
during which the process died is a failure, and is not tried again without `--again`.

`--sample N` asks N rows of the zoo, drawn with a seed that changes with the date, and writes nothing: that is what CI runs.
It exits with 1 when a row fails that is not among the failures that docs/validation.json knows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "validation.json"
PARTS = ("zoo", "statistics", "attacks")
DIED = "the process died during this row"


class Results:
    """What was found so far, on disk after every row."""

    def __init__(self, path: Path | None, again: bool, only: str | None = None) -> None:
        self.path = path
        known = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
        same = known.get("versions") == _versions() and known.get("digest") == _digest() and not again
        same = same or (bool(known) and only == "attacks")  # they say nothing of the zoo: its rows stay those of their own date
        self.body: dict[str, Any] = known if same else {"versions": _versions(), "digest": _digest(), "zoo": {}}
        if only is not None and "attacks" in known:  # each of them has a date of its own
            self.body["attacks"] = known["attacks"]
        if (last := self.body.pop("running", None)) is not None and last not in self.body["zoo"]:
            name, dtype, attention = last.split("|")
            row = {"name": name, "kind": name, "dtype": dtype, "attention": attention, "refused": None, "fails": [DIED]}
            self.body["zoo"][last] = row | {"counts": {}, "locate": {}, "planted": None, "seconds": 0.0}

    def save(self, **more: Any) -> None:
        """Write, with what is new."""
        self.body.setdefault("date", time.strftime("%Y-%m-%d"))
        self.body |= ({} if set(more) == {"attacks"} else {"date": time.strftime("%Y-%m-%d")}) | more
        if self.path is not None:
            draft = self.path.with_suffix(".draft")
            draft.write_text(_lines(self.body) + "\n", encoding="utf-8")
            draft.replace(self.path)


def _lines(body: dict[str, Any]) -> str:
    """JSON with one row of the zoo a line."""
    rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(row, ensure_ascii=False)}" for key, row in body["zoo"].items())
    rest = json.dumps({k: v for k, v in body.items() if k != "zoo"}, indent=1, ensure_ascii=False)
    return f'{rest[:-2]},\n "zoo": {{\n{rows}\n}}\n}}'


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "numpy", "scipy")
    return {"python": platform.python_version(), "cpu": platform.machine()} | {name: version(name) for name in names}


def _digest() -> str:
    """Of the package and of what is asked of it."""
    own = [p for p in Path(__file__).parent.glob("*.py") if p.name not in ("page.py", "validate.py", "attacks.py")]
    files = sorted([*(ROOT / "src").rglob("*.py"), *own])
    return hashlib.blake2b(b"".join(f.read_bytes() for f in files), digest_size=8).hexdigest()


def cases() -> list[tuple[str, Any, Any, str]]:
    """Every row of the zoo: its key, and what is built."""
    import torch

    from zoo import animals

    every = [(a, d, w) for a in animals() for d in (torch.float32, torch.bfloat16) for w in ("sdpa", "eager")]
    return [(f"{a.name}|{str(d).removeprefix('torch.')}|{w}", a, d, w) for a, d, w in every]


def run_zoo(results: Results, chosen: list[tuple[str, Any, Any, str]]) -> None:
    """Ask what is not known yet."""
    import torch
    import transformers

    from checks import check

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    missing = [case for case in chosen if case[0] not in results.body["zoo"]]
    start = time.monotonic()
    for i, (key, animal, dtype, attention) in enumerate(missing):
        results.save(running=key)
        row = check(animal, dtype, attention)
        results.body.pop("running")
        results.body["zoo"][key] = row
        results.save()
        left = (time.monotonic() - start) / (i + 1) * (len(missing) - i - 1)
        print(f"{i + 1}/{len(missing)} {key}: {_said(row)} ({left / 60:.0f} min left)", flush=True)


def _said(row: dict[str, Any]) -> str:
    if row["refused"]:
        return f"refused, {row['refused'][:80]}"
    return f"FAILS, {row['fails'][0][:120]}" if row["fails"] else "passes"


def sample(n: int, out: Path) -> int:
    """Some rows for CI: exit code."""
    known = json.loads(out.read_text(encoding="utf-8"))["zoo"] if out.exists() else {}
    results, every = Results(None, again=False), cases()
    run_zoo(results, random.Random(time.strftime("%Y-%m-%d")).sample(every, min(n, len(every))))
    new = [key for key, row in results.body["zoo"].items() if row["fails"] and not known.get(key, {"fails": []})["fails"]]
    for key in new:
        print(f"{key}: {'; '.join(results.body['zoo'][key]['fails'])}", file=sys.stderr)
    return int(bool(new))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--name", default="", help="rows of the zoo, or suites, whose name has this text")
    parser.add_argument("--again", action="store_true", help="forget what is known")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    sys.path[:0] = [str(Path(__file__).parent)]
    if given.sample is not None:
        sys.exit(sample(given.sample, given.out))
    results = Results(given.out, given.again, given.only)
    if given.only in (None, "statistics") and "statistics" not in results.body:
        from simulated import simulate

        print("simulated studies", flush=True)
        results.save(statistics=simulate())
    if given.only in (None, "zoo"):
        run_zoo(results, [case for case in cases() if given.name in case[0]])
    if given.only in (None, "attacks"):
        from attacks import attack

        before = {row["name"]: row for row in results.body.get("attacks", []) if given.name not in row["name"]}
        rows = before | {row["name"]: row for row in attack(given.name)}
        results.save(attacks=[rows[name] for name in sorted(rows)])
    from page import page

    given.out.with_suffix(".md").write_text(page(results.body), encoding="utf-8")
    fails = [r for part in PARTS for r in _rows(results.body.get(part, [])) if r["fails"]]
    print(f"{len(fails)} rows fail; {given.out.with_suffix('.md').name}")


def _rows(part: Any) -> list[dict[str, Any]]:
    return list(part.values()) if isinstance(part, dict) else part


if __name__ == "__main__":
    main()
