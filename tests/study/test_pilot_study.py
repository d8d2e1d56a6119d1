"""The pilot of training on a GPU: what its file asks for, and that it runs from warm start to report, small and on a CPU."""

import pytest

from shaketable.study.cells import cells_of
from shaketable.study.file import load_study
from shaketable.study.run_cell import do
from tests import ROOT
from tests.study.small_studies import findings

FILE = ROOT / "studies" / "gpu" / "pilot.yaml"


def header_command():
    """The settings of the command for a CPU, as the file's comment has it."""
    text = FILE.read_text().replace("\\\n#", "")
    line = next(line for line in text.splitlines() if "--set model=nano" in line)
    return [word for word in line.split() if "=" in word]


@pytest.mark.slow
def test_it_runs_and_all_arms_begin_with_one_warm_start(tmp_path, monkeypatch):
    monkeypatch.setenv("SHAKETABLE_CACHE", str(tmp_path / "cache"))
    study = load_study(FILE, header_command())
    cells = cells_of(study)
    for cell in cells:
        assert do(cell, study.study, tmp_path / "runs", "test") == "done"
    found = findings(study, tmp_path)
    assert found["complete"] and not any("were not the same" in note for note in found.get("notes", []))
    made = [_made_of(tmp_path / "runs" / cell.name) for cell in cells]
    assert len({m["weights"] for m in made}) == 1 and all(m["warm_start"]["weights"] == m["weights"] for m in made)
    assert sorted(m["warm_start"]["cached"] for m in made) == [False, True, True, True]


def _made_of(folder):
    from shaketable.records.record import RunRecord

    return RunRecord.open(folder, "train").events("made_of")[0]
