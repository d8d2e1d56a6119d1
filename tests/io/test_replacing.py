"""Files that are there as a whole or not at all."""

import os

from shaketable.io.replacing import replacing


def test_two_processes_write_to_drafts_of_their_own(tmp_path, monkeypatch):
    path = tmp_path / "file"
    with replacing(path) as mine:
        mine.write_text("mine")
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with replacing(path) as theirs:
            theirs.write_text("theirs")
        assert mine != theirs and path.read_text() == "theirs"
    assert path.read_text() == "mine"
