"""The page of a mismatch: whole, self-contained, and safe whatever names and tokens hold."""

from dataclasses import replace

import torch

from shaketable.report.mismatch_html import page
from tests.mismatch import pairs, planted

EVIL = "<script>alert(1)</script>\"'&"


def test_every_stage_is_on_the_page():
    found = pairs.verdict(pairs.engine(torch.bfloat16), recorded=1)
    text = page(found)
    for word in ("LEGAL", "The stages", "Gap and floor", "Shares of the KL", "Operators", "Semantics", "Not looked at"):
        assert word in text
    for row in found.shares.families:
        assert row.family in text
    assert "http" not in text.replace("http-equiv", "")


def test_a_defect_is_on_the_page_and_nothing_of_others_is_code():
    found = pairs.verdict(pairs.engine(plant=planted.norm_eps), recorded=1)
    found.gap = replace(found.gap, worst=[replace(found.gap.worst[0], text=EVIL), *found.gap.worst[1:]])
    found.trainer, found.engine = replace(found.trainer, model=EVIL), replace(found.engine, version=EVIL)
    found.operators = replace(found.operators, wrong=[replace(found.operators.wrong[0], text=EVIL)])
    found.conclusion = replace(found.conclusion, sentence=found.sentence + EVIL)
    text = page(found)
    assert "<script" not in text
    assert "model.layers.3.input_layernorm" in text


def test_a_page_without_an_engine():
    from shaketable.mismatch.stages import Question, run_stages

    given = pairs.rollouts(pairs.engine(torch.bfloat16), count=3)
    text = page(run_stages(Question(pairs.trainer(), None, given, pairs.sampling(), {})))
    assert "recorded log-probabilities" in text
