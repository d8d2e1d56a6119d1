"""The trainer believes only what it can read: a worker that is missing, deaf or idle stops the run, and is named."""

import errno
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import InertError, ShaketableError
from shaketable.inject.injection import Injection
from shaketable.integrations.common.instructions import Instructions
from shaketable.integrations.common.worker_report import WorkerReport
from shaketable.integrations.verl.workers import VerlWorkers

ORDERS = Instructions(plan="gain:0.1@module.linear,phase=rollout+train", seed=1)
BACKWARD = Instructions(plan="gain:0.1@op.matmul,direction=backward,phase=train")
PHASE = {"sampler": "rollout", "actor": "train"}


@pytest.fixture(autouse=True)
def closed_in_the_end():
    """Workers are never told to stop; what they leave open would be seen by other tests."""
    yield
    for worker in Worker.made:
        worker.close()
    Worker.made.clear()


class Worker:
    """A worker with a model of one norm and one linear, that reports as verl's do."""

    made = []  # noqa: RUF012

    def __init__(self, folder, role="sampler", rank=0, instructions=ORDERS):
        self.made.append(self)
        self.model = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4))
        self.role, self.injection, self.noise = role, None, None
        if instructions.plan is not None:
            self.injection = Injection(st.Plan.parse(instructions.plan, seed=instructions.seed), rank=rank, allow_inert=True)
            self.injection.attach(self.model)
        if instructions.aqn is not None:
            self.noise = st.AQN.load(instructions.aqn).attach(self.model, instructions.total_steps, rank=rank, allow_inert=True)
        self.state = {"rank": rank, "instructions": instructions.digest(), "phase": "rollout"}
        self.state |= {"step": 0, "written": 0, "updates": 0}
        self.file = WorkerReport(folder, role, self.report)

    def report(self):
        ledgers = {"plan": self.injection, "aqn": self.noise}
        found = {what: None if part is None else part.ledger.to_dict() for what, part in ledgers.items()}
        sigmas = {} if self.noise is None else {str(k): v for k, v in self.noise.sigmas.items()}
        return {**self.state, **found, "sigma": 0.0 if self.noise is None else self.noise.sigma, "sigmas": sigmas}

    def close(self):
        self.file.close()
        for part in filter(None, (self.injection, self.noise)):
            part.close(check=False)

    def work(self, times=1, phase=None, backward=False, updates=1):
        self.state["updates"] += updates
        for part in filter(None, (self.injection, self.noise)):
            part.enable()
        for _ in range(times):
            with st.phase(phase or PHASE[self.role]):
                y = self.model(torch.randn(2, 4))
                if backward:
                    y.sum().backward()
        for part in filter(None, (self.injection, self.noise)):
            part.disable()


class Run:
    """The workers as the trainer sees them, and as they are, who answer whenever they are asked."""

    def __init__(self, folder, instructions, size=1):
        self.shaken = VerlWorkers(folder, instructions, size, patience=0)
        self.workers = [Worker(folder, role, rank, instructions[role]) for role in instructions for rank in range(size)]
        self.mark = 0

    def read(self):
        self.mark += 1
        for worker in self.workers:
            worker.file.flush(self.mark)
        self.shaken.read(self.mark)
        return self.shaken

    def step(self, *trained):
        return self.read().after_step(trained or ("forward", "backward"))

    def finish(self):
        return self.read().finish()


def test_all_there(tmp_path):
    run = Run(tmp_path, {"sampler": ORDERS, "actor": ORDERS}, size=2)
    run.read().check_in()
    run.shaken.check_samplers(step=0, phase="rollout")
    for worker in run.workers:
        worker.work(3)
    first = run.step()
    assert first["shaketable/sampler/forward"] == 6
    assert first["shaketable/actor/measured_error"] == pytest.approx(0.1)
    for worker in run.workers[1:]:
        worker.work()
    assert run.step()["shaketable/sampler/forward"] == 1, "since the last time"
    assert run.shaken.after_validation() == 0
    body = run.finish()
    assert body["merged"]["sampler.plan"]["forward"] == 7
    assert body == json.loads((tmp_path / "ledger.json").read_text())


# ---- is every worker there, and does it what it was told?


def test_a_worker_that_never_reported_stops_the_run(tmp_path):
    workers = VerlWorkers(tmp_path, {"sampler": ORDERS}, size=2, patience=0)
    Worker(tmp_path).file.flush(1)
    with pytest.raises(ShaketableError, match="1 of 2 samplers reported"):
        workers.read(1)


def test_a_file_that_is_being_replaced_is_read_again(tmp_path, monkeypatch):
    workers = VerlWorkers(tmp_path, {"sampler": ORDERS}, size=1, patience=60)
    Worker(tmp_path).file.flush(1)
    real, problems = Path.read_text, [OSError(errno.ESTALE, "away")]

    def read_text(path, **kwargs):
        if problems:
            raise problems.pop()
        return real(path, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr("time.sleep", lambda _: None)
    workers.read(1)
    assert len(workers.now["sampler"]) == 1


def test_a_worker_with_other_instructions_stops_the_run(tmp_path):
    workers = VerlWorkers(tmp_path, {"sampler": ORDERS}, size=1)
    Worker(tmp_path, instructions=ORDERS.model_copy(update={"seed": 2}))
    workers.read(0)
    with pytest.raises(ShaketableError, match=r"sampler 0 \(pid \d+\) acts on instructions \w+ and was given \w+"):
        workers.check_in()


def test_a_worker_that_a_call_did_not_reach_stops_the_run(tmp_path):
    run = Run(tmp_path, {"sampler": ORDERS}, size=2)
    run.workers[0].state |= {"step": 1, "written": 3}
    with pytest.raises(ShaketableError, match=r"sampler 1 .* has step 0 and was told 1: the call was lost"):
        run.read().check_samplers(step=1)
    with pytest.raises(ShaketableError, match=r"sampler 0 .* is to validate, and 3 of its weights hold a fault"):
        run.shaken.check_clean()


# ---- each step is proven by itself


@pytest.mark.parametrize(("role", "fails"), [("actor", True), ("sampler", False)])
def test_an_idle_worker_after_a_step(tmp_path, role, fails):
    """A small batch can leave a sampler without work; an actor always has some."""
    run = Run(tmp_path, {role: ORDERS}, size=2)
    run.workers[0].work()
    if fails:
        with pytest.raises(InertError, match=f"{role} 1 .* fired nowhere in a whole step"):
            run.step()
    else:
        run.step()
    with pytest.raises(InertError, match=f"{role} 1 .* fired nowhere"):
        run.finish()


@pytest.mark.parametrize(("role", "what"), [("sampler", "aqn"), ("actor", "plan")])
def test_who_goes_silent_in_a_later_step_stops_the_run(tmp_path, role, what):
    instructions = ORDERS if what == "plan" else Instructions(aqn="constant:0.1,where=both", total_steps=3)
    run = Run(tmp_path, {role: instructions}, size=2)
    for worker in run.workers:
        worker.work()
    run.step()
    with pytest.raises(InertError, match=f"{role} 0 .* fired nowhere in a whole step"):
        run.step()


def test_aqn_is_due_where_sigma_is_above_0(tmp_path):
    """The first third of this schedule is silent."""
    run = Run(tmp_path, {"sampler": Instructions(aqn="global_decay:0.2-0.1,stages=3", total_steps=3)})
    assert run.step()["shaketable/sigma"] == 0
    run.workers[0].noise.step = 1
    with pytest.raises(InertError, match=r"sampler 0 .* has AQN on and fired nowhere"):
        run.step()


def test_a_backward_is_due_when_there_was_an_update(tmp_path):
    """While a critic warms up, actors give log probabilities and are not updated."""
    run = Run(tmp_path, {"actor": BACKWARD})
    run.workers[0].work()
    run.step("forward")
    run.finish()
    run.workers[0].work(backward=True)
    assert run.step("forward", "backward")["shaketable/actor/backward"] > 0


def test_a_clause_that_changed_nothing_is_an_error_after_the_step(tmp_path):
    plan = "gain:0.1@module.rmsnorm;saturation:2@module.linear,phase=train"
    run = Run(tmp_path, {"actor": Instructions(plan=plan)}, size=2)
    for worker in run.workers:
        worker.work(40)
    with pytest.raises(InertError, match=r"actors: saturation.* fired 80 times and changed no value"):
        run.step()


# ---- a validation is proven both ways


@pytest.mark.parametrize("what", ["plan", "aqn"])
def test_a_validation_that_was_not_clean_stops_the_run(tmp_path, what):
    instructions = ORDERS if what == "plan" else Instructions(aqn="constant:0.1")
    run = Run(tmp_path, {"sampler": instructions})
    report = run.workers[0].report
    run.workers[0].work()

    def as_if_validating():
        found = report()
        for site in found[what]["sites"]:
            site["phases"] = {"eval": site["phases"]["rollout"]}
        return found

    run.workers[0].file.ask = as_if_validating
    with pytest.raises(ShaketableError, match=r"hit 1 times in a validation that was to be without it"):
        run.read().after_validation()


def test_clean_and_noisy_validations_of_a_plan_that_names_eval_are_proven(tmp_path):
    """With validate=both the plan is switched off for one of the two."""
    run = Run(tmp_path, {"sampler": Instructions(plan="gain:0.1@module.linear,phase=rollout+eval")})
    assert run.read().after_validation(faulty=False) == 0
    run.workers[0].work(2, phase="eval")
    assert run.read().after_validation(faulty=True) == 2
    with pytest.raises(InertError, match="fired nowhere in a whole validation"):
        run.read().after_validation(faulty=True)
    run.workers[0].work(2, phase="eval")
    with pytest.raises(ShaketableError, match="hit 2 times in a validation that was to be without it"):
        run.read().after_validation(faulty=False)


# ---- a release of verl that calls other methods


def test_log_probabilities_do_not_excuse_updates_that_went_another_way(tmp_path):
    run = Run(tmp_path, {"actor": ORDERS})
    run.workers[0].work(3, updates=0)
    with pytest.raises(InertError, match=r"actor 0 .* and not by train_mini_batch"):
        run.step()


def test_forwards_do_not_excuse_a_missing_backward(tmp_path):
    run = Run(tmp_path, {"actor": Instructions(plan="gain:0.1@op.matmul,phase=train")})
    run.workers[0].work(3, backward=True)
    run.step()
    run.workers[0].work(3)
    with pytest.raises(InertError, match=r"fired nowhere in a whole step \(backward\)"):
        run.step()
