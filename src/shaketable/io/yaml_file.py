"""Reading YAML files: one line when it cannot be done, and no key twice. PyYAML by itself takes the last of two equal keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shaketable.errors import ShaketableError


class Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value)
        return node


def read_yaml(path: Path, what: str, error: type[ShaketableError] = ShaketableError) -> Any:
    """What a YAML file holds.

    Args:
        path: Of the file.
        what: How an error calls it, e.g. `the plan file`.
        error: Its class.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise error(f"cannot read {what} {path}: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise error(f"cannot read {what} {path}: {problem}") from None
    try:
        return yaml.load(text, Loader)
    except Exception as problem:  # PyYAML's constructors raise whatever int(), dict[] and datetime do
        raise error(f"{what} {path} is not YAML: {problem or type(problem).__name__}") from None
