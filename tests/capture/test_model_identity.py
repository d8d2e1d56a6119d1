"""Which model it is: the same hash wherever and however it was loaded, and another one for another model."""

import hashlib
import json

import pytest
import torch

from shaketable.capture.reference import config_hash, describe, device_name
from tests.locate.architectures import build


class Config:
    def __init__(self, **told):
        self.told = told

    def to_diff_dict(self):
        return self.told


def test_the_order_and_the_place_do_not_matter_and_everything_else_does():
    one = config_hash(Config(a=1, b={"x": 2, "y": [3]}))
    assert (
        one
        == config_hash(Config(b={"y": [3], "x": 2}, a=1))
        == hashlib.sha256(b'{"a": 1, "b": {"x": 2, "y": [3]}}').hexdigest()
    )
    for local in ("_name_or_path", "transformers_version", "attn_implementation", "_attn_implementation_internal"):
        assert config_hash(Config(a=1, b={"x": 2, "y": [3], local: "here"}, **{local: "there"})) == one, local
    for other in (
        Config(a=2, b={"x": 2, "y": [3]}),
        Config(a=1, b={"x": 2, "y": [4]}),
        Config(a=1, b={"x": 2, "y": [3], "z": 0}),
    ):
        assert config_hash(other) != one
    assert config_hash(Config(a=torch.float32)) == config_hash(Config(a="torch.float32")), "types are written as text"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_is_described_by_what_it_is(dtype):
    model = build("llama", dtype)
    found = describe(model)
    assert json.loads(json.dumps(found)) == found
    assert (found["model_class"], found["dtype"]) == (type(model).__name__, str(dtype).removeprefix("torch."))
    assert (found["num_layers"], found["hidden_size"]) == (model.config.num_hidden_layers, model.config.hidden_size)
    assert (
        found["device"] == "cpu" == device_name(torch.device("cpu")) and found["attention"] == model.config._attn_implementation
    )
    assert found["versions"]["torch"] == str(torch.__version__) and set(found["versions"]) == {
        "shaketable", "torch", "transformers", "python",
    }  # fmt: skip
    assert set(found["switches"]) == {"float32_matmul_precision", "cuda_tf32"}
    other = build("llama", dtype)
    assert describe(other)["weights_sha256"] == found["weights_sha256"]
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1
    assert describe(other)["weights_sha256"] != found["weights_sha256"]
    assert describe(other)["config_sha256"] == found["config_sha256"]
