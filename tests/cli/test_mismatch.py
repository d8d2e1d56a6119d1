"""`shaketable mismatch` as its user meets it: the stages, three exit codes, its files, and one line for what is wrong."""

import json

import pytest

from tests.cli.command_server import shaketable

SMALL = ["--task", "arithmetic", "-n", "4", "--recorded", "1"]


def line_of(done):
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stderr
    return next(line for line in reversed(done.stderr.splitlines()) if line.startswith("error:"))


def test_a_legal_pair_with_all_its_files(tmp_path):
    files = ["--json", "a.json", "--html", "a.html", "--rollouts-out", "r.jsonl", "--exact"]
    run = ["mismatch", "nano", "--engine", "hf", "--engine-args", '{"dtype": "bfloat16"}', *SMALL]
    done = shaketable(tmp_path, *run, *files)
    assert done.code == 0, done.stderr + done.stdout
    stages = ("1 gap", "2 returned", "3 floor", "4 semantics", "5 weights", "6 routing", "7 operators", "8 shares")
    assert all(word in done.stdout for word in (*stages, "Not looked at", "LEGAL"))
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["verdict"], found["kind"], found["exit_code"]) == ("LEGAL", "mismatch", 0)
    assert found["exact"]["kinds"] and "exact        " in done.stdout
    text = (tmp_path / "a.html").read_text()
    assert "LEGAL" in text and "<h2>Bits</h2>" in text
    again = shaketable(tmp_path, "mismatch", "nano", "--rollouts", "r.jsonl", "--json", "b.json")
    assert again.code == 4, again.stderr + again.stdout
    assert json.loads((tmp_path / "b.json").read_text())["gap"]["k3"] == pytest.approx(found["gap"]["k3"])
    taken = shaketable(tmp_path, *run, "--rollouts-out", "r.jsonl")
    assert "exists and is not overwritten" in line_of(taken)


def test_a_defect_exits_1(tmp_path):
    rows = [{"prompt": [30 + i, 12, 25], "completion": [20, 21, 22, 23], "logprobs": [-9.0] * 4} for i in range(3)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wrong = shaketable(tmp_path, "mismatch", "nano", "--rollouts", "r.jsonl")
    assert wrong.code == 4, wrong.stdout
    sampled = ["mismatch", "nano", "--engine", "hf", *SMALL, "--logprobs", "processed", "--top-k", "5"]
    shaketable(tmp_path, *sampled, "--rollouts-out", "k.jsonl")
    done = shaketable(tmp_path, "mismatch", "nano", "--rollouts", "k.jsonl", "--top-k", "5")
    assert done.code == 1, done.stdout
    assert "DEFECT: the sides mean different probabilities" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engine", "hf"], "give either --task"),
        (["--task", "arithmetic"], "add --engine vllm"),
        (["--engine", "hf", "--engine-args", "{", *SMALL], "is not JSON"),
        (["--engine", "hf", "--max-new-tokens", "400", *SMALL], "do not fit into the context of 256"),
        (["--rollouts", "none.jsonl", "--exact"], "--exact compares the operators of two programs"),
    ],
)
def test_one_line_for_what_is_wrong(tmp_path, arguments, says):
    assert says in line_of(shaketable(tmp_path, "mismatch", "nano", *arguments))
