"""Functions that models of somebody's own call: norms without a module, a convolution over tokens."""

import pytest
import torch
import torch.nn.functional as F

from shaketable.numerics.intervals import Precision
from shaketable.numerics.operators import BOUNDED, Call
from tests.tensors import draw

X, W, B = draw(2, 7, 24), draw(24, seed=1), draw(24, seed=2)
CALLS = {
    "layer_norm": (F.layer_norm, (X * 3 + 1, (24,), W, B, 1e-5), {}),
    "layer_norm bare": (F.layer_norm, (X, (7, 24)), {}),
    "layer_norm by name": (F.layer_norm, (X, (24,)), {"weight": W, "eps": 1e-3}),
    "rms_norm": (F.rms_norm, (X, (24,), W, 1e-6), {}),
    "rms_norm bare": (F.rms_norm, (X * 0.01, (24,)), {}),
    "rms_norm by name": (F.rms_norm, (X, (24,)), {"weight": W, "eps": 1e-3}),
    "conv1d": (F.conv1d, (X.mT, draw(24, 1, 4, seed=6), None, 1, 3, 1, 24), {}),
    "conv1d with bias": (F.conv1d, (X.mT, draw(6, 24, 3, seed=6)), {"bias": draw(6), "padding": 2}),
}


def outside(name, dtype, change=lambda y: y, precision=None):
    def cast(value):
        return [cast(v) for v in value] if isinstance(value, list) else value.to(dtype) if torch.is_tensor(value) else value

    func, args, kwargs = CALLS[name]
    args, kwargs = tuple(map(cast, args)), {k: cast(v) for k, v in kwargs.items()}
    got = func(*args, **kwargs)
    call = Call(func, args, kwargs, dtype, precision or Precision(), lambda tensor: tensor.double())
    return BOUNDED[name.split()[0]](call).outside(change(got))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_what_the_host_makes_is_allowed_and_a_wrong_value_is_not(name, dtype):
    assert not outside(name, dtype).any()

    def wrong(y):
        y = y.clone()
        y.view(-1)[y.abs().argmax()] *= 1.25
        return y

    assert int(outside(name, dtype, wrong).sum()) == 1


@pytest.mark.parametrize("name", CALLS)
def test_a_hundredth_too_much_is_not_allowed_in_float32(name):
    assert outside(name, torch.float32, lambda y: y * 1.01).double().mean() > 0.9


def test_factors_that_a_device_is_documented_to_round_widen_the_bound():
    def nearly(y):
        return y * (1 + 2.0**-10)

    assert outside("conv1d", torch.float32, nearly).double().mean() > 0.5
    assert outside("conv1d", torch.float32, nearly, Precision(product_input=2.0**-10)).double().mean() < 0.1
