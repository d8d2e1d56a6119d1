"""σ over the steps of a run, before the run: a table for the terminal, and a PNG.

The table has a row for every step at which some σ changes, or evenly spaced ones where it changes at every step, and the last.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shaketable.aqn.spec import AQN, Group

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import nn

ROWS = 24
"""Rows of a table at most."""


@dataclass(frozen=True)
class SigmaTable:
    """σ of every group at every step."""

    title: str
    groups: tuple[Group, ...]
    values: tuple[tuple[float, ...], ...]
    """One row per group, one value per step."""

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return len(self.values[0])

    def rows(self) -> list[tuple[int, tuple[float, ...]]]:
        """Steps worth showing, with the σ of each group: where something changes, and the last."""
        columns = list(zip(*self.values, strict=True))
        changes = [step for step in range(self.steps) if step == 0 or columns[step] != columns[step - 1]]
        if len(changes) > ROWS:
            changes = sorted({round(i * (self.steps - 1) / (ROWS - 1)) for i in range(ROWS)})
        return [(step, columns[step]) for step in sorted({*changes, self.steps - 1})]

    def render(self) -> RenderableType:
        """For the terminal: the line that was read, and the table."""
        from rich.console import Group as Lines
        from rich.table import Table
        from rich.text import Text

        table = Table()
        table.add_column("step", justify="right", no_wrap=True)
        for group in self.groups:
            table.add_column(f"σ, {group.label}", justify="right")
        for step, values in self.rows():
            table.add_row(str(step), *(f"{value:.4g}" for value in values))
        return Lines(Text(self.title), table)


def sigmas(aqn: AQN, total_steps: int, model: nn.Module | int) -> SigmaTable:
    """σ of every step of a run.

    Args:
        aqn: The noise.
        total_steps: Steps of the run.
        model: The model, or the number of its decoder layers, to name the layers of each group.
    """
    from shaketable.sites.structure import find_layers

    groups = aqn.groups(model if isinstance(model, int) else len(find_layers(model)[0]))
    values = tuple(tuple(aqn.sigma(group, step, total_steps) for step in range(total_steps)) for group in groups)
    return SigmaTable(f"{aqn.text()} over {total_steps} steps", tuple(groups), values)


def plot(aqn: AQN, total_steps: int, path: str | Path, model: nn.Module | int) -> None:
    """Draw σ over the steps into a PNG, one line per group of layers."""
    from matplotlib.figure import Figure

    found = sigmas(aqn, total_steps, model)
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    steps = [*range(total_steps), total_steps]
    for i, (group, values) in enumerate(zip(found.groups, found.values, strict=True)):
        width = 3.5 - 2 * (i + 1) / len(found.groups)
        axes.step(steps, [*values, values[-1]], where="post", label=group.label, linewidth=width)
    axes.set(xlabel="step", ylabel="σ" if aqn.unit == "absolute" else "σ, relative", xlim=(0, total_steps), ylim=(0, None))
    title = textwrap.fill(aqn.text().replace(",", ", "), 80, break_on_hyphens=False)
    axes.set_title(title, fontsize=9, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")
