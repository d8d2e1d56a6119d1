"""The public API is one list, and docs/api.md has all of it."""

import re
from pathlib import Path

import shaketable as st
from tests import ROOT


def test_every_public_name_can_be_imported_and_no_other_is_listed():
    assert st.__all__ == sorted(st.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert all(getattr(st, name) is not None for name in st.__all__)
    assert set(dir(st)) == {*st.__all__, "__version__"}


def test_the_api_page_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^\| `(?:st\.)?(\w+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(st.__all__)
    shown = {path.rpartition(".")[2] for path in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)}
    assert set(st.__all__) <= shown


def test_types_are_shipped():
    assert (Path(st.__file__).parent / "py.typed").is_file()
