"""The findings of a study as Markdown, for a pull request, a terminal or a paper's appendix.

The verdict, the design, and the tables of the page, without readings of layers and answers of the model. Everything that came
from outside is escaped: a name with a pipe, an asterisk or a tag stays what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from shaketable.report import study_tables
from shaketable.report.study_tables import StudyTable, TableCell
from shaketable.report.wording import METHOD, ROUGHNESS, badge, counted, fact, missing_runs, named, place, proof_summary
from shaketable.study.analysis.results import Findings

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&$])")
STEPS = "Exploratory; the interval of each step is of that step alone."


def markdown(findings: Findings) -> str:
    """The report of a study, or of a single run, as one Markdown text."""
    f = findings.visible()
    blocks = [
        *_verdict(f),
        *_design(f),
        *_section("Scores", *study_tables.score_tables(f)),
        *_section("Comparisons", study_tables.comparison_table(f)),
        "\n".join(f"- {'**primary:** ' if c.primary else ''}{plain(c.sentence)}" for c in f.comparisons if c.sentence),
        *_section("Recovered", study_tables.recovered_table(f)),
        *_section("First and last value, and roughness", study_tables.curve_table(f), lead=ROUGHNESS),
        *_section("Difference to the baseline, step by step", *study_tables.step_tables(f), lead=STEPS),
        *_diagnoses(f),
        *(_section("Proof of injection", study_tables.proof_table(f)) or ["## Proof of injection", "There is none."]),
        *_section("Cost", study_tables.cost_table(f)),
        *_section("Runs", study_tables.run_table(f)),
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


def _section(title: str, *tables: StudyTable, lead: str = "") -> list[str]:
    """Tables of the page under a heading; nothing when they have no rows."""
    blocks = [f"## {title}", lead]
    for made in tables:
        columns = list(made.columns.items())
        rows = [[_cell(cell, kind) for cell, (_, kind) in zip(row, columns, strict=True)] for row in made.rows]
        blocks += [f"{plain(made.title)}:" if made.title != title and rows else "", table([plain(n) for n, _ in columns], rows)]
    return blocks if any(made.rows for made in tables) else []


def _cell(cell: TableCell, kind: str) -> str:
    if cell.link or kind == "code":
        return code(cell.link or cell.text)
    more = "; ".join(text for text in (cell.note, f"by seed {cell.seeds}" if cell.seeds else "") if text)
    return plain(f"{cell.text} ({more})" if more else cell.text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
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
    s, p = f.study, f.primary
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


def _diagnoses(f: Findings) -> list[str]:
    lines = []
    for d in f.diagnoses:
        planted = f" Planted: {code(d.plan)}." if d.plan else ""
        lines.append(f"- **{plain(d.verdict)}** {plain(d.sentence.removeprefix(d.verdict + ': '))}{planted}")
    return ["## Diagnosis", "\n".join(lines)] if lines else []


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
