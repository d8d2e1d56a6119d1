"""The published studies: their records are whole, and still give the report that lies beside them."""

import tarfile

import pytest

from shaketable.report.study_markdown import markdown
from shaketable.study.analysis.findings import findings
from shaketable.study.file import load_study
from shaketable.study.store import last_defined
from tests import ROOT

RESULTS = ROOT / "results"
PUBLISHED = [
    *sorted((RESULTS / "guided-aqn-h200").glob("*/records.tar.gz")),
    RESULTS / "layer-pruning" / "records.tar.xz",
]


def unpacked(archive, folder):
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


def report_of(archive):
    return (archive.parent / "report.md").read_text().replace("\\<", "<")


@pytest.mark.parametrize("archive", PUBLISHED, ids=lambda path: path.parent.name)
def test_the_records_give_the_report(archive, tmp_path):
    folder = unpacked(archive, tmp_path)
    found = findings(last_defined(folder), folder)
    assert len(PUBLISHED) == 3 and found.complete and found.study.named_before
    assert not [note for note in found.notes if "the dry run says" not in note]
    assert all(row.verdict == "agrees" for arm in found.arms for row in arm.proof)
    for comparison in found.comparisons:
        assert comparison.sentence in report_of(archive)
    assert markdown(found).splitlines()[0] == report_of(archive).splitlines()[0]


def test_the_hardening_of_smollm2_gives_its_report_and_its_table(tmp_path):
    archive = RESULTS / "hardening-h200" / "records.tar.gz"
    found = findings(load_study(archive.parent / "study.yaml"), unpacked(archive, tmp_path))
    assert found.complete and all(row.verdict in ("agrees", "proven") for arm in found.arms for row in arm.proof)
    first = markdown(found).splitlines()[0].replace("the arm “nothing”", "nothing")
    assert first == report_of(archive).splitlines()[0]
    own = [r for r in found.recovered if r.arm == f"hardened: {r.condition}"]
    assert {r.condition for r in own} == {"noise", "products", "nvfp4", "mxfp4", "dead zone"}
    for r in own:
        scores = f"| {100 * r.before:.1f} | {100 * r.after:.1f} | **{round(100 * r.share)} %** "
        assert (
            f"{scores}({round(100 * r.interval.low)}–{round(100 * r.interval.high)}) |"
            in (archive.parent / "README.md").read_text()
        )
        assert r.interval.low > 0.4 and r.clean - r.clean_after < 0.02
