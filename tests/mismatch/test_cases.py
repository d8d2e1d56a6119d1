"""Every command of docs/mismatch-cases.md prints the lines that the page shows; numbers may differ by a factor of two.

A line that ends in … is shown up to there. The page's files come from examples/mismatch_cases.py.
"""

import re
import shlex

import pytest

from tests import ROOT
from tests.cli.command_server import shaketable

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "examples" / "mismatch_cases.py"
BLOCKS = re.findall(r"```console\n\$ (.*?)\n(.*?)```", (ROOT / "docs" / "mismatch-cases.md").read_text(), re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")
EXITS = {"LEGAL": 0, "DEFECT": 1, "INCONCLUSIVE": 4}


def run(folder, command):
    program, *words = shlex.split(command)
    defect = "" if program == "shaketable" else words.pop(1).replace("-", "_")
    planted = f"import runpy; runpy.run_path({str(SCRIPT)!r})[{defect!r}]()" if defect else ""
    if program == "python":
        words = words[1:] or ["--version"]
    return shaketable(folder, *words, first=planted)


def alike(shown, printed):
    """Whether two lines say the same, with numbers of about the same size."""
    shown, printed = (re.sub(r"\s+", " ", line).strip() for line in (shown, printed))
    values = [[float(x.replace(",", "")) for x in NUMBER.findall(line)] for line in (shown, printed)]
    words = [NUMBER.sub("#", line) for line in (shown, printed)]
    if shown.endswith("…"):
        words[1] = words[1][: len(words[0].removesuffix("…").rstrip())]
        words[0] = words[0].removesuffix("…").rstrip()
    near = all(abs(a - b) <= max(0.5 * max(abs(a), abs(b)), 0.003) for a, b in zip(*values, strict=False))
    return words[0] == words[1] and near


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cases")
    done = run(path, BLOCKS[0][0])
    assert done.code == 0, done.stderr
    return path


def test_the_page_has_ten_cases():
    assert len(re.findall(r"^## \d+\.", (ROOT / "docs" / "mismatch-cases.md").read_text(), re.MULTILINE)) == 10


@pytest.mark.parametrize(("command", "lines"), BLOCKS[1:], ids=[" ".join(command.split()[:6]) for command, _ in BLOCKS[1:]])
def test_a_case_says_what_the_page_shows(folder, command, lines):
    done = run(folder, command)
    printed = done.stdout.splitlines()
    for line in lines.splitlines():
        if line != "…":
            assert any(alike(line, other) for other in printed), f"{line}\n\nis not in\n\n{done.stdout}{done.stderr[-1000:]}"
    verdict = lines.splitlines()[-1].partition(":")[0]
    assert done.code == EXITS.get(verdict, 0)
