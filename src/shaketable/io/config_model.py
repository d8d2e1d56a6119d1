"""Configs whose fields are the options of a command: frozen, no unknown key, one line for what is wrong. Imports no torch.

What is written under a field is its description, and the help of its option (`cli/verb.py`).
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from shaketable.errors import ShaketableError, first_problem


class ConfigModel(BaseModel):
    """What a command is asked to do."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def checked(cls, **fields: Any) -> Self:
        """The configuration, or one line that says what is wrong with it."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise ShaketableError(first_problem(error)) from None
