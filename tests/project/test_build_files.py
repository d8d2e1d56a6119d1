"""What a newcomer relies on before reading code: the lock file is complete, `make` says what it can do, CI is one script."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import ROOT


def needed():
    """Names of all that `.[dev]` brings, as far as it is installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    todo = [Requirement(line) for lines in (project["dependencies"], *extras.values()) for line in lines]
    found = set()
    while todo:
        asked = todo.pop()
        key = canonicalize_name(asked.name), frozenset(asked.extras)
        if key in found or key[0] == "shaketable":
            continue
        found.add(key)
        try:
            lines = requires(asked.name) or []
        except PackageNotFoundError:
            found.remove(key)  # for another system, or another Python
            continue
        chosen = [{"extra": extra} for extra in ("", *asked.extras)]
        todo += [r for r in map(Requirement, lines) if not r.marker or any(r.marker.evaluate(e) for e in chosen)]
    return {name for name, _ in found} - {"pip", "setuptools", "wheel"}


def test_the_lock_file_has_everything():
    pinned = {
        canonicalize_name(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert needed() - pinned == set()
