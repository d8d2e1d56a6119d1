"""A diagnosis as the report shows it: probes and statistics per layer, and the σ that was made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shaketable.study.analysis.runs import Run
from shaketable.study.cells import Cell


def diagnosis(run: Run, cells: Sequence[Cell]) -> dict[str, Any]:
    """The diagnosis of a finished `locate` run, with the noise that its rules give the arms that it guided."""
    event = run.last("diagnosis")
    assert event is not None
    found = event["diagnosis"]
    layers = [
        {
            "layer": row["layer"],
            "results": {probe: result["status"] for probe, result in row["results"].items()},
            "statistics": row["statistics"] or {},
        }
        for row in found["probes"]
        if row["layer"] is not None
    ]
    return {
        "plan": run.config["plan"],
        "model": run.config["model"],
        "verdict": found["verdict"],
        "sentence": found["sentence"],
        "layer": found["layer"],
        "layers": layers,
        "sigmas": _sigmas(found, next((c.guide for c in cells if c.needs == run.name and c.guide), None)),
        "folder": f"runs/{run.name}",
    }


def _sigmas(found: dict[str, Any], guide: dict[str, Any] | None) -> list[dict[str, Any]]:
    """σ of every layer by the rules: what `guide: all` gives, and others take from; none where it guides nobody."""
    if guide is None:
        return []
    from shaketable.harden.aqn.guidance import Guidance

    rows = Guidance.of(found, target="all", base_sigma=guide["sigma"], schedule=guide["schedule"]).layers
    return [{"layer": r.layer, "sigma": r.sigma, "label": r.label, "why": list(r.why)} for r in rows]
