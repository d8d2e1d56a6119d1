"""The origin's scans as a diagnosis, and several diagnoses as one."""

import math
import statistics

import pytest

from shaketable.aqn.diagnoses import as_diagnosis, averaged
from shaketable.aqn.guidance import Guidance
from shaketable.errors import ShaketableError
from tests import ROOT

LAYERS = 28


def scans(layers=LAYERS, **more):
    """What `analyze_hardware_sensitivity` returned, as JSON has it."""
    gain = {str(i): 1.0 + 0.01 * math.sin(i) for i in range(layers)} | {"15": 0.4}
    kurtosis = {str(i): 3000.0 + i for i in range(layers)} | {"10": 5000.0, "15": 4500.0}
    instability = {str(i): 0.0 for i in range(layers)} | {"22": 0.2}
    return {"gain": gain, "kurtosis": kurtosis, "instability": instability, **more}


def origin_sigmas(found, base=0.05):
    """The document's formula, written down once more."""
    gains, kurts = ([found[scan][str(i)] for i in range(LAYERS)] for scan in ("gain", "kurtosis"))
    sigmas = {}
    for layer in range(LAYERS):
        low, sharp = gains[layer] < 0.8 * statistics.median(gains), kurts[layer] > 1.2 * statistics.median(kurts)
        noisy = found["instability"][str(layer)] > 0.1
        sigmas[layer] = max(0.01, min(base * (1.5 if low else 1) * (1.5 if sharp else 1) * (0.5 if noisy else 1), 0.15))
    return sigmas


def guided(data, **options):
    return {row.layer: row.sigma for row in Guidance.of(as_diagnosis(data, "scans.json"), **options).layers}


def test_the_origins_scans_give_the_sigmas_of_its_formula():
    assert guided(scans()) == pytest.approx(origin_sigmas(scans()))
    assert guided(scans())[15] == pytest.approx(0.1125)
    listed = {scan: list(column.values()) for scan, column in scans().items()}
    assert guided(listed) == guided(scans())


def test_scans_alone_decide_nothing_and_a_detected_layer_is_a_fault():
    open_ = Guidance.of(as_diagnosis(scans(analysis_date="2026-01-07", model_path="Qwen"), "s"))
    assert (open_.metadata["verdict"], open_.metadata["date"], open_.metadata["model"]) == (
        "INCONCLUSIVE",
        "2026-01-07",
        "Qwen",
    )
    with pytest.raises(ShaketableError, match="the verdict is INCONCLUSIVE"):
        guided(scans(), target="fault")
    assert list(guided(scans(detected_layer=15, fault_type="dead_zone"), target="fault")) == [15]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kurtosis": None}, "kurtosis of s.json must hold a mapping"),
        ({"gain": {"0": 1.0}}, "gain and the 28 layers differ at layer 1"),
        ({"gain": {"x": 1.0}}, "'x': 1.0 is not a layer with its number"),
        ({"gain": {"0": "1"}}, "'0': '1' is not a layer with its number"),
        ({"num_layers": 29}, "differ at layer 28"),
        ({"num_layers": "many"}, "num_layers is 'many'"),
    ],
)
def test_scans_that_lack_something_are_refused(change, message):
    with pytest.raises(ShaketableError, match=message):
        as_diagnosis(scans() | change, "s.json")
    without = {key: value for key, value in scans().items() if key != "instability"}
    with pytest.raises(ShaketableError, match=r"s\.json has no instability; scans are"):
        as_diagnosis(without, "s.json")


def diagnosis(gains, **changes):
    probes = [{"layer": i, "statistics": {"gain": g, "kurtosis": 3.0, "instability": 0.0}} for i, g in enumerate(gains)]
    facts = {"model": "m", "device": "cpu", "date": "x", "verdict": "HEALTHY", "layer": None, "fault_class": None}
    return {"schema": 1, "kind": "diagnosis", "num_layers": len(gains), "probes": probes, **facts, **changes}


def mean(*several):
    return averaged(several, [f"{i}.json" for i in range(len(several))])


def test_the_mean_is_taken_layer_by_layer_and_one_is_left_as_it_is():
    one, other = diagnosis([1.0, 0.5, 1.0]), diagnosis([2.0, 1.5, math.inf])
    assert mean(one) is one
    found = [probe["statistics"]["gain"] for probe in mean(one, other)["probes"]]
    assert found == [1.5, 1.0, math.inf]
    lost = mean(one, diagnosis([None, 1.5, 1.0]))["probes"]
    assert [probe["statistics"]["gain"] for probe in lost] == [None, 1.0, 1.0], "no mean of what is not there"


def test_a_layer_that_one_prompt_blames_is_not_guided_by_the_mean_of_many():
    odd, usual = diagnosis([1.0, 0.5, 1.0]), diagnosis([1.0, 1.0, 1.0])
    assert {row.label for row in Guidance.of(mean(odd)).layers} == {"BASE", "HIGH"}
    assert {row.label for row in Guidance.of(mean(odd, usual, usual)).layers} == {"BASE"}


def test_a_verdict_is_kept_when_all_agree():
    fault = {"verdict": "FAULT", "layer": 1, "fault_class": "dead_zone"}
    agreed = mean(diagnosis([1.0, 0.5], **fault), diagnosis([1.0, 0.6], **fault))
    assert (agreed["verdict"], agreed["layer"]) == ("FAULT", 1)
    apart = mean(diagnosis([1.0, 0.5], **fault), diagnosis([1.0, 0.6], **(fault | {"layer": 0})))
    assert (apart["verdict"], apart["layer"], apart["fault_class"]) == ("INCONCLUSIVE", None, None)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (diagnosis([1.0, 1.0], model="n"), "different models are not averaged: model 'n' in 1.json and 'm' in 0.json"),
        (diagnosis([1.0, 1.0, 1.0]), "num_layers 3 in 1.json and 2 in 0.json"),
        ({"kind": "fingerprint"}, "1.json is no diagnosis"),
        (diagnosis([1.0, 1.0], probes=[{"layer": 0}, {"layer": 1}]), "1.json was made without statistics"),
        (diagnosis([1.0, 1.0], probes=[{"layer": 0, "statistics": {"gain": 1.0}}]), "1.json has other layers or statistics"),
        (diagnosis([1.0, 1.0], probes=[{"layer": 0, "statistics": {}}] * 2), "1.json names a layer twice"),
    ],
)
def test_what_cannot_be_averaged_is_named(other, message):
    with pytest.raises(ShaketableError, match=message):
        mean(diagnosis([1.0, 1.0]), other)


def test_the_page_says_what_scans_are():
    page = (ROOT / "docs" / "guide.md").read_text()
    for word in ("detected_layer", "num_layers", "analysis_date", "fault_type"):
        assert word in page
