"""What `shaketable sweep` prints: a table of points, and a sentence on each faulty one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaketable.evaluate.statistics import points
from shaketable.evaluate.sweep.config import magnitude_name

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Facts = dict[str, Any]


def show(found: Facts, files: list[Path]) -> None:
    """The table, the sentences, the notes, and which files were written."""
    from rich.console import Console, Group

    console = Console(highlight=False)
    table: RenderableType = _table(found)
    wide = console.measure(table, options=console.options.update(max_width=1000)).maximum
    if not console.is_terminal:
        console = Console(highlight=False, width=max(80, wide))
    elif wide > console.width:
        table = Group(*(_table(found, model) for model in found["config"]["models"]))
    console.print(table)
    for point in found["points"]:
        if point["magnitude"] != 0:
            console.print(_sentence(found, point), markup=False, soft_wrap=True)
    for line in [*(f"note: {n}" for n in found["notes"]), *(f"wrote {f}" for f in files), f"recorded in {found['folder']}"]:
        console.print(line, markup=False, soft_wrap=True)


def page_of(found: Facts) -> str:
    """The same as one HTML page."""
    from shaketable.report.table_html import page

    config, faulty = found["config"], [p for p in found["points"] if p["magnitude"] != 0]
    shown = [p for p in faulty if p["distinguishable"]]
    sentence = f"{len(shown)} of {len(faulty)} faulty points can be told from clean."
    facts = {"plan": config["plan"], "task": config["task"], "problems": str(config["n"]), "engine": config["engine"]}
    return page(
        "sweep",
        ", ".join(config["models"]),
        "CURVE",
        sentence,
        [("Points", _table(found))],
        facts=facts,
        lines=[*(_sentence(found, p) for p in faulty), *found["notes"]],
    )


def _sentence(found: Facts, point: Facts) -> str:
    name = magnitude_name(point["magnitude"])
    where = f"{point['model']} at {name}" if len(found["config"]["models"]) > 1 else name
    return f"{where}: {point['sentence']}{_loss(point)}"


def _table(found: Facts, model: str | None = None) -> Table:
    """One row per point; on a narrow screen one model without frames, and with intervals on lines of their own."""
    from rich.box import HEAVY_HEAD
    from rich.table import Table
    from rich.text import Text

    narrow = model is not None
    points = [p for p in found["points"] if model in (None, p["model"])]
    title = f"{model}, {_title(found)}" if narrow else _title(found)
    table = Table(title=Text(title), title_justify="left", title_style="", box=None if narrow else HEAVY_HEAD)
    table.pad_edge = not narrow
    columns = {name: cell for name, cell in COLUMNS.items() if name != "loss" or "loss" in points[0]}
    if not narrow:
        table.add_column("model", overflow="fold")
    for name in columns:
        table.add_column(SHORT.get(name, name) if narrow else name, justify="right", overflow="fold")
    for point, after in zip(points, [*points[1:], None], strict=True):
        cells = [cell(point).replace(" (", "\n(" if narrow else " (") for cell in columns.values()]
        style, last = "bold" if point["distinguishable"] else "", after is None or after["model"] != point["model"]
        table.add_row(*([] if narrow else [Text(point["model"])]), *cells, style=style, end_section=last)
    return table


def _title(found: Facts) -> str:
    config, runs = found["config"], max((len(p["seeds"]) for p in found["points"]), default=1)
    return f"{config['plan']}\n{config['task']}, n = {config['n']}, {runs} noise seed{'s' * (runs > 1)}"


def _loss(point: Facts) -> str:
    """In a text task, what the fault costs in nats per token."""
    if point.get("loss_difference") is None:
        return ""
    low, high = point["loss_difference_low"], point["loss_difference_high"]
    return f"; loss {point['loss_difference']:+.3f} ({low:+.3f} to {high:+.3f}) nats a token, mean over texts".replace("-", "−")


def _accuracy(point: Facts) -> str:
    return f"{100 * point['accuracy']:.1f} % ({100 * point['ci_low']:.1f} to {100 * point['ci_high']:.1f})"


def _difference(point: Facts) -> str:
    if point["magnitude"] == 0:
        return ""
    low, high = points(point["difference_low"]), points(point["difference_high"])
    return f"{points(point['difference'])} ({low} to {high})"


def _p(point: Facts) -> str:
    p = point["p_adjusted"]
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.2g}"


def _number(value: float | None, form: str) -> str:
    return "no number" if value is None else format(value, form)


COLUMNS: dict[str, Callable[[Facts], str]] = {
    "magnitude": lambda p: magnitude_name(p["magnitude"]),
    "accuracy (95 %)": _accuracy,
    "loss": lambda p: _number(p["loss"], ".3f"),
    "difference (95 %)": _difference,
    "p (Holm)": _p,
    "KL": lambda p: "" if p["magnitude"] == 0 else _number(p["kl"], ".3g"),
    "top-1": lambda p: "" if p["magnitude"] == 0 else f"{100 * p['agreement']:.1f} %",
    "measured error": lambda p: "" if p["magnitude"] == 0 else f"{p['measured_error']:.3g}",
    "injections": lambda p: "" if p["magnitude"] == 0 else f"{p['injections']:,}",
}
SHORT = {"magnitude": "at", "accuracy (95 %)": "accuracy", "difference (95 %)": "difference", "p (Holm)": "p"}
SHORT |= {"measured error": "error", "injections": "fired"}
