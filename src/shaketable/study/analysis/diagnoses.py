"""A diagnosis as the report shows it: probes and statistics per layer, and the σ that was made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shaketable.study.analysis.results import DiagnosisResult, LayerProbes, LayerSigmaResult
from shaketable.study.analysis.runs import Run
from shaketable.study.cells import Cell

if TYPE_CHECKING:
    from shaketable.aqn.guidance import LayerSigma


def diagnosis(run: Run, cells: Sequence[Cell], runs: Sequence[Run]) -> DiagnosisResult:
    """The diagnosis of a finished `locate` run, with the noise that its rules give the arms that it guided."""
    event = run.last("diagnosis")
    assert event is not None
    found = event["diagnosis"]
    layers = [
        LayerProbes(
            layer=row["layer"],
            results={probe: result["status"] for probe, result in row["results"].items()},
            statistics=row["statistics"] or {},
        )
        for row in found["probes"]
        if row["layer"] is not None
    ]
    return DiagnosisResult(
        plan=run.config["plan"],
        model=run.config["model"],
        verdict=found["verdict"],
        sentence=found["sentence"],
        layer=found["layer"],
        layers=tuple(layers),
        sigmas=tuple(_sigmas(found, [c for c in cells if c.needs == run.name and c.guide], runs)),
        folder=f"runs/{run.name}",
    )


def _sigmas(found: dict[str, Any], guided: Sequence[Cell], runs: Sequence[Run]) -> list[LayerSigmaResult]:
    """σ of every layer by the rules: what `guide: all` gives, and others take from; none where it guides nobody.

    A run that was made by rules of another time has another σ: that one is shown, since the rules may change and runs do not.
    """
    if not guided or guided[0].guide is None:
        return []
    from shaketable.aqn.guidance import Guidance

    base, had = guided[0].guide["sigma"], _factors({c.name for c in guided}, runs)
    rows = Guidance.of(found, target="all", base_sigma=base, schedule=guided[0].guide["schedule"]).layers
    return [_row(r, base * had[r.layer] if r.layer in had else r.sigma) for r in rows]


def _factors(names: set[str], runs: Sequence[Run]) -> dict[int, float]:
    """What the σ of each layer was multiplied by, from the noise that finished runs had."""
    from shaketable.aqn.spec import AQN

    noises = [AQN.load(run.config["aqn"]) for run in runs if run.name in names and run.is_done]
    return {layer: aqn.multipliers.get(layer, 1.0) for aqn in noises for layer in aqn.layers or ()}


def _row(rule: LayerSigma, sigma: float) -> LayerSigmaResult:
    if math.isclose(sigma, rule.sigma, rel_tol=1e-9):
        return LayerSigmaResult(layer=rule.layer, sigma=rule.sigma, label=rule.label, why=tuple(rule.why))
    why = f"the rules of that time; those of today give {rule.sigma:.4g}"
    return LayerSigmaResult(layer=rule.layer, sigma=sigma, why=(why,))
