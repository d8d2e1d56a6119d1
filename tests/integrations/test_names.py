"""Names that frameworks do not promise: the page lists those of the code, and a missing one is said in one line."""

from types import SimpleNamespace

import pytest

from shaketable.errors import ShaketableError
from shaketable.integrations.names import OBJECTS, check_object, tables
from tests import ROOT


def test_the_page_lists_every_name():
    assert tables() in (ROOT / "docs" / "frameworks.md").read_text(), (
        "write what `names.tables()` returns at the end of the page"
    )


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OBJECTS.items() for name in names])
def test_an_object_without_a_name_is_refused(kind, name):
    found = SimpleNamespace(**{other: None for other in OBJECTS[kind] if other != name})
    with pytest.raises(ShaketableError, match=rf"has no \S+\.{name} \(needed: .*was tested with"):
        check_object(kind, found)
