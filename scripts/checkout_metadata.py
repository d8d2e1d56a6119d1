"""Make a checkout look installed to `importlib.metadata`: write its name, version and entry points into a folder.

    python scripts/checkout_metadata.py FOLDER

Frameworks find our plugins by their entry points, which live in the metadata of an installed distribution. The environments
of frameworks are shared by all checkouts of a machine, so none of these is installed there; instead FOLDER and `src` go on
PYTHONPATH, which children and Ray workers inherit. Standard library only.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = (ROOT / "src" / "shaketable" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert found is not None, "src/shaketable/__init__.py names no version"
    info = folder / f"shaketable-{found[1]}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    groups = {"console_scripts": project["scripts"]} | project["entry-points"]
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in points.items()) + "\n" for group, points in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: shaketable\nVersion: {found[1]}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
