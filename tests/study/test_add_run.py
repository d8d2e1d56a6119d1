"""Runs that were made elsewhere in a study: verl's ledgers with its validation dumps, run records, and what is refused."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

import shaketable as st
from shaketable.cli.study import study
from shaketable.errors import ShaketableError
from shaketable.integrations.common.instructions import Instructions
from shaketable.integrations.verl.workers import VerlWorkers
from shaketable.models import load_model
from shaketable.records.record import RunRecord
from shaketable.report.study_markdown import markdown
from shaketable.study.add_run import add_run
from shaketable.study.analysis.results import Findings
from shaketable.study.file import parse_study
from shaketable.study.store import define
from tests.study.small_studies import findings

PLAN = "relative_gaussian:0.05@module.linear"
SEEDS = (0, 1)


def asked(**replaced):
    arms = {"baseline": {"elsewhere": True}, "noise": {"elsewhere": True, "plan": PLAN}}
    small = {"study": "verl", "model": "Qwen/Qwen2.5-1.5B", "task": "gsm8k", "seeds": [*SEEDS], "arms": arms}
    return parse_study(small | {"compare": {"primary": {"a": "noise", "b": "baseline", "condition": "clean"}}} | replaced)


@pytest.fixture(scope="module")
def ledger():
    """A ledger of a plan that acted in rollouts, as a sampler of verl leaves it."""
    model, tokenizer = load_model("nano")
    with st.inject(model, f"{PLAN},phase=rollout", seed=1) as made, st.phase("rollout"), torch.no_grad():
        model(torch.tensor([tokenizer("12+34=")["input_ids"]]))
    return made.to_dict()


@pytest.fixture
def verl(tmp_path, ledger):
    """What a verl run leaves in its folder of ledgers, written by the code that writes it there."""
    folder = tmp_path / "ledgers"
    workers = VerlWorkers(folder, {"sampler": Instructions(plan=f"{PLAN},phase=rollout", seed=1)}, 1)
    workers.now["sampler"] = [{"role": "sampler", "rank": 0, "pid": 1, "plan": ledger, "aqn": None, "sigmas": {}}]
    for step in (1, 2):
        workers.log({"step": step, "epoch": 0, "shaketable/sampler/forward": 57.0, "shaketable/kl": 0.01 * step})
    workers.finish()
    return folder


def dump(path, right, n=20):
    """verl's validation dump: the first `right` of n problems are solved."""
    rows = [{"input": f"q{i}", "output": f"a{i}", "gts": str(i), "score": float(i < right), "step": 2} for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def added(tmp_path, verl):
    """A store with two seeds of both arms."""
    define(asked(), tmp_path)
    (tmp_path / "plain").mkdir()
    for seed in SEEDS:
        for arm, folder, right in (("baseline", tmp_path / "plain", 12), ("noise", verl, 9 + seed)):
            for path in (folder, verl / "ledger.json"):  # a minute after the study was written down
                os.utime(path, (time.time() + 60,) * 2)
            scores = {"clean": dump(tmp_path / f"{arm}{seed}.jsonl", right)}
            add_run(asked(), tmp_path, folder, arm=arm, seed=seed, scores=scores)
    return tmp_path


def test_runs_of_verl_are_compared_by_the_same_report(added):
    found = findings(asked(), added / "verl")
    assert found["complete"] and found["study"]["named_before"]
    primary = found["comparisons"][0]
    assert (primary["seeds"], primary["problems"]) == (2, 20)
    assert primary["difference"] == pytest.approx((0.45 + 0.5) / 2 - 0.6)
    noise = next(arm for arm in found["arms"] if arm["name"] == "noise")
    assert [(row["where"], row["verdict"]) for row in noise["proof"]] == [("training: plan", "agrees")]
    curve = next(c for c in noise["curves"] if c["name"].startswith("KL"))
    assert [p["mean"] for p in curve["points"]] == [0.01, 0.02]
    notes = " ".join(found["notes"])
    assert "4 of 4 runs were made elsewhere and added" in notes and "have no ledger" in notes
    text = markdown(Findings.model_validate(found))
    assert "made elsewhere: verl" in text and "made elsewhere: a run without a ledger" in text
    record = RunRecord.open(added / "verl" / "runs" / next(r["name"] for r in found["runs"] if r["arm"] == "noise"))
    assert record.events("added")[0]["files"].keys() == {"instructions.json", "ledger.json", "steps.jsonl", "scores, clean"}
    assert record.sealed()


def test_results_that_are_older_than_the_study_are_not_named_before(added, tmp_path, verl):
    late = asked(study="late")
    os.utime(verl / "ledger.json", (1e9, 1e9))
    add_run(late, tmp_path, verl, arm="noise", seed=0, scores={"clean": dump(tmp_path / "late.jsonl", 3)})
    found = findings(late, tmp_path / "late")
    assert not found["study"]["named_before"]
    assert "there were results before the study was written down" in " ".join(found["notes"])


def broken(verl, name, text):
    (verl / name).write_text(text)


WRONG = {
    "seed": (lambda v, s: {"seed": 9}, "has no arm 'noise' with `elsewhere: true` and the seed 9"),
    "condition": (lambda v, s: {"scores": {"clena": s}}, "there is no such condition; did you mean 'clean'?"),
    "no ledger": (lambda v, s: {"folder": v.parent}, "nothing says that the plan of noise acted"),
    "other arm": (lambda v, s: {"arm": "baseline"}, f"had the plan {PLAN}, and the arm baseline has None"),
    "not JSON": (lambda v, s: broken(v, "ledger.json", "{"), "is no whole run of verl: JSONDecodeError"),
    "empty ledger": (lambda v, s: broken(v, "ledger.json", '{"merged": {}}'), "has no ledger of the plan"),
    "twice": (lambda v, s: s.write_text('{"input": "1", "acc": 1}\n' * 2) and None, "line 2 is a second answer to one problem"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_and_changes_nothing(case, tmp_path, verl):
    change, words = WRONG[case]
    scores = dump(tmp_path / "s.jsonl", 5)
    given = {"folder": verl, "arm": "noise", "seed": 0, "scores": {"clean": scores}} | (change(verl, scores) or {})
    folder = given.pop("folder")
    with pytest.raises(ShaketableError) as error:
        add_run(asked(), tmp_path, folder, **given)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "verl" / "runs").exists() or not list((tmp_path / "verl" / "runs").glob("[!.]*"))


def test_nothing_is_overwritten_and_other_problems_are_refused(added, verl):
    scores = {"clean": dump(added / "again.jsonl", 1)}
    with pytest.raises(ShaketableError, match=r"is there already, .* nothing is overwritten"):
        add_run(asked(), added, verl, arm="noise", seed=0, scores=scores)
    shutil.rmtree(next((added / "verl" / "runs").glob("noise-s0-*")))
    with pytest.raises(ShaketableError, match="was scored on other problems than"):
        add_run(asked(), added, verl, arm="noise", seed=0, scores={"clean": dump(added / "few.jsonl", 1, n=10)})


def test_scores_under_a_fault_need_a_fault_that_acted_in_a_validation(tmp_path, verl):
    faulty = asked(evaluate={"conditions": {"faulty": PLAN}})
    both = {"clean": dump(tmp_path / "c.jsonl", 9), "faulty": dump(tmp_path / "f.jsonl", 3)}
    with pytest.raises(ShaketableError, match="no fault fired in a validation of this run, so its scores are clean"):
        add_run(faulty, tmp_path, verl, arm="noise", seed=0, scores=both)


def test_the_command_says_what_it_did(tmp_path, verl, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = asked().model_dump(mode="json", exclude={"engine", "diagnose", "harden", "train"})
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(content))
    dump(tmp_path / "v.jsonl", 4)
    done = CliRunner().invoke(study, ["add", "s.yaml", str(verl), "--arm", "noise", "--seed", "0", "--scores", "v.jsonl"])
    assert done.exit_code == 0, done.output
    assert "added noise, seed 0: shaketable-runs/verl/runs/noise-s0-" in done.output.replace("\n", "")
    shown = CliRunner().invoke(study, ["status", "verl"])
    assert "1 done" in shown.output and "3 missing" in shown.output


RECORDED = Path(__file__).with_name("verl_run")
"""What verl 0.9.1 left of four steps of GRPO on nano: its ledgers, its last validation both ways, and its file of metrics."""


def test_a_real_run_of_verl_enters_with_its_proof_both_scores_and_its_metrics(tmp_path):
    plan, aqn = "relative_gaussian:0.3@op.matmul", "epoch_aware:0.2-0.1+0.05-0.01,multipliers=3:2"
    arms = {"noise": {"elsewhere": True, "plan": plan, "aqn": aqn}, "baseline": {"elsewhere": True}}
    study = asked(arms=arms, seeds=[7], evaluate={"conditions": {"faulty": plan}})
    scores = {name: RECORDED / f"{name}.jsonl" for name in ("clean", "faulty")}
    cell = add_run(study, tmp_path, RECORDED, arm="noise", seed=7, scores=scores, metrics=RECORDED / "metrics.jsonl")
    record = RunRecord.open(tmp_path / "verl" / "runs" / cell.name)
    told = [json.loads(line) for line in (RECORDED / "metrics.jsonl").read_text().splitlines()]
    (scored,) = record.events("evaluation")
    for condition, name in zip(scored["conditions"], ("val-core", "shaketable/faulty/val-core"), strict=True):
        assert condition["accuracy"] == told[4]["data"][f"{name}/sums/acc/mean@1"] and condition["n"] == 16
    steps = record.events("step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step["kl_sampler_trainer"] for step in steps] == [row["data"]["shaketable/kl"] for row in told[1:]]
    assert record.events("finished")[0]["ledgers"].keys() == {"plan", "aqn"}
