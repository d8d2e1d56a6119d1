"""Every snippet of the README, of docs/tour.md, of docs/plans.md and of the first pages is executed; see also test_docs_commands.py."""

import re
import runpy
import shlex
import sys

import pytest

from shaketable.plan import Plan
from tests import ROOT
from tests.cli.command_server import shaketable


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/plans.md", "docs/locate.md", "docs/api.md", "docs/journeys/training.md"])
def test_python_snippets_run(page, capsys):
    snippets = blocks(page, "python")
    assert snippets
    exec("\n".join(snippets), {})
    assert capsys.readouterr().out


def test_every_plan_of_the_tour_parses():
    lines = [line.partition("#")[0].strip() for block in blocks("docs/tour.md", "text") for line in block.splitlines()]
    assert len(lines) == 6
    for line in lines:
        Plan.parse(line)


def test_yaml_snippets_load(tmp_path):
    for number, text in enumerate(blocks("docs/plans.md", "yaml")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        plan = Plan.load(path)
        assert plan.seed == 7
        assert plan.clauses[0].text() == "dead_zone:0.01,scope=token@layer.2,phase=rollout"


SMALL = "seeds=1 train.steps=4 train.prompts=2 train.samples=2 evaluate.n=6 evaluate.every=0"
"""A study of the tour, in seconds."""


VERBS = ["run", "inspect", "locate", "sweep", "train", "harden", "mismatch", "study"]


def tour_commands():
    return [c for block in blocks("docs/tour.md", "bash") for c in block.splitlines() if c.startswith("shaketable")]


def test_the_tour_has_one_example_a_verb():
    assert [c.split()[1] for c in tour_commands()] == VERBS


def test_the_readme_s_command_is_one_of_the_tour():
    (line,) = [c for block in blocks("README.md", "bash") for c in block.splitlines() if c.startswith("shaketable")]
    assert line in tour_commands()


@pytest.mark.parametrize("verb", [v if v in ("run", "inspect") else pytest.param(v, marks=pytest.mark.slow) for v in VERBS])
def test_a_command_of_the_tour_runs(verb, tmp_path):
    (tmp_path / "train.py").write_text("import torch\nm = torch.nn.Linear(4, 4)\nm(torch.ones(2, 4)).sum().backward()\n")
    words = shlex.split(tour_commands()[VERBS.index(verb)])[1:]
    words = [sys.executable if w == "python" else w for w in words]
    if verb == "study":
        words += [f"--set={small}" for small in SMALL.split()]
    done = shaketable(tmp_path, *words)
    assert done.code == (verb == "locate"), done.stderr
    if verb == "locate":
        (told,) = [
            line for block in blocks("docs/tour.md", "console") for line in block.splitlines() if line.startswith("FAULT")
        ]
        assert all(part in " ".join(done.stdout.split()) for part in told.split(" … "))
    if verb == "study":
        assert "there is one seed" in (tmp_path / "guided.html").read_text().lower()


def test_the_demo_is_a_study_that_is_shipped():
    line = next(x for x in (ROOT / "Makefile").read_text().splitlines() if "study run" in x)
    assert (ROOT / next(word for word in line.split() if word.endswith(".yaml"))).is_file()


def test_the_ledger_example_runs_and_every_clause_of_it_changes_values(capsys):
    space = runpy.run_path(str(ROOT / "examples" / "ledger.py"))
    space["main"]()
    shown = capsys.readouterr().out
    assert "bit-identical: True" in shown
    for clause in Plan.parse(space["PLAN"]).clauses:
        assert clause.fault.kind in shown


def test_every_fault_and_key_is_in_the_guide():
    from shaketable.faults import KINDS
    from shaketable.plan import INCLUDABLE, OPS, SITE_KEYS

    text = (ROOT / "docs" / "plans.md").read_text()
    for word in [*KINDS, *OPS, *(f"`{k}=`" for k in SITE_KEYS), *INCLUDABLE]:
        assert word in text, word
