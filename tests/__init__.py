"""The tests; a package so that they import what they share by its full name, `tests.locate.architectures`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
