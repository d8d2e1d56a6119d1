"""The published studies: their records are whole, and still give the report that lies beside them."""

import tarfile

import pytest

from shaketable.report.study_markdown import markdown
from shaketable.study.analysis.results import Findings
from shaketable.study.store import last_defined
from tests import ROOT
from tests.study.small_studies import findings

PUBLISHED = [
    *sorted((ROOT / "results" / "guided-aqn-h200").glob("*/records.tar.gz")),
    ROOT / "results" / "layer-pruning" / "records.tar.xz",
]


@pytest.mark.parametrize("archive", PUBLISHED, ids=lambda path: path.parent.name)
def test_the_records_give_the_report(archive, tmp_path):
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    found = findings(last_defined(folder), folder)
    assert found["complete"] and found["study"]["named_before"] and found["notes"] == []
    assert all(row["verdict"] == "agrees" for arm in found["arms"] for row in arm["proof"])
    report = (archive.parent / "report.md").read_text().replace("\\<", "<")
    for comparison in found["comparisons"]:
        assert comparison["sentence"] in report
    assert markdown(Findings.from_json(found)).splitlines()[0] == report.splitlines()[0]


def test_all_are_here():
    assert len(PUBLISHED) == 3
