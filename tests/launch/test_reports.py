"""A clause that does nothing under `shaketable run` is reported while the program runs, in one line, once."""

import re

import pytest

from tests.launch.under_run import TORCHRUN, program, under_plan

SILENT = "silent_plans.py"


def notices(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("shaketable: ")]


def test_a_model_in_which_nothing_matches_is_named_at_its_first_call(tmp_path):
    code, _, printed = under_plan(tmp_path / "l", "gain:0.1@module.rmsnorm;gain:0.1@module.frist", *program(SILENT, "plain"))
    assert code == 3
    first, second = notices(printed)
    assert "gain:0.1@module.rmsnorm does nothing in Experts: nothing in Experts matches 'rmsnorm'" in first
    assert "did you mean 'first'?" in second
    assert printed.index(first) < printed.index("pass 0"), "before the first pass is over"


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("saturation:2@module.linear", r"saturation:2@module.linear fired \d times and changed no value"),
        ("gain:0.1@module.linear;gain:0.1@module.second", r"gain:0.1@module.second was on in \d passes and never fired"),
    ],
)
def test_a_clause_that_does_nothing_is_told_after_the_first_passes(tmp_path, plan, said):
    code, _, printed = under_plan(tmp_path / "l", plan, *program(SILENT, "plain"))
    assert code == 3
    (line,) = notices(printed)
    assert re.search(said, line)
    assert printed.index(line) < printed.index("end\n"), "not when the program is over"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "kind", "code"),
    [("gain:0.1@module.linear", "functional", 0), ("gain:0.1@op.matmul,direction=backward", "evaluation", 3)],
)
def test_nothing_is_said_of_what_acts_or_may_still_act(tmp_path, plan, kind, code):
    found, _, printed = under_plan(tmp_path / "l", plan, *program(SILENT, kind))
    assert found == code, printed
    assert [line for line in notices(printed) if "Sequential" not in line] == []


@pytest.mark.slow
def test_many_processes_say_it_once(tmp_path):
    code, _, printed = under_plan(tmp_path / "children", "saturation:1e9@module.linear", *program("workers.py", "fork"))
    assert code == 3 and len(notices(printed)) <= 1, printed
    code, _, printed = under_plan(tmp_path / "ranks", "gain:0.1@module.rmsnorm", *TORCHRUN, program("ranks.py")[1])
    assert len(notices(printed)) == 1, printed
