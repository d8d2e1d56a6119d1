"""The loss of given tokens, against torch's own cross entropy."""

import pytest
import torch

from shaketable.evaluate.evaluation import Condition, Evaluator
from shaketable.evaluate.tasks import Problem, load_task, sample
from shaketable.evaluate.text_evaluation import TextEvaluator
from shaketable.evaluate.token_loss import answer_tokens, read
from shaketable.models import load_model
from shaketable.plan import Plan

ZONE = Plan.parse("dead_zone:0.6,scope=token@layer.3")


@pytest.fixture(scope="module")
def nano():
    return load_model("nano")


def test_a_loss_is_the_mean_over_the_tokens_after_the_prompt(nano):
    model, tokenizer = nano
    pairs = [(tokenizer("512+134=")["input_ids"], answer_tokens(tokenizer, "646")), ([1, 2, 3], [4])]
    found = read(model, pairs, batch_size=8, pad=0)
    for (prompt, rest), reading in zip(pairs, found, strict=True):
        ids = torch.tensor([[*prompt, *rest]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        with torch.no_grad():
            expected = model(ids, labels=labels).loss
        assert reading.loss == pytest.approx(float(expected), rel=1e-5)
    assert found[0].foreseen in (0.25, 0.5, 0.75, 1.0)
    assert pairs[0][1][-1] == tokenizer.eos_token_id


def test_a_score_reads_the_loss_of_the_right_answers_under_its_plan(nano):
    task = load_task("arithmetic,level=3")
    problems = sample(task, "test", 24, 0)
    plain, reading = (Evaluator(*nano, task, problems, 24, loss=loss) for loss in (False, True))
    clean, faulty = (reading.score(Condition.of(name, plan)) for name, plan in (("clean", None), ("faulty", ZONE)))
    assert 0 < clean.loss < faulty.loss
    assert [a["loss"] for a in faulty.to_dict()["answers"]] == [a.loss for a in faulty.answers]
    without = plain.score(Condition("clean")).to_dict()
    assert "loss" not in without and "loss" not in without["answers"][0]
    assert [a["text"] for a in without["answers"]] == [a.text for a in clean.answers]


def test_texts_are_scored_by_their_loss(nano):
    texts = [Problem("a", "12+34=46", ""), Problem("b", "7*8=56", "")]
    evaluator = TextEvaluator(*nano, texts, 2)
    clean, faulty = evaluator.score(Condition("clean")), evaluator.score(Condition.of("faulty", ZONE))
    assert 0 < clean.loss < faulty.loss and faulty.ledger.forward == 1
    assert all(0 <= answer.correct <= 1 for answer in clean.answers)
