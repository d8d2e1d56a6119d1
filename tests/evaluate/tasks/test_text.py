import pytest

from shaketable.errors import ShaketableError
from shaketable.evaluate.tasks import TextTask, sample


@pytest.mark.parametrize(
    ("name", "data", "texts"),
    [
        ("a.txt", "one\ntwo \nthree\n\n", ["one", "two", "three"]),
        ("b.txt", "\none\nstill one\n \n\ntwo\n", ["one still one", "two"]),
        ("d.jsonl", '{"text": "one\\n\\nstill one"}\n\n{"text": " two "}\n', ["one\n\nstill one", "two"]),
    ],
)
def test_texts_of_a_file(tmp_path, name, data, texts):
    (tmp_path / name).write_bytes(data.encode())
    assert TextTask(path=tmp_path / name).texts() == texts


def test_bad_files_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "none.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    for name, message in {"empty.txt": "is empty", "none.jsonl": "line 2 has no text", "nowhere.txt": "no such file"}.items():
        with pytest.raises(ShaketableError, match=message):
            TextTask(path=tmp_path / name).texts()


def test_it_generates_nothing():
    assert TextTask().describe() == {"name": "text", "path": None}
    with pytest.raises(ShaketableError, match="no problems to solve"):
        sample(TextTask(), "test", 1, seed=0)
