"""`shaketable fingerprint` and `shaketable compare` as their users meet them."""

import json
import subprocess
import sys

import pytest
import torch

from shaketable.compare.fingerprint import fingerprint, read_fingerprint
from shaketable.plan import Plan
from tests.cli.invoked import shaketable

IDS = torch.arange(32)[None] * 7 % 41
FAULT = "relative_gaussian:0.02@module.mlp.up_proj,layers=2"


@pytest.fixture
def model(tiny_llama, tmp_path):
    """The small model with a tokenizer of single characters, as a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {c: i for i, c in enumerate("?abcdefghijklmnopqrstuvwxyz0123456789 .,\n")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tiny_llama.save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def good(tiny_llama, tmp_path):
    fingerprint(tiny_llama, input_ids=IDS, name="tiny").save(tmp_path / "good.safetensors")
    return tmp_path / "good.safetensors"


def test_the_same_device_exits_0_and_writes_no_plan(good, model, tmp_path):
    done = shaketable("compare", good, model, "--plan-out", tmp_path / "measured.yaml")
    assert done.exit_code == 0, done.output
    assert "SAME: 47 operators" in done.output
    assert "was not written: nothing to inject" in done.output
    assert not (tmp_path / "measured.yaml").exists()


def test_a_difference_exits_1_names_it_and_writes_a_plan_that_makes_it_again(good, model, tmp_path):
    plan, facts, page = tmp_path / "measured.yaml", tmp_path / "found.json", tmp_path / "found.html"
    done = shaketable("compare", good, model, "--plan", FAULT, "--plan-out", plan, "--json", facts, "--html", page)
    assert done.exit_code == 1, done.output
    assert "layer 2 is the first, mlp.up_proj" in done.output
    assert "best described as relative_gaussian:0.0" in done.output
    assert json.loads(facts.read_text())["first"]["op"] == "mlp.up_proj"
    assert "BEYOND THE DTYPE" in page.read_text() and "mlp.up_proj" in page.read_text()
    (clause,) = Plan.load(str(plan)).clauses
    assert (clause.fault.kind, clause.site.names) == ("relative_gaussian", ("model.layers.2.mlp.up_proj",))
    assert plan.read_text().startswith("# Errors measured by shaketable compare")

    again = shaketable("compare", good, model, "--plan", plan, "--json", facts, "--force")
    assert again.exit_code == 1
    assert json.loads(facts.read_text())["first"]["relative"] == pytest.approx(0.02, rel=0.1)


def test_another_model_s_weights_are_refused(good, model, tiny_llama):
    with torch.no_grad():
        tiny_llama.lm_head.weight[0, 0] += 0.25
    tiny_llama.save_pretrained(model)
    done = shaketable("compare", good, model)
    assert "the weights of tiny were not the same" in str(done.exception)


@pytest.mark.attack("hostile inputs")
def test_a_damaged_file_is_one_line_and_exit_2(good, model):
    good.write_bytes(good.read_bytes()[:-100])
    words = [sys.executable, "-m", "shaketable", "compare", str(good), str(model)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "truncated, damaged or not a safetensors file" in done.stderr


def test_a_fingerprint_is_a_file_and_says_what_is_in_it(model, tmp_path):
    out, facts = tmp_path / "good.safetensors", tmp_path / "good.json"
    done = shaketable("fingerprint", model, "-o", out, "--tokens", 32, "--json", facts)
    assert done.exit_code == 0, done.output
    assert "float32 on cpu, sdpa attention, 32 tokens: 4 layers and 43 operators" in done.output

    about = read_fingerprint(out).about
    assert (about.tokens, about.prompts, about.model) == (32, None, str(model))
    told = json.loads(facts.read_text())
    assert told == json.loads(about.model_dump_json(by_alias=True))
