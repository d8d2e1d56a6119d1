"""Killed at any moment, a run goes on to the same weights, bit for bit, and its record has every step once.

`first` is run in the process before the command: it kills the process, as `kill -9` does, at a chosen moment.
"""

import json
import re
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from shaketable.records.record import RunRecord
from shaketable.train.checkpoints import sealed, step_of
from tests.cli.command_server import shaketable

pytestmark = pytest.mark.attack("kills")
RUN = [
    "train", "nano", "--task", "arithmetic", "--device", "cpu", "--steps", "4", "--problems", "4", "--samples", "4",
    "--lr", "1e-3", "--temperature", "1.3", "--limit", "8", "--eval-every", "3", "--save-every", "2", "--micro-batch", "8",
    "--plan", "relative_gaussian:0.02@op.matmul", "--aqn", "global_decay:0.2-0.05,stages=4", "--tis", "2",
]  # fmt: skip

KILL = "import os, signal\ndef kill(): os.kill(os.getpid(), signal.SIGKILL)\n"


def at_event(kind, step, before=False):
    """Killed when the record gets an event, before or after it is written."""
    return KILL + (
        "from shaketable.records.record import RunRecord\nappend = RunRecord.append\n"
        "def patched(self, event, **facts):\n"
        f"    now = event == {kind!r} and facts.get('step') == {step}\n"
        f"    if now and {before}: kill()\n"
        "    append(self, event, **facts)\n"
        "    if now: kill()\n"
        "RunRecord.append = patched\n"
    )


def in_checkpoint(step, part):
    """Killed while a checkpoint is written: after the weights, before the seal, or with the seal as a draft only."""
    if part == "weights":
        return KILL + (
            "from shaketable.train.trainer import FaultyGRPO\nsave = FaultyGRPO._save_optimizer_and_scheduler\n"
            f"def patched(self, *a): self.state.global_step == {step} and kill(); save(self, *a)\n"
            "FaultyGRPO._save_optimizer_and_scheduler = patched\n"
        )
    if part == "draft":
        return KILL + (
            "from pathlib import Path\nreplace = Path.replace\n"
            f"def patched(self, to): self.parent.name == 'checkpoint-{step}' and kill(); return replace(self, to)\n"
            "Path.replace = patched\n"
        )
    return KILL + (
        "from shaketable.train import checkpoints\nseal = checkpoints.seal\n"
        f"def patched(folder, content): folder.name == 'checkpoint-{step}' and kill(); seal(folder, content)\n"
        "checkpoints.seal = patched\n"
    )


MOMENTS = {
    "before the first checkpoint": (at_event("step", 1), None),
    "between two checkpoints": (at_event("step", 3), 2),
    "after the weights of a checkpoint": (in_checkpoint(4, "weights"), 2),
    "with a draft of the seal": (in_checkpoint(4, "draft"), 2),
    "after the last checkpoint": (at_event("finished", 4, before=True), 4),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    done = shaketable(folder, *RUN, "--out", "run", "--json", "out.json")
    assert done.code == 0, done.stderr
    return folder


def facts(folder):
    """What does not depend on the clock: of steps, scores and ledgers."""
    record = RunRecord.open(folder / "run", "train")
    steps = [{k: v for k, v in e.items() if not re.search("time|seconds|per_second", k)} for e in record.events("step")]
    scores = [
        (e["step"], c["name"], [a["text"] for a in c["answers"]], c["injections"])
        for e in record.events("evaluation")
        for c in e["conditions"]
    ]
    (finished,) = record.events("finished")
    fires = {
        name: [(s["forward"], s["backward"], s["phases"], s["layers"]) for s in ledger["sites"]]
        for name, ledger in finished["ledgers"].items()
    }
    measured = {
        name: [f"{s[key]:.9g}" for s in ledger["sites"] for key in ("measured_error", "changed_fraction", "measured_magnitude")]
        for name, ledger in finished["ledgers"].items()
    }
    return steps, scores, fires, measured


def assert_same_run(folder, whole):
    assert facts(folder) == facts(whole)
    assert [s["step"] for s in facts(folder)[0]] == [1, 2, 3, 4]
    one, other = (load_file(f / "run" / "model" / "model.safetensors") for f in (folder, whole))
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_goes_on_to_the_same_end(tmp_path, whole, moment):
    first, checkpoint = MOMENTS[moment]
    assert shaketable(tmp_path, *RUN, "--out", "run", first=first).code == -signal.SIGKILL
    assert [step_of(p) for p in sealed(tmp_path / "run")][-1:] == ([] if checkpoint is None else [checkpoint])
    done = shaketable(tmp_path, "train", "--resume", "run", "--json", "out.json")
    assert done.code == 0, done.stderr
    assert_same_run(tmp_path, whole)
    found, expected = (json.loads((f / "out.json").read_text()) for f in (tmp_path, whole))
    assert (found["resumed"], expected["resumed"]) == (1, 0)
    assert [c["difference"] for c in found["comparisons"]] == [c["difference"] for c in expected["comparisons"]]


def test_a_run_that_is_killed_again_and_again_ends_the_same(tmp_path, whole):
    moments = [at_event("evaluation", 0, before=True), at_event("step", 3), in_checkpoint(4, "seal")]
    words = [*RUN, "--out", "run"]
    for first in moments:
        assert shaketable(tmp_path, *words, first=first).code == -signal.SIGKILL
        words = ["train", "--resume", "run"]
    with (tmp_path / "run" / "record.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "st')
    done = shaketable(tmp_path, "train", "--resume", "run")
    assert done.code == 0, done.stderr
    assert_same_run(tmp_path, whole)


@pytest.mark.attack("tampered records")
def test_a_changed_checkpoint_is_one_line_and_nothing_of_it_is_opened(tmp_path, whole):
    assert shaketable(tmp_path, *RUN, "--out", "run", first=at_event("step", 3)).code == -signal.SIGKILL
    folder = tmp_path / "run" / "checkpoint-2"
    weights = load_file(folder / "model.safetensors")
    name = min(weights)
    weights[name].view(-1)[0] += 1e-3
    kept = (folder / "model.safetensors").read_bytes()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    told = refused(tmp_path)
    assert "checkpoint-2 is not what this run saved: model.safetensors was changed; move the folder away" in told
    (folder / "model.safetensors").write_bytes(kept)
    (folder / "optimizer.pt").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    assert "optimizer.pt was changed" in refused(tmp_path)
    assert not (tmp_path / "opened").exists()
    folder.rename(tmp_path / "away")
    done = shaketable(tmp_path, "train", "--resume", "run")
    assert done.code == 0, done.stderr
    assert_same_run(tmp_path, whole)


def refused(folder):
    done = shaketable(folder, "train", "--resume", "run")
    assert done.code == 2
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def limited(size):
    """No file may grow beyond this: the kernel refuses the write, as it does on a full disk."""
    return f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.RLIM_INFINITY))\n"


def from_step(step, size):
    return (
        "import resource\nfrom shaketable.records.record import RunRecord\nappend = RunRecord.append\n"
        "def patched(self, event, **facts):\n"
        "    append(self, event, **facts)\n"
        f"    if event == 'step' and facts['step'] == {step}:\n"
        f"        resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.RLIM_INFINITY))\n"
        "RunRecord.append = patched\n"
    )


@pytest.mark.parametrize("size", [3_000_000, 8_000_000])
@pytest.mark.attack("full disks")
def test_a_disk_that_is_full_while_a_checkpoint_is_written_is_one_line_and_loses_nothing(tmp_path, whole, size):
    """3 MB cut the weights, 8 MB the state of the optimizer."""
    done = shaketable(tmp_path, *RUN, "--out", "run", first=from_step(4, size))
    assert done.code == 2 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: cannot write checkpoint-4 in run: ") and "--resume run" in last
    assert [step_of(p) for p in sealed(tmp_path / "run")] == [2], "the one before is whole"
    assert shaketable(tmp_path, "train", "--resume", "run").code == 0
    assert_same_run(tmp_path, whole)


@pytest.mark.attack("full disks")
def test_a_disk_that_is_full_for_the_record_is_one_line(tmp_path):
    done = shaketable(tmp_path, *RUN, "--out", "run", first=limited(2000))
    assert done.code == 2 and "Traceback" not in done.stderr
    assert re.search(r"error: cannot write run/record.jsonl: File too large", done.stderr)
