"""The ledger of a process on disk: when it is written, and what a full disk does to it."""

import json
import os

import pytest

from shaketable.errors import ShaketableError
from shaketable.launch.ledger_file import KeptFile
from shaketable.launch.run import collect
from tests.faulty_disk import every_use


@pytest.fixture
def kept(request):
    """Makes files that are kept until the test ends."""

    def make(*arguments):
        file = KeptFile(*arguments)
        request.addfinalizer(file.close)
        return file

    return make


def test_news_that_comes_while_it_is_written_is_written_the_next_time(kept, tmp_path):
    """The clock may look in the middle of a pass; what it then wrote must not count as all of it."""
    state = {"n": 0}

    def ask():
        seen = dict(state)
        state["n"] = 1
        return seen

    file = kept(tmp_path / "f.json", ask, lambda: state["n"])
    file.catch_up()
    assert json.loads(file.path.read_text()) == {"n": 1}


@pytest.mark.attack("full disks")
def test_a_file_that_cannot_be_written_is_told_once_and_has_everything_later(kept, tmp_path, capsys):
    state, folder = {"n": 0}, tmp_path / "l"
    folder.mkdir()
    file = kept(folder / "f.json", lambda: dict(state), lambda: state["n"])
    file.path.unlink()
    folder.rmdir()
    for n in (1, 2):
        state["n"] = n
        file.catch_up()
    with pytest.raises(OSError, match="No such file"):
        file.flush()
    assert (
        capsys.readouterr().err
        == f"shaketable: cannot write {file.path}: No such file or directory; it is behind what was done\n"
    )
    folder.mkdir()
    file.catch_up()
    assert json.loads(file.path.read_text()) == {"n": 2}


@pytest.mark.attack("full disks")
def test_a_merged_ledger_that_cannot_be_written_is_one_line_and_none_is_torn(tmp_path, monkeypatch):
    def folder_of(at):
        return tmp_path / str(at)

    for _, folder, error in every_use(monkeypatch, folder_of, lambda folder: collect(folder, ["true"], 7)):
        assert isinstance(error, ShaketableError), repr(error)
        assert os.strerror(28) in str(error) and "ended with 7" in str(error) and "\n" not in str(error)
        left = [json.loads(path.read_text()) for path in folder.glob("*")]
        assert [ledger["program_exit"] for ledger in left] in ([], [7]), "all of it or nothing"
        assert collect(folder, ["true"], 7).exit_code == 7
