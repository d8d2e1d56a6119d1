"""Layer indices as text: `0+4-6+29`. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from shaketable.errors import PlanError


def parse_layers(text: str) -> tuple[int, ...]:
    """`3`, `10-19` or `0+4-6+29` as sorted indices, each once. They have at most four digits."""
    found: set[int] = set()
    for part in text.split("+"):
        match = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part)
        if not match:
            raise PlanError(f"layers {text!r} is not a list of indices and ranges such as 0+4-6+29")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise PlanError(f"layers {text!r}: the range {first}-{last} runs backwards")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def join_layers(layers: Iterable[int]) -> str:
    """The inverse of `parse_layers`: consecutive indices become ranges."""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return "+".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
