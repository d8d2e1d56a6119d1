"""Pages from the templates of this folder. Every value is escaped, and one that a template misses is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """A self-contained HTML page."""
    loader = PackageLoader("shaketable.report", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= filters
    return environment.get_template(template).render(**values)
