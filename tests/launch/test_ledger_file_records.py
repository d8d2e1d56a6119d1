"""What the file of a process says: of a fork, of training, and what is told while the program runs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shaketable.launch.inert_notices import Notices
from shaketable.launch.ledger_file import LedgerFile
from shaketable.launch.process import ProcessInjection
from shaketable.plan import Plan

BACKWARD = "gain:0.5@module.linear,direction=backward"


@pytest.fixture
def process(tmp_path):
    injection = ProcessInjection(Plan.parse("gain:0.5@module.linear"))
    injection.enable()
    yield injection, LedgerFile(injection, tmp_path)
    injection.close(check=False)


def called(injection):
    model = nn.Sequential(nn.Linear(4, 4))
    injection.meet(model)
    model(torch.ones(2, 4))
    return model


def test_a_child_has_made_no_pass_when_it_is_forked(process):
    injection, file = process
    called(injection).eval()
    assert file._record()["phases"] == ["train"] and file._record()["ledger"]["forward"] == 1
    file.after_fork()
    assert file._record()["phases"] == [] and file._record()["ledger"]["forward"] == 0
    assert file._record()["forked"]


def test_a_process_that_trained_says_so(process, tmp_path):
    injection, file = process
    assert not file._record()["trained"]
    injection.notices = Notices(injection, tmp_path)
    assert not file._record()["trained"]
    injection.notices.trained = True
    assert file._record()["trained"]


def test_a_clause_that_matched_in_an_earlier_model_is_not_told_of_a_later_one(tmp_path, capfd):
    plan = Plan.parse("gain:0.5@module.first;gain:0.5@module.second;gain:0.5@module.third")
    notices = Notices(SimpleNamespace(plan=plan, roots=[]), tmp_path)
    model = nn.Sequential(nn.Linear(2, 2))
    notices.on_model(model, {1: "no second", 2: "no third"})
    capfd.readouterr()
    notices.on_model(nn.ModuleList(model), {0: "no first", 1: "no second"})
    said = capfd.readouterr().err
    assert "module.second does nothing in ModuleList: no second" in said and "module.first" not in said
