"""docs/validation.md, from docs/validation.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from shaketable.evaluate.statistics import wilson

Row = dict[str, Any]


def page(body: dict[str, Any]) -> str:
    """The whole page, in Markdown."""
    zoo = list(body["zoo"].values())
    built = [r for r in zoo if not r["refused"]]
    versions = ", ".join(f"{name} {number}" for name, number in body["versions"].items())
    parts = [
        "# Validation",
        "",
        "Written by `make validate`; `docs/validation.json` has every number. " + f"{body['date']}, {versions}.",
        "",
        *([f"**{body['note']}**", ""] if "note" in body else []),
        *_summary(zoo, built, body),
        *_failures(zoo, body),
        *_statistics(body.get("statistics", [])),
        *_attacks(body.get("attacks", [])),
        *_zoo(built),
        *_refused(zoo),
    ]
    return "\n".join(parts) + "\n"


def _summary(zoo: list[Row], built: list[Row], body: dict[str, Any]) -> list[str]:
    names = {r["name"] for r in built}
    verdicts = Counter(_verdict(r["locate"].get(mode, "")) for r in built for mode in ("device", "host", "all"))
    planted = [r["planted"] for r in built if r["planted"]]
    found = sum(p["found"] for p in planted)
    healthy, attacks = sum(verdicts.values()), body.get("attacks", [])
    return [
        "| what | counted |", "|---|---|",
        f"| architectures and variants built | {len(names)} of {len({r['name'] for r in zoo})} |",
        f"| models (× float32, bfloat16 × sdpa, eager) | {len(built)}, {sum(bool(r['fails']) for r in built)} with a failure |",
        f"| injections whose fires are those counted without us | {_counts(built)} |",
        f"| locate on healthy models | {healthy}: {verdicts['HEALTHY']} HEALTHY, {verdicts['INCONCLUSIVE']} INCONCLUSIVE, "
        f"{verdicts['FAULT']} FAULT (false alarms), {verdicts['refused']} refused |",
        f"| planted faults of one linear | {len(planted)}: {found} found, layer and operator; "
        f"{sum(not p['found'] and p['sentence'].startswith('INCONCLUSIVE') for p in planted)} INCONCLUSIVE |",
        f"| simulated studies | {sum(r['studies'] for r in body.get('statistics', []))} |",
        f"| attacks | {sum(r['passed'] + r['failed'] for r in attacks)} tests in {len(attacks)} suites |",
        "",
    ]  # fmt: skip


def _counts(built: list[Row]) -> str:
    pairs = [pair for r in built for pair in r["counts"].values()]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def _verdict(text: str) -> str:
    return "refused" if text.startswith("refused") or not text else text.split(":")[0]


def _failures(zoo: list[Row], body: dict[str, Any]) -> list[str]:
    """One line for each thing that fails, however many rows of one model it fails in."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in zoo:
        for text in row["fails"]:
            where.setdefault((row["name"], _cell(text, 200)), []).append(f"{row['dtype']} {row['attention']}")
    lines = [f"- **{name}** ({_places(places)}): {text}" for (name, text), places in where.items()]
    for part in ("statistics", "attacks"):
        lines += [f"- **{r['name']}**: {_cell('; '.join(r['fails']), 300)}" for r in body.get(part, []) if r["fails"]]
    return ["## What fails", "", *(lines or ["Nothing."]), ""]


def _places(where: list[str]) -> str:
    return ", ".join(where) if len(where) < 4 else "everywhere"


def _statistics(rows: list[Row]) -> list[str]:
    lines = [
        "## Statistics", "",
        "Studies that were drawn, judged as real ones are (`validation/simulated.py`), at a level of 5 %.", "",
        "| drawn | studies | true difference | false positives | true ones seen | intervals that hold the truth |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        n = r["studies"]
        shown = [_rate(r[key], n) for key in ("false", "seen", "covered")]
        lines.append(f"| {r['name']} | {n} | {100 * r['truth']:.1f} points | {' | '.join(shown)} |")
    return [*lines, ""] if rows else []


def _rate(rate: float | None, n: int) -> str:
    if rate is None:
        return "–"
    ends = wilson(rate, n)
    return f"{100 * rate:.1f} % ({100 * ends.low:.1f}–{100 * ends.high:.1f})"


def _attacks(rows: list[Row]) -> list[str]:
    lines = [
        "## Attacks", "",
        'Tests with `@pytest.mark.attack("suite")` (`validation/attacks.py`).', "",
        "| suite | what it attacks | tests | passed | failed | skipped | seconds | run |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        counts = [r["passed"], r["failed"], r["skipped"]]
        cells = [r["name"], r["about"], sum(counts), *counts, f"{r['seconds']:.0f}", r["date"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return [*lines, ""] if rows else ["## Attacks", "", "No suite was run.", ""]


def _zoo(built: list[Row]) -> list[str]:
    """Counts by dtype and attention; every row of its own is in the JSON."""
    lines = [
        "## The zoo", "",
        "One forward of every model under a plan at modules, layers and operators; the fires are compared with a count made "
        "without us. Then `locate` on the healthy model in three modes (H: HEALTHY, I: INCONCLUSIVE, F: FAULT), and with a "
        "gain of 5 % planted in one linear of the second layer. Off is bit-identical in every model that does not fail.", "",
        "| dtype | attention | models | counts agree | device | host | all | planted, found |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in built:
        groups.setdefault((row["dtype"], row["attention"]), []).append(row)
    for (dtype, attention), rows in groups.items():
        planted = [r["planted"]["found"] for r in rows if r["planted"]]
        modes = [_letters(r["locate"].get(mode, "") for r in rows) for mode in ("device", "host", "all")]
        cells = [dtype, attention, len(rows), _counts(rows), *modes, f"{sum(planted)} of {len(planted)}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    doubted = _by_reason((r["locate"].get("host", "").partition(": ")[2], r["name"]) for r in built if _is_doubted(r))
    return [*lines, "", *_listed("Healthy models that `--mode host` calls INCONCLUSIVE:", doubted)]


def _is_doubted(row: Row) -> bool:
    return _verdict(row["locate"].get("host", "")) == "INCONCLUSIVE"


def _letters(verdicts: Iterable[str]) -> str:
    counted = Counter(_verdict(v) for v in verdicts)
    return ", ".join(f"{counted[word]} {word[0]}" for word in ("HEALTHY", "INCONCLUSIVE", "FAULT") if counted[word]) or "–"


def _refused(zoo: list[Row]) -> list[str]:
    """Why models were not built, by kind of reason."""
    reasons = _by_reason((_kind_of(r["refused"]), r["name"]) for r in zoo if r["refused"])
    return ["## Not tried", "", *_listed("", reasons)]


def _kind_of(reason: str) -> str:
    if "does not support an attention implementation" in reason:
        return "transformers has no sdpa for it; tried in eager only"
    if "smallest configuration" in reason:
        return "too large at its smallest known size"
    return "transformers cannot build it from a small configuration"


def _by_reason(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for reason, name in pairs:
        names = found.setdefault(reason, [])
        if name not in names:
            names.append(name)
    return found


def _listed(title: str, reasons: dict[str, list[str]]) -> list[str]:
    if not reasons:
        return []
    lines = [f"- {_cell(reason, 160)} ({len(names)}): {', '.join(names)}" for reason, names in reasons.items()]
    return [*([title, ""] if title else []), *lines, ""]


def _cell(text: str, most: int) -> str:
    shown = " ".join(text.split()).replace("|", "\\|")
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"
