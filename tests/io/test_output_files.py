"""Files that a verb writes."""

import pytest

from shaketable.errors import ShaketableError
from shaketable.io.output_files import check_free


def test_two_outputs_of_one_command_are_two_files(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    check_free([one, other], [], force=True)
    with pytest.raises(ShaketableError, match=f"cannot write {one}: this command reads or writes it already"):
        check_free([one, other, one], [], force=True)
