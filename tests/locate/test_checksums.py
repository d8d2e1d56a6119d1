"""Sums of products: healthy below 1, a planted lane or token above."""

import functools
import math

import pytest
import torch
from torch import nn

from shaketable.capture.recorder import Recorder
from shaketable.capture.reference import Reference
from shaketable.capture.trace import record_layer, trace
from shaketable.locate.replay import _columns, check_products
from shaketable.numerics.intervals import Precision
from shaketable.sites.nested_tensors import tensors_of
from tests.locate.architectures import build, tokens

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@functools.cache
def traced(name, dtype):
    model = build(name, dtype)
    reference = Reference(model)
    return reference, trace(model, tokens(), reference).calls[1]


def checked(name, dtype, path=None, tamper=None, precision=None):
    """The checksum of a layer, one product's result changed."""
    reference, call = traced(name, dtype)
    recording = record_layer(call, reference)
    if path is not None:
        record = recording.leaf(path)
        y = next(tensors_of(record.output)).clone()
        tamper(y)
        record.output = y
    return check_products(recording, reference, call.name, precision or Precision())


PRODUCTS = {
    "llama": ["self_attn.q_proj", "mlp.down_proj"],
    "gpt2": ["attn.c_attn", "mlp.c_proj"],
    "qwen2": ["self_attn.k_proj"],
}
EACH = [(name, path) for name, paths in PRODUCTS.items() for path in paths]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_healthy_products_are_below_one(name, dtype):
    scores = checked(name, dtype)
    assert set(PRODUCTS[name]) < set(scores)
    assert all(0 < score < 1 for score in scores.values())


def shift_lane(y):
    y[..., 3] += 0.3 * y.float().std()


def scale_token(y):
    y[:, 5] *= 1.3


def one_value(y):
    y[0, 2, 1] += 4 * y.float().std()


@pytest.mark.parametrize("fault", [shift_lane, scale_token, one_value])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "path"), EACH)
def test_a_wrong_lane_token_or_value_is_above_one(name, path, dtype, fault):
    scores = checked(name, dtype, path, fault)
    assert scores[path] > 1
    assert all(score < 1 for p, score in scores.items() if p != path)


def test_signs_see_what_cancels_in_the_plain_sums():
    """Added to one lane and taken from another, the other way round for every second token: all plain sums stay."""

    def cancel(lane):
        def tamper(y):
            turn = torch.tensor([1.0, -1.0]).repeat(y.shape[1] // 2)
            y[..., 0] += turn
            y[..., lane] -= turn

        return tamper

    seen = [checked("llama", torch.float32, "self_attn.q_proj", cancel(lane))["self_attn.q_proj"] > 1 for lane in range(1, 32)]
    assert sum(seen) > 10


def test_documented_rounding_of_factors_widens_the_threshold():
    def jitter(y):
        y *= 1 + 2.0**-12 * torch.randn(y.shape, generator=torch.Generator().manual_seed(0))

    assert checked("llama", torch.float32, "mlp.up_proj", jitter)["mlp.up_proj"] > 1
    assert checked("llama", torch.float32, "mlp.up_proj", jitter, Precision(product_input=2.0**-10))["mlp.up_proj"] < 1


def test_a_layer_without_products_has_nothing_to_sum():
    root = nn.Sequential(nn.SiLU())
    reference = Reference(root)
    with Recorder(root, lambda path, module: reference.leaf(path) is not None).watching() as recording:
        root(torch.randn(2, 4))
    assert check_products(recording, reference, "", Precision()) == {}


def poison(y):
    y[0, 2, 1] = math.nan


@pytest.mark.parametrize("path", ["self_attn.q_proj", "mlp.down_proj"])
def test_a_value_that_is_no_number_is_infinitely_wrong(path):
    scores = checked("llama", torch.float32, path, poison)
    assert scores.pop(path) == math.inf and max(scores.values()) < 1


class Biased(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.layer = nn.ModuleDict({"linear": nn.Linear(64, 64)})
        with torch.no_grad():
            self.layer["linear"].bias.fill_(bias)

    def forward(self, x):
        return self.layer["linear"](x)


@pytest.mark.parametrize("bias", [0.1, 100.0])
def test_a_large_bias_rounds_the_result_more(bias):
    torch.manual_seed(0)
    root = Biased(bias).bfloat16()
    reference = Reference(root)
    with Recorder(root, lambda path, module: reference.leaf(path) is not None).watching() as recording:
        root(torch.randn(1, 24, 64).bfloat16())
    recording.records[0].path = "linear"
    assert check_products(recording, reference, "layer", Precision())["linear"] < 1


def test_two_tokens_that_are_swapped_in_one_channel_are_seen_by_its_checksum():
    """Their sum is what it was: every token has a weight of its own."""
    chance = torch.Generator().manual_seed(0)
    x, w = torch.randn(16, 8, generator=chance), torch.randn(4, 8, generator=chance)
    y = x @ w.T
    assert (_columns(x, y, w.double(), None, Precision()) < 1).all()
    y[[0, 1], 2] = y[[1, 0], 2]
    assert (_columns(x, y, w.double(), None, Precision()) > 1).tolist() == [False, False, True, False]
