"""Layer indices as ranges: `0-999999` takes the room of `3`. Imports no torch.

Rejected: tuples of indices. A plan of a hundred clauses with a range of a million layers each took 4 GB to read.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shaketable.errors import PlanError

MOST = 10_000
"""Layers that may be listed one by one, more than any model has."""


@dataclass(frozen=True)
class Layers:
    """A set of layers."""

    runs: tuple[range, ...]
    """Sorted; no two of them touch."""

    @classmethod
    def of(cls, indices: Iterable[int]) -> Layers:
        """The set of these layers."""
        return cls.joined(range(i, i + 1) for i in indices)

    @classmethod
    def joined(cls, runs: Iterable[range]) -> Layers:
        """The set of the layers in any of these ranges."""
        found: list[range] = []
        for run in sorted(runs, key=lambda r: r.start):
            if found and run.start <= found[-1].stop:
                found[-1] = range(found[-1].start, max(found[-1].stop, run.stop))
            else:
                found.append(run)
        return cls(tuple(found))

    def __contains__(self, layer: object) -> bool:
        if not isinstance(layer, int):
            return False
        at = bisect(self.runs, layer, key=lambda r: r.start)
        return at > 0 and layer in self.runs[at - 1]

    def __iter__(self) -> Iterator[int]:
        return (layer for run in self.runs for layer in run)

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    @property
    def last(self) -> int:
        """The largest index."""
        return self.runs[-1][-1]

    def indices(self) -> tuple[int, ...]:
        """All of them, one by one; refuses more than any model has."""
        if len(self) > MOST:
            raise PlanError(f"layers {self} are {len(self):,} layers; {MOST:,} are more than any model has")
        return tuple(self)

    def __str__(self) -> str:
        return "+".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in self.runs)


def parse_layers(text: str) -> Layers:
    """`3`, `10-19`, `0+4-6+29` to a set of layers."""
    found: list[range] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part)
        if not match:
            raise PlanError(f"layers {text!r} is not a list of indices and ranges such as 0+4-6+29")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise PlanError(f"layers {text!r}: the range {first}-{last} runs backwards")
        found.append(range(first, last + 1))
    return Layers.joined(found)


def join_layers(layers: Iterable[int]) -> str:
    """The inverse of `parse_layers`: consecutive indices become ranges."""
    return str(layers if isinstance(layers, Layers) else Layers.of(layers))
