"""What is told while a program runs: to whom, how often, and when a model counts as trained. And how a process is called."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shaketable.launch import process_identity
from shaketable.launch.inert_notices import Notices
from shaketable.launch.process_identity import Place, number
from shaketable.plan import Plan

END = f" (process {os.getpid()}; the program goes on)\n"


def notices(plan, folder, **more):
    return Notices(SimpleNamespace(plan=Plan.parse(plan), **{"roots": [], **more}), folder)


class Stderr:
    def __init__(self):
        self.done = []

    def write(self, text):
        self.done.append(text)

    def flush(self):
        self.done.append("flushed")


def test_a_line_is_written_and_is_not_kept_in_a_buffer(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr := Stderr())
    notices("gain:1@layer.1", tmp_path)._tell(0, "a line")
    assert stderr.done == [f"shaketable: a line{END}", "flushed"]


def test_a_process_tells_a_thing_once_also_where_it_can_leave_no_mark(tmp_path, capsys):
    told = notices("gain:1@layer.1", tmp_path / "gone")
    for what in (0, 0, 1, 0):
        told._tell(what, f"line {what}")
    assert capsys.readouterr().err == f"shaketable: line 0{END}shaketable: line 1{END}"


def test_a_process_that_is_not_the_first_says_nothing_and_leaves_no_second_mark(tmp_path, capsys):
    first, second = (notices("gain:1@layer.1", tmp_path) for _ in range(2))
    first._tell((0, "Net"), "a line")
    marks = sorted(tmp_path.iterdir())
    second._tell((0, "Net"), "another line")
    assert capsys.readouterr().err == f"shaketable: a line{END}" and sorted(tmp_path.iterdir()) == marks
    second._tell((0, "Other"), "a third")
    assert capsys.readouterr().err == f"shaketable: a third{END}" and len(list(tmp_path.glob("told-*.mark"))) == 2


def test_each_class_of_models_is_told_of_and_each_clause_in_it(tmp_path, capsys):
    told = notices("gain:1@module.a;gain:1@module.b", tmp_path)
    for model in (nn.Sequential(nn.ReLU()), nn.ModuleList([nn.ReLU()]), nn.Sequential(nn.ReLU())):
        told.on_model(model, {1: "no b", 0: "no a"})
    assert capsys.readouterr().err == "".join(
        f"shaketable: gain:1@module.{x} does nothing in {name}: no {x}{END}"
        for name in ("Sequential", "ModuleList")
        for x in "ba"
    )


def test_a_clause_that_matched_in_a_single_layer_is_not_told_of_models(tmp_path, capsys):
    told = notices("gain:1@module.a;gain:1@module.b", tmp_path)
    told.on_model(nn.Linear(2, 2), {1: "no b"})
    told.on_model(nn.Sequential(nn.ReLU()), {0: "no a", 1: "no b"})
    assert capsys.readouterr().err == f"shaketable: gain:1@module.b does nothing in Sequential: no b{END}"


def test_what_is_hidden_is_told_of_the_clause_that_it_is_hidden_from(tmp_path, capsys):
    told = notices("gain:1@op.matmul;gain:1@op.softmax", tmp_path)
    told.on_hidden(nn.Sequential(), [[], ["one"]])
    assert capsys.readouterr().err == f"shaketable: gain:1@op.softmax in Sequential: one{END}"
    told.on_hidden(nn.ModuleList(), [["one"], ["one", "two"]])
    said = capsys.readouterr().err
    assert said == f"shaketable: gain:1@op.matmul in ModuleList: one{END}shaketable: gain:1@op.softmax in ModuleList: two{END}"


@pytest.mark.parametrize(
    ("directions", "watched"),
    [
        (("forward",), False),
        (("both",), False),
        (("backward",), True),
        (("forward", "backward"), True),
        (("backward", "forward"), True),
        (("both", "forward"), False),
    ],
)
def test_optimizers_are_watched_where_a_clause_acts_backward_alone(tmp_path, directions, watched):
    plan = ";".join(f"gain:1@layer.{i},direction={direction}" for i, direction in enumerate(directions))
    told = notices(plan, tmp_path)
    assert hasattr(told, "_hook") is watched and told.trained is False
    if watched:
        told._hook.remove()


def test_a_model_is_trained_when_one_of_its_parameters_has_a_gradient(tmp_path):
    ours, more = nn.Linear(2, 2), nn.Linear(2, 2)
    told = notices("gain:1@module.linear,direction=backward", tmp_path, roots=[more, ours])
    told._on_optimizer("optimizer", (), {})
    assert told.trained is False, "gradients are wanted, and there are none"
    ours.bias.grad = torch.zeros(2)
    told._on_optimizer()
    assert told.trained is True


def test_whoever_judges_is_given_what_is_known(tmp_path, capsys):
    check = SimpleNamespace(inert=lambda **given: {2: "the third", 0: "the first"} if given["trained"] else {})
    told = notices("gain:1@module.a", tmp_path, inert_check=check)
    told.look([])
    assert capsys.readouterr().err == ""
    told.trained = True
    told.look([])
    told.look([])
    assert capsys.readouterr().err == f"shaketable: the third{END}shaketable: the first{END}"


# ---- how a process is called


def test_no_name_becomes_the_number_of_the_driver():
    found = {number(f"actor {i}", 1) for i in range(4000)}
    assert found == set(range(1, 256)), "a byte that would be 0 is 1"


def test_names_are_numbered_by_four_bytes_unless_more_are_asked_for():
    assert number("Trainer#1") == number("Trainer#1", 4) < 2**32
    assert number("Trainer#1", 8) != number("Trainer#1") and number("ä#1") != number("a#1")


@pytest.mark.parametrize("place", ["12:", "12", "12:a:b"])
def test_a_rank_is_what_stands_before_the_first_colon(monkeypatch, place):
    monkeypatch.setenv(process_identity.PLACE, place)
    assert process_identity.rank_here() == 12
    assert process_identity.label_here() == {"12:": "", "12": "", "12:a:b": "a:b"}[place]


def test_a_place_is_nothing_unless_somebody_says_so_and_its_children_are_no_actors():
    assert (Place().label, Place().actor) == ("", "") and process_identity.before_an_answer() == 0
    child = Place("a", "id").child()
    assert (child.label, child.actor) == ("child of a", "") and child.child().label == "child of child of a"
    assert Place("", "id").child() == Place()
