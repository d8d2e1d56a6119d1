"""Plant bugs one at a time, and see which of them no test catches (`make mutants`).

    python scripts/mutants.py [LIST …] [--only TEXT] [--survivors] [--again] [--jobs 2]
    python scripts/mutants.py --try FILE        bugs of a list that is not kept, and neither is what comes of it

A bug is one line of `src/shaketable` that is replaced by another, in a copy, and the tests that ought to notice. The
lists are in scripts/mutants, in the order in which they were made: the bugs that nothing caught got tests, so the rates today
show what those tests bought, and the rates when they were first planted what was missing. A line that the package has no more
is not planted; what was found while it was there stays.

A bug is caught when a test fails that passes without it. Of the older lists only the tests that the list names are run. A row
that names none gets the suite: every quick test that executes the line (`scripts/line_tests.py` records which do; that takes
half an hour, once), the quickest first, until one fails or a minute of processor time is over. The test that has failed is run
alone with the bug, where it must fail again, and without it, where it must pass. Once a test is known to catch a bug, that
test is asked first.

Results are kept in benchmarks/mutants.json after every bug, and are used again as long as the changed file, the line and
the tests are what they were; so a run that was stopped goes on where it was. Rejected: mutmut, which makes thousands of
mutants here (a run would take days on the two cores of CI), most of them in messages and defaults; a list that a person
wrote is short and has the bugs that people write.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from line_tests import Recorded
from mutant_copy import FAILED, LATE, NOT_COLLECTED, PASSED, Copy

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "scripts" / "mutants"
NAMES = (
    "first",
    "second",
    "fresh",
    "third_fresh",
    "fourth_fresh",
    "fifth_fresh",
    "sixth_fresh",
    "seventh_by_rule",
    "eighth_fresh",
    "ninth_by_rule",
    "tenth_by_rule",
    "eleventh_fresh",
    "twelfth_fresh",
)
RESULTS = ROOT / "benchmarks" / "mutants.json"
PAGE = RESULTS.with_suffix(".md")
PATIENCE = 300
"""Seconds of processor time after which tests that a list names count as failed: a bug may well be an endless loop."""
LIMIT = 60
"""Seconds of processor time for tests that execute a line; those that have not failed by then count as passed."""
FEW = 300
"""So many are asked first, and have a minute of their own: to collect thousands takes longer than to run these."""


@dataclass(frozen=True)
class Mutant:
    """One bug."""

    list: str
    file: str
    """Below src/shaketable."""
    old: str
    """A line, or a part of one, that is there exactly once."""
    new: str
    tests: tuple[str, ...]
    """Files below tests, or tests in them (`file::name`)."""
    note: str = ""
    is_drawn: bool = False
    """Whether the line was drawn by `scripts/mutant_sample.py` and nobody chose its tests."""

    @property
    def room(self) -> str:
        """The folder of the package that it is in."""
        return self.file.split("/")[0].removesuffix(".py")

    @property
    def clean(self) -> str:
        """The file without the bug; nothing when there is no such file any more."""
        path = ROOT / "src" / "shaketable" / self.file
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def is_there(self) -> bool:
        """Whether the line is still in the package, once."""
        return self.clean.count(self.old) == 1

    def text(self) -> str:
        """The file with the bug in it."""
        return self.clean.replace(self.old, self.new)

    @property
    def lines(self) -> tuple[int, int]:
        """The first and the last line of what is replaced, counted from one."""
        before, _, _ = self.clean.partition(self.old)
        return before.count("\n") + 1, before.count("\n") + 1 + self.old.rstrip().count("\n")

    def key(self, caught_by: str | None = None) -> str:
        """Names the bug, the file it is in, and the tests that are asked as they are now."""
        asked = self.tests or ((caught_by,) if caught_by else ())
        parts = [self.file, self.text(), *asked, *(_content(ROOT / "tests" / t.split("::")[0]) for t in asked)]
        return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).hexdigest()


def _content(path: Path) -> str:
    """Of a file or of all in a folder; of "collecting", which is no file, nothing."""
    if not path.exists():
        return ""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def read(name: str) -> list[Mutant]:
    """The bugs of one list; a line that the package has no more is left out by who plants them."""
    return read_file(LISTS / f"{name}.yaml")


def read_file(path: Path) -> list[Mutant]:
    """The bugs of any file; its name is that of the list."""
    data = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    return [
        Mutant(path.stem, **(row | {"tests": tuple(row.get("tests", "").split()), "is_drawn": "tests" not in row}))
        for row in data
    ]


class Results:
    """What is known of every bug, on disk."""

    def __init__(self) -> None:
        self.body: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": []}

    def of(self, mutant: Mutant) -> dict[str, Any] | None:
        """What was found of this bug the last time."""
        return next((r for r in self.body["rows"] if _name(r) == _name(vars(mutant))), None)

    def is_known(self, mutant: Mutant) -> bool:
        """Whether that was found in exactly this file by exactly these tests."""
        found = self.of(mutant)
        return found is not None and found["key"] == mutant.key(found["caught_by"])

    def survived(self, mutant: Mutant) -> bool:
        """Whether no test is known to catch it."""
        found = self.of(mutant)
        return found is None or found["caught_by"] is None

    def add(self, mutant: Mutant, by: str | None, seconds: float) -> None:
        """Keep what was found, in the place of what was known of the same bug before."""
        rows = [r for r in self.body["rows"] if _name(r) != _name(vars(mutant))]
        new = {"list": mutant.list, "file": mutant.file, "old": mutant.old, "new": mutant.new, "note": mutant.note}
        before = self.of(mutant)
        at_first = by is not None if before is None else before["caught_at_first"]
        found = {"key": mutant.key(by), "caught_by": by, "caught_at_first": at_first, "seconds": round(seconds, 1)}
        rows.append(new | found)
        self.body |= {"date": time.strftime("%Y-%m-%d"), "versions": _versions(), "rows": rows}
        self.save()

    def keep(self, known: list[Mutant]) -> None:
        """Forget bugs that are in no list any more, and put the others in the order of the lists."""
        order = [_name(vars(m)) for m in known]
        self.body["rows"] = sorted((r for r in self.body["rows"] if _name(r) in order), key=lambda r: order.index(_name(r)))
        self.save()

    def save(self) -> None:
        """Write the file."""
        RESULTS.write_text(json.dumps(self.body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class Unkept(Results):
    """Results that are only told."""

    def __init__(self) -> None:
        self.body = {"rows": []}

    def save(self) -> None:
        """Nothing is written."""


def _name(row: dict[str, Any]) -> tuple[str, ...]:
    return row["list"], row["file"], row["old"], row["new"]


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers", "pytest")}


def page(body: dict[str, Any]) -> str:
    """The results for people."""
    versions = ", ".join(f"{name} {number}" for name, number in body["versions"].items())
    lines = [
        "# Planted bugs", "",
        f"{body['date']}, {versions}; `make mutants` writes this page and says in `scripts/mutants.py` what is counted.", "",
        "| list | bugs | planted so far | caught when first planted | caught today |", "|---|---|---|---|---|",
    ]  # fmt: skip
    names = list(dict.fromkeys(r["list"] for r in body["rows"]))
    for name in names:
        rows = [r for r in body["rows"] if r["list"] == name]
        caught = sum(r["caught_by"] is not None for r in rows)
        first = sum(r["caught_at_first"] for r in rows)
        whole = len(read(name)) if name in NAMES else len(rows)
        lines.append(f"| {name} | {whole} | {len(rows)} | {_share(first, len(rows))} | {_share(caught, len(rows))} |")
    for name in names:
        lines += ["", f"## {name}", "", *about(name), "| file | bug | caught by |", "|---|---|---|"]
        for r in (r for r in body["rows"] if r["list"] == name):
            lines.append(f"| {r['file']} | {_code(r['old'])} → {_code(r['new'])} | {r['caught_by'] or '**nothing**'} |")
    return "\n".join(lines) + "\n"


def about(name: str) -> list[str]:
    """How a list was made, as the lines at its head say."""
    path = LISTS / f"{name}.yaml"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    said = " ".join(line.removeprefix("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines))
    return [said, ""] if said else []


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.0f} %)"


def _code(text: str) -> str:
    shown = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return f"`{shown}`" if shown else "(deleted)"


def check(
    test: Callable[[list[str]], tuple[str, str]], mutants: list[Mutant], results: Results, say: Callable[[str], None]
) -> None:
    """The tests that are named are there and pass on the unchanged copy; asked once for every state of package and tests."""
    state = hashlib.blake2b(_content(ROOT / "src").encode(), digest_size=8)
    known = results.body.setdefault("clean", {})
    now = {t: state.hexdigest() + _short(t) for m in mutants if not m.is_drawn for t in m.tests}
    if unknown := sorted(t for t in now if known.get(t) != now[t]):
        say(f"the tests named, without a bug ({len(unknown)} files or tests)")
        code, said = test(unknown)
        if code != PASSED:
            raise SystemExit(f"tests fail without any bug planted: {said}")
        known |= {t: now[t] for t in unknown}


def _short(test: str) -> str:
    return hashlib.blake2b(_content(ROOT / "tests" / test.split("::")[0]).encode(), digest_size=8).hexdigest()


def _paths(tests: Iterable[str]) -> list[str]:
    return [f"tests/{t}" for t in tests]


def run(mutants: list[Mutant], results: Results, say: Callable[[str], None], jobs: int = 1) -> None:
    """Plant what is not known yet; every one of `jobs` processes does so in a copy of its own."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(jobs, initializer=_open, initargs=(folder,)) as pool:
        check(lambda tests: pool.submit(_pass, tests).result(), mutants, results, say)
        waiting = {pool.submit(_planted, m, (results.of(m) or {}).get("caught_by")): m for m in mutants}
        for i, done in enumerate(as_completed(waiting)):
            mutant, (by, how, seconds) = waiting[done], done.result()
            results.add(mutant, by, seconds)
            say(f"{i + 1}/{len(mutants)} {mutant.file}: {mutant.new.strip()}: {by or 'NOT CAUGHT'} ({how})")


def _open(folder: str) -> None:
    """In a process that plants: make its copy."""
    global copy
    copy = Copy(Path(folder) / str(os.getpid()))


def _pass(tests: list[str]) -> tuple[str, str]:
    return copy.test(_paths(tests), PATIENCE * len(tests))


def _planted(mutant: Mutant, known: str | None) -> tuple[str | None, str, float]:
    start = time.monotonic()
    return *plant(copy, mutant, known), time.monotonic() - start


def plant(copy: Copy, mutant: Mutant, known: str | None = None) -> tuple[str | None, str]:
    """The test that catches a bug, and what was asked; first the one that is known to."""
    copy.write(mutant.file, mutant.text())
    try:
        return _first_that_fails(copy, mutant, known) if mutant.is_drawn else _named(copy, mutant)
    finally:
        copy.write(mutant.file, mutant.clean)


def _named(copy: Copy, mutant: Mutant) -> tuple[str | None, str]:
    code, said = copy.test(_paths(mutant.tests), PATIENCE)
    if code == NOT_COLLECTED:
        raise SystemExit(f"{mutant.list}: {mutant.new!r} in {mutant.file} is no bug that a test could catch")
    said = "still running" if code == LATE else said.removeprefix("tests/")
    return (None if code == PASSED else said), "the tests named"


def _first_that_fails(copy: Copy, mutant: Mutant, known: str | None) -> tuple[str | None, str]:
    """Out of all that execute the line. One that fails only after others, or without the bug too, catches nothing."""
    if known is not None and _is_caught_by(copy, mutant, f"tests/{known}"):
        return known, "as before"
    tests = Recorded().tests_of(mutant.file, *mutant.lines)
    how, end = f"{len(tests)} tests execute it", time.monotonic() + 8 * LIMIT
    for part in (tests[:FEW], tests[FEW:]):
        while part and time.monotonic() < end:
            code, failed = copy.test(part, LIMIT)
            if code == NOT_COLLECTED:
                return _collecting(copy, mutant, part), how
            if code == LATE:
                return None, f"{how}; not all of them in {LIMIT} seconds"
            if code == PASSED:
                break
            if _is_caught_by(copy, mutant, failed):
                return failed.removeprefix("tests/"), how
            part = part[part.index(failed) + 1 :] if failed in part else []
    return None, how


def _collecting(copy: Copy, mutant: Mutant, tests: list[str]) -> str:
    """With the bug nothing can be collected, and without it all of the tests; else they were recorded under other names."""
    copy.write(mutant.file, mutant.clean)
    code, _ = copy.test(["--collect-only", *tests], LIMIT)
    if code != PASSED:
        raise SystemExit(f"tests that were recorded are gone: run scripts/line_tests.py again for those of {mutant.file}")
    return "collecting"


def _is_caught_by(copy: Copy, mutant: Mutant, test: str) -> bool:
    copy.write(mutant.file, mutant.text())
    with_bug, _ = copy.test([test], LIMIT)
    copy.write(mutant.file, mutant.clean)
    without, _ = copy.test([test], LIMIT)
    copy.write(mutant.file, mutant.text())
    return (with_bug, without) == (FAILED, PASSED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="*", help="first, fresh; all by default")
    parser.add_argument("--only", default="", help="bugs whose file or line has this text")
    parser.add_argument("--survivors", action="store_true", help="only those that no test is known to catch")
    parser.add_argument("--again", action="store_true", help="also those that are known")
    parser.add_argument("--least", type=float, help="exit 1 when a smaller share (0 to 1) of what was chosen is caught")
    parser.add_argument("--jobs", type=int, default=1, help="processes that plant bugs side by side")
    parser.add_argument("--try", dest="tried", type=Path, metavar="FILE", help="plant the bugs of this file, and keep nothing")
    given = parser.parse_args()
    if given.tried:
        mine = read_file(given.tried)
        for mutant in (m for m in mine if not m.is_there):
            print(f"not there, or more than once: {mutant.file}: {mutant.old.strip()}")
        run([m for m in mine if m.is_there], Unkept(), lambda line: print(line, flush=True), given.jobs)
        return
    listed = [m for name in NAMES for m in read(name)]
    every = [m for m in listed if m.is_there]
    chosen = [m for m in every if (not given.lists or m.list in given.lists) and given.only in f"{m.file} {m.old} {m.new}"]
    results = Results()
    unknown = [m for m in chosen if given.again or not results.is_known(m)]
    asked = [m for m in unknown if results.survived(m)] if given.survivors else unknown
    run(asked, results, lambda line: print(line, flush=True), given.jobs)
    results.keep(listed)
    PAGE.write_text(page(results.body), encoding="utf-8")
    caught = [m for m in chosen if not results.survived(m)]
    print(f"{len(caught)} of {len(chosen)} caught; {PAGE.relative_to(ROOT)}")
    if given.least is not None and len(caught) < given.least * len(chosen):
        sys.exit(1)


if __name__ == "__main__":
    main()
