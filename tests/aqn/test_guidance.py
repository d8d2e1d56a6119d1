"""Guidance against the origin's own snippet, and what it does with a diagnosis that is broken or incomplete."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shaketable.aqn.guidance import Guidance
from shaketable.errors import ShaketableError


def make_diagnosis(gain, kurtosis, instability, verdict="HEALTHY", layer=None, fault_class=None):
    """A diagnosis as `locate` writes it, with only the statistics that matter set."""
    rows = [
        {
            "layer": i,
            "name": f"model.layers.{i}",
            "results": {},
            "statistics": {"gain": g, "kurtosis": k, "instability": s, "distinct": 7},
        }
        for i, (g, k, s) in enumerate(zip(gain, kurtosis, instability, strict=True))
    ]
    head = {"schema": 1, "kind": "diagnosis", "model": "tiny", "num_layers": len(gain), "device": "cpu", "mode": "all"}
    found = {
        "date": "2026-11-15T06:00:00+00:00",
        "verdict": verdict,
        "layer": layer,
        "fault_class": fault_class,
        "planted": None,
    }
    return {**head, **found, "probes": [*rows, {"layer": None, "name": "", "results": {}}]}


def plain(layers=5, **verdict):
    return make_diagnosis([1.0] * layers, [800.0] * layers, [0.0] * layers, **verdict)


def sigmas(diagnosis, **options):
    return Guidance.of(diagnosis, **options).config()["aqn"]["layer_sigmas"]


def origin_sigmas(gain, kurtosis, instability, base_sigma, source=None):
    """The origin's `generate_layer_sigmas`, over arrays; `source` is its rule for a propagated saturation."""
    low_gain = np.array(gain) < np.median(gain) * 0.8
    high_kurtosis = np.array(kurtosis) > np.median(kurtosis) * 1.2
    noisy = np.array(instability) > 0.1
    sigma = np.full(len(gain), base_sigma)
    sigma = np.where(low_gain, sigma * 1.5, sigma)
    sigma = np.where(high_kurtosis, sigma * 1.5, sigma)
    sigma = np.where(noisy, sigma * 0.5, sigma)
    if source is not None:
        sigma[source] *= 1.5
    return np.maximum(0.01, np.minimum(sigma, 0.15))


positive = st.floats(1e-3, 1e6)
rows = st.lists(st.tuples(st.floats(0.1, 3), positive, st.floats(0, 0.3)), min_size=1, max_size=40)
bases = st.one_of(st.sampled_from([0.05, 0.01, 0.1, 0.125, 0.15, 0.2]), st.floats(1e-4, 0.5))


@given(rows=rows, base=bases, data=st.data())
def test_sigmas_are_the_origin_s(rows, base, data):
    gain, kurtosis, instability = map(list, zip(*rows, strict=True))
    source = data.draw(st.one_of(st.none(), st.integers(0, len(rows) - 1)))
    verdict = {} if source is None else {"verdict": "FAULT", "layer": source, "fault_class": "saturation"}
    found = Guidance.of(make_diagnosis(gain, kurtosis, instability, **verdict), base_sigma=base)
    expected = origin_sigmas(gain, kurtosis, instability, base, source)
    assert found.config()["aqn"]["layer_sigmas"] == dict(enumerate(expected.tolist()))
    assert found.high_priority_layers == np.flatnonzero(expected > base * 1.2).tolist()
    assert [x.label == "LOW" for x in found.layers] == (expected < base * 0.8).tolist()


def test_the_file_keeps_the_origin_s_shape_and_names_its_layers():
    config = Guidance.of(plain(3, verdict="FAULT", layer=1, fault_class="saturation"), target="fault").config()
    assert config == {
        "aqn": {
            "enabled": True,
            "layer_specific": True,
            "base_sigma": 0.05,
            "layers": [1],
            "layer_sigmas": {1: 0.05 * 1.5},
            "schedule": "epoch_aware",
            "high_priority_layers": [1],
        },
        "srdd_metadata": {
            "num_layers": 3,
            "analysis_date": "2026-11-15T06:00:00+00:00",
            "model": "tiny",
            "device": "cpu",
            "verdict": "FAULT",
            "fault_layers": {1: "saturation"},
            "target": "fault",
        },
    }


def test_every_located_layer_is_guided_by_its_own_class():
    diagnosis = plain(5, verdict="FAULT", layer=1, fault_class="dead_zone")
    diagnosis["evidence"] = [
        {"layer": 1, "fault_class": "dead_zone", "text": "x"},
        {"layer": 3, "fault_class": "saturation", "text": "x"},
        {"layer": 4, "fault_class": "gain", "text": "x"},
        {"layer": None, "fault_class": "gain", "text": "x"},
    ]
    assert sigmas(diagnosis, target="fault") == {1: 0.05 * 1.5, 3: 0.05 * 1.5, 4: 0.05}
    assert set(sigmas(diagnosis, target="healthy")) == {0, 2}
    assert set(sigmas(diagnosis, target="high")) == {1, 3}
    assert Guidance.of(diagnosis).metadata["fault_layers"] == {1: "dead_zone", 3: "saturation", 4: "gain"}


@pytest.mark.parametrize(("model", "layer"), [("nano", 3), pytest.param("smollm2-135m", 15, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scope", ["tensor", "token"])
def test_the_origin_s_own_fault_sets_its_layer_apart(model, layer, scope):
    """A dead zone of 0.01: over the tensor it kills SmolLM2, elsewhere the gain does not see it."""
    from shaketable.locate.locate import locate
    from shaketable.models import load_model

    diagnosis = locate(*load_model(model), tokens=64, plan=f"dead_zone:0.01,scope={scope}@layer.{layer}").as_dict()
    guided = sigmas(diagnosis)
    assert guided[layer] == 0.05 * 1.5
    assert layer == max(guided, key=guided.__getitem__) and list(guided.values()).count(guided[layer]) == 1
    arms = {target: Guidance.of(diagnosis, target=target).aqn() for target in ("all", "fault", "healthy")}
    assert arms["fault"].layers == (layer,) and arms["all"].multipliers[layer] == 1.5
    assert set(arms["healthy"].layers) == set(arms["all"].layers) - {layer}


def without(diagnosis, *keys):
    return {k: v for k, v in diagnosis.items() if k not in keys}


def with_probe(index, **fields):
    diagnosis = copy.deepcopy(plain())
    diagnosis["probes"][index] |= fields
    return diagnosis


@pytest.mark.parametrize(
    ("diagnosis", "words"),
    [
        (plain() | {"schema": 2}, "has schema 2; this version reads schema 1"),
        (plain() | {"num_layers": 10**12}, "must name each of the 1000000000000 layers once"),
        (plain(verdict="FAULT", layer=5), "names layer 5 of a model with 5 layers"),
        (with_probe(4, statistics=None), r"was made without statistics \(layer 4 has none\)"),
        (with_probe(1, statistics={"gain": 1.0, "instability": 1.0}), r"probes\.1\.statistics\.kurtosis: Field required"),
    ],
)
def test_what_is_no_complete_diagnosis_is_refused_in_one_line(diagnosis, words):
    with pytest.raises(ShaketableError, match=words) as caught:
        Guidance.of(diagnosis)
    assert "\n" not in str(caught.value)
