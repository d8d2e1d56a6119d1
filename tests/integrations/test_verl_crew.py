"""The trainer believes only what it can read: a worker that is missing, deaf or idle stops the run, and is named."""

import json

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import InertError, ShaketableError
from shaketable.inject.injection import Injection
from shaketable.integrations.orders import Orders
from shaketable.integrations.reports import Report
from shaketable.integrations.verl_crew import Crew

ORDERS = Orders(plan="gain:0.1@module.linear,phase=rollout+train", seed=1)


class Worker:
    """A worker with a model of one linear, that reports as verl's do."""

    def __init__(self, folder, role="sampler", rank=0, orders=ORDERS):
        self.model = nn.Sequential(nn.Linear(4, 4))
        self.injection = Injection(st.Plan.parse(orders.plan, seed=orders.seed), rank=rank, allow_inert=True)
        self.injection.attach(self.model)
        self.state = {"rank": rank, "orders": orders.digest(), "step": 0, "phase": "rollout", "sigmas": {}, "aqn": None}
        self.file = Report(folder, role, lambda: {**self.state, "plan": self.injection.ledger.to_dict()})

    def work(self, times=1):
        self.injection.enable()
        for _ in range(times):
            with st.phase("rollout"):
                self.model(torch.randn(2, 4))
        self.injection.disable()
        self.file.flush()


def test_all_there(tmp_path):
    crew = Crew(tmp_path, {"sampler": ORDERS, "actor": ORDERS}, size=2)
    workers = [Worker(tmp_path, role, rank) for role in ("sampler", "actor") for rank in range(2)]
    crew.check_in()
    crew.check_samplers(step=0, phase="rollout")
    for worker in workers:
        worker.work(3)
    crew.check_fired()
    assert crew.metrics()["shaketable/sampler/forward"] == 6
    workers[0].work()
    assert crew.metrics()["shaketable/sampler/forward"] == 1, "since the last time"
    assert crew.metrics()["shaketable/actor/measured_error"] == pytest.approx(0.1)
    assert crew.in_validation() == 0
    body = crew.finish()
    assert body["merged"]["sampler.plan"]["forward"] == 7
    assert body == json.loads((tmp_path / "ledger.json").read_text())


def test_a_worker_that_never_reported_stops_the_run(tmp_path):
    crew = Crew(tmp_path, {"sampler": ORDERS}, size=2)
    Worker(tmp_path)
    with pytest.raises(ShaketableError, match="1 of 2 samplers reported"):
        crew.check_in()


def test_a_worker_with_other_orders_stops_the_run(tmp_path):
    crew = Crew(tmp_path, {"sampler": ORDERS}, size=1)
    Worker(tmp_path, orders=ORDERS.model_copy(update={"seed": 2}))
    with pytest.raises(ShaketableError, match=r"sampler 0 \(pid \d+\) acts on orders \w+ and was given \w+"):
        crew.check_in()


def test_a_worker_that_a_call_did_not_reach_stops_the_run(tmp_path):
    crew = Crew(tmp_path, {"sampler": ORDERS}, size=2)
    there, deaf = Worker(tmp_path, rank=0), Worker(tmp_path, rank=1)
    there.state["step"] = 1
    there.file.flush()
    deaf.file.flush()
    with pytest.raises(ShaketableError, match=r"sampler 1 .* has step 0 and was told 1: the call got lost"):
        crew.check_samplers(step=1)


@pytest.mark.parametrize(("role", "fails"), [("actor", True), ("sampler", False)])
def test_an_idle_worker_after_a_step(tmp_path, role, fails):
    """A small batch can leave a sampler without work; an actor always has some."""
    crew = Crew(tmp_path, {role: ORDERS}, size=2)
    busy, _ = Worker(tmp_path, role, 0), Worker(tmp_path, role, 1)
    busy.work()
    if fails:
        with pytest.raises(InertError, match=f"{role} 1 .* struck nothing in a whole step"):
            crew.check_fired()
    else:
        crew.check_fired()
    with pytest.raises(InertError, match=f"{role} 1 .* struck nothing"):
        crew.finish()


def test_a_clause_that_changed_nothing_is_an_error_at_the_end(tmp_path):
    orders = Orders(plan="dead_zone:1e-30,scope=token@module.linear,phase=rollout")
    crew = Crew(tmp_path, {"sampler": orders}, size=1)
    Worker(tmp_path, orders=orders).work()
    with pytest.raises(InertError, match=r"samplers: dead_zone.* changed no value"):
        crew.finish()
