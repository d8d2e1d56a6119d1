"""From numbers to places: a scale with round ticks, linear or logarithmic, and what every drawing needs to know of values.

Two sorts of drawing share it. Curves have a fixed view box and scale as a whole. Strips (a forest row, the dots of the
seeds, a row of layers) are as wide as their column and give every x as a percentage, so that text and dots keep their
size on a phone; a scale from 0 to 100 serves those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from shaketable.report.locate_html import number


def finite(value: Any) -> bool:
    """Whether it can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def known(values: Iterable[Any]) -> list[float]:
    """Those that can be drawn."""
    return [float(v) for v in values if finite(v)]


def signed(value: Any, scale: float = 1.0, unit: str = "points") -> str:
    """A difference for reading: +1.8, −0.4; points have one decimal."""
    if not finite(value):
        return number(value)
    scaled = value * scale
    if unit == "points":
        text = f"{scaled:+.1f}"
        return "0.0" if float(text) == 0 else text.replace("-", "−")
    return ("+" if scaled > 0 else "") + number(scaled)


def amount(value: Any, unit: str) -> str:
    """A score for reading; a score in points is kept as a fraction and read in hundredths."""
    return f"{100 * value:.1f}" if unit == "points" and finite(value) else number(value)


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end]. `end` may be the smaller one, as heights are on a screen."""

    low: float
    high: float
    start: float = 0.0
    end: float = 100.0
    log: bool = False

    @classmethod
    def over(
        cls, values: Iterable[Any], start: float = 0.0, end: float = 100.0, *, log: bool = False, margin: float = 0.04
    ) -> Scale:
        """A scale that holds the values with some air; values that are all equal lie in its middle."""
        seen = [v for v in known(values) if not log or v > 0]
        low, high = min(seen, default=0.1), max(seen, default=1.0)
        if log:
            air = (high / low) ** margin if high > low else 2.0
            return cls(low / air, high * air, start, end, True)
        air = margin * (high - low) if high > low else abs(high) * 0.1 or 1.0
        return cls(low - air, high + air, start, end)

    def __call__(self, value: float) -> float:
        """Where a value lies; beyond the ends it stays at the end."""
        low, high, v = (
            math.log10(x) if self.log else x for x in (self.low, self.high, max(value, 1e-300) if self.log else value)
        )
        return self.start + (self.end - self.start) * min(max((v - low) / (high - low), 0.0), 1.0)

    def draws(self, value: Any) -> bool:
        """Whether a value has a place."""
        return finite(value) and (value > 0 or not self.log)

    def ticks(self, about: int = 5) -> list[float]:
        """Round numbers inside: 1, 2 or 5 times a power of ten; powers of ten on a long logarithmic scale."""
        if self.log:
            decades = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            if len(decades) > 1:
                return [10.0**d for d in decades][:: math.ceil(len(decades) / (about + 1))]
        power = 10.0 ** math.floor(math.log10((self.high - self.low) / about))
        choices = [self._multiples(m * power) for m in (1, 2, 5, 10)]
        return min(choices, key=lambda ticks: abs(len(ticks) - about))

    def _multiples(self, step: float) -> list[float]:
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def needs_log(values: Iterable[Any], ratio: float = 100.0) -> bool:
    """All positive and spread over so many decades that a linear scale would show the largest only."""
    seen = known(values)
    return len(seen) > 1 and min(seen) > 0 and max(seen) > ratio * min(seen)


def joined(parts: Iterable[Markup]) -> Markup:
    """Pieces of a drawing as one."""
    return Markup("").join(parts)
