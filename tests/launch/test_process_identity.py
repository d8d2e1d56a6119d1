"""What keys the noise of a program under `run`: its seed, its rank, its task, and how often its models were called."""

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from shaketable.inject.injection import this_rank
from shaketable.launch import process_identity
from shaketable.launch.process import ProcessInjection
from shaketable.plan import Plan
from tests.tensors import same

LINEAR = "relative_gaussian:0.05@module.linear"
X = torch.ones(2, 8)


def model():
    torch.manual_seed(0)
    return nn.Linear(8, 8)


class Process:
    """A process under a plan, its models met at their first call."""

    def __init__(self, plan=LINEAR, seed=0):
        self.injection = ProcessInjection(Plan.parse(plan, seed=seed))
        self.injection.enable()
        self.hook = register_module_forward_pre_hook(self.injection.on_call)

    def __enter__(self):
        return self.injection

    def __exit__(self, *_):
        self.hook.remove()
        self.injection.close()


def noise(calls=1, seed=0, plan=LINEAR):
    """What a process adds to the calls of one model, one after the other."""
    one = model()
    clean = one(X).detach()
    with Process(plan, seed):
        return [one(X).detach() - clean for _ in range(calls)]


def test_a_process_repeats_its_noise_and_no_call_that_of_another():
    first = noise(3)
    assert same(first, noise(3)) and len({tuple(n.flatten().tolist()) for n in first}) == 3
    assert not same(first, noise(3, seed=1))


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0), ({"RANK": "3"}, 3), ({"SHAKETABLE_PLACE": "5:Sampler#2"}, 5),
        ({"RANK": "3", "SHAKETABLE_PLACE": "5:Sampler#2"}, 3), ({"RANK": "", "SHAKETABLE_PLACE": "5:"}, 5),
    ],
)  # fmt: skip
def test_the_rank_of_a_process_is_what_its_environment_says(monkeypatch, environment, rank):
    for name in ("RANK", "SHAKETABLE_PLACE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert this_rank() == rank
    assert process_identity.rank_here() == (5 if "SHAKETABLE_PLACE" in environment else 0)
    with Process() as injection:
        assert injection.rank == rank


def test_ranks_have_noise_of_their_own(monkeypatch):
    drawn = []
    for rank in ("0", "1", "1"):
        monkeypatch.setenv("RANK", rank)
        drawn.append(noise())
    assert not same(drawn[0], drawn[1]) and same(drawn[1], drawn[2])


def test_a_task_has_the_noise_of_its_own_number_whatever_ran_before(monkeypatch):
    """Passes and models are counted from zero in a task: what a worker did before does not show."""
    plain, one = noise(2), model()
    clean = one(X).detach()
    found = {}
    with Process() as injection:
        for task in (7, 8, 7, 0):
            monkeypatch.setattr(process_identity, "current_task", lambda task=task: task)
            drawn = [one(X).detach() - clean for _ in range(2)]
            assert task not in found or same(found[task], drawn), "a task that is tried again sees its noise again"
            found[task] = drawn
            assert injection.calls.task == task
    assert same(found[0], plain) and not same(found[7], plain) and not same(found[7], found[8])


def test_models_are_numbered_anew_in_each_task(monkeypatch):
    with Process() as injection:
        for task in (1, 2):
            monkeypatch.setattr(process_identity, "current_task", lambda task=task: task)
            for _ in range(2):
                model()(X)
        names = [tap.name for tap in injection.taps]
    assert [name.partition(".")[0] for name in names] == ["", "model1", "", "model1"]


def test_operators_outside_of_all_modules_are_met_and_counted_under_no_layer():
    a = torch.eye(4)
    with Process("gain:1@op.matmul") as injection:
        assert torch.equal(a @ a, 2 * a)
        with injection.standing_aside():
            assert torch.equal(a @ a, a), "an engine runs its own models"
        assert torch.equal(torch.mm(a, a), 2 * a)
        site = injection.ledger.sites[0]
        assert site.by("layer") == {"None": {"forward": 2, "backward": 0}} and list(site.spots) == ["matmul"]
    assert torch.equal(a @ a, a)


@pytest.mark.parametrize("size", [4, 8])
def test_the_number_of_a_name_is_that_of_every_run_and_never_zero(size):
    found = [process_identity.number(text, size) for text in ("Sampler#1", "Sampler#2", "Trainer#1")]
    assert len(set(found)) == 3 and all(0 < n < 256**size for n in found)
    assert process_identity.number("Sampler#1") == 1966345626, "what an actor was given before, it is given again"


def test_a_child_of_an_actor_says_so():
    assert process_identity.Place("Sampler#2", "id").child() == process_identity.Place("child of Sampler#2")
    assert process_identity.Place().child() == process_identity.Place()


@pytest.mark.parametrize("size", [1, 4, 7])
def test_a_name_becomes_as_many_bytes_as_are_asked_for(size):
    found = [process_identity.number(f"actor {i}", size) for i in range(64)]
    assert 256 ** (size - 1) / 64 < max(found) < 256**size and min(found) > 0
    assert size == 1 or len(set(found)) == 64
