"""Reading YAML files: one line when it cannot be done, and no key twice. PyYAML by itself takes the last of two equal keys.

What a file may cost is bounded before anything is made of it: its characters (PyYAML reads about a megabyte in a second), and
the values that it means once every alias stands for what it names, for eight lines of aliases can mean a billion values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shaketable.errors import ShaketableError

LONGEST = 1_000_000
"""Characters of a file."""
MOST = 100_000
"""Values that it may mean."""


class Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, and more values than `MOST`."""

    def get_single_node(self) -> yaml.Node | None:
        """The document, looked at before anything is made of it."""
        node = super().get_single_node()
        if node is not None:
            _weigh(node, {})
        return node


def _weigh(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node means, its aliases included."""
    if id(node) not in known:
        known[id(node)] = MOST + 1  # for a node that is inside of itself
        known[id(node)] = 1 + sum(_weigh(part, known) for part in _parts(node))
        if known[id(node)] > MOST:
            raise yaml.YAMLError(f"it means more than {MOST:,} values")
    return known[id(node)]


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        return list(node.value) if isinstance(node, yaml.SequenceNode) else []
    seen = set()
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
        if key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
        seen.add(key.value)
    return [part for pair in node.value for part in pair]


def read_yaml(path: Path, what: str, error: type[ShaketableError] = ShaketableError) -> Any:
    """What a YAML file holds.

    Args:
        path: Of the file.
        what: How an error calls it, e.g. `the plan file`.
        error: Its class.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read(LONGEST + 1)
    except OSError as problem:
        raise error(f"cannot read {what} {path}: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise error(f"cannot read {what} {path}: {problem}") from None
    if len(text) > LONGEST:
        raise error(f"{what} {path} has more than {LONGEST:,} characters")
    try:
        return yaml.load(text, Loader)
    except Exception as problem:  # PyYAML's constructors raise whatever int(), dict[] and datetime do
        raise error(f"{what} {path} is not YAML: {problem or type(problem).__name__}") from None
