"""The report as Markdown: the same verdict and numbers as the page, in tables that stay tables whatever they hold."""

import re

import pytest

from shaketable.report import study_markdown
from shaketable.report.study_markdown import plain
from shaketable.report.wording import METHOD
from shaketable.study.analysis.results import Findings
from tests.report.findings_sample import FAULT, SAMPLES, study

EVIL = "a|b\n## not a heading <script>x</script> *bold* `tick` [x](javascript:1) \u202e"


def markdown(found):
    return study_markdown.markdown(Findings.model_validate(found))


def assert_tables_are_whole(text):
    width = None
    for line in text.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else None
        assert cells is None or width is None or cells == width, line
        width = cells


@pytest.mark.parametrize("name", SAMPLES)
def test_tables_have_as_many_cells_as_their_head(name):
    assert_tables_are_whole(markdown(SAMPLES[name]()))


def test_verdict_first_then_every_number():
    found = study()
    text = markdown(found)
    assert (
        text.splitlines()[0]
        == "# ○ NOT SHOWN: No difference between targeted and global in faulty accuracy could be told from chance"
    )
    assert text.index(plain(found["verdict"]["sentence"])) < text.index("## Design") < text.index("## Scores")
    for arm in found["arms"]:
        for score in arm["scores"]:
            seeds = ", ".join(f"{100 * p['value']:.1f}" for p in score["per_seed"])
            assert f"| {100 * score['mean']:.1f} (" in text and f"by seed {seeds}; before training" in text
    for c in found["comparisons"]:
        assert plain(c["sentence"]) in text
    assert all(sentence in text for sentence in METHOD)
    assert f"`{FAULT}`" in text and "Proof of injection: 15 of 15 places proven." in text
    assert "| ◆ targeted − global | faulty, accuracy | −2.5 points |" in text


def test_partial_and_missing_proof_are_said_at_the_top():
    text = markdown(SAMPLES["partial"]())
    head = text[: text.index("## Design")]
    assert "**PARTIAL**: 3 of 26 runs are not done: clean-s0" in head
    assert "No proof was recorded for healthy" in head and "1 inert" in head
    assert "PARTIAL" not in markdown(study())


@pytest.mark.attack("hostile inputs")
def test_hostile_text_stays_one_cell():
    found = study()
    found["arms"][0] |= {"name": EVIL, "plan": EVIL, "description": EVIL}
    found["runs"][0] |= {"error": EVIL, "folder": EVIL}
    text = markdown(found)
    assert "<script>" not in re.sub(r"`+[^\n]*?`+", "", text.replace("\\<", ""))
    assert "\n## not" not in text and "\u202e" not in text and "| a\\|b" in text
    assert_tables_are_whole(text)
