"""One run of a study: begun, or gone on with."""

import pytest

from shaketable.records.record import FILE, is_begun


@pytest.mark.parametrize(("text", "goes_on"), [('{"event": "ru', False), ("", False), ('{"event": "run"}\n{"ev', True)])
def test_a_record_whose_first_line_is_torn_is_begun_anew(tmp_path, text, goes_on):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / FILE).write_text(text)
    assert is_begun(folder) == goes_on and folder.exists() == goes_on
