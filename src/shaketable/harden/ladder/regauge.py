"""Being written."""

from collections.abc import Callable, Sequence
from typing import Any


def regauge(students: Any, injections: Sequence[Any], pairs: Sequence[Any], tell: Callable[[int, int], None]) -> dict[str, Any]:
    """Nothing yet."""
    return {"layers": 0, "of": 0, "flops_added": 0.0, "sentence": "nothing"}
