"""Every `shaketable` line in a bash block of the first pages runs, in the order written, in one folder per page.

A line ends in 0, or as its comment says: `# exit 1`. Studies are made small; nothing else is changed. What the tour has too is run
by test_docs.py.
"""

import re
import shlex
import sys

import pytest

from tests import ROOT, slow
from tests.cli.command_server import shaketable

DOCS = ROOT / "docs"
PAGES = (
    "start",
    "run",
    "inspect",
    "env",
    "harden",
    "mismatch",
    *(f"journeys/{name}" for name in ("device", "format", "sampler", "training", "study")),
)
QUICK = ("start", "inspect", "env")
SMALL = "seeds=1 train.steps=4 train.prompts=2 train.samples=2 evaluate.n=6 evaluate.every=0 evaluate.mechanism=false diagnose.tokens=32"
TRAIN = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64}
ids = torch.arange(32).view(2, 16)
LlamaForCausalLM(LlamaConfig(**shape))(ids, labels=ids).loss.backward()
"""


def commands(page):
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    elsewhere = (DOCS / "tour.md").read_text().splitlines()
    lines = [line for block in blocks for line in re.sub(r"\\\n +", "", block).splitlines()]
    return [line for line in lines if line.startswith("shaketable") and line not in elsewhere]


@pytest.mark.parametrize("page", [page if page in QUICK else slow(page) for page in PAGES])
def test_commands_of_a_page_run(page, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{a}+{a + 7}="}}\n' for a in range(10, 90)))
    assert commands(page)
    for line in commands(page):
        words = [sys.executable if word == "python" else word for word in shlex.split(line, comments=True)[1:]]
        if words[:2] == ["study", "run"]:
            words += [f"--set={small}" for small in SMALL.split()]
        expected = int(found[1]) if (found := re.search(r"# exit (\d)", line)) else 0
        done = shaketable(tmp_path, *words)
        assert done.code == expected, f"{line}\n{done.stdout[-500:]}\n{done.stderr[-1500:]}"


def test_the_site_has_every_page():
    """A page that nobody can reach is not read."""
    nav = (DOCS.parent / "zensical.toml").read_text()
    pages = [path.relative_to(DOCS.parent).as_posix() for path in DOCS.rglob("*.md")]
    assert [page for page in pages if f'"{page}"' not in nav] == []
