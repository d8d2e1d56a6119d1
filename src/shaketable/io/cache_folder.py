"""Where things go that can be made again: compiled kernels, converted models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$SHAKETABLE_CACHE`, else `shaketable` under `$XDG_CACHE_HOME` or `~/.cache`."""
    if chosen := os.environ.get("SHAKETABLE_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shaketable"
