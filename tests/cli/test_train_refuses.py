"""What a sceptical user found: each was a false number, a traceback or a wasted run, and is one clear line now."""

import json
import shutil

import pytest

from shaketable.records.record import RunRecord
from tests.cli.command_server import shaketable

RUN = [
    "train", "--device", "cpu", "--problems", "4", "--samples", "4", "--lr", "1e-3", "--limit", "8", "--temperature", "2",
]  # fmt: skip
STOP = (  # dies before the seal of the checkpoint of step 4, so that step 2 is the last one
    "import os, signal\nfrom shaketable.train import checkpoints\nseal = checkpoints.seal\n"
    "def patched(folder, content):\n"
    "    folder.name.endswith('-4') and os.kill(os.getpid(), signal.SIGKILL)\n"
    "    seal(folder, content)\n"
    "checkpoints.seal = patched\n"
)


def line_of(done, code=2):
    assert done.code == code, done.stderr
    assert "Traceback" not in done.stderr
    return next(line for line in reversed(done.stderr.splitlines()) if line.startswith("error:"))


def write_problems(path, shift):
    rows = [{"id": str(i), "question": f"{i + 10}+{i + 20}=", "answer": str(2 * i + 30 + shift)} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    write_problems(folder / "q.jsonl", 0)
    model = shutil.copytree(__import__("shaketable.models").models.NANO, folder / "base")
    words = [*RUN, str(model), "--task", "q.jsonl,max_new_tokens=5", "--steps", "5", "--save-every", "2", "--out", "run"]
    assert shaketable(folder, *words, first=STOP).code == -9
    return folder


def copy_of(killed, tmp_path):
    return shutil.copytree(killed, tmp_path / "copy")


def test_a_run_does_not_go_on_with_other_problems(killed, tmp_path):
    here = copy_of(killed, tmp_path)
    write_problems(here / "q.jsonl", 1)
    assert "the problems have changed" in line_of(shaketable(here, "train", "--resume", "run"))
    assert not (here / "run" / "model").exists()


def test_a_run_does_not_go_on_from_another_base(killed, tmp_path):
    from safetensors.torch import load_file, save_file

    here = copy_of(killed, tmp_path)
    weights = load_file(killed / "base" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01
    save_file(weights, killed / "base" / "model.safetensors", {"format": "pt"})
    assert "the weights have changed" in line_of(shaketable(here, "train", "--resume", "run"))
    shutil.copy(__import__("shaketable.models").models.NANO / "model.safetensors", killed / "base" / "model.safetensors")


def test_resume_takes_no_other_options(killed, tmp_path):
    here = copy_of(killed, tmp_path)
    line = line_of(shaketable(here, "train", "nano", "--resume", "run", "--steps", "9", "--dry-run"))
    assert "drop" in line and "--steps" in line and "--dry-run" in line
    assert not (here / "run" / "model").exists()


@pytest.mark.attack("two processes on one study")
def test_two_processes_do_not_work_on_one_run(killed, tmp_path):
    here = copy_of(killed, tmp_path)
    with RunRecord.open(here / "run", "train").alone():
        assert "another process" in line_of(shaketable(here, "train", "--resume", "run"))
    assert shaketable(here, "train", "--resume", "run").code == 0


def test_weights_that_are_no_numbers_are_never_saved(tmp_path):
    words = [*RUN, "nano", "--task", "arithmetic", "--steps", "1", "--out", "run"]
    done = shaketable(tmp_path, *words, "--plan", "bit_flip:1e-3@op.all,direction=backward")
    assert "step 1: the weights are no longer finite" in line_of(done)
    assert not (tmp_path / "run" / "model").exists()


def test_a_task_that_rewards_nonsense_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from shaketable.evaluate.tasks import Arithmetic\n"
        "class Mine(Arithmetic):\n    name = 'mine'\n    def reward(self, score): return float('nan')\n"
    )
    line = line_of(shaketable(tmp_path, *RUN, "nano", "--task", "mine.py:Mine", "--steps", "1", "--out", "run"))
    assert "mine" in line and "as the reward" in line
