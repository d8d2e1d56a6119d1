"""A group of keys in a framework's config, as a pydantic model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from shaketable.errors import ShaketableError, first_problem, nearest

T = TypeVar("T", bound=BaseModel)


def read_keys(model: type[T], name: str, found: object) -> T:
    """The keys of a group; null is a key that is not there.

    Raises:
        ShaketableError: A key is unknown, or its value is not accepted.
    """
    valid = [field.alias or key for key, field in model.model_fields.items()]
    if not isinstance(found, Mapping):
        raise ShaketableError(f"{name} is a group of keys ({', '.join(valid)}), not {found!r}")
    if unknown := next((str(key) for key in found if key not in valid), None):
        raise ShaketableError(f"{name}.{unknown}: unknown key; {nearest(unknown, valid, shown=20)}")
    try:
        return model(**{key: value for key, value in found.items() if value is not None})
    except ValidationError as error:
        raise ShaketableError(f"{name}.{first_problem(error)}") from None
