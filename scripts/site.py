"""Build the documentation site into build/site, with warnings as errors (`make docs`).

Pages link to what lies beside docs/ in the repository: benchmarks, results, studies, CONTRIBUTING. So that the same
links work on a code host and on the site, and the build checks all of them, the site's tree is the repository's:
everything that is to be read is copied to build/pages, and README.md becomes the first page. Rejected: links to a code
host, which nothing would check.

Zensical looks at links to pages and their headings, and at the names of the API. Links to other files (figures,
studies, reports) are looked at here.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
FOLDERS = ("docs", "benchmarks", "results", "studies", "examples")
READ = {".md", ".png", ".svg", ".yaml", ".html", ".sh"}


def stage() -> None:
    """Copy what is read to the folder that the site is built from."""
    shutil.rmtree(PAGES, ignore_errors=True)
    found = [path for folder in FOLDERS for path in (ROOT / folder).resolve().rglob("*") if path.suffix in READ]
    for path in [*found, *ROOT.glob("*.md")]:
        shipped = ROOT / "src" / "shaketable" / "data"
        target = PAGES / path.relative_to(shipped if path.is_relative_to(shipped) else ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (PAGES / "README.md").rename(PAGES / "index.md")


def broken() -> list[str]:
    """Links of staged pages to files that are not there; a folder is no page."""
    found = []
    for page in sorted(PAGES.rglob("*.md")):
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        targets = re.findall(r"\]\(([^)#\s]+)", prose)
        found += [
            f"{page.relative_to(PAGES)}: {to} does not exist"
            for to in targets
            if not re.match(r"https?:|mailto:", to) and not to.endswith(".md") and not (page.parent / to).is_file()
        ]
    return found


if __name__ == "__main__":
    stage()
    if lines := broken():
        sys.exit("\n".join(lines))
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(ROOT / "zensical.toml")]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)
