"""A score under a condition: its faults proven, nothing else leaking in, the model left as it was."""

import json

import pytest
import torch
from scipy.stats import binomtest
from torch.nn.functional import kl_div

import shaketable as st
from shaketable.errors import InertError, NoMatchError, ShaketableError
from shaketable.evaluate.evaluation import Condition, Evaluator, drift, in_phases, prompt_tokens
from shaketable.evaluate.tasks import load_task, sample
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
    exact = binomtest(sum(right), 40).proportion_ci(method="wilson")
    assert (found.interval.low, found.interval.high) == pytest.approx((exact.low, exact.high), abs=1e-9)
    assert found.tokens == sum(len(c.tokens) for c in found.completions)
    assert found.ledger is None


def test_the_record_of_a_score_names_its_condition_and_proof(evaluator):
    clean = json.loads(json.dumps(evaluator.score(Condition("clean")).to_dict()))
    assert (clean["name"], clean["plan"], clean["injections"], clean["ledger"]) == ("clean", None, 0, None)
    faulty = json.loads(json.dumps(evaluator.score(under(NOISE, seed=5)).to_dict()))
    assert (faulty["name"], faulty["plan"], faulty["plan_seed"]) == ("plan", NOISE, 5)
    assert faulty["injections"] == faulty["ledger"]["forward"] > 0
    assert faulty["measured_error"] == pytest.approx(0.05, rel=0.1)
    assert faulty["n"] == len(faulty["answers"]) == 40 and faulty["batch_size"] == 16
    assert set(faulty["ledger"]["sites"][0]["phases"]) == {"eval"}


def test_faults_change_the_answers_and_their_seed_decides_how(evaluator):
    clean = evaluator.score(Condition("clean"))
    loud = "relative_gaussian:0.5@module.linear"
    draws = [evaluator.score(under(loud, seed=s)).completions for s in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert clean.completions not in draws
    assert evaluator.score(Condition("clean")).completions == clean.completions, "and nothing stays"


@pytest.mark.parametrize("phases", ["rollout", "train", "rollout+train", "eval"])
def test_a_condition_acts_whatever_phases_its_plan_names(evaluator, phases):
    named, bare = under(f"{NOISE},phase={phases}"), under(NOISE)
    assert named == bare
    assert named.plan.clauses[0].site.phase == ()
    assert evaluator.score(named).ledger.forward > 0


def test_in_phases_sets_every_clause():
    plan = Plan.parse(f"{NOISE},phase=eval;gain:0.1@layer.1", seed=3)
    moved = in_phases(plan, ("rollout",))
    assert [c.site.phase for c in moved.clauses] == [("rollout",), ("rollout",)] and moved.seed == 3
    assert [c.fault for c in moved.clauses] == [c.fault for c in plan.clauses]


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


class StopError(Exception):
    pass


def stop(*_):
    raise StopError


@pytest.mark.parametrize("training", [True, False])
def test_the_training_flag_is_left_as_it_was_on_every_way_out(evaluator, nano, training):
    model = nano[0].train(training)
    seen = []
    handle = model.register_forward_hook(lambda m, *_: seen.append((m.training, current_phase(m.training))))
    evaluator.score(Condition("clean"))
    handle.remove()
    assert set(seen) == {(False, "eval")} and model.training is training
    for condition, error in (
        (under("saturation:1e9,scope=absolute@layer.3"), InertError),
        (under("gain:0.1@layer.99"), NoMatchError),
    ):
        with pytest.raises(error):
            evaluator.score(condition)
        assert model.training is training
    for condition in (Condition("clean"), under(NOISE)):
        with pytest.raises(StopError):
            evaluator.score(condition, stop)
        assert model.training is training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), "and no hook is left"


def test_a_task_without_problems_is_refused(nano):
    with pytest.raises(ShaketableError, match="sweeps only"):
        Evaluator(*nano, load_task("text"), [], 1)


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


@pytest.fixture
def texts(evaluator):
    done = evaluator.score(Condition("clean")).completions
    return [(p, c.tokens) for p, c in zip(evaluator.prompts, done, strict=True)][:12]


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


@pytest.mark.parametrize("text", ["truncation:2@module.linear", "gain:0.3@layer.2,phase=rollout", "gain:1e-3@layer.2"])
@pytest.mark.parametrize("size", [1, 16])
def test_drift_is_kl_and_agreement_with_the_clean_model_on_the_completions(nano, texts, text, size):
    model, tokenizer = nano
    found, ledger = drift(model, texts, Plan.parse(text), size, tokenizer.pad_token_id)
    kl, agreement, tokens = oracle(model, texts, text.partition(",phase")[0])
    assert found.kl == pytest.approx(kl, rel=2e-3, abs=1e-6) and kl > 0
    assert (found.agreement, found.tokens) == (agreement, tokens)
    assert ledger.forward > 0


def test_drift_of_a_tiny_fault_is_next_to_nothing_and_grows_with_it(nano, texts):
    model, tokenizer = nano
    plans = [Plan.parse(f"relative_gaussian:{m}@module.linear") for m in (1e-6, 0.02, 0.3)]
    small, middle, large = (drift(model, texts, plan, 16, tokenizer.pad_token_id)[0] for plan in plans)
    assert abs(small.kl) < 1e-6 and small.agreement == 1
    assert 1e-6 < middle.kl < large.kl
    assert large.agreement < 1


def test_drift_leaves_no_hook_and_refuses_what_changes_nothing(nano, texts, monkeypatch):
    model, tokenizer = nano
    inert = Plan.parse("saturation:1e9,scope=absolute@layer.3")
    with pytest.raises(InertError):
        drift(model, texts, inert, 16, tokenizer.pad_token_id)
    found, _ = drift(model, texts, inert, 16, tokenizer.pad_token_id, check=False)
    assert (found.kl, found.agreement) == (0, 1)
    readings = iter([lambda: torch.zeros(1, 2), stop])
    monkeypatch.setattr("shaketable.evaluate.evaluation.log_probs", lambda *_: next(readings)())
    with pytest.raises(StopError):
        drift(model, texts, Plan.parse(f"{NOISE};{NOISE.replace('module.linear', 'op.matmul')}"), 16, tokenizer.pad_token_id)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
