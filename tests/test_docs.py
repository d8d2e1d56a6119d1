"""Every snippet of the README and of docs/plans.md is executed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shaketable.plan import Plan

ROOT = Path(__file__).parent.parent


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/plans.md", "docs/locate.md"])
def test_python_snippets_run(page, capsys):
    snippets = blocks(page, "python")
    assert snippets
    exec("\n".join(snippets), {})
    assert capsys.readouterr().out


def test_every_plan_of_the_readme_parses():
    lines = [line.partition("#")[0].strip() for block in blocks("README.md", "text") for line in block.splitlines()]
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


def test_commands_of_the_readme_run(tmp_path):
    (tmp_path / "train.py").write_text("import torch\nm = torch.nn.Linear(4, 4)\nm(torch.ones(2, 4)).sum().backward()\n")
    commands = [c for block in blocks("README.md", "bash") for c in block.splitlines() if c.startswith("shaketable")]
    assert [c.split()[1] for c in commands] == ["run", "inspect", "locate", "sweep", "train"]
    for command in commands:
        words = [sys.executable, "-m", "shaketable", *shlex.split(command)[1:]]
        words = [sys.executable if w == "python" else w for w in words]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == ("locate" in command), done.stderr
        assert "locate" not in command or "FAULT: layer 12, mlp.down_proj" in done.stdout


def test_the_demo_runs_and_every_clause_of_it_changes_values(capsys):
    from shaketable.demo import PLAN, main

    main()
    shown = capsys.readouterr().out
    assert "bit-identical: True" in shown
    for clause in Plan.parse(PLAN).clauses:
        assert clause.fault.kind in shown


def test_every_fault_and_key_is_in_the_guide():
    from shaketable.faults import KINDS
    from shaketable.plan import INCLUDABLE, OPS, SITE_KEYS

    text = (ROOT / "docs" / "plans.md").read_text()
    for word in [*KINDS, *OPS, *(f"`{k}=`" for k in SITE_KEYS), *INCLUDABLE]:
        assert word in text, word
