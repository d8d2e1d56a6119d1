"""A plan in a whole process: the models that it meets, the ones it leaves alone, and the keys of its noise."""

import gc
import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from shaketable.launch import process_identity
from shaketable.launch.process import ProcessInjection
from shaketable.plan import Plan
from tests.launch.under_run import under_plan
from tests.tensors import same

LINEAR = "relative_gaussian:0.05@module.linear"
GAIN = "gain:1@module.linear"
X = torch.ones(2, 8)


class Process:
    """A process under a plan, its models met at their first call."""

    def __init__(self, plan=LINEAR, seed=0):
        self.process = ProcessInjection(Plan.parse(plan, seed=seed))
        self.process.injection.enable()
        self.hook = register_module_forward_pre_hook(self.process.on_call)

    def __enter__(self):
        return self.process

    def __exit__(self, *_):
        self.hook.remove()
        self.process.injection.close()


def model():
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def linear():
    return nn.Linear(8, 8, bias=False)


def noise(calls=1, seed=0, plan=LINEAR):
    """What a process adds to the calls of one model, one after the other."""
    one = model()
    clean = one(X).detach()
    with Process(plan, seed):
        return [one(X).detach() - clean for _ in range(calls)]


def fires(process):
    return process.injection.ledger.forward


def in_task(monkeypatch, number):
    monkeypatch.setattr(process_identity, "current_task", lambda: number)


# ---- meeting models


@pytest.mark.parametrize(
    ("plan", "count"),
    [(f"{GAIN},point=weight", 2), (f"{GAIN},point=input", 2), ("gain:1@op.matmul", 2), ("gain:1@module.rmsnorm", 0)],
)
def test_a_model_has_faults_from_its_first_call_on(plan, count):
    one = nn.Sequential(linear(), nn.ReLU(), linear())
    clean = one(X).detach()
    with Process(plan) as found:
        for n in (1, 2):
            assert torch.allclose(one(X), 2**count * clean) and fires(found) == n * count
        assert found.names == ["Sequential"] * bool(count)
        assert found.unmatched_models == (set() if count else {("Sequential", "train")})
        if count:
            one[0](X)
            assert fires(found) == 2 * count + 1, "a part that is called alone is known already"
    assert torch.equal(one(X), clean)


def test_a_module_that_was_added_to_a_model_after_its_first_call_is_named():
    one = nn.Sequential(linear())
    with Process(GAIN) as found:
        one(X)
        one.append(linear())
        one(X)
        assert found.late == {"a Linear was added to a model after its first call and has no faults"} and fires(found) == 2


def test_a_model_of_another_injection_is_left_alone_with_all_its_parts():
    one = nn.Sequential(nn.Sequential(linear()))
    clean = one(X).detach()
    with Process(GAIN) as found:
        found.leave_alone(one)
        for part in (one, one[0], one[0][0]):
            assert torch.equal(part(X), clean)
        assert (found.names, fires(found), found.unmatched) == ([], 0, [])


def test_a_model_that_the_program_has_let_go_is_not_kept():
    """A program may make a thousand models; the plan must not hold the memory of all of them."""
    one = nn.Sequential(linear()).eval()
    with Process(GAIN) as found:
        one(X)
        seen = weakref.ref(one)
        assert [attached.model for attached in found.injection.models] == [one] and not found.injection.is_training
        del one
        gc.collect()
        assert seen() is None and found.injection.models == [] and found.injection.is_training


# ---- operators


def test_operators_outside_of_all_modules_are_met_and_counted_under_no_layer():
    a = torch.eye(4)
    with Process("gain:1@op.matmul") as found:
        assert torch.equal(a @ a, 2 * a)
        with found.standing_aside(), found.standing_aside():
            assert torch.equal(a @ a, a), "an engine runs its own models"
        with pytest.raises(ZeroDivisionError), found.standing_aside():
            raise ZeroDivisionError
        with torch.no_grad():
            assert torch.equal(torch.mm(a, a), 2 * a)
        site = found.injection.ledger.sites[0]
        assert site.by("layer") == {"None": {"forward": 2, "backward": 0}} and list(site.spots) == ["matmul"]
        assert {name: row["forward"] for name, row in site.by("phase").items()} == {"train": 1, "eval": 1}
        found.injection.disable()
        assert torch.equal(a @ a, a)


def test_a_graph_that_an_engine_has_made_of_its_model_is_the_engines():
    """vLLM calls the pieces of a compiled model as modules of their own; they were hit by the process too, in phase train."""
    piece = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8)))
    with Process("gain:1@op.matmul;gain:1@module.linear") as found, torch.no_grad():
        with found.standing_aside():
            clean = piece(X)
        assert fires(found) == 0 and not found.names
        assert not torch.equal(piece(X), clean) and fires(found) == 2


# ---- the keys of the noise


def test_a_task_has_the_noise_of_its_own_number_whatever_ran_before(monkeypatch):
    """Passes and models are counted from zero in a task: what a worker did before does not show."""
    plain, one = noise(2), model()
    clean = one(X).detach()
    found = {}
    with Process() as here:
        for task in (7, 8, 7, 0):
            in_task(monkeypatch, task)
            drawn = [one(X).detach() - clean for _ in range(2)]
            assert task not in found or same(found[task], drawn), "a task that is tried again sees its noise again"
            found[task] = drawn
        thread = threading.Thread(target=lambda: (in_task(monkeypatch, 9), one(X)))
        thread.start()
        thread.join()
        assert here.calls.task == 0, "a thread belongs to the task that was noticed last"
    assert same(found[0], plain) and not same(found[7], plain) and not same(found[7], found[8])


class Calls(nn.Module):
    """A model that calls another one, which is no part of it."""

    def __init__(self, other):
        super().__init__()
        self.own, self.other = nn.Linear(8, 8), [other]

    def forward(self, x):
        return self.other[0](self.own(x))


def test_a_model_that_calls_another_in_its_first_pass_keeps_that_pass():
    outer, inner = Calls(nn.Sequential(nn.Linear(8, 8))).eval(), None
    inner = outer.other[0].train()
    with Process("gain:1@module.linear") as process:
        for _ in range(2):
            outer(X)
        assert process.injection.ledger.sites[0].by("phase") == {"eval": {"forward": 4, "backward": 0}}
        assert dict(process.injection.inert_check.phases) == {"rollout": 0, "train": 0, "eval": 2}
    assert inner.training


# ---- ranks


@pytest.fixture
def without_rank(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SHAKETABLE_PLACE"):
        monkeypatch.delenv(name, raising=False)


def test_a_rank_that_joins_its_group_after_torch_was_imported_is_asked_again(without_rank, monkeypatch):
    found = []
    for rank in (0, 1):
        one = model()
        clean = one(X).detach()
        with Process() as process, monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "is_initialized", lambda: True)
            patch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            patch.setattr(torch.distributed, "get_world_size", lambda: 2)
            found.append(one(X).detach() - clean)
            assert process.injection.rank == rank
    assert not torch.equal(*found)


PROGRAM = """
import multiprocessing, os, sys
import torch
from torch import nn


def work():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.ones(2, 8)
    with torch.no_grad():
        found = model(x)
    with open(f"{sys.argv[1]}-{os.getpid()}.noise", "w") as file:
        file.write(repr(float(found.double().sum())))


if __name__ == "__main__":
    children = [multiprocessing.get_context("fork").Process(target=work) for _ in range(2)]
    work()
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
"""


def test_processes_of_one_program_do_not_share_their_noise(without_rank, tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    found = []
    for repeat in "ab":
        code, ledger, printed = under_plan(tmp_path / repeat, LINEAR, sys.executable, str(program), repeat)
        assert code == 0, printed
        found.append(sorted(file.read_text() for file in tmp_path.glob(f"{repeat}-*.noise")))
        ranks = [worker["rank"] for worker in ledger["workers"] if worker["forward"]]
        assert len(set(ranks)) == len(ranks) == len(found[-1]) == 3
    assert found[0] == found[-1] and len(set(found[0])) == len(found[0])
