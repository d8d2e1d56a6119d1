"""What a finished training run came to, as a table for people and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from shaketable.cli.outputs import OutputFiles
    from shaketable.records.record import RunRecord

MOSTLY = 0.9
"""Share of groups without variance from which on the summary speaks of it."""


def show(record: RunRecord, outputs: OutputFiles) -> None:
    """Print the outcome, and write it where it is asked for."""
    from rich.console import Console

    from shaketable.train.summary import outcome

    found = outcome(record)
    outputs.save(lambda: found)
    _print(found, Console(highlight=False))


def _print(found: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    table = Table(title="Accuracy, greedy, with 95 % intervals", title_justify="left", box=None, pad_edge=False)
    for head in ("condition", "step 0", "last step", "n", "injections", "measured error"):
        table.add_column(head, justify="left" if head == "condition" else "right")
    first = {c["name"]: c for c in found["evaluations"][0]["conditions"]}
    for name, score in found["final"].items():
        error = f"{score['measured_error']:.2%}" if score["injections"] else "–"
        cells = [_score(first[name]), _score(score), str(score["n"]), f"{score['injections']:,}", error]
        table.add_row(name.replace("[", "\\["), *cells)
    console.print(table)
    for comparison in found["comparisons"]:
        console.print(f"{comparison['of']}: {comparison['sentence']}", markup=False, soft_wrap=True)
    for name, ledger in found["ledgers"].items():
        fires = f"{ledger['forward']:,} forward, {ledger['backward']:,} backward"
        console.print(f"{name} in training: {fires}; {_measured(ledger)}", markup=False, soft_wrap=True)
    same = [step["zero_variance"] for step in found["steps"] if step.get("zero_variance") is not None]
    if same and sum(same) / len(same) > MOSTLY:
        share = f"{sum(same) / len(same):.0%} of the groups had one reward for all answers"
        console.print(f"note: {share}; those teach nothing", markup=False)
    for warning in found["warnings"]:
        console.print(f"[bold yellow]warning:[/] {warning}", soft_wrap=True)
    console.print(f"Weights, clean: {found['model']}", markup=False, soft_wrap=True)


def _measured(ledger: dict[str, Any]) -> str:
    """Each clause with what was asked for, on average over a schedule, and what was measured."""
    shown = []
    for site in ledger["sites"]:
        fault, found = site["fault"].partition(":")[0], site["measured_magnitude"]
        asked = "" if site["asked"] is None else f" asked {site['asked']:.3g},"
        size = found if found is not None else site["measured_error"]
        shown.append(f"{fault}@{site['site']}{asked} measured {size:.3g}" if size is not None else f"{fault}@{site['site']}")
    return "; ".join(shown)


def _score(condition: dict[str, Any]) -> str:
    return f"{condition['accuracy']:.1%} ({condition['ci_low']:.1%}–{condition['ci_high']:.1%})"
