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

from shaketable.report import study_tables
from shaketable.report.strips import proof_rows
from shaketable.report.study_tables import StudyTable
from shaketable.report.wording import (
    METHOD,
    ROUGHNESS,
    amount,
    badge,
    counted,
    fact,
    known,
    missing_runs,
    named,
    number,
    place,
    proof_summary,
)
from shaketable.study.analysis.results import Findings

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&$])")


def markdown(findings: Findings) -> str:
    """The report of a study, or of a single run, as one Markdown text."""
    f = findings.visible()
    blocks = [
        *_verdict(f),
        *_design(f),
        *_scores(f),
        *_comparisons(f),
        *section(study_tables.recovered_table(f)),
        *section(study_tables.curve_table(f), ROUGHNESS),
        *_at_steps(f),
        *section(study_tables.strength_table(f)),
        *_diagnoses(f),
        *_proof(f),
        *_mechanism(f),
        *section(study_tables.cost_table(f)),
        *section(study_tables.run_table(f)),
        *_end(f),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def plain(value: Any) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(value).split()))


def code(value: Any) -> str:
    """A code span that holds any text, and may stand in a table."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}" if text else ""


def section(made: StudyTable, *notes: str) -> list[str]:
    """A table of the page with its title, under a few sentences; nothing when it has no rows."""
    rows = [[code(c.link) if c.link else plain(c.text) for c in row] for row in made.rows]
    return [f"## {made.title}", *notes, table([plain(name) for name in made.columns], rows)] if rows else []


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
    arms = []
    for arm in f.arms:
        what = "; ".join([arm.description, *arm.settings] if arm.description else arm.settings)
        arms.append([plain(arm.name), plain(what), code(arm.plan or ""), code(arm.aqn or "")])
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
    rows = []
    for arm, s in [(a, score) for a in f.arms for score in a.scores]:
        mean, low, high, first = (amount(value, s.unit) for value in (s.mean, s.ci_low, s.ci_high, s.first))
        seeds = ", ".join(amount(p.value, s.unit) for p in s.per_seed) or "–"
        endpoint = f"{s.endpoint}, {s.unit}".rstrip(", ")
        rows.append([plain(arm.name), plain(s.condition), plain(endpoint), mean, f"{low} … {high}", seeds, first])
    made = table(("arm", "condition", "endpoint", "mean", "95 % interval", "by seed", "before training"), rows)
    return ["## Scores", made] if made else []


def _comparisons(f: Findings) -> list[str]:
    if not f.comparisons:
        return ["## Comparisons", "No comparison is possible."] if f.kind == "study" else []
    found = sorted(f.comparisons, key=lambda c: not c.primary)
    sentences = [f"- {'**primary:** ' if c.primary else ''}{plain(c.sentence)}" for c in found if c.sentence]
    return [*section(study_tables.comparison_table(f)), "\n".join(sentences)]


def _at_steps(f: Findings) -> list[str]:
    found = [block for made in study_tables.step_tables(f) for block in (f"{plain(made.title)}:", *section(made)[1:])]
    said = "Exploratory; the interval of each step is of that step alone."
    return ["## Difference to the baseline, step by step", said, *found] if found else []


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
    rows = []
    for arm, row in [(a, found) for a in f.arms for found in proof_rows(a.proof)]:
        texts = [plain(arm.name), f"{row.mark} {plain(row.verdict)}", plain(row.where), code(row.fault), code(row.site)]
        numbers = [row.asked, row.measured, row.changed, number(row.forward), number(row.backward)]
        rows.append([*texts, *numbers, plain(row.remark or "")])
    return ["## Proof of injection", table(head, rows) or "No injection was recorded."]


def _mechanism(f: Findings) -> list[str]:
    rows = []
    for arm, m in [(a, found) for a in f.arms for found in a.mechanism]:
        seen = [known(getattr(row, key) for row in m.layers) for key in ("grad_norm", "survival", "rms", "kurtosis")]
        ends = [f"{number(min(values))} … {number(max(values))}" if values else "–" for values in seen]
        rows.append([plain(arm.name), plain(m.condition), number(m.loss), *ends])
    made = table(("arm", "condition", "loss", "gradient norm", "survival", "RMS", "kurtosis"), rows)
    return ["## Mechanism", "Least and greatest over the layers.", made] if made else []


def _end(f: Findings) -> list[str]:
    facts = []
    for e in f.environments:
        facts.append(f"- {counted(e.runs, 'run')}: " + ", ".join(f"{plain(k)} {plain(fact(v))}" for k, v in e.facts.items()))
    notes, digest = [f"- {plain(note)}" for note in f.notes], f.study.digest
    return [
        *(["## Environment", "\n".join(facts)] if facts else []),
        *(["## Notes", "\n".join(notes)] if notes else []),
        f"Records: {code('sha256:' + digest)}, as `shaketable study verify` prints it." if digest else "",
        "## Method",
        "\n".join(f"{i}. {sentence}" for i, sentence in enumerate(METHOD, 1)),
    ]
