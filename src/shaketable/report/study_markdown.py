"""The findings of a study as Markdown, for a pull request, a terminal or a paper's appendix.

The same content as the page in the same order, without its figures: the verdict, the design, scores by seed, every comparison,
the proof of injection, diagnosis, cost, runs, notes and method. Curves are given by their ends, layers by their extremes; the
findings hold the rest. Samples are not repeated here: text of a model in a format without escapes is a risk, not a service.

Everything that came from outside is escaped: a name with a pipe, an asterisk or a tag stays what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from shaketable.report.strips import ProofRow, proof_rows
from shaketable.report.wording import (
    METHOD,
    amount,
    badge,
    chance,
    counted,
    difference_at,
    duration,
    fact,
    known,
    missing_runs,
    named,
    number,
    percent,
    place,
    proof_summary,
    share_of,
    signed,
    strength_unit,
    unit_of,
)
from shaketable.study.analysis.results import ArmScore, ComparisonResult, Findings, RunFacts

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&$])")


def markdown(findings: Findings) -> str:
    """The report of a study, or of a single run, as one Markdown text."""
    f = findings.visible()
    parts = (
        _verdict,
        _design,
        _scores,
        _comparisons,
        _recovered,
        _curves,
        _at_steps,
        _robustness,
        _diagnoses,
        _proof,
        _mechanism,
        _cost,
        _runs,
        _end,
    )
    return "\n\n".join(block for part in parts for block in part(f) if block) + "\n"


def plain(value: Any) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(value).split()))


def code(value: Any) -> str:
    """A code span that holds any text, and may stand in a table."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}" if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; nothing when it has no rows."""
    lines = [" | ".join(row) for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {line} |" for line in lines)]) if lines else ""


def _verdict(f: Findings) -> list[str]:
    b, missing, proof = badge(f), missing_runs(f.runs), proof_summary(f.arms)
    some = ", ".join(plain(m) for m in missing[:12]) + (f", and {len(missing) - 12} more" if len(missing) > 12 else "")
    gap = f": {len(missing)} of {len(f.runs)} runs are not done: {some}" if missing else ": the study has not ended"
    return [
        f"# {b.mark} {b.words.upper()}: {plain(b.headline)}",
        "" if f.complete else f"**PARTIAL**{gap}.",
        plain(f.study.question),
        f"**{plain(f.verdict.sentence)}**" if f.verdict.sentence else "",
        f"Proof of injection: {proof.words}.",
        f"**No proof was recorded for {plain(', '.join(proof.silent))}.**" if proof.silent else "",
    ]


def _design(f: Findings) -> list[str]:
    s, p = f.study, f.study.primary
    facts = [f"study {code(s.name)}", f"key {code(s.key)}", f"model {plain(s.model)}", f"task {plain(s.task)}"]
    facts += [counted(s.n, "problem"), counted(len(s.seeds), "seed"), counted(s.steps, "step")]
    pair = f"{plain(p.a)} − {plain(p.b)}, {plain(place(p.condition, p.endpoint))}" if p else ""
    arms = [
        [
            plain(a.name),
            plain("; ".join([a.description, *a.settings] if a.description else a.settings)),
            code(a.plan or ""),
            code(a.aqn or ""),
        ]
        for a in f.arms
    ]
    conditions = [[plain(c.name), code(c.plan or "") or "no fault"] for c in s.conditions]
    return [
        "## Design",
        ", ".join(facts) + ".",
        f"Primary endpoint, {plain(named(f))}: {pair}." if p else "",
        plain(s.origin),
        table(("arm", "what it is", "plan", "AQN"), arms),
        table(("condition", "plan"), conditions),
        f"    {' '.join(s.command.split())}" if s.command else "",
    ]


def _scores(f: Findings) -> list[str]:
    rows = [_score(arm.name, s) for arm in f.arms for s in arm.scores]
    made = table(("arm", "condition", "endpoint", "mean", "95 % interval", "by seed", "before training"), rows)
    return ["## Scores", made] if made else []


def _score(arm: str, s: ArmScore) -> list[str]:
    seeds = ", ".join(amount(p.value, s.unit) for p in s.per_seed) or "–"
    values = [amount(getattr(s, key), s.unit) for key in ("mean", "ci_low", "ci_high", "first")]
    endpoint = f"{s.endpoint}, {s.unit}".rstrip(", ")
    return [plain(arm), plain(s.condition), plain(endpoint), values[0], f"{values[1]} … {values[2]}", seeds, values[3]]


def _comparisons(f: Findings) -> list[str]:
    if not f.comparisons:
        return ["## Comparisons", "No comparison could be made."] if f.kind == "study" else []
    found = sorted(f.comparisons, key=lambda c: not c.primary)
    tests = ("p", "p, Holm", "exact p over seeds")
    head = ("comparison", "condition", "difference", "95 % interval", *tests, "detectable", "verdict")
    sentences = [f"- {'**primary:** ' if c.primary else ''}{plain(c.sentence)}" for c in found if c.sentence]
    return ["## Comparisons", table(head, map(_comparison, found)), "\n".join(sentences)]


def _comparison(c: ComparisonResult) -> list[str]:
    keys = ("difference", "ci_low", "ci_high", "detectable")
    difference, low, high, least = (signed(getattr(c, key), c.scale, c.unit) for key in keys)
    name = f"{'◆ ' if c.primary else ''}{plain(c.a)} − {plain(c.b)}"
    where = plain(place(c.condition, c.endpoint))
    values = [f"{difference} {plain(c.unit)}".strip(), f"{low} … {high}"]
    chances = [chance(getattr(c, key)) for key in ("p", "p_holm", "p_seeds")]
    return [name, where, *values, *chances, least.lstrip("+"), plain(c.verdict)]


def _recovered(f: Findings) -> list[str]:
    rows = [
        [
            plain(r.arm),
            plain(r.condition),
            amount(r.taken, "points"),
            f"{amount(r.before, 'points')} → {amount(r.after, 'points')}",
            f"{amount(r.clean, 'points')} → {amount(r.clean_after, 'points')}",
            share_of(r.share, r.interval.low, r.interval.high),
        ]
        for r in f.recovered
        if r.share is not None
    ]
    head = ("arm", "condition", "the fault takes", "before → after", "clean before → after", "recovered, 95 % interval")
    return ["## What came back", table(head, rows)] if rows else []


def _curves(f: Findings) -> list[str]:
    rows = []
    for arm in f.arms:
        for curve in arm.curves:
            if ends := known(p.mean for p in curve.points):
                unit = unit_of(curve.name)
                values = [amount(value, unit) for value in (ends[0], ends[-1], curve.roughness)]
                rows.append([plain(arm.name), plain(curve.name), *values])
    made = table(("arm", "curve", "first", "last", "roughness"), rows)
    said = "Roughness: how far a point lies, on average, from the straight line between its two neighbours, by run."
    return ["## Learning curves", made, said] if made else []


def _at_steps(f: Findings) -> list[str]:
    rows = [
        [f"{plain(one.a)} − {plain(one.b)}", plain(one.curve), number(p.step), difference_at(p, one.scale, one.unit)]
        for one in f.at_steps
        for p in one.points
    ]
    made = table(("comparison", "curve", "step", "difference, 95 % interval"), rows)
    said = "Exploratory; the interval of each step is of that step alone."
    return ["## Difference to the baseline, step by step", said, made] if made else []


def _robustness(f: Findings) -> list[str]:
    unit = strength_unit(f.robustness)
    points = [(r.arm, p) for r in f.robustness for p in r.points]
    rows = [
        [plain(arm), plain(p.label), *(amount(getattr(p, key), unit) for key in ("mean", "low", "high"))] for arm, p in points
    ]
    made = table(("arm", "strength", "mean", "low", "high"), rows)
    return ["## Robustness", made] if made else []


def _diagnoses(f: Findings) -> list[str]:
    lines = []
    for d in f.diagnoses:
        given = [g for g in d.sigmas if known([g.sigma])]
        high = max(given, key=lambda g: g.sigma or 0.0, default=None)
        words = f" Largest σ: {number(high.sigma)} on layer {high.layer}." if high else ""
        planted = f" Planted: {code(d.plan)}." if d.plan else ""
        lines.append(f"- **{plain(d.verdict)}** {plain(d.sentence.removeprefix(d.verdict + ': '))}{planted}{words}")
    return ["## Diagnosis", "\n".join(lines)] if lines else []


def _proof(f: Findings) -> list[str]:
    head = ("arm", "verdict", "where", "fault", "site", "asked", "measured", "changed, %", "forward", "backward", "remark")
    rows = [[plain(arm.name), *_place(row)] for arm in f.arms for row in proof_rows(arm.proof)]
    return ["## Proof of injection", table(head, rows) or "No injection was recorded."]


def _place(row: ProofRow) -> list[str]:
    texts = [f"{row.mark} {plain(row.verdict)}", plain(row.where), code(row.fault), code(row.site)]
    numbers = [row.asked, row.measured, row.changed, number(row.forward), number(row.backward)]
    return [*texts, *numbers, plain(row.remark or "")]


def _mechanism(f: Findings) -> list[str]:
    rows = []
    for arm in f.arms:
        for m in arm.mechanism:
            ends = [_extremes([getattr(row, key) for row in m.layers]) for key in ("grad_norm", "survival", "rms", "kurtosis")]
            rows.append([plain(arm.name), plain(m.condition), number(m.loss), *ends])
    made = table(("arm", "condition", "loss", "gradient norm", "survival", "RMS", "kurtosis"), rows)
    return ["## Mechanism", "Least and greatest over the layers.", made] if made else []


def _extremes(values: Sequence[Any]) -> str:
    seen = known(values)
    return f"{number(min(seen))} … {number(max(seen))}" if seen else "–"


def _cost(f: Findings) -> list[str]:
    shares = ("sampling_share", "injection_share", "aqn_share")
    there = [(arm.name, arm.cost) for arm in f.arms if arm.cost.is_known]
    rows = [
        [plain(n), number(c.seconds_per_step), *(percent(getattr(c, s)) for s in shares), duration(c.evaluation_seconds)]
        for n, c in there
    ]
    made = table(("arm", "seconds per step", "sampling", "injection", "AQN", "evaluation"), rows)
    return ["## Cost", made] if made else []


def _runs(f: Findings) -> list[str]:
    rows = [_run(run) for run in f.runs]
    made = table(("run", "status", "time", "attempts", "folder", "remarks"), rows)
    return ["## Runs", made] if made else []


def _run(run: RunFacts) -> list[str]:
    remarks = "; ".join(plain(text) for text in [run.error, *run.warnings] if text)
    facts = [plain(run.name), plain(run.status), duration(run.seconds), number(run.attempts)]
    return [*facts, code(run.folder), remarks]


def _end(f: Findings) -> list[str]:
    told = [", ".join(f"{plain(k)} {plain(fact(v))}" for k, v in e.facts.items()) for e in f.environments]
    facts = [f"- {counted(e.runs, 'run')}: {text}" for e, text in zip(f.environments, told, strict=True)]
    notes, digest = [f"- {plain(note)}" for note in f.notes], f.study.digest
    return [
        *(["## Environment", "\n".join(facts)] if facts else []),
        *(["## Notes", "\n".join(notes)] if notes else []),
        f"Records: {code('sha256:' + digest)}, as `shaketable study verify` prints it." if digest else "",
        "## Method",
        "\n".join(f"{i}. {sentence}" for i, sentence in enumerate(METHOD, 1)),
    ]
