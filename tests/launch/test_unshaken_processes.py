"""Which process should have been shaken, from ledgers that were written by hand."""

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.launch.run import RunResult, collect
from shaketable.launch.unshaken_processes import unshaken
from shaketable.ledger.ledger import Ledger


def ledger(plan, acts):
    model = nn.Linear(64, 64)
    with st.inject(model, plan, allow_inert=True) as found:
        if acts:
            model(torch.ones(4, 64)).sum().backward()
    return found.to_dict()


def process(plan, acts, **more):
    facts = {"pid": 1, "place": "", "command": "train.py", "phases": ["train"], "unmatched_models": [], "unmatched": []}
    facts |= {"models": ["Linear"], "trained": False, "distributed": None, "engine": False}
    return facts | more | {"ledger": ledger(plan, acts)}


GAIN = "gain:0.5@module.linear"


@pytest.mark.parametrize(
    ("plan", "more", "said"),
    [
        (GAIN, {}, "Linear ran there, and no clause changed a value"),
        (GAIN, {"unmatched": ["nothing matches"]}, "Linear ran there, and nothing matches"),
        (GAIN, {"phases": []}, None),
        (GAIN, {"phases": [], "unmatched_models": [("Tower", "train")]}, "Linear, Tower ran there"),
        (GAIN, {"unmatched_models": [("Linear", "eval"), ("Tower", "train")]}, "others were: Linear, Tower ran there"),
        (f"{GAIN},phase=rollout", {}, None),
        (f"{GAIN},phase=rollout", {"phases": ["train", "rollout"]}, "Linear ran there"),
        (f"{GAIN},direction=backward", {}, None),
        (f"{GAIN},direction=backward", {"trained": True}, "Linear ran there"),
        (f"{GAIN},direction=both", {}, "Linear ran there"),
        ("gain:0@module.linear", {}, None),
    ],
)
def test_a_process_that_did_nothing_is_named_if_it_should_have(plan, more, said):
    idle, shaken = process(plan, False, pid=2, **more), process(GAIN, True)
    found = unshaken([shaken, idle])
    assert list(found) == ([] if said is None else [1])
    assert said is None or said in found[1]
    assert not unshaken([idle]), "where nothing was shaken, the plan as a whole is inert"


@pytest.mark.parametrize(
    ("rank", "others", "engine", "named"),
    [((1, 2), (0, 2), False, True), ((1, 2), None, False, False), ((1, 2), (0, 2), True, False), (None, (0, 2), False, False)],
)
def test_a_rank_without_a_pass_is_named_unless_it_serves(rank, others, engine, named):
    idle = process(GAIN, False, phases=[], distributed=rank, engine=engine)
    found = unshaken([process(GAIN, True, distributed=others), idle])
    assert bool(found) == named
    assert not named or found[1].startswith("rank 1 (process 1, train.py) was not shaken")


def test_rare_faults_and_old_ledgers_are_left_alone():
    shaken, rare = process(GAIN, True), process("bit_flip:1e-5@module.linear", True)
    assert not unshaken([shaken, rare])
    old = process(GAIN, False)
    del old["phases"]
    assert not unshaken([shaken, old])


def test_a_process_that_was_not_shaken_is_told_once(tmp_path):
    """As one that should have been, and not as one that was idle too."""
    processes = [
        process(GAIN, True, late=[]),
        process(GAIN, False, pid=2, late=[]),
        process(GAIN, False, pid=3, phases=[], late=[]),
    ]
    merged = Ledger.merge(Ledger.from_dict(p["ledger"]) for p in processes)
    found = RunResult(["true"], 0, tmp_path, merged, processes).warnings
    assert [sum(f"process {pid}" in line for line in found) for pid in (1, 2, 3)] == [0, 1, 1]


def test_a_folder_that_the_program_deleted_is_made_again(tmp_path):
    folder = tmp_path / "a" / "b"
    assert collect(folder, ["true"], 0).ledger is None and (folder / "ledger.json").is_file()
