"""The published studies: their records are whole, and still give the report that lies beside them."""

import pytest

from shaketable.report.study_markdown import markdown
from tests.study.published import RESULTS, findings_of

PUBLISHED = ["guided-aqn-h200/dead-zone-0.01", "guided-aqn-h200/dead-zone-0.03", "layer-pruning"]


def report_of(name):
    return (RESULTS / name / "report.md").read_text().replace("\\<", "<")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_records_give_the_report(name):
    found = findings_of(name)
    assert found.complete and found.study.named_before and not found.notes
    assert all(row.verdict == "agrees" for arm in found.arms for row in arm.proof)
    for comparison in found.comparisons:
        assert comparison.sentence in report_of(name)
    assert markdown(found).splitlines()[0] == report_of(name).splitlines()[0]


def test_the_hardening_of_smollm2_gives_its_report_and_its_table():
    name = "hardening-h200"
    found = findings_of(name)
    assert found.complete and all(row.verdict in ("agrees", "proven") for arm in found.arms for row in arm.proof)
    assert markdown(found).splitlines()[0] == report_of(name).splitlines()[0]
    own = [r for r in found.recovered if r.arm == f"hardened: {r.condition}"]
    assert {r.condition for r in own} == {"noise", "products", "nvfp4", "mxfp4", "dead zone"}
    table = (RESULTS / name / "README.md").read_text()
    for r in own:
        scores = f"| {100 * r.before:.1f} | {100 * r.after:.1f} | **{round(100 * r.share)} %** "
        assert f"{scores}({round(100 * r.interval.low)}–{round(100 * r.interval.high)}) |" in table
        assert r.interval.low > 0.4 and r.clean - r.clean_after < 0.02
