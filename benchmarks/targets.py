"""A target for a ratio, as the tables of `speed.py` and `gpu.py` print it: the limit, and whether it was missed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A limit for a ratio; a cost must stay below it, a throughput above it."""

    limit: float
    at_least: bool = False

    def is_met(self, ratio: float) -> bool:
        """Compares what the table shows: three digits."""
        shown = round(ratio, 3)
        return shown >= self.limit if self.at_least else shown <= self.limit

    def text(self, ratio: float) -> str:
        """`≤ 1.10`, or `≤ 1.10, missed`."""
        limit = f"{'≥' if self.at_least else '≤'} {self.limit:.2f}"
        return limit if self.is_met(ratio) else f"{limit}, missed"
