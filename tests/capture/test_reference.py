"""What the device should compute: definitions from the config, weights from the file, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from shaketable.capture.reference import Reference
from shaketable.capture.trace import record_layer, trace
from shaketable.locate.replay import judge
from shaketable.numerics.intervals import Precision
from tests.locate.architectures import build, tokens

UP = "model.layers.1.mlp.up_proj.weight"


def tied_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def blamed(model, reference, layer=1):
    call = trace(model, tokens(), reference).calls[layer]
    judgement = judge(record_layer(call, reference), reference, call.name, Precision())
    return {v.path for v in judgement.violations}


def save(model, folder, **options):
    model.save_pretrained(folder, **options)
    return str(folder)


# ---- weights


def test_weights_come_from_the_file(tmp_path):
    model = build("llama")
    source = save(model, tmp_path, max_shard_size="30KB")
    reference = Reference(model, source)
    assert reference.has_file and reference.is_rebuilt
    for name, parameter in model.named_parameters():
        assert torch.equal(reference.weight(name), parameter)
        assert reference.weight(name).data_ptr() != parameter.data_ptr()


def test_file_weights_are_cast_to_the_devices_dtype(tmp_path):
    model = build("llama")
    source = save(model, tmp_path)
    wide = model.get_parameter(UP).detach().clone()
    reference = Reference(model.bfloat16(), source)
    assert torch.equal(reference.weight(UP), wide.bfloat16()) and reference.weight(UP).dtype == torch.bfloat16
    assert blamed(model, reference) == set()


def test_a_tied_head_is_the_embedding(tmp_path):
    model = tied_llama()
    source = save(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    reference = Reference(model, source)
    kept = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(reference.weight("lm_head.weight"), kept)
    assert torch.equal(reference.weight("model.embed_tokens.weight"), kept)


@pytest.mark.parametrize(
    ("name", "path"),
    [("mlp.gate.weight", "mlp.gate"), ("mlp.experts.down_proj", "mlp.experts")],
)
def test_a_parameter_that_a_function_takes_comes_from_the_file_too(tmp_path, name, path):
    model = build("mixtral")
    source = save(model, tmp_path)
    with torch.no_grad():
        model.get_parameter(f"model.layers.1.{name}").mul_(1.25)
    assert blamed(model, Reference(model, source)) == {path}
