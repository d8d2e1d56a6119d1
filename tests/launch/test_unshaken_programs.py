"""A process that computes and is not shaken, while others are, is an error; one that merely imported torch is not."""

import json
import sys

import pytest

from shaketable.launch.run import collect
from tests.launch.shaken_programs import LINEAR, PROGRAMS, program, shake

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def ranks(folder, kind, plan=LINEAR):
    code, ledger, printed = shake(folder, plan, *TORCHRUN, str(PROGRAMS / "ranks_apart.py"), kind)
    return code, ledger, " ".join(printed.split())


@pytest.mark.parametrize("kind", ["other model", "layer", "no model"])
def test_a_rank_in_which_nothing_happened_is_an_error_and_is_named(tmp_path, kind):
    code, ledger, said = ranks(tmp_path / "l", kind)
    assert code == ledger["exit"] == 3, said
    (line,) = [line for line in ledger["warnings"] if "was not shaken" in line]
    assert line.startswith("rank 1 (process ")
    assert "error: rank 1" in said
    why = {"other model": "Sequential ran there", "layer": "Conv1d ran there", "no model": "no pass of a model was seen"}
    assert why[kind] in line
    assert ledger["forward"] == 6


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("alike", LINEAR),
        ("evaluation", f"{LINEAR},phase=eval"),
        ("loader", LINEAR),
        ("backward", f"{LINEAR},direction=backward"),
        ("alike", "bit_flip:1e-3@module.linear"),
    ],
)
def test_ranks_whose_passes_were_not_meant_are_no_error(tmp_path, kind, plan):
    code, ledger, said = ranks(tmp_path / "l", kind, plan)
    assert code == 0, said
    assert not any("was not shaken" in line for line in ledger["warnings"])


@pytest.mark.parametrize(
    ("kind", "plan", "code"),
    [
        ("subprocess", LINEAR, 0),
        ("serve", LINEAR, 0),
        ("evaluate", f"{LINEAR},phase=train", 0),
        ("stuck", "gain:0.1@module.linear", 0),
        ("other_model", LINEAR, 3),
        ("other_model", f"{LINEAR};gain:0.1@op.softmax", 3),
    ],
)
def test_children(tmp_path, kind, plan, code):
    found, ledger, printed = shake(tmp_path / "l", plan, *program("processes_apart.py", kind))
    assert found == code, printed
    lines = [line for line in ledger["warnings"] if "was not shaken" in line]
    assert len(lines) == (code == 3)
    if kind in ("subprocess", "serve"):
        assert any("imported torch but injected nothing (it called no model)" in line for line in ledger["warnings"])


def test_allow_inert_accepts_it(tmp_path):
    shake(tmp_path / "l", LINEAR, *program("processes_apart.py", "other_model"))
    again = collect(tmp_path / "l", [], 0, allow_inert=True)
    assert (again.exit_code, len(again.unshaken)) == (0, 1)
    assert collect(tmp_path / "l", [], 7).exit_code == 7


def test_ledgers_from_before_are_read_and_complained_about_as_before(tmp_path):
    shake(tmp_path / "l", LINEAR, *program("processes_apart.py", "other_model"))
    for file in (tmp_path / "l").glob("process-*.json"):
        body = json.loads(file.read_text())
        for new in ("unmatched_models", "phases", "trained", "distributed", "engine"):
            del body[new]
        file.write_text(json.dumps(body))
    result = collect(tmp_path / "l", [], 0)
    assert (result.exit_code, result.unshaken) == (0, {})
    assert any("imported torch but injected nothing" in line for line in result.warnings)
