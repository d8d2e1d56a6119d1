"""Operator noise in two samplers and two actors, AQN by epochs, validations both ways: four steps of real GRPO."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shaketable.integrations.common.worker_report import read_reports
from shaketable.models import load_model
from tests.frameworks.verl.tiny_run import make_tiny, run_example

pytestmark = pytest.mark.covers(
    "verl + vLLM", "operator noise in both, AQN by epochs, validations both ways, two workers of each", "eager, Ray, FSDP2"
)

GPUS = 2
PRODUCTS = 8 * 7
"""Of one pass through nano: seven linears in each of eight layers; lm_head and rotary angles are left out."""
PLAN = "relative_gaussian:0.3@op.matmul"
"""Strong enough to change what nano answers: at 5 % its greedy answers are the clean ones, and validation would show nothing."""
AQN = "epoch_aware:0.2-0.1+0.05-0.01,multipliers=3:2"
SIGMAS = [0.2, math.sqrt(0.2 * 0.1), 0.05, math.sqrt(0.05 * 0.01)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two epochs of two steps. The learning rate is 0, so that every validation is one of the model that we know."""
    folder = make_tiny(tmp_path_factory.mktemp("noise"), train=8, test=16)
    settings = {"EPOCHS": "2", "TEST_EVERY": "2", "SAVE_EVERY": "4", "LR": "0", "MICRO": "8"}
    settings |= {"SEED": "7", "PLAN": PLAN, "AQN": AQN}
    done = run_example("aqn_epoch_aware.sh", folder, f"+shaketable.ledger={folder / 'ledger'}", gpus=GPUS, **settings)
    assert done.exit == 0, done.text[-6000:]
    return done


@pytest.fixture(scope="module")
def lines(run):
    return [json.loads(line) for line in (run.folder / "ledger" / "steps.jsonl").read_text().splitlines()]


def greedy_answers(folder):
    """What the model itself answers, without verl, vLLM and us."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()

    def answer(question):
        ids = tokenizer(question, return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=8, do_sample=False)
        return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)

    return answer


def test_every_worker_acts_on_the_instructions_it_was_given(run):
    instructions = json.loads((run.folder / "ledger" / "instructions.json").read_text())
    for role in ("sampler", "actor"):
        reports = [report for report in read_reports(run.folder / "ledger") if report["role"] == role]
        assert len({report["rank"] for report in reports}) == len(reports) == GPUS
        assert {report["instructions"] for report in reports} == {instructions[role]["digest"]}
        for report in reports:
            assert {key: instructions[role][key] for key in report["config"]} == report["config"]
            assert report["plan"]["forward"] > 0


def test_nobody_else_was_shaken(run):
    for step in run.steps[1:]:
        passes = 2  # log probabilities and update of the policy; the reference's would be a third
        assert step["shaketable/actor/forward"] == passes * PRODUCTS * GPUS
        assert step["shaketable/actor/backward"] > 0
        assert step["shaketable/sampler/forward"] > 0
        assert step["shaketable/sampler/backward"] == 0


def test_phases_are_rollout_in_samplers_and_train_in_actors(run):
    merged = json.loads((run.folder / "ledger" / "ledger.json").read_text())["merged"]
    assert {phase for site in merged["sampler.plan"]["sites"] for phase in site["phases"]} == {"rollout", "eval"}
    assert {phase for site in merged["sampler.aqn"]["sites"] for phase in site["phases"]} == {"rollout"}
    assert {phase for site in merged["actor.plan"]["sites"] for phase in site["phases"]} == {"train"}
    assert merged["sampler.plan"]["processes"] == merged["actor.plan"]["processes"] == GPUS
    assert "actor.aqn" not in merged


def test_sigma_follows_the_epochs_in_every_sampler_and_layer(run, lines):
    assert [line["epoch"] for line in lines] == [0, 0, 1, 1]
    for line, sigma in zip(lines, SIGMAS, strict=True):
        assert len(line["sigmas"]) == GPUS
        for layers in line["sigmas"].values():
            assert layers == pytest.approx({str(i): sigma * (2 if i == 3 else 1) for i in range(8)})
    assert [step["shaketable/sigma"] for step in run.steps[1:]] == pytest.approx(SIGMAS)


def test_aqn_as_measured_is_aqn_as_asked(run):
    merged = json.loads((run.folder / "ledger" / "ledger.json").read_text())["merged"]
    for site in merged["sampler.aqn"]["sites"]:
        assert site["measured_magnitude"] == pytest.approx(site["asked"], rel=0.15)
    for site in merged["sampler.plan"]["sites"] + merged["actor.plan"]["sites"]:
        assert site["measured_magnitude"] == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("step", [0, 2, 4])
def test_validation_is_of_the_clean_model(run, step):
    answer = greedy_answers(run.folder)
    found = run.generations("val", step)
    assert len(found) == 16
    assert [row["output"] for row in found] == [answer(row["input"]) for row in found]
    assert run.steps[step]["shaketable/validation_fires"] == 0


@pytest.mark.parametrize("step", [0, 2, 4])
def test_the_same_validation_under_the_plan_has_a_name_and_answers_of_its_own(run, step):
    clean, faulty = run.generations("val", step), run.generations("val/faulty", step)
    assert [row["input"] for row in clean] == [row["input"] for row in faulty]
    assert [row["output"] for row in clean] != [row["output"] for row in faulty]
    for name, rows in (("val-core", clean), ("shaketable/faulty/val-core", faulty)):
        assert run.steps[step][f"{name}/sums/acc/mean@1"] == pytest.approx(sum(row["score"] for row in rows) / len(rows))
    assert run.steps[step]["shaketable/faulty/validation_fires"] > 0


def test_its_checkpoint_loads_and_holds_no_noise(run):
    """Two ranks wrote it; the learning rate is 0, so it is the model that was given."""
    saved, _ = load_model(str(run.folder / "out" / "global_step_4" / "actor"), dtype=torch.float32)
    clean = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32)
    for (name, a), b in zip(saved.state_dict().items(), clean.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
