"""A process that computes without the plan, while others run under it, is an error; one that merely imported torch is not."""

import pytest

from tests.launch.under_run import LINEAR, PROGRAMS, TORCHRUN, under_plan


def ranks(folder, kind):
    code, ledger, printed = under_plan(folder, LINEAR, *TORCHRUN, str(PROGRAMS / "ranks_apart.py"), kind)
    return code, ledger, " ".join(printed.split())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["other model", "no model"])
def test_a_rank_in_which_nothing_happened_is_an_error_and_is_named(tmp_path, kind):
    code, ledger, said = ranks(tmp_path / "l", kind)
    assert code == ledger["exit"] == 3, said
    (line,) = [line for line in ledger["warnings"] if "ran without the plan" in line]
    assert line.startswith("rank 1 (process ")
    assert "error: rank 1" in said
    why = {"other model": "Sequential ran there", "no model": "no pass of a model was seen"}
    assert why[kind] in line
    assert ledger["forward"] == 6


@pytest.mark.slow
def test_workers_of_the_loaders_of_ranks_are_no_error(tmp_path):
    code, ledger, said = ranks(tmp_path / "l", "loader")
    assert code == 0, said
    assert not any("ran without the plan" in line for line in ledger["warnings"])
