"""The published hardening of SmolLM2: its records are whole, and still give the report that lies beside them."""

import tarfile

from shaketable.report.study_markdown import markdown
from shaketable.study.analysis.results import Findings
from shaketable.study.file import load_study
from tests import ROOT
from tests.study.small_studies import findings

RESULTS = ROOT / "results" / "hardening-h200"


def test_the_records_give_the_report_and_its_table(tmp_path):
    with tarfile.open(RESULTS / "records.tar.gz") as packed:
        packed.extractall(tmp_path, filter="data")
    found = findings(load_study(RESULTS / "study.yaml"), tmp_path / "hardening-h200")
    assert found["complete"]
    assert all(row["verdict"] in ("agrees", "proven") for arm in found["arms"] for row in arm["proof"])
    report, page = (RESULTS / "report.md").read_text(), (RESULTS / "README.md").read_text()
    first = markdown(Findings.from_json(found)).splitlines()[0].replace("the arm “nothing”", "nothing")
    assert first == report.splitlines()[0]
    own = {r["arm"].removeprefix("hardened: "): r for r in found["recovered"] if r["arm"] == f"hardened: {r['condition']}"}
    assert set(own) == {"noise", "products", "nvfp4", "mxfp4", "dead zone"}
    for row in own.values():
        low, high = (round(100 * row["interval"][end]) for end in ("low", "high"))
        assert (
            f"| {100 * row['before']:.1f} | {100 * row['after']:.1f} | **{round(100 * row['share'])} %** ({low}–{high}) |"
            in page
        )
        assert row["interval"]["low"] > 0.4
        assert row["clean"] - row["clean_after"] < 0.02
