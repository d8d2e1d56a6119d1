"""`shaketable train` as its users meet it: what it says, what it writes, and one line for every mistake."""

import json
import re
import shutil

import pytest
import yaml

from shaketable.models import NANO
from tests.cli.command_server import shaketable
from tests.evaluate.tasks.test_verl_parquet import row, written

SMALL = ["--device", "cpu", "--steps", "2", "--problems", "4", "--samples", "4", "--limit", "20"]
RUN = ["train", "nano", "--task", "arithmetic", *SMALL]
PLAN = "relative_gaussian:0.05@op.matmul"


def test_a_run_tells_scores_with_their_proof_and_writes_them(tmp_path):
    done = shaketable(
        tmp_path, *RUN, "--plan", PLAN, "--aqn", "constant:0.05", "--tis", "2", "--out", "run", "--json", "o.json"
    )
    assert done.code == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.json", "run"]
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["final"]["plan"]["injections"] > 0 == found["final"]["clean"]["injections"]
    assert [s["step"] for s in found["steps"]] == [1, 2] and set(found["ledgers"]) == {"plan", "aqn"}
    assert found["config"]["tis"] == 2 and found["environment"]["torch"]
    for part in (f"{found['final']['plan']['injections']:,}", "plan against clean", "run/model", "in training"):
        assert part in done.stdout
    assert "step     0: clean" in done.stderr and "step     2: clean" in done.stderr
    assert {"record.jsonl", "model", "checkpoint-2", "tensorboard"} <= {p.name for p in (tmp_path / "run").iterdir()}
    record = (tmp_path / "run" / "record.jsonl").read_bytes()
    again = shaketable(tmp_path, "train", "--resume", "run")
    assert (tmp_path / "run" / "record.jsonl").read_bytes() == record
    assert again.code == 0 and again.stdout == done.stdout, "a finished run is shown and not run"


def test_a_sigma_that_destroys_the_model_is_told_with_numbers_and_the_run_goes_on(tmp_path):
    done = shaketable(tmp_path, *RUN, "--aqn", "constant:5.0", "--out", "run")
    assert done.code == 0, done.stderr
    line = r"warning: with AQN at its largest σ = 5 accuracy falls from \d\d\.\d% to \d\.\d% before the first step"
    assert re.search(line, done.stderr) and re.search(line, done.stdout)


def test_a_torn_model_is_one_line_and_makes_no_folder(tmp_path):
    folder = shutil.copytree(NANO, tmp_path / "torn")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    done = shaketable(tmp_path, "train", folder, "--task", "arithmetic", *SMALL, "--out", "run")
    refused(done, "cannot be loaded", tmp_path, {"torn"})


def refused(done, message, folder, there=frozenset()):
    assert done.code == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and done.stderr.startswith("error: ")
    assert done.stdout == ""
    assert {p.name for p in folder.iterdir()} == set(there), "nothing is written"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "text"], "no answers to reward"),
        (["--micro-batch", "5"], "micro_batch 5 does not divide the 16 answers"),
        (["--plan-in", "rollout"], "plan_in=rollout needs a plan"),
        (["--plan", f"{PLAN},phase=train", "--plan-in", "rollout"], "the run never has it there"),
        (["--eval-plan", f"{PLAN},direction=backward"], "backward only"),
        (["--aqn", "global_decay:0.05-0.0005,stages=10", "--steps", "1"], "σ"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, words, message):
    refused(shaketable(tmp_path, *RUN, "--out", "run", *words), message, tmp_path)


def test_nothing_is_put_over_what_is_there(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    refused(shaketable(tmp_path, *RUN, "--out", "run"), "not empty and nothing is overwritten", tmp_path, {"run"})
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["mine.txt"]
    (tmp_path / "file").touch()
    refused(shaketable(tmp_path, *RUN, "--out", "file"), "cannot make the run folder", tmp_path, {"run", "file"})


def test_a_dry_run_prints_sigma_and_writes_nothing(tmp_path):
    words = ["--aqn", "global_decay:0.05-0.0005,stages=4", "--steps", "8", "--plan", PLAN, "--dry-run"]
    done = shaketable(tmp_path, *RUN, *words)
    assert done.code == 0, done.stderr
    assert not list(tmp_path.iterdir())
    for part in ("0.05", "0.005", "0.0005", "1,391,104 parameters", f"{PLAN},phase=rollout+train"):
        assert part in done.stdout


def test_the_origins_files_train_a_model(tmp_path):
    """GSM8K as verl has it on disk, and the `aqn_config.yaml` of the guided experiment: noise where its trainer had it."""
    sums = [(f"{a}+{b}=", f"#### {a + b}") for a in range(121, 129) for b in range(211, 213)]
    for split in ("train", "test"):
        written(tmp_path / f"{split}.parquet", [row(ask, said, split, n) for n, (ask, said) in enumerate(sums)])
    aqn = {"enabled": True, "layer_specific": True, "base_sigma": 0.05, "layer_sigmas": {2: 0.1}, "schedule": "epoch_aware"}
    (tmp_path / "aqn_config.yaml").write_text(yaml.safe_dump({"aqn": aqn, "srdd_metadata": {"num_layers": 8}}))
    task = ["--task", f"gsm8k,path={tmp_path},max_new_tokens=4", "--aqn", "aqn_config.yaml"]
    small = ["--steps", "1", "--problems", "2", "--samples", "2", "--limit", "4", "--device", "cpu"]
    done = shaketable(tmp_path, "train", "nano", *task, *small, "--out", "run", "--json", "o.json")
    assert done.code == 0, done.stderr
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["config"]["aqn"].endswith("form=output,layers=0-7,multipliers=2:2,where=both")
    measured = {site["site"]: site["measured_magnitude"] for site in found["ledgers"]["aqn"]["sites"]}
    assert sorted(measured.values()) == pytest.approx([0.05, 0.1], rel=0.1)
