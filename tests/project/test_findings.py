"""docs/findings.md states what the published records say."""

import subprocess
import sys

from tests import ROOT


def test_every_difference_of_the_findings_follows_from_the_records():
    hidden = "import runpy, sys; sys.modules['shaketable'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", hidden, "results/check.py"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
