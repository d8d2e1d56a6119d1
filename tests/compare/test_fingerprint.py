"""Fingerprints: what is in them, and what is refused."""

import copy
import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shaketable.compare.compare import compare
from shaketable.compare.fingerprint import (
    HEAD_TOKENS,
    FingerprintError,
    check_same_model,
    fingerprint,
    read_fingerprint,
)
from tests.locate.architectures import build, tokens

IDS = torch.arange(24)[None] * 7 % 64


@pytest.fixture
def made(tiny_llama):
    return fingerprint(tiny_llama, input_ids=IDS, name="tiny", prompts=["a", "b"])


@pytest.fixture
def path(made, tmp_path):
    made.save(tmp_path / "good.safetensors")
    return tmp_path / "good.safetensors"


def header(path):
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size])["__metadata__"]


def rewrite(path, change):
    """The same file with other metadata or tensors, and an honest container."""
    head, tensors = header(path), load_file(path)
    about = json.loads(head["shaketable"])
    change(about, tensors)
    save_file(tensors, path, metadata=head | {"shaketable": json.dumps(about)})


def test_a_file_gives_back_what_was_made(made, path):
    read = read_fingerprint(path)
    assert read.about == made.about
    assert read.tensors.keys() == made.tensors.keys()
    assert all(torch.equal(read.tensors[name], made.tensors[name]) for name in made.tensors)


def test_every_operator_s_input_and_output_is_there(made, tiny_llama):
    assert made.about.layers[2][:5] == ["input_layernorm", *(f"self_attn.{n}_proj" for n in "qkvo")]
    assert (made.about.before, made.about.after) == (["model.embed_tokens"], ["model.norm", "lm_head"])
    x, y = made.op(2, "mlp.down_proj")
    assert torch.equal(tiny_llama.model.layers[2].mlp.down_proj(x), y)
    x, y = made.op(None, "lm_head")
    assert (x.shape, y.shape) == ((1, HEAD_TOKENS, 32), (1, HEAD_TOKENS, 64))
    assert torch.equal(tiny_llama.lm_head(x), y)
    logits = tiny_llama(input_ids=IDS).logits[:, -HEAD_TOKENS:]
    assert torch.allclose(logits, y, atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.999])
def test_a_truncated_file_is_refused(path, share):
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(FingerprintError, match="truncated, damaged or not a safetensors"):
        read_fingerprint(path)


def test_a_flipped_bit_anywhere_is_refused(path):
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    for at in (*range(0, 8 + size, 97), (8 + size + len(raw)) // 2, len(raw) - 1):
        broken = bytearray(raw)
        broken[at] ^= 0x01
        path.write_bytes(broken)
        with pytest.raises(FingerprintError):
            read_fingerprint(path)


def test_changed_metadata_is_refused(path):
    rewrite(path, lambda about, tensors: about.update(device="cuda (another)"))
    with pytest.raises(FingerprintError, match="sha256"):
        read_fingerprint(path)
    rewrite(path, lambda about, tensors: tensors.pop("layer.2.op.mlp.down_proj.output"))
    with pytest.raises(FingerprintError, match="sha256"):
        read_fingerprint(path)


class Bomb:
    """Goes off when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.attack("hostile inputs")
def test_a_pickle_is_refused_and_never_opened(tmp_path, archive):
    torch.save({"x": Bomb()}, tmp_path / "x.pt", _use_new_zipfile_serialization=archive)
    with pytest.raises(FingerprintError, match="not a safetensors file"):
        read_fingerprint(tmp_path / "x.pt")


def test_a_safetensors_file_of_another_program_is_refused(tmp_path):
    for metadata in (None, {"format": "pt"}):
        save_file({"x": torch.zeros(3)}, tmp_path / "x.safetensors", metadata=metadata)
        with pytest.raises(FingerprintError, match="not one of shaketable fingerprint"):
            read_fingerprint(tmp_path / "x.safetensors")
    save_file({"x": torch.zeros(3)}, tmp_path / "x.safetensors", metadata={"shaketable": json.dumps({"format": "weights"})})
    with pytest.raises(FingerprintError, match="damaged, or of another version: format"):
        read_fingerprint(tmp_path / "x.safetensors")


def test_another_schema_is_refused(path):
    rewrite(path, lambda about, tensors: about.update(schema=2))
    with pytest.raises(FingerprintError, match="of another version: schema: Input should be 1"):
        read_fingerprint(path)


def test_another_model_is_refused(made, tiny_llama, tinier_llama):
    check_same_model(made.about, tiny_llama)
    with pytest.raises(FingerprintError, match="number of layers is 4, not 2"):
        check_same_model(made.about, tinier_llama)
    with pytest.raises(FingerprintError, match="dtype is float32, not bfloat16"):
        check_same_model(made.about, copy.deepcopy(tiny_llama).to(torch.bfloat16))
    tiny_llama.config.rms_norm_eps *= 2
    with pytest.raises(FingerprintError, match="config"):
        check_same_model(made.about, tiny_llama)
    tiny_llama.config.rms_norm_eps /= 2
    with torch.no_grad():
        tiny_llama.model.layers[3].mlp.up_proj.weight[5, 7] += 1e-6
    with pytest.raises(FingerprintError, match="weights"):
        check_same_model(made.about, tiny_llama)


def test_how_a_model_was_loaded_does_not_make_it_another(made, tiny_llama, tmp_path):
    from transformers import AutoModelForCausalLM

    tiny_llama.save_pretrained(tmp_path / "model")
    check_same_model(made.about, AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval())


def compiled_layer(model):
    model.transformer.h[1] = torch.compile(model.transformer.h[1])
    return model


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, compiled_layer, nn.Module.train], ids=lambda f: f.__name__)
def test_a_wrapped_or_training_model_is_the_model_in_eval_mode(wrap):
    good, model = fingerprint(build("gpt2"), input_ids=tokens()), wrap(build("gpt2"))
    assert fingerprint(model, input_ids=tokens()).about.weights_sha256 == good.about.weights_sha256
    assert compare(good, model).sentence.startswith("SAME")
