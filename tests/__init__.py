"""The tests; a package so that they import what they share by its full name, `tests.locate.architectures`."""

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""


def slow(*values: Any) -> Any:
    """A case of a parametrized test that `make test` leaves to `make test-all`: another one shows the same."""
    return pytest.param(*values, marks=pytest.mark.slow)
