"""What guidance can be made from: our own diagnoses, the origin's scans, and several of either, averaged. Imports no torch.

The origin's scans are three mappings of layers to numbers, without a verdict:

    {"gain": {"0": 1.02, "1": 0.98, …}, "kurtosis": {…}, "instability": {…}}

They become a diagnosis of ours, so that guidance has one thing to read. Beside them may stand `num_layers`, `model` (or
`model_path`), `device`, `date` (or `analysis_date`), and the layer that the scans blame, `detected_layer`, with its
`fault_type`; other keys are left alone. Scans decide nothing here (they blame a layer of a healthy model too): without
`detected_layer` the verdict is INCONCLUSIVE.

A statistic depends on the prompts, so several diagnoses of one model are averaged: per layer and statistic the arithmetic mean.
A value that is not a number in one of them is none in the mean. The verdict is that of all of them if they agree, and
INCONCLUSIVE if they do not.

Rejected: the origin's defaults for a layer that a scan does not have (gain 1, kurtosis 3000, instability 0). A scan that lost
a layer would pass for a healthy one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from shaketable.errors import ShaketableError

SCANS = ("gain", "kurtosis", "instability")


def as_diagnosis(data: object, name: str) -> object:
    """The origin's scans as a diagnosis; anything else as it is.

    Args:
        data: What a JSON file holds.
        name: How an error calls it.
    """
    if not isinstance(data, Mapping) or "kind" in data or not any(scan in data for scan in SCANS):
        return data
    if missing := [scan for scan in SCANS if scan not in data]:
        lacking = " and no ".join(missing)
        raise ShaketableError(f"{name} has no {lacking}; scans are {', '.join(SCANS)}, each of layers to numbers")
    columns = {scan: _by_layer(data[scan], f"{scan} of {name}") for scan in SCANS}
    count = data.get("num_layers", max(max(column) for column in columns.values()) + 1)
    if not isinstance(count, int) or not 1 <= count < 10**6:
        raise ShaketableError(f"{name}: num_layers is {count!r}; write the number of decoder layers, or leave it out")
    for scan, column in columns.items():
        if set(column) != set(range(count)):
            odd = min(set(column) ^ set(range(count)))
            raise ShaketableError(
                f"{name}: {scan} and the {count} layers differ at layer {odd}; every scan needs each layer once"
            )
    probes = [{"layer": layer, "statistics": {scan: columns[scan][layer] for scan in SCANS}} for layer in range(count)]
    return {"schema": 1, "kind": "diagnosis", "num_layers": count, "probes": probes, **_facts(data)}


def averaged(diagnoses: Sequence[object], names: Sequence[str]) -> object:
    """One diagnosis with the mean statistics of several of the same model; a single one as it is."""
    if len(diagnoses) == 1:
        return diagnoses[0]
    read = [_checked(data, name) for data, name in zip(diagnoses, names, strict=True)]
    first = read[0]
    for other, name in zip(read, names, strict=True):
        for key in ("schema", "model", "num_layers"):
            if other.get(key) != first.get(key):
                found = f"{key} {other.get(key)!r} in {name} and {first.get(key)!r} in {names[0]}"
                raise ShaketableError(f"diagnoses of different models are not averaged: {found}")
    return {**first, **_verdict(read), "probes": _mean_probes(read, names)}


def _by_layer(column: object, name: str) -> dict[int, float | None]:
    """Layers to numbers, from a mapping (whose keys JSON makes text) or a list."""
    pairs = enumerate(column) if isinstance(column, list) else column.items() if isinstance(column, Mapping) else ()
    found: dict[int, float | None] = {}
    for key, value in pairs:
        is_layer = str(key).isdecimal() and len(str(key)) < 7
        is_value = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        if not is_layer or not is_value or int(key) in found:
            raise ShaketableError(f"{name}: {key!r}: {value!r} is not a layer with its number, each once")
        found[int(key)] = None if value is None else float(value)
    if not found:
        raise ShaketableError(f"{name} must hold a mapping of layers to numbers, such as {{'0': 1.02}}")
    return found


def _facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but the statistics."""
    layer = data.get("detected_layer")
    kind = data.get("fault_type", "not classified") if layer is not None else None
    verdict = {"verdict": "INCONCLUSIVE" if layer is None else "FAULT", "layer": layer, "fault_class": kind}
    model = data.get("model", data.get("model_path", "a model that its scans do not name"))
    when = data.get("date", data.get("analysis_date", "no date"))
    return {"model": str(model), "device": str(data.get("device", "a device that is not named")), "date": str(when), **verdict}


def _checked(data: object, name: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping) or data.get("kind") != "diagnosis" or not isinstance(data.get("probes"), list):
        raise ShaketableError(f"{name} is no diagnosis; expected what `shaketable locate --json FILE` writes")
    return data


def _verdict(read: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = ("verdict", "layer", "fault_class")
    said = [{key: data.get(key) for key in keys} for data in read]
    return said[0] if all(other == said[0] for other in said) else dict(zip(keys, ("INCONCLUSIVE", None, None), strict=True))


def _mean_probes(read: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    tables = [_statistics(data, name) for data, name in zip(read, names, strict=True)]
    for table, name in zip(tables, names, strict=True):
        if {layer: set(row) for layer, row in table.items()} != {layer: set(row) for layer, row in tables[0].items()}:
            raise ShaketableError(f"{name} has other layers or statistics than {names[0]}; make all diagnoses with one version")
    return [
        {"layer": layer, "statistics": {field: _mean([table[layer][field] for table in tables]) for field in row}}
        for layer, row in tables[0].items()
    ]


def _statistics(data: Mapping[str, Any], name: str) -> dict[int, Mapping[str, Any]]:
    probes = [p for p in data["probes"] if isinstance(p, Mapping) and isinstance(p.get("layer"), int)]
    if lacking := next((p for p in probes if not isinstance(p.get("statistics"), Mapping)), None):
        raise ShaketableError(f"{name} was made without statistics (layer {lacking['layer']} has none); guidance needs them")
    found = {p["layer"]: p["statistics"] for p in probes}
    if len(found) < len(probes):
        raise ShaketableError(f"{name} names a layer twice; make it anew with `shaketable locate --json FILE`")
    return found


def _mean(values: Sequence[Any]) -> float | None:
    numbers = [value for value in values if isinstance(value, int | float)]
    return fmean(numbers) if len(numbers) == len(values) else None
