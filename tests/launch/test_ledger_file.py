"""The ledger of a program on a disk that is full at every use of it in turn."""

import json
import os

import pytest

from shaketable.errors import ShaketableError
from shaketable.launch.run import collect
from tests.faulty_disk import every_use

pytestmark = pytest.mark.attack("full disks")


def test_a_merged_ledger_that_cannot_be_written_is_one_line_and_none_is_torn(tmp_path, monkeypatch):
    def folder_of(at):
        return tmp_path / str(at)

    for _, folder, error in every_use(monkeypatch, folder_of, lambda folder: collect(folder, ["true"], 7)):
        assert isinstance(error, ShaketableError), repr(error)
        assert os.strerror(28) in str(error) and "ended with 7" in str(error) and "\n" not in str(error)
        left = [json.loads(path.read_text()) for path in folder.glob("*")]
        assert [ledger["program_exit"] for ledger in left] in ([], [7]), "all of it or nothing"
        assert collect(folder, ["true"], 7).exit_code == 7
