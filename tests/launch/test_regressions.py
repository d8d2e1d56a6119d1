"""Bugs that programs under `shaketable run` met."""

import sys

import pytest
import torch
from torch import nn

from tests.launch.test_process import Process, X, model
from tests.launch.under_run import under_plan

LINEAR = "relative_gaussian:0.05@module.linear"


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
