"""A score under a condition: its faults proven, nothing else leaking in, the model left as it was."""

import pytest
import torch
from torch.nn.functional import kl_div

import shaketable as st
from shaketable.errors import InertError, ShaketableError
from shaketable.evaluate.reading import pair_logits, read_pairs
from shaketable.evaluate.score import Condition, Evaluator, answer_tokens, prompt_tokens
from shaketable.evaluate.tasks import Problem, load_task, sample
from shaketable.models import load_model
from shaketable.plan import Plan
from shaketable.sites.phases import current_phase

NOISE = "relative_gaussian:0.05@module.linear"


@pytest.fixture(scope="module")
def nano():
    return load_model("nano")


@pytest.fixture
def evaluator(nano):
    task = load_task("arithmetic")
    nano[0].eval()
    return Evaluator(*nano, task, sample(task, "test", 40, 0), 16)


def under(text, name="plan", seed=0):
    return Condition.of(name, Plan.parse(text, seed=seed))


def test_a_clean_score_counts_right_answers(evaluator):
    found = evaluator.score(Condition("clean"))
    right = [p.answer == a.text for p, a in zip(evaluator.problems, found.answers, strict=True)]
    assert [a.correct for a in found.answers] == right
    assert found.accuracy == sum(right) / 40 and 0.2 < found.accuracy < 0.9
    assert [a.id for a in found.answers] == [p.id for p in evaluator.problems]
    assert found.ledger is None


@pytest.mark.parametrize("kind", ["plan", "aqn"])
def test_origin_05_nothing_meant_for_rollouts_or_training_leaks_into_a_score(evaluator, nano, kind):
    clean = evaluator.score(Condition("clean")).completions
    if kind == "plan":
        noise = st.inject(nano[0], f"{NOISE},phase=rollout+train", allow_inert=True).enable()
        ledger = noise.ledger
    else:
        noise = st.AQN.load("constant:2").attach(nano[0], 10, allow_inert=True).enable()
        ledger = noise.injection.ledger
    try:
        nano[0].train()
        found = evaluator.score(Condition("clean")).completions
        assert found == clean and ledger.forward == 0
        sampled = evaluator.score(Condition("noisy"), during="rollout")
        assert ledger.forward > 0 and sampled.completions != clean
    finally:
        noise.close(check=False)
        nano[0].eval()


def test_a_plan_that_changes_nothing_is_an_error_and_never_a_score(evaluator):
    with pytest.raises(InertError, match="changed no value"):
        evaluator.score(under("saturation:1e9,scope=absolute@layer.3"))
    with pytest.raises(InertError, match="never fired"):
        evaluator.score(under("relative_gaussian:0.1@op.matmul,direction=backward"))


@pytest.mark.parametrize("training", [True, False])
def test_the_training_flag_is_left_as_it_was_on_every_way_out(evaluator, nano, training):
    model = nano[0].train(training)
    seen = []
    handle = model.register_forward_hook(lambda m, *_: seen.append((m.training, current_phase(m.training))))
    evaluator.score(Condition("clean"))
    handle.remove()
    assert set(seen) == {(False, "eval")} and model.training is training
    inert = under("saturation:1e9,scope=absolute@layer.3")
    for condition, stop, error in ((inert, None, InertError), (under(NOISE), lambda *_: 1 / 0, ZeroDivisionError)):
        with pytest.raises(error):
            evaluator.score(condition, stop)
        assert model.training is training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), "and no hook is left"


def test_a_chat_model_gets_a_chat_turn(nano):
    class Chat:
        chat_template = "…"

        def apply_chat_template(self, messages, **how):
            assert how == {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
            return {"input_ids": [len(messages[0]["content"]), messages[0]["role"]]}

    task = load_task("arithmetic")
    problem = sample(task, "test", 1, 0)[0]
    assert prompt_tokens(Chat(), task, problem) == [len(task.prompt(problem, chat=True)), "user"]
    assert nano[1].decode(prompt_tokens(nano[1], task, problem)) == problem.question


def oracle(model, texts, plan):
    """KL and agreement in float64, one text at a time, for plans that draw nothing."""
    total, same, count = 0.0, 0, 0
    for prompt, completion in texts:
        ids, rows = torch.tensor([[*prompt, *completion]]), slice(len(prompt) - 1, -1)
        with torch.no_grad():
            clean = model(ids).logits[0, rows].double().log_softmax(-1)
            with st.inject(model, plan):
                faulty = model(ids).logits[0, rows].double().log_softmax(-1)
        total += float(kl_div(faulty, clean, log_target=True, reduction="sum"))
        same += int((clean.argmax(-1) == faulty.argmax(-1)).sum())
        count += len(completion)
    return total / count, same / count, count


@pytest.mark.parametrize("text", ["truncation:2@module.linear", "gain:0.3@layer.2,phase=rollout"])
def test_drift_is_kl_and_agreement_with_the_clean_model_on_the_completions(nano, evaluator, text):
    done = [c.tokens for c in evaluator.score(Condition("clean")).completions[:12]]
    found = evaluator.drift(done, Plan.parse(text))
    texts = list(zip(evaluator.prompts, done, strict=False))
    kl, agreement, tokens = oracle(nano[0], texts, text.partition(",phase")[0])
    assert found["kl"] == pytest.approx(kl, rel=2e-3, abs=1e-6) and kl > 0
    assert (found["agreement"], found["tokens"]) == (pytest.approx(agreement), tokens)


# ---- the loss of given tokens, and texts

ZONE = "dead_zone:0.6,scope=token@layer.3"
TEXTS = [Problem(f"t{i}", text, "") for i, text in enumerate(["12+34=46", "7-3=4 5", "100+200=300 and so on", "1+1=2"])]


@pytest.mark.parametrize("left", [False, True])
def test_a_loss_is_the_mean_over_the_tokens_after_the_prompt(nano, left):
    model, tokenizer = nano
    pairs = [(tokenizer("512+134=")["input_ids"], answer_tokens(tokenizer, "646")), ([1, 2, 3], [4])]
    found = read_pairs(pairs, 8, lambda some: pair_logits(model, some, 0, left=left))
    for (prompt, rest), reading in zip(pairs, found, strict=True):
        ids = torch.tensor([[*prompt, *rest]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        with torch.no_grad():
            expected = model(ids, labels=labels).loss
        assert reading.loss / reading.tokens == pytest.approx(float(expected), rel=1e-5)
    assert pairs[0][1][-1] == tokenizer.eos_token_id


def test_a_score_reads_the_loss_of_the_right_answers_under_its_plan(nano):
    task = load_task("arithmetic,level=3")
    problems = sample(task, "test", 24, 0)
    plain, reading = (Evaluator(*nano, task, problems, 24, loss=loss) for loss in (False, True))
    clean, faulty = reading.score(Condition("clean")), reading.score(under(ZONE))
    assert 0 < clean.loss < faulty.loss
    assert [a["loss"] for a in faulty.to_dict()["answers"]] == [a.loss for a in faulty.answers]
    without = plain.score(Condition("clean")).to_dict()
    assert "loss" not in without and "loss" not in without["answers"][0]
    assert [a["text"] for a in without["answers"]] == [a.text for a in clean.answers]


def test_texts_are_read_clean_and_under_a_fault_beside_it(nano):
    model, tokenizer = nano
    evaluator = Evaluator(model, tokenizer, load_task("text"), TEXTS, 3)
    clean = evaluator.score(Condition("clean"), beside=True)
    faulty = evaluator.score(under("gain:0.2@module.linear"), beside=True)
    assert evaluator.score(under("gain:0.2@module.linear")).loss == pytest.approx(faulty.loss), "alone or beside the clean one"
    for text, before, after, row in zip(TEXTS, clean.answers, faulty.answers, faulty.readings, strict=True):
        ids = torch.tensor([tokenizer(text.question)["input_ids"]])
        with torch.no_grad():
            out = model(ids, labels=ids)
        assert before.loss == pytest.approx(float(out.loss), rel=1e-4)
        assert before.correct == pytest.approx(float((out.logits[0, :-1].argmax(-1) == ids[0, 1:]).double().mean()))
        kl, agreement, tokens = oracle(model, [(ids[0, :1].tolist(), ids[0, 1:].tolist())], "gain:0.2@module.linear")
        assert (row.kl / tokens, row.agree / tokens) == (pytest.approx(kl, rel=1e-3, abs=1e-5), pytest.approx(agreement))
        assert after.loss != before.loss
    assert clean.readings[0].kl == 0 and evaluator.score(Condition("clean")).loss == pytest.approx(clean.loss)


def test_long_texts_are_cut_and_counted_and_short_ones_refused(nano):
    evaluator = Evaluator(*nano, load_task("text"), [*TEXTS, Problem("long", "1+" * 400, "")])
    assert (len(evaluator.rest[-1]), evaluator.cut) == (255, 1)
    with pytest.raises(ShaketableError, match="t is shorter than two tokens"):
        Evaluator(*nano, load_task("text"), [Problem("t", "1", "")])
