"""`shaketable study` as its user meets it: help, bad input, status, list, report, forecast."""

import json

import pytest
import yaml

from shaketable.study.store import definitions
from tests.cli.command_server import shaketable

TINY = {
    "study": "tiny",
    "question": "Is [bold]this[/] <script>alert(1)</script> safe?",
    "model": "nano",
    "task": "arithmetic",
    "seeds": 1,
    "train": {"steps": 2, "prompts": 2, "samples": 2},
    "evaluate": {"n": 6, "conditions": {"noise": "relative_gaussian:0.2@op.matmul"}},
    "arms": {"noise": {"plan": "noise"}, "as it comes": {"train": False}},
    "compare": {"primary": {"a": "noise", "b": "as it comes", "condition": "noise"}},
}


def written(folder, **replaced):
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY | replaced, sort_keys=False))
    return "tiny.yaml"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder with a finished study in its store."""
    folder = tmp_path_factory.mktemp("study")
    found = shaketable(folder, "study", "run", written(folder), "--workers", "1", "--report", "r.html", "--json", "r.json")
    assert found.code == 0, found.stderr
    return folder, found


def test_a_run_prints_the_verdict_scores_and_proof(done):
    folder, found = done
    assert "Nothing can be concluded: there is one seed" in found.stdout
    assert "noise − as it comes, noise accuracy:" in found.stdout and "1 seed: nothing can be concluded" in found.stdout
    assert "proof of injection: 3 of 3 places proven" in found.stdout
    assert "r.html" in found.stdout
    page = (folder / "r.html").read_text()
    assert "<script>alert(1)" not in page and "&lt;script&gt;alert(1)" in page
    assert 'href="shaketable-runs/tiny/runs/' in page, "links lead to the records from where the page lies"


def test_a_model_that_solves_nothing_is_refused_before_the_first_run(tmp_path):
    task = "arithmetic,level=3,max_new_tokens=1"
    for words in ((), ("--dry-run",)):
        found = shaketable(tmp_path, "study", "run", written(tmp_path, task=task), *words)
        assert found.code == 2
        [line] = found.stderr.splitlines()[-1:]
        assert f"arm 'noise': nano solves 0 of 32 problems of {task} without a fault: there is no reward" in line
    assert not list(tmp_path.rglob("record.jsonl"))


def test_running_again_does_nothing_and_says_the_same(done):
    folder, first = done
    again = shaketable(folder, "study", "run", "tiny.yaml", "--json", "again.json")
    assert again.code == 0
    assert again.stdout.split("wrote")[0] == first.stdout.split("wrote")[0]
    arms = [json.loads((folder / name).read_text())["arms"] for name in ("r.json", "again.json")]
    assert arms[0] == arms[1]


def test_status_by_file_by_folder_and_by_name(done):
    folder, _ = done
    for what in ("tiny.yaml", "shaketable-runs/tiny", "tiny"):
        found = shaketable(folder, "study", "status", what, "--json", "s.json", "--force")
        assert found.code == 0, found.stderr
        assert "2 done" in found.stdout and "as it comes, seed 0" in found.stdout
        assert json.loads((folder / "s.json").read_text())["complete"]
    more = shaketable(folder, "study", "status", "tiny.yaml", "--set", "seeds=2")
    assert "2 done, 2 missing" in more.stdout


def test_reports_in_every_format(done):
    folder, _ = done
    assert shaketable(folder, "study", "report", "tiny.yaml", "-o", "a.html").code == 0
    assert (folder / "a.html").read_text().startswith("<!doctype html>")
    assert "# ? NOTHING CAN BE CONCLUDED" in shaketable(folder, "study", "report", "tiny").stdout
    (folder / "deep").mkdir(exist_ok=True)
    assert shaketable(folder, "study", "report", "tiny.yaml", "-o", "deep/b.html").code == 0
    assert 'href="../shaketable-runs/tiny/runs/' in (folder / "deep" / "b.html").read_text()
    assert shaketable(folder, "study", "report", "shaketable-runs/tiny", "-o", "a.json").code == 0
    assert json.loads((folder / "a.json").read_text())["complete"]


def test_dry_run_says_what_how_long_and_what_it_can_show(done):
    folder, _ = done
    found = shaketable(folder, "study", "run", "tiny.yaml", "--dry-run", "--set", "seeds=3", "--json", "d.json", "--force")
    assert found.code == 0, found.stderr
    assert "4 of 6 runs to do; very roughly" in found.stdout
    assert "3 seeds × 6 problems" in found.stdout
    forecast = json.loads((folder / "d.json").read_text())
    assert forecast["seconds"] > 0 and sum(run["to_do"] for run in forecast["runs"]) == 4
    one = shaketable(folder, "study", "run", "tiny.yaml", "--dry-run")
    assert "0 of 2 runs to do" in one.stdout and "fewer than two seeds conclude nothing" in one.stdout


BAD = {
    ("run", "tiny.yaml", "--set", "model=nanno"): "arm 'noise': model 'nanno'",
    ("run", "tiny.yaml", "--set", "evaluate.conditions.noise=relative_gaussian:0.2@layer.9"): "arm 'noise'",
    ("run", "tiny.yaml", "--set", "device=npu"): "device 'npu' cannot be used here",
    ("run", "tiny.yaml", "--store", "tiny.yaml"): "cannot write in the store tiny.yaml/tiny: Not a directory",
    ("status", "shaketable-runs/tiny", "--set", "seeds=3"): "--set goes with a study's file",
}


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_bad_input_is_one_line_and_exit_2(done, words):
    found = shaketable(done[0], "study", *words)
    assert found.code == 2, found.stdout
    errors = [line for line in found.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and BAD[words] in errors[0], found.stderr
    assert "Traceback" not in found.stderr
    assert len(definitions(done[0] / "shaketable-runs" / "tiny")) == 1, "what cannot be run was not asked for"
