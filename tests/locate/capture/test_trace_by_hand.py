"""Traces of models of a few numbers, what a model and its device are called, and the tokens that are asked about."""

import hashlib
import json
import platform
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable
from shaketable.errors import ModelError, ShaketableError
from shaketable.locate.capture import model_identity
from shaketable.locate.capture.model_identity import config_hash, describe, device_name, product_name
from shaketable.locate.capture.prompts import TEXT, read_prompts, token_batch
from shaketable.locate.capture.reference import Reference
from shaketable.locate.capture.trace import LayerCall, forward, hidden, record_layer, trace, with_hidden
from tests.tensors import draw

IDS = torch.tensor([[1, 3, 2]])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Linear(4, 4), nn.SiLU()

    def forward(self, hidden_states, scale=None, cache=None):
        if cache is not None:
            cache.append(len(cache))
        return hidden_states + self.act(self.up(hidden_states)) * (1 if scale is None else scale), scale


class Model(nn.Module):
    """Embeds, runs its layers in an order of its own, and returns logits; says how it was called."""

    def __init__(self, order=(0, 1, 2), by_name=False):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(5, 4), nn.ModuleList(Layer() for _ in range(3)), nn.Linear(4, 5)
        self.order, self.by_name, self.told = order, by_name, []

    def forward(self, input_ids, **kwargs):
        self.told.append((kwargs, torch.is_grad_enabled()))
        x = self.embed(input_ids)
        scale, self.cache = x.mean() * 0 + 0.5, []
        for i in self.order:
            if self.by_name:
                x, _ = self.layers[i](hidden_states=x, scale=scale, cache=self.cache)
            else:
                x, _ = self.layers[i](x, scale, cache=self.cache)
        return SimpleNamespace(logits=self.head(x))


def model(**given):
    torch.manual_seed(0)
    return Model(**given).eval()


def traced(made):
    return trace(made, IDS, Reference(made))


def test_a_plain_forward_keeps_no_cache_and_no_gradient():
    made = model()
    logits = forward(made, IDS)
    assert made.told == [({"use_cache": False}, False)] and logits.shape == (1, 3, 5) and not logits.requires_grad


@pytest.mark.parametrize("by_name", [False, True])
def test_every_layer_has_what_it_was_given_and_returned(by_name):
    made = model(by_name=by_name)
    found = traced(made)
    assert [(c.index, c.name, c.module) for c in found.calls] == [(i, f"layers.{i}", made.layers[i]) for i in range(3)]
    for call, before in zip(found.calls[1:], found.calls[:-1], strict=True):
        assert call.x is before.y
    assert found.calls[0].x is found.outside.leaf("embed").output and torch.equal(found.logits, forward(made, IDS))
    assert found.logits is found.outside.leaf("head").output
    for i, call in enumerate(found.calls):
        assert (call.kwargs["cache"], call.output[1]) == (list(range(i)), call.kwargs["scale"] if by_name else call.args[1])
        assert torch.equal(call.again()[0], call.y) and call.kwargs["cache"] == list(range(i)), "as it was when it was called"


def test_layers_are_numbered_by_their_place_and_not_by_the_order_of_their_calls():
    found = traced(model(order=(2, 0, 1)))
    assert [c.name for c in found.calls] == ["layers.0", "layers.1", "layers.2"]
    assert found.calls[0].x is found.calls[2].y and found.calls[1].x is found.calls[0].y


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ((0, 1), "layers.2 was not called in a forward"), ((0, 2), "layers.1 was not called in a forward"), ((), "layers.0 was not called in a forward"),
        ((0, 1, 2, 1), "layers.1 is called more than once in a forward; locate follows one call per layer"),
        ((0, 0), "layers.0 is called more than once in a forward; locate follows one call per layer"),
    ],
)  # fmt: skip
def test_a_layer_that_is_not_called_once_is_named(order, said):
    with pytest.raises(ModelError) as refused:
        traced(model(order=order))
    assert str(refused.value) == said


def test_what_is_inside_of_a_layer_is_not_in_the_trace_and_what_is_outside_is():
    found = traced(model())
    leaves = [r.path for r in found.outside.records if r.func is None]
    assert leaves == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert {r.path for r in found.outside.records if r.func is not None} == {""}


def test_a_layer_is_recorded_operator_by_operator_with_its_own_input_or_another():
    made = model()
    call = traced(made).calls[1]
    own, other = record_layer(call, Reference(made)), record_layer(call, Reference(made), call.x * 2)
    for recording, x in ((own, call.x), (other, call.x * 2)):
        assert [(r.path, r.function) for r in recording.records] == [("up", None), ("act", None), ("", "mul"), ("", "add")]
        assert torch.equal(recording.leaf("up").args[0], x) and torch.equal(recording.output[0], call.again(x)[0])
    assert torch.equal(own.output[0], call.y)


def test_other_hidden_states_leave_the_arguments_alone():
    x, y, given = draw(2), draw(2, seed=1), {"hidden_states": draw(2, seed=2), "mask": 3}
    before = dict(given)
    args, kwargs = with_hidden((), given, given["hidden_states"], y)
    assert given == before and kwargs["hidden_states"] is y and kwargs["mask"] == 3 and args == ()
    args, kwargs = with_hidden((x, 1, 2), given, x, y)
    assert args[0] is y and args[1:] == (1, 2) and kwargs == given
    args, kwargs = with_hidden((3, (x, x)), given, x, y)
    assert args[0] == 3 and args[1][0] is y and args[1][1] is y and kwargs == given
    for args, kwargs in (((3, x), {}), ((), {"x": x}), ((torch.tensor(1), x), {}), ((), {"mask": y, "hidden_states": x})):
        assert hidden(args, kwargs, y) is x
    assert hidden((draw(3), x), {}, y) is x and hidden((draw(3), x), {}, draw(5)).shape == (3,), (
        "of the result's shape, else the first"
    )
    assert hidden((tokens := torch.tensor([1]),), {}, y) is tokens
    with pytest.raises(ModelError, match="no hidden states"):
        hidden((3,), {}, y)


def test_the_result_of_a_layer_is_its_first_tensor():
    x, y = draw(2), draw(2, seed=1)
    for output, first in ((x, x), ((x, y), x), ({"a": y, "b": x}, y), ((None, [y], x), y)):
        assert LayerCall(0, "", nn.Identity(), (x,), {}, output).y is first


# ---- which model on which device


class Config:
    def __init__(self, **told):
        self.told = told

    def to_diff_dict(self):
        return self.told


LOCAL = [
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "_attn_implementation",
    "attn_implementation", "_attn_implementation_internal",
]  # fmt: skip


@pytest.mark.parametrize("key", LOCAL)
def test_how_a_model_was_loaded_is_no_part_of_what_it_is(key):
    bare = hashlib.sha256(b'{"a": 1, "deep": {"b": {}}}').hexdigest()
    assert config_hash(Config(a=1, deep={"b": {}})) == bare
    assert config_hash(Config(a=1, deep={"b": {key: 3}, key: 4}, **{key: "x"})) == bare


@pytest.mark.parametrize("key", ["name", "version", "dtypes", "attention", "architecture"])
def test_everything_else_is(key):
    assert config_hash(Config(a=1)) != config_hash(Config(a=1, **{key: 2})) != config_hash(Config(a=1, **{key: 3}))


def described(dtype=torch.float32):
    made = model().to(dtype)
    text = SimpleNamespace(hidden_size=4.0)
    made.config = SimpleNamespace(
        get_text_config=lambda: text, to_diff_dict=lambda: {"a": 1}, _attn_implementation="eager", hidden_size=99
    )
    return describe(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_model_is_described_field_by_field(dtype):
    now = datetime.now(UTC)
    found = described(dtype)
    assert (found["model_class"], found["num_layers"], found["hidden_size"]) == ("Model", 3, 4)
    assert type(found["hidden_size"]) is int and found["attention"] == "eager" and found["device"] == "cpu"
    assert found["config_sha256"] == hashlib.sha256(b'{"a": 1}').hexdigest() and len(found["weights_sha256"]) == 64
    assert found["dtype"] == str(dtype)[6:] and found["product_input"] == 0.0
    assert found["versions"] == {
        "shaketable": shaketable.__version__, "torch": str(torch.__version__), "transformers": version("transformers"),
        "python": platform.python_version(),
    }  # fmt: skip
    date = datetime.fromisoformat(found["date"])
    assert date.tzinfo is not None and date.microsecond == 0 and abs(date - now) < timedelta(minutes=5)
    assert json.loads(json.dumps(found)) == found


@pytest.fixture
def medium():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def test_what_torch_may_do_to_products_is_described(medium):
    found = described()
    assert found["switches"] == {"float32_matmul_precision": "medium", "cuda_tf32": torch.backends.cuda.matmul.allow_tf32}
    assert found["product_input"] == 2.0**-8 and described(torch.bfloat16)["product_input"] == 0.0


def test_an_accelerator_is_called_by_the_name_it_is_sold_under(monkeypatch):
    asked = []

    def module(device):
        asked.append(device)
        return SimpleNamespace(get_device_name=lambda which: f"Fast {which.index}")

    monkeypatch.setattr(model_identity.torch, "get_device_module", module)
    device = torch.device("cuda", 3)
    assert (product_name(device), device_name(device)) == ("Fast 3", "cuda (Fast 3)") and asked[0] == device
    assert (product_name(torch.device("cpu")), device_name(torch.device("cpu"))) == (None, "cpu") and len(asked) == 2
    monkeypatch.setattr(model_identity.torch, "get_device_module", lambda device: SimpleNamespace())
    assert (product_name(device), device_name(device)) == (None, "cuda")


# ---- tokens


class Letters:
    """One token per letter; says what it was asked."""

    def __call__(self, text):
        self.text = text
        return {"input_ids": [ord(c) for c in text], "attention_mask": [1] * len(text)}


@pytest.mark.parametrize(
    ("prompts", "tokens", "text"),
    [
        (["ab"], 9, "ab"), (["ab", "", " c"], 9, "ab\n c"), (["ab"], 2, "ab"), (("x", "y"), 3, "x\ny"), ([" a "], 9, " a "),
    ],
)  # fmt: skip
def test_prompts_become_one_sequence(prompts, tokens, text):
    tokenizer = Letters()
    ids = token_batch(tokenizer, prompts, tokens)
    assert tokenizer.text == text and ids.tolist() == [[ord(c) for c in text][:tokens]] and ids.dtype == torch.int64


@pytest.mark.parametrize(("tokens", "times"), [(2, 1), (63, 1), (64, 2), (127, 2), (640, 11)])
def test_the_built_in_text_is_repeated_for_long_sequences(tokens, times):
    tokenizer = Letters()
    assert token_batch(tokenizer, None, tokens).shape == (1, tokens) and tokenizer.text == TEXT * times


@pytest.mark.parametrize(("prompts", "count"), [(["a"], 1)])
def test_too_few_tokens_are_counted(prompts, count):
    with pytest.raises(ShaketableError, match=f"^the prompts make {count} tokens; at least 2 are needed$"):
        token_batch(Letters(), prompts, 8)
    assert token_batch(Letters(), ["ab"], 8).shape == (1, 2)


def test_lines_of_a_file_are_prompts_as_they_stand(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("  two spaces\n\t\nlast é\r\nno end".encode())
    assert read_prompts(path) == ["  two spaces", "last é", "no end"]
    path.write_bytes(b"")
    assert read_prompts(path) == []


def test_a_folder_is_no_file_of_prompts(tmp_path):
    with pytest.raises(ShaketableError) as refused:
        read_prompts(tmp_path)
    assert str(refused.value).startswith(f"prompts cannot be read from {tmp_path}: ")
