"""The stages of `shaketable mismatch` in the terminal, each with its numbers, then the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from shaketable.report.mismatch_lines import STAGES, adding_up, lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.padding import Padding

    from shaketable.mismatch.results import Exact, Mismatch

COLOR = {"LEGAL": "green", "DEFECT": "red", "INCONCLUSIVE": "yellow"}
SHOWN = 6
INDENT = 13


def print_stages(found: Mismatch, console: Console) -> None:
    """All stages and the verdict."""
    engine, trainer = found.engine, found.trainer
    other = "recorded log-probabilities" if engine is None else f"{engine.engine} {engine.version}, {engine.dtype}"
    head = f"{trainer.model}, {trainer.dtype}, {trainer.attention} attention, against {other}"
    console.print(head, markup=False, soft_wrap=True)
    text = lines(found)
    for number, stage in enumerate(STAGES, 1):
        console.print(f"{f'{number} {stage}':{INDENT}}{text[stage]}", markup=False, soft_wrap=True)
        for line in _details(found, stage):
            console.print(f"{'':{INDENT}}{line}", markup=False, soft_wrap=True, style="dim" if stage == "gap" else None)
        if stage == "floor":
            rows = ((r.side, r.variant, f"{r.mean_abs:.2e}", f"{r.largest:.2e}", f"{r.k3:.2e}") for r in found.floor.rows)
            console.print(_table(("side", "variant", "mean |Δ log p|", "largest", "k3"), rows))
        if stage == "shares" and found.shares is not None and found.shares.families:
            shares = (
                (r.family, f"{r.share:.1%}", f"{r.low:.0%} to {r.high:.0%}", f"{r.kl:.2e}", f"{r.relative_error:.1e}")
                for r in found.shares.families
            )
            console.print(_table(("family", "share", "95 %", "KL alone", "relative error"), shares))
            console.print(f"{'':{INDENT}}{adding_up(found.shares)}", markup=False, soft_wrap=True)
    if found.exact is not None:
        _print_exact(found.exact, console)
    conclusion = found.conclusion
    console.print("Not looked at:", *(f"\n  - {line}" for line in conclusion.not_looked_at), markup=False, style="dim")
    if conclusion.next is not None:
        console.print(f"Next: {conclusion.next}", markup=False, soft_wrap=True)
    console.print(conclusion.sentence, style=f"bold {COLOR[conclusion.verdict]}", markup=False, soft_wrap=True)


def _details(found: Mismatch, stage: str) -> Iterator[str]:
    """The lines below a stage's own: the worst tokens, the first weights and operators that are wrong."""
    if stage == "gap":
        for w in found.gap.worst[:3]:
            text = "" if w.text is None else f" {w.text!r}"
            trainer = "none" if w.trainer is None else f"{w.trainer:.4g}"
            yield f"token {w.token}{text} at {w.position} of rollout {w.rollout}: {w.engine:.4g} and {trainer}"
    if stage == "weights" and found.weights is not None:
        yield from (f"{d.name} {d.says}" for d in found.weights.differing[:SHOWN])
        if (more := len(found.weights.differing) - SHOWN) > 0:
            yield f"… and {more} more"
    if stage == "operators" and found.operators is not None:
        yield from (f"{w.name} ({w.phase}): {w.text}, looks like {w.looks_like}" for w in found.operators.wrong[:SHOWN])


def _print_exact(exact: Exact, console: Console) -> None:
    """The first operator that differs, the share of bit-equal values by kind and phase, and the reasons."""
    console.print(f"{'exact':{INDENT}}{exact.says}", markup=False, soft_wrap=True)
    shares: dict[str, dict[str, str]] = {}
    reasons: dict[str, list[str]] = {}
    for k in exact.kinds:
        shares.setdefault(k.kind, {"operators": str(k.operators)})[k.phase] = f"{k.share:.1%}"
        for why in k.why:
            reasons.setdefault(why, []).append(f"{k.kind} in {k.phase}")
    heads = ("operators", "prefill", "decode")
    console.print(_table(("kind", *heads), ((kind, *(row.get(h, "–") for h in heads)) for kind, row in shares.items())))
    for line in [f"{', '.join(where)}: {why}" for why, where in reasons.items()] + exact.unavailable:
        console.print(f"{'':{INDENT}}{line}", markup=False, soft_wrap=True)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Padding:
    from rich.padding import Padding
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 or head == "variant" else "right")
    for row in rows:
        table.add_row(*row)
    return Padding(table, (0, 0, 0, INDENT))
