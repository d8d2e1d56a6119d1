"""The robustness curve as a picture: accuracy with its intervals over the magnitude, one line per model.

Magnitudes stand at equal distances, each named: they usually span decades, 0 has no place on a logarithm, and a symmetric
logarithm needs a threshold that nobody can read off. Models are set a little apart, so that bars do not hide each other. The
clean score goes through as a dotted line: what is left of it is what the picture is about.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaketable.evaluate.sweep.config import magnitude_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0b6e99", "#d1495b", "#3b8c5a", "#8e5ea2", "#e08e26", "#5b6770", "#12a4a4", "#a03e99")
APART = 0.09
"""Between two models at one magnitude, in units of the distance of two magnitudes."""


def plot(results: dict[str, Any], path: str | Path) -> None:
    """Draw what `sweep_results.results` gave into a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    magnitudes = list(dict.fromkeys(p["magnitude"] for p in results["points"]))
    models = list(dict.fromkeys(p["model"] for p in results["points"]))
    figure = Figure(figsize=(max(6.4, 2.2 + 0.9 * len(magnitudes)), 4.2), layout="constrained")
    axes = figure.add_subplot()
    for i, (model, name) in enumerate(zip(models, short_names(models), strict=True)):
        shift = APART * (i - (len(models) - 1) / 2)
        _line(axes, [p for p in results["points"] if p["model"] == model], magnitudes, shift, COLOURS[i % len(COLOURS)], name)
    axes.set_xticks(range(len(magnitudes)), [magnitude_name(m) for m in magnitudes])
    axes.set(xlim=(-0.5, len(magnitudes) - 0.5), ylim=_limits(results["points"]), xlabel="magnitude (not to scale)")
    axes.set_ylabel("next tokens foreseen" if "loss" in results["points"][0] else "accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _hooks_and_classes(axes, results)
    figure.savefig(path, dpi=150, format="png")


def short_names(models: list[str]) -> list[str]:
    """Last parts of paths, where these tell the models apart."""
    names = [m.rstrip("/").rpartition("/")[2] for m in models]
    return names if len(set(names)) == len(names) else list(models)


def _line(axes: Axes, points: list[dict[str, Any]], magnitudes: list[Any], shift: float, colour: str, name: str) -> None:
    x = [magnitudes.index(p["magnitude"]) + shift for p in points]
    y = [p["accuracy"] for p in points]
    below = [max(0.0, p["accuracy"] - p["ci_low"]) for p in points]
    above = [max(0.0, p["ci_high"] - p["accuracy"]) for p in points]
    axes.axhline(y[0], color=colour, linestyle=(0, (1, 3)), linewidth=1.2, zorder=1)
    axes.errorbar(x, y, yerr=[below, above], color=colour, linewidth=1.8, elinewidth=1.3, capsize=3.5, zorder=2, label=name)
    axes.scatter(x[1:], y[1:], s=34, color=colour, zorder=3)
    axes.scatter(x[:1], y[:1], s=62, facecolor="white", edgecolor=colour, linewidth=1.8, zorder=3)


def _limits(points: list[dict[str, Any]]) -> tuple[float, float]:
    """From 0, so that a fall looks as deep as it is, to a little above the highest bar."""
    return 0.0, min(1.05, max(0.01, 1.12 * max(p["ci_high"] for p in points)))


def _hooks_and_classes(axes: Axes, results: dict[str, Any]) -> None:
    config = results["config"]
    axes.set_title(
        textwrap.fill(config["plan"], 70, break_on_hyphens=False), fontsize=11, loc="left", fontweight="bold", pad=22
    )
    unit, runs = ("texts" if "loss" in results["points"][0] else "problems"), max(len(p["seeds"]) for p in results["points"])
    head = f"{config['task']}, {results['points'][0]['n']} {unit}, {runs} noise seed{'s' * (runs > 1)}, 95 % intervals"
    axes.annotate(head, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=9, color="#555555")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.legend(frameon=False, fontsize=9, loc="best")
