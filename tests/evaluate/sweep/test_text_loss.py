"""Texts that are read: transformers' own loss as the oracle, one text at a time."""

import pytest
import torch
from torch.nn import functional as F

from shaketable.errors import ShaketableError
from shaketable.evaluate.sweep.config import Setting
from shaketable.evaluate.sweep.text_loss import TextReading
from shaketable.evaluate.tasks import Problem, load_task
from shaketable.inject import inject
from shaketable.models import load_model
from shaketable.plan import Plan

CLEAN = Setting(0.0, 0, None, True)
GAIN = Setting(0.2, 0, Plan.parse("gain:0.2@module.linear"), True)
TEXTS = [Problem(f"t{i}", text, "") for i, text in enumerate(["12+34=46", "7-3=4 5", "100+200=300 and so on", "1+1=2"])]


@pytest.fixture(scope="module")
def nano():
    return load_model("nano")


def reading(nano, texts=TEXTS, batch_size=None):
    return TextReading(*nano, load_task("text"), texts, batch_size)


@torch.no_grad()
def alone(model, ids):
    """Log-probabilities of one text, not padded."""
    return model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)


def test_losses_are_those_of_transformers(nano):
    model, tokenizer = nano
    for row, text in zip(reading(nano).measure(CLEAN)["texts"], TEXTS, strict=True):
        ids = tokenizer(text.question, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = model(input_ids=ids, labels=ids)
        assert row["id"] == text.id and row["tokens"] == ids.shape[1] - 1
        assert row["loss"] / row["tokens"] == pytest.approx(float(out.loss), rel=1e-4)
        assert row["correct"] == int((out.logits[0, :-1].argmax(-1) == ids[0, 1:]).sum())
        assert (row["kl"], row["agree"]) == (0.0, row["tokens"])


def test_the_distance_is_from_clean_to_faulty(nano):
    found = reading(nano, batch_size=3)
    for row, ids in zip(found.measure(GAIN)["texts"], found.ids, strict=True):
        clean = alone(nano[0], ids)
        with inject(nano[0], GAIN.plan):
            faulty = alone(nano[0], ids)
        assert row["kl"] == pytest.approx(float(F.kl_div(faulty, clean, log_target=True, reduction="sum")), rel=1e-3, abs=1e-5)
        assert row["agree"] == int((clean.argmax(-1) == faulty.argmax(-1)).sum())
        assert row["loss"] == pytest.approx(float(F.nll_loss(faulty, torch.tensor(ids[1:]), reduction="sum")), rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_batches_do_not_matter(nano, batch_size):
    whole, parts = (reading(nano, batch_size=b).measure(CLEAN)["texts"] for b in (None, batch_size))
    assert [t["loss"] for t in parts] == pytest.approx([t["loss"] for t in whole], rel=1e-4)


def test_the_model_is_clean_again(nano):
    before = reading(nano).measure(CLEAN)["texts"]
    reading(nano).measure(GAIN)
    assert reading(nano).measure(CLEAN)["texts"] == before


def test_a_failing_reading_leaves_no_fault_behind(nano, monkeypatch):
    before = reading(nano).measure(CLEAN)["texts"]
    broken, read, calls = reading(nano), TextReading._log_probs, []

    def dies(self, ids, mask):
        calls.append(1)
        return read(self, ids, mask) if len(calls) == 1 else 1 / 0

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(TextReading, "_log_probs", dies)
        broken.measure(GAIN)
    assert reading(nano).measure(CLEAN)["texts"] == before


def test_logits_that_are_no_numbers_give_none(nano):
    plan = Plan.parse("gain:1e38@module.linear")
    rows = reading(nano).measure(Setting(1e38, 0, plan, True))["texts"]
    assert {r["loss"] for r in rows} == {r["kl"] for r in rows} == {None}


def test_a_long_text_is_cut_and_counted(nano):
    found = reading(nano, [*TEXTS, Problem("long", "1+" * 400, "")])
    assert (len(found.ids[-1]), found.cut, found.measure(CLEAN)["cut"]) == (256, 1, 1)


def test_a_text_of_one_token_is_refused(nano):
    with pytest.raises(ShaketableError, match="t is shorter than two tokens"):
        reading(nano, [Problem("t", "1", "")])
