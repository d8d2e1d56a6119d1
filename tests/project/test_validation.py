"""The validation itself: what it counts without us, that it sees what is wrong, and that a stopped run goes on."""

import pytest
import torch

from tests import ROOT

VALIDATION = ROOT / "validation"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(VALIDATION))


def row_of(kind, attention="eager", dtype=torch.float32):
    from checks import check
    from zoo import Animal

    return check(Animal(kind, kind), dtype, attention)


@pytest.mark.parametrize(("kind", "counts"), [("llama", (21, 3, 27)), ("gpt2", (12, 3, 18)), ("mixtral", (15, 3, 24))])
def test_a_healthy_architecture_passes_with_the_counts_that_its_configuration_says(kind, counts):
    row = row_of(kind)
    assert not row["fails"] and row["refused"] is None
    assert row["counts"] == {level: [n, n] for level, n in zip(("module", "layer", "op"), counts, strict=True)}
    assert row["locate"]["host"] == row["locate"]["all"] == "HEALTHY" and row["planted"]["found"]
    assert row["locate"]["device"] == "HEALTHY" or "no symmetries are known" in row["locate"]["device"]


def test_an_injection_that_misses_a_module_and_a_locate_that_alarms_are_failures(monkeypatch):
    import checks

    monkeypatch.setitem(checks.PLANS, "module", "relative_gaussian:0.01@module.linear,layers=0-1")
    real = checks.st.locate

    def wrong(model, **given):
        found = real(model, **given)
        found.verdict = "FAULT" if given["mode"] == "host" else "HEALTHY"
        return found

    monkeypatch.setattr(checks.st, "locate", wrong)
    fails = " ".join(row_of("llama")["fails"])
    assert "module: fired 14 times instead of 21" in fails and "locate host, healthy" in fails and "planted in" in fails
    assert "locate device" not in fails


def test_a_plan_that_stays_on_is_a_failure(monkeypatch):
    from shaketable.inject.injection import Injection

    monkeypatch.setattr(Injection, "disable", lambda self: self)
    assert [f for f in row_of("llama")["fails"] if "off is not bit-identical" in f]


def test_simulated_studies_have_the_level_and_the_coverage_that_they_say():
    from simulated import CASES, simulate

    rows = {row["name"]: row for row in simulate(studies=30)}
    assert len(rows) == len(CASES) + 2 and not any(row["fails"] for row in rows.values())
    assert rows["better by half a logit, 5 seeds"]["seen"] > 0.1 > rows["equal arms, 5 seeds"]["false"]
