"""A name means one thing."""

import ast
from collections import Counter

from tests import ROOT


def test_no_two_classes_share_a_name():
    files = (ROOT / "src" / "shaketable").rglob("*.py")
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, n in names.items() if n > 1 and not name.startswith("_")] == []
