"""The stages of `shaketable mismatch` in the terminal, each with its numbers, then the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLOR = {"LEGAL": "green", "DEFECT": "red", "INCONCLUSIVE": "yellow"}
SHOWN = 6


def print_stages(found: dict[str, Any], console: Console) -> None:
    """All stages and the verdict."""
    engine = found["engine"]
    other = "recorded log-probabilities" if engine is None else f"{engine['engine']} {engine['version']}, {engine['dtype']}"
    trainer = found["trainer"]
    console.print(
        f"{trainer['model']}, {trainer['dtype']}, {trainer['attention']} attention, against {other}",
        markup=False,
        soft_wrap=True,
    )
    _gap(found, console)
    console.print(f"2 returned   {_returned(found['returned'])}", markup=False, soft_wrap=True)
    _floor(found, console)
    _semantics(found["semantics"], console)
    for stage, text in (("5 weights", _weights(found["weights"])), ("6 routing", _routing(found["routing"], engine))):
        console.print(f"{stage:13}{text}", markup=False, soft_wrap=True)
    _operators(found["operators"], console)
    _shares(found["shares"], console)
    console.print("Not looked at:", *(f"\n  - {line}" for line in found["not_looked_at"]), markup=False, style="dim")
    if found["next"] is not None:
        console.print(f"Next: {found['next']}", markup=False, soft_wrap=True)
    console.print(found["sentence"], style=f"bold {COLOR[found['verdict']]}", markup=False, soft_wrap=True)


def _gap(found: dict[str, Any], console: Console) -> None:
    gap = found["gap"]
    low, high = gap["interval"]["k3"]
    kl = f"KL k1 {gap['k1']:.3g}, k3 {gap['k3']:.3g} ({low:.2g} to {high:.2g} over {gap['interval']['over']})"
    size = f"mean |Δ log p| {gap['mean_abs']:.3g}, largest {gap['largest']:.3g}"
    many = f"{gap['tokens']:,} tokens of {gap['rollouts']} rollouts"
    console.print(
        f"1 gap        {kl}; {size}; {gap['outside']:.1%} of ratios outside [0.9, 1.1]; {many}", markup=False, soft_wrap=True
    )
    for w in gap["worst"][:3]:
        text = "" if w["text"] is None else f" {w['text']!r}"
        line = (
            f"token {w['token']}{text} at {w['position']} of rollout {w['rollout']}: {w['engine']:.4g} and {w['trainer']:.4g}"
        )
        console.print(f"             {line}", markup=False, style="dim", soft_wrap=True)


def _floor(found: dict[str, Any], console: Console) -> None:
    floor, rounding = found["floor"], found["rounding"]
    wrong = sum(bool(r["wrong"]) for r in floor["rows"])
    held = f"{wrong} ways of computing differ by more than rounding" if wrong else "every way of computing is within rounding"
    size = f"mean |Δ log p| {floor['mean_abs']:.3g} ({floor['largest']})"
    times = found["gap"]["judged"]["mean_ratio"]
    scale = f"rounding in {rounding['dtype']} makes {rounding['mean_abs']:.3g}, and the gap is {times:.3g} times that"
    console.print(f"3 floor      {size}: {held}; {scale}", markup=False, soft_wrap=True)
    table = _table("side", "variant", "mean |Δ log p|", "largest", "k3")
    for r in floor["rows"]:
        table.add_row(r["side"], r["variant"], f"{r['mean_abs']:.2e}", f"{r['largest']:.2e}", f"{r['k3']:.2e}")
    _indented(table, console)


def _returned(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return "not looked at"
    if facts["explained"]:
        size = f"mean |Δ log p| {facts['mean_abs']:.3g}, {facts['tokens']:,} tokens"
        return f"the engine's own logits give the returned numbers: {size}"
    example = facts["example"]
    return (
        f"not those of the engine's own logits: {facts['says']} (token {example['position']} of rollout {example['rollout']})"
    )


def _semantics(facts: dict[str, Any], console: Console) -> None:
    named, best = facts["named"], facts["best"]
    tried = f"{len(facts['rows'])} tried on {facts['tokens']} tokens"
    if named is not None:
        said = f"{named['says']} (leaves {named['mean_abs']:.2e} of {facts['mean_abs']:.2e})"
    elif best is None:
        said = "no hypothesis is better than what was declared"
    else:
        low, high = best["gain"]
        how = f"leaves {best['mean_abs']:.2e} of {facts['mean_abs']:.2e}; gain {low:.2g} to {high:.2g} a token"
        said = f"none explains the gap; best: {best['says']} ({how})"
    console.print(f"4 semantics  {said}; {tried}", markup=False, soft_wrap=True)


def _weights(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return "not looked at"
    cast = f", all cast to {facts['engine_dtype']}" if facts["cast"] else ""
    if not facts["differing"]:
        return f"{facts['compared']} parameters, bit for bit the trainer's{cast}"
    lines = [f"{d['name']} {d['says']}" for d in facts["differing"][:SHOWN]]
    more = f"\n             … and {len(facts['differing']) - SHOWN} more" if len(facts["differing"]) > SHOWN else ""
    return (
        f"{len(facts['differing'])} of {facts['compared']} parameters differ:\n             "
        + "\n             ".join(lines)
        + more
    )


def _routing(rows: list[dict[str, Any]] | None, engine: dict[str, Any] | None) -> str:
    if not rows:
        return "not looked at" if engine is None else "no experts, or the engine does not tell"
    weights = [r["weights"] for r in rows if r["weights"] is not None]
    told = f"; weights of the same experts differ by up to {max(weights):.2g}" if weights else ""
    return "tokens whose experts differ: " + ", ".join(f"layer {r['layer']} {r['differs']:.2%}" for r in rows) + told


def _operators(facts: dict[str, Any] | None, console: Console) -> None:
    if facts is None:
        console.print("7 operators  not looked at")
        return
    wrong = f"{len(facts['wrong'])} are wrong" if facts["wrong"] else "all inside of their rounding intervals"
    count = sum(k["operators"] for k in facts["kinds"].values())
    phases = " and ".join(facts["phases"])
    console.print(f"7 operators  {count} in {phases} on {facts['tokens']} tokens: {wrong}", markup=False, soft_wrap=True)
    for w in facts["wrong"][:SHOWN]:
        console.print(
            f"             {w['name']} ({w['phase']}): {w['text']}, looks like {w['class']}", markup=False, soft_wrap=True
        )


def _shares(facts: dict[str, Any] | None, console: Console) -> None:
    if facts is None or not facts["families"]:
        console.print("8 shares     " + ("not measured" if facts is None else "no operator differs"))
        return
    given = facts["reproduced"]["explained"]
    head = f"KL {facts['kl']:.3g} of all differences together; they give back {given:.0%} of the gap, token by token"
    console.print(f"8 shares     {head}", markup=False, soft_wrap=True)
    table = _table("family", "share", "95 %", "KL alone", "relative error")
    for r in facts["families"]:
        ends = f"{r['low']:.0%} to {r['high']:.0%}"
        table.add_row(r["family"], f"{r['share']:.1%}", ends, f"{r['kl']:.2e}", f"{r['relative_error']:.1e}")
    _indented(table, console)
    console.print(f"             {adding_up(facts)}", markup=False, soft_wrap=True)


def adding_up(facts: dict[str, Any]) -> str:
    """How far the shares add up."""
    together = facts["together"]
    if together is None:
        return "no difference moves a probability"
    if 0.8 <= together <= 1.25:
        return f"the families add up: all together make {together:.2f} times the sum of their KL"
    how = "cancel" if together < 1 else "amplify each other"
    return f"the families do not add up: all together make {together:.2f} times the sum of their KL, their errors {how}"


def _table(*heads: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 or head == "variant" else "right")
    return table


def _indented(table: Table, console: Console) -> None:
    from rich.padding import Padding

    console.print(Padding(table, (0, 0, 0, 13)))
