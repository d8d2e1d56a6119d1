"""Values as strict JSON has them."""

from __future__ import annotations

import math
from typing import Any


def strict(value: Any) -> Any:
    """The same nest of dictionaries and lists, with null for a number that is not finite."""
    if isinstance(value, dict):
        return {str(key): strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
