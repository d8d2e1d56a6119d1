"""Values as strict JSON has them."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any


def strict(value: Any) -> Any:
    """The same nest of dictionaries and lists, with null for a number that is not finite.

    A dataclass is a dictionary of its fields and properties.
    """
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value)]
        names += [n for kind in type(value).__mro__ for n, v in vars(kind).items() if isinstance(v, property)]
        return {name: strict(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
