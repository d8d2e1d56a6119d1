"""`shaketable fingerprint` as its users meet it."""

import json

import pytest

from tests.cli.invoked import shaketable


@pytest.fixture
def folder(tiny_llama, tmp_path):
    """The small model with a tokenizer of single characters, as a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {c: i for i, c in enumerate("?abcdefghijklmnopqrstuvwxyz0123456789 .,\n")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tiny_llama.save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_it_writes_a_file_and_says_what_is_in_it(folder, tmp_path):
    out, facts = tmp_path / "good.safetensors", tmp_path / "good.json"
    done = shaketable("fingerprint", folder, "-o", out, "--tokens", 32, "--json", facts)
    assert done.exit_code == 0, done.output
    assert "float32 on cpu, sdpa attention, 32 tokens: 4 layers and 43 operators" in done.output

    from shaketable.compare.fingerprint import read_fingerprint

    about = read_fingerprint(out).about
    assert (about.tokens, about.prompts, about.model) == (32, None, str(folder))
    told = json.loads(facts.read_text())
    assert told == json.loads(about.model_dump_json(by_alias=True))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--dtype", "int4"], "unknown dtype 'int4'"),
        (["--prompts", "none.txt"], "prompts cannot be read"),
    ],
)
def test_wrong_use_is_one_line(folder, tmp_path, words, line):
    done = shaketable("fingerprint", folder, "-o", tmp_path / "x.safetensors", *words)
    assert done.exit_code != 0
    assert line in str(done.exception)
    assert not (tmp_path / "x.safetensors").exists()
