"""`shaketable harden` as its user meets it: the table, the JSON, one line for what is wrong, and nothing lost by a kill."""

import json

import pytest

from shaketable.records.record import RunRecord
from tests.cli.command_server import shaketable
from tests.harden.small_runs import HURTS, same_weights

RUN = [
    "harden", "nano", "--task", "arithmetic", "--device", "cpu", "--steps", "4", "--batch", "8", "--limit", "40",
    "--save-every", "2",
]  # fmt: skip
KILL = (
    "import os, signal\nfrom shaketable.records.record import RunRecord\nappend = RunRecord.append\n"
    "def patched(self, event, **facts):\n"
    "    append(self, event, **facts)\n"
    "    if event == 'step' and facts['step'] == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
    "RunRecord.append = patched\n"
)


def line_of(done):
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stderr
    return next(line for line in reversed(done.stderr.splitlines()) if line.startswith("error:"))


@pytest.mark.slow
def test_table_json_and_model(tmp_path):
    done = shaketable(tmp_path, *RUN, "--plan", HURTS, "-o", "run", "--json", "out.json")
    assert done.code == 0, done.stderr
    for word in ("after", "distil", "recovered", "points that the fault costs", "fired 2 times", "run/model"):
        assert word in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["kind"] == "hardening"
    assert found["rungs"][0]["shares"]["plan"]["interval"]["low"] is not None
    again = shaketable(tmp_path, "harden", "--resume", "run", "--json", "again.json", "--html", "again.html")
    assert again.code == 0, again.stderr
    assert json.loads((tmp_path / "again.json").read_text()) == found
    page = (tmp_path / "again.html").read_text()
    assert all(word in page for word in ("HARDENED", "distil", "fired 2 times", found["sentence"]))
    assert shaketable(tmp_path, "sweep", "run/model", "--task", "arithmetic", "--limit", "8", "--plan", HURTS).code == 0


@pytest.mark.attack("kills")
def test_killed_it_goes_on_to_the_same_bits(tmp_path):
    assert shaketable(tmp_path, *RUN, "--plan", HURTS, "-o", "whole").code == 0
    assert shaketable(tmp_path, *RUN, "--plan", HURTS, "-o", "killed", first=KILL).code == -9
    done = shaketable(tmp_path, "harden", "--resume", "killed")
    assert done.code == 0, done.stderr
    assert same_weights(tmp_path / "killed", tmp_path / "whole")
    assert len(RunRecord.open(tmp_path / "killed", "harden").events("step")) == 4


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["harden", "nano", "--task", "arithmetic"], "name a model and a --plan"),
        ([*RUN[:2], "--plan", HURTS, "--prompts", "few.txt"], "too few prompts to keep one in five apart"),
        (
            [*RUN[:2], "--plan", HURTS, "--prompts", "long.txt", "--max-new-tokens", "250"],
            "do not fit into the model's context",
        ),
        ([*RUN, "--plan", "relative_gaussian:0.0001@module.linear"], "there is nothing to harden against"),
        (["harden", "--resume", "nowhere"], "no run to resume"),
    ],
)
def test_bad_input_is_one_line(tmp_path, words, line):
    (tmp_path / "few.txt").write_text("one\ntwo\n")
    (tmp_path / "long.txt").write_text("\n".join(f"prompt number {i} " + "and so on " * 20 for i in range(60)))
    assert line in line_of(shaketable(tmp_path, *words))
