"""The studies that ship: each can be read without torch, says what it is for, and runs to a report with its faults proven."""

import subprocess
import sys

import pytest

from shaketable.plan import Plan
from shaketable.study.cells import cells_of
from shaketable.study.config import Guide
from shaketable.study.file import load_study
from shaketable.study.forecast import check
from shaketable.study.run_cell import do
from tests import ROOT, slow
from tests.study.small_studies import findings

FILES = sorted((ROOT / "studies").glob("*.yaml"))
NAMES = [file.stem for file in FILES]
SMALL = (
    "seeds=1", "task=arithmetic,level=3,max_new_tokens=1", "train.steps=2", "train.prompts=1", "train.samples=2", "evaluate.n=4", "evaluate.every=0",
    "evaluate.mechanism=false", "diagnose.tokens=32", "keep=records",
)  # fmt: skip
LARGER = "smollm2-135m"
"""Its weights need a download, and its steps a minute: `nano` runs in its place, and its skeleton is checked."""
OWN = {
    "directions": ("task=arithmetic,level=3", "train.prompts=4", "train.samples=8"),
    "hardening": ("harden.steps=2", "harden.batch=2"),
    "layer-pruning": ("harden.steps=2", "harden.batch=2"),
}
"""Where all answers have the same reward there is no gradient: nothing that errors of a backward could change."""
TRAINED = ("training: plan", "hardening: plan", "scored: own")


def header(file):
    """The comment that a file opens with."""
    lines = file.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


def small(file):
    """The study with one seed, two steps, four problems and answers of one character, on the smallest model."""
    study = load_study(file)
    replaced = [*SMALL, *OWN.get(file.stem, ())]
    for name, arm in study.arms.items():
        if arm.model == LARGER:
            replaced += [f"arms.{name}.model=nano", f"arms.{name}.overrides.steps=2"]
    return load_study(file, replaced)


def hit(arm):
    """The directions in which the faults of an arm's training fired."""
    rows = [row for row in arm["proof"] if row["where"] in TRAINED]
    return {name for name in ("forward", "backward") for row in rows if row[name] > 0}


def directions(study, arm):
    """The directions in which they were to: rollouts have no backward."""
    if arm.plan is None:
        return set()
    asked = {d for clause in Plan.parse(study.plan_of(arm)).clauses for d in clause.site.directions}
    return asked - {"backward"} if arm.plan_in == "rollout" or not arm.train else asked


def test_studies_are_read_without_torch():
    code = (
        "import sys; from pathlib import Path; from shaketable.study.file import load_study; from shaketable.study.cells import cells_of\n"
        "for name in sys.argv[1:]: cells_of(load_study(Path(name)))\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, FILES)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_a_study_says_what_it_is_for(file):
    study, text = load_study(file), header(file)
    assert study.study == file.stem
    assert study.question.endswith("?") and study.origin
    assert study.compare.primary is not None and len(study.seeds) >= 3
    assert all(arm.description for arm in study.arms.values())
    assert "origin" in text
    assert f"shaketable study run studies/{file.name}\n" in text and f"shaketable study run studies/{file.name} --set" in text


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_the_large_command_of_a_header_is_accepted(file, tmp_path):
    """Its own line, read by a shell as a user would paste it."""
    lines = [line.removeprefix("#").strip() for line in header(file).splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith(f"shaketable study run studies/{file.name} --set"))
    end = next(i for i in range(start, len(lines)) if not lines[i].endswith("\\"))
    shell = 'shaketable() { printf "%s\\n" "$@"; }\n' + "\n".join(lines[start : end + 1])
    words = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[:3] == ["study", "run", f"studies/{file.name}"]
    assert words[3::2] == ["--set"] * (len(words[3:]) // 2)
    large = load_study(file, words[4::2])
    assert large.device == "cuda" and "Qwen" in large.model
    assert cells_of(large)


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_a_study_as_it_ships_stands_its_check(file):
    """Every plan matches its model's skeleton, every schedule fires within the steps, every task has enough problems."""
    check(load_study(file))


@pytest.mark.slow
@pytest.mark.parametrize("file", [f if f.stem in ("guided-aqn", "guided-aqn-untrained") else slow(f) for f in FILES], ids=NAMES)
def test_a_study_runs_and_proves_its_faults(file, tmp_path):
    study = small(file)
    for cell in cells_of(study):
        assert do(cell, study.study, tmp_path / "runs", "test") == "done"
    found = findings(study, tmp_path)
    assert found["complete"]
    assert (found["study"]["steps"] > 0) == any(arm.kind != "evaluate" for arm in study.arms.values())
    assert found["verdict"]["kind"] == "nothing" and "one seed" in found["verdict"]["headline"].lower()
    for arm in found["arms"]:
        asked = study.arms[arm["name"]]
        assert [s["condition"] for s in arm["scores"]] == list(study.conditions) * (1 + study.evaluate.loss)
        where = [row["where"] for row in arm["proof"]]
        assert bool(set(TRAINED) & set(where)) == (asked.plan is not None)
        assert ("training: AQN" in where) == (asked.aqn is not None and asked.train)
        noise = [row for row in arm["proof"] if row["where"] == "scored: own" and "gaussian" in row["fault"]]
        assert bool(noise) == (asked.aqn is not None and not asked.train)
        assert {f"scored: {name}" for name in study.evaluate.conditions} <= set(where) or asked.skip_layers
        assert [row for row in arm["proof"] if row["verdict"] == "inert"] == []
        assert hit(arm) == directions(study, asked)
    guided = {arm.plan for arm in study.arms.values() if isinstance(arm.aqn, Guide)}
    assert len(found["diagnoses"]) == len(guided | set(study.diagnose.conditions))
    for diagnosis in found["diagnoses"]:
        assert diagnosis["verdict"] == "FAULT" and f"layer.{diagnosis['layer']}" in diagnosis["plan"]
