"""The page of a diagnosis: one HTML file that explains a verdict to the person who has to act on it.

The page is made from the JSON of a diagnosis alone, without torch, and loads nothing.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

from shaketable.report.render import render
from shaketable.report.wording import MARKS, PROBES, STATUS_OF, finite, number, ranges

MEANING = {
    "fail": "exact evidence of a fault",
    "suspect": "a test with a tolerance fired",
    "inconclusive": "the probe could not tell",
    "skipped": "not needed",
    "pass": "nothing wrong",
    "absent": "not run here",
}
JUDGED_BY = {
    "replayed": "replayed",
    "agreed": "the host's same bits",
    "twin": "compared with a twin",
}


def page(diagnosis: dict[str, Any]) -> str:
    """The self-contained HTML page of a diagnosis (the object that `shaketable locate --json` writes)."""
    layers = [row for row in diagnosis["probes"] if row["layer"] is not None]
    return render(
        "locate.html.jinja",
        {"number": number, "exact": exact, "score": score, "day": day, "ranges": ranges},
        d=diagnosis,
        status=STATUS_OF[diagnosis["verdict"]],
        says=_says(diagnosis),
        marks=MARKS,
        meaning=MEANING,
        probes=_probes_run(diagnosis["probes"]),
        not_run=[p for p in PROBES if p not in _probes_run(diagnosis["probes"])],
        reasons=reasons(diagnosis["probes"]),
        place=place,
        counts=Counter(result["status"] for row in diagnosis["probes"] for result in row["results"].values()),
        evidence=[item | {"columns": _columns(item)} for item in diagnosis["evidence"]],
        judged_by=JUDGED_BY,
        covered=covered(diagnosis["probes"]),
        foreign=diagnosis.get("foreign") or [],
        outside=_outside,
        shade=shade,
        statistics=list(dict.fromkeys(name for row in layers for name in row["statistics"] or {})),
        layers=layers,
    )


def score(value: Any) -> str:
    """A number for a cell of the map: two decimals where they suffice, so that a column lines up."""
    if value is None:
        return ""
    return f"{value:.2f}" if finite(value) and 0.01 <= value < 10 else number(value, 2)


def exact(value: Any) -> str:
    """Nine digits: enough to tell two neighbouring float32 apart."""
    return number(value, 9)


def day(date: str) -> str:
    """An ISO date in UTC, to the minute."""
    return datetime.fromisoformat(date).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _says(diagnosis: dict[str, Any]) -> str:
    """The sentence without the verdict, which stands above it. It starts with a capital, unless with the name of an op."""
    text = str(diagnosis["sentence"]).removeprefix(f"{diagnosis['verdict']}: ")
    return text if text.startswith(diagnosis["op"] or " ") else text[:1].upper() + text[1:]


def place(item: dict[str, Any]) -> list[str]:
    """Where something is, from the outside in: layer, op, function."""
    layer, op, function = item["layer"], item.get("op"), item.get("function")
    head = "outside of the layers" if layer is None else f"layer {layer}"
    own = " ".join(part for part in (function, f"after {item['after']}" if item.get("after") else None) if part)
    return [head, *([op] if op else []), *([own] if own else [])]


def covered(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was judged of each operator, over all layers: those of which not every row was replayed, and how many others."""
    sums: dict[str, Counter[str]] = {}
    for row in rows:
        for op, counts in (row.get("coverage") or {}).items():
            sums.setdefault(op, Counter()).update({"places": 1, **counts})
    some = {op: counts for op, counts in sums.items() if counts["replayed"] < counts["rows"]}
    names = [name for name in JUDGED_BY if any(c[name] for c in some.values())]
    return {"some": some, "whole": len(sums) - len(some), "names": names}


def reasons(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results that are not a pass, with layers of the same reason in one line; the most telling first."""
    found: dict[tuple[str, str, str | None, str], list[int | None]] = {}
    for row in rows:
        for probe, result in row["results"].items():
            if result["status"] != "pass":
                key = (result["status"], probe, result["op"], result["reason"])
                found.setdefault(key, []).append(row["layer"])
    order = list(MARKS)
    lines = [dict(zip(("status", "probe", "op", "reason"), key, strict=True), where=_where(at)) for key, at in found.items()]
    return sorted(lines, key=lambda line: order.index(line["status"]))


def _where(layers: list[int | None]) -> str:
    inside = [layer for layer in layers if layer is not None]
    words = [("layers " if len(inside) > 1 else "layer ") + ranges(inside, 8)] if inside else []
    return " and ".join([*words, *(["outside of the layers"] if None in layers else [])])


def _probes_run(rows: list[dict[str, Any]]) -> list[str]:
    seen = {probe for row in rows for probe in row["results"]}
    return [*(p for p in PROBES if p in seen), *sorted(seen.difference(PROBES))]


def _columns(item: dict[str, Any]) -> list[str]:
    """The keys of the examples, in order of appearance: probes have more to show than token and channel."""
    return list(dict.fromkeys(key for example in item["examples"] for key in example))


def _outside(example: dict[str, Any]) -> str:
    """How far a value lies outside of its interval, and on which side."""
    got, low, high = (example.get(key) for key in ("got", "low", "high"))
    if low is None or high is None or got is None:
        return "–"
    if low <= got <= high:
        return "inside"
    if not got < low and not got > high:
        return "not a number"
    return f"▼ {number(low - got, 4)} below" if got < low else f"▲ {number(got - high, 4)} above"


def shade(score: Any) -> str:
    """How warm the cell of a pass is, 0 to 1: a score near its tolerance should be seen before it fires."""
    return f"{min(max(float(score), 0.0), 1.0):.2f}" if finite(score) else "0"
