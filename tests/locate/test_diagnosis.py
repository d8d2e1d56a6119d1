"""How a verdict is reached, and what is written down."""

import json
import math

import pytest

from shaketable.locate.diagnosis import Diagnosis, Evidence, LayerReport, LayerStatistics, Result
from shaketable.locate.verdict import decide


def diagnosis(mode="all", layers=3, **fields):
    return Diagnosis(
        model="m", model_class="M", num_layers=layers, dtype="float32", device="cpu", attention="sdpa", mode=mode,
        date="2026-01-01", versions={}, tokens=8, seed=0, **fields,
    )  # fmt: skip


def passing(layers=3, mode="all"):
    """Every deciding probe of every layer passed."""
    found = diagnosis(mode, layers)
    names = {"device": ("repeat", "links", "twin"), "host": ("weights", "repeat", "links", "replay")}
    names["all"] = (*names["host"], "twin")
    for i in [*range(layers), None]:
        found.probes.append(LayerReport(i, f"layers.{i}", {name: Result("pass", 0.0) for name in names[mode]}))
    return found


def evidence(layer, probe, op="mlp.up_proj", place=None, **fields):
    fields = {"function": None, "text": f"{probe} failed", "fault_class": "gain", **fields}
    return Evidence(layer=layer, op=op, probe=probe, place=layer if place is None else place, **fields)


def decided(found, has_file=True):
    decide(found, has_file)
    return found


def test_the_first_layer_in_the_order_of_computation_is_blamed():
    found = passing()
    found.evidence = [
        evidence(2, "weights"),
        evidence(1, "twin", "mlp.down_proj"),
        evidence(1, "repeat", None, fault_class="noise"),
    ]
    decided(found)
    assert (found.verdict, found.exit_code, found.layer) == ("FAULT", 1, 1)


@pytest.mark.parametrize(
    ("mode", "probe", "verdict"),
    [
        ("device", "twin", "INCONCLUSIVE"), ("host", "replay", "INCONCLUSIVE"), ("all", "repeat", "INCONCLUSIVE"),
        ("all", "twin", "HEALTHY"), ("all", "causal", "HEALTHY"),
    ],
)  # fmt: skip
def test_a_gap_of_the_deciding_probe_is_no_health(mode, probe, verdict):
    found = passing(mode=mode)
    found.probes[2].results[probe] = Result("inconclusive", reason="no host definition of cumsum")
    decided(found)
    assert found.verdict == verdict and found.exit_code == (0 if verdict == "HEALTHY" else 4)
    if verdict != "HEALTHY":
        assert str(found) == f"INCONCLUSIVE: layer 2, {probe}: no host definition of cumsum; nothing that was judged is wrong."


# ---- what is written down


def test_json_is_strict(tmp_path):
    found = passing()
    found.probes[0].results["repeat"] = Result("suspect", math.inf, "mlp", "off")
    found.probes[1].statistics = LayerStatistics(math.nan, 1.0, -math.inf, 0.0, 0.1, 3)
    found.evidence = [evidence(0, "replay", examples=[{"got": math.nan, "low": 1.0}])]
    decided(found)
    found.save(tmp_path / "diagnosis.json")
    text = (tmp_path / "diagnosis.json").read_text(encoding="utf-8")
    plain = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert plain["probes"][0]["results"]["repeat"]["score"] is None
    assert list(plain["probes"][1]["statistics"].values()) == [None, 1.0, None, 0.0, 0.1, 3, None]
    assert plain["evidence"][0]["examples"] == [{"got": None, "low": 1.0}]
