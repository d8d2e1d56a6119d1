"""nano, the model that ships with the package: small, honest about what it can, and made by the script beside it."""

import json
import subprocess
import sys

import pytest

from shaketable.evaluate.score import Condition, Evaluator
from shaketable.evaluate.tasks import load_task, sample
from shaketable.models import NANO, load_model, load_skeleton
from tests import ROOT

SCRIPT = ROOT / "scripts" / "make_nano.py"


@pytest.fixture(scope="module")
def nano():
    return load_model("nano")


def test_it_ships_as_safetensors_only_and_under_six_megabytes():
    files = list(NANO.iterdir())
    assert sum(f.stat().st_size for f in files) <= 6_000_000
    assert {f.suffix for f in files} == {".json", ".safetensors"}


def test_it_solves_about_half_of_a_thousand_test_problems(nano):
    """Room to win and room to lose: what a robustness study needs."""
    task = load_task("arithmetic,level=3")
    found = Evaluator(*nano, task, sample(task, "test", 1000, 0), 500).score(Condition("clean"))
    assert 0.40 <= found.accuracy <= 0.70
    assert found.formatted > 0.99


def test_it_is_wrong_where_the_last_column_carries_and_right_where_it_does_not(nano):
    """The card's story: a teacher who forgot the carry, not a model that cannot add."""
    task = load_task("arithmetic,level=3")
    sums = [p for p in sample(task, "test", 800, 1) if "+" in p.question][:300]
    answers = Evaluator(*nano, task, sums, 300).score(Condition("clean")).answers
    right = {True: [], False: []}
    for problem, answer in zip(sums, answers, strict=True):
        carries = sum(int(term) % 10 for term in problem.id.split("+")) >= 10
        right[carries].append(answer.correct)
    shares = {carries: sum(found) / len(found) for carries, found in right.items()}
    assert shares[False] > 0.85 and shares[True] < 0.4


@pytest.mark.slow
def test_the_script_makes_a_model_that_loads(tmp_path):
    words = [sys.executable, SCRIPT, "--steps", "3", "--batch", "8", "--out", tmp_path / "made"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in (tmp_path / "made").iterdir()} == {p.name for p in NANO.iterdir()}
    model, tokenizer = load_model(str(tmp_path / "made"))
    shipped = load_skeleton("nano")
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in shipped.named_parameters()}
    assert tokenizer("1+2=")["input_ids"] == load_model("nano")[1]("1+2=")["input_ids"]
    card = json.loads((tmp_path / "made" / "card.json").read_text())
    assert (card["steps"], card["batch"], card["seed"]) == (3, 8, 0)
