"""The numbers of docs/tour.md are those of benchmarks/, and no other number of speed stands there or in the README."""

import re
import subprocess
import sys

import pytest

from tests import ROOT


def test_the_numbers_are_what_the_benchmarks_say():
    script = ROOT / "scripts" / "readme_numbers.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/tour.md"])
def test_no_measurement_is_typed(page):
    """Outside of the generated part and of code there is no decimal number."""
    text = re.sub(r"<!-- numbers.*<!-- end of numbers -->", "", (ROOT / page).read_text(), flags=re.DOTALL)
    prose = re.sub(r"```.*?```|`[^`]*`|\([^)]*\)", "", text, flags=re.DOTALL)
    assert set(re.findall(r"\d+\.\d+", prose)) <= {"3.11", "2.0"}, "a number on this page comes from benchmarks/"
