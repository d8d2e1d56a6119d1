"""The tokens a model is asked about."""

import pytest

from shaketable.capture.trace import read_prompts, token_batch
from shaketable.errors import ShaketableError


class Words:
    """A tokenizer that numbers words."""

    def __init__(self):
        self.asked = []

    def __call__(self, text):
        self.asked.append(text)
        return {"input_ids": list(range(100, 100 + len(text.split())))}


def test_prompts_are_joined_and_cut():
    tokenizer = Words()
    ids = token_batch(tokenizer, ["one two", "  ", "three four five"], 4)
    assert tokenizer.asked == ["one two\nthree four five"]
    assert ids.tolist() == [[100, 101, 102, 103]]


@pytest.mark.parametrize(
    ("tokenizer", "prompts", "message"),
    [
        (None, ["a b"], "there is no tokenizer to make tokens with; give one, or token ids"),
        (Words(), ["  ", ""], "the prompts are empty; give at least one line of text"),
        (Words(), ["one"], "the prompts make 1 tokens; at least 2 are needed"),
    ],
)
def test_what_makes_no_sequence_is_refused_in_one_line(tokenizer, prompts, message):
    with pytest.raises(ShaketableError) as error:
        token_batch(tokenizer, prompts, 8)
    assert str(error.value) == message


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ShaketableError, match=r"cannot be read from .*none\.txt"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ShaketableError, match="cannot be read") as error:
        read_prompts(tmp_path / "bytes")
    assert "\n" not in str(error.value)
