"""What the tests of the Triton kernels share: the two routes, tensors that are hard to get right, and what "the same" means.

Where there is a GPU the kernels run on it. Elsewhere they run in Triton's interpreter on tensors of the CPU, which `dispatch.fits`
would refuse: the `fused` route lets them through. The other route has no kernels at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from shaketable.faults.gpu import dispatch
from shaketable.faults.gpu import dispatch as gpu

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
kernels = [
    pytest.mark.gpu if ON_GPU else pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(dispatch._kernels() is None, reason="no Triton here"),
    pytest.mark.skipif(not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="no GPU and no interpreter"),
]
quick = settings(max_examples=12)

INF, NAN = float("inf"), float("nan")
HARD = (
    0.0,
    -0.0,
    INF,
    -INF,
    NAN,
    1e-45,
    -1e-45,
    1e-40,
    -9e-41,
    2.0**-126,
    2.0**-127,
    -6e-8,
    3e38,
    -3e38,
    448.0,
    57344.0,
    6.0,
    -7.99,
)
KEYS = st.integers(0, 2**64 - 1)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SHAPES = st.sampled_from(
    [(1,), (7,), (32,), (), (3, 5, 33), (5, 16), (2, 128), (4, 130), (70, 31), (2, 576), (3, 1100), (1, 2048), (2, 9001)]
)
LONG_ROWS = [(16, 576), (3, 576), (2, 1536), (1, 4096), (2, 8960), (1, 20480), (2, 20481), (1, 24576)]
"""One tile, several of which the last is full or not, in programs that are full or not; and too long to be held."""
_fits = dispatch.fits


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Gaussian values of a hard scale, with some of the hard values among them or none."""
    shape, dtype = draw(SHAPES), draw(DTYPES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=generator) ** 3 * 2.0 ** draw(st.integers(-20, 14))
    flat = x.view(-1)
    for value in draw(st.lists(st.sampled_from(HARD), max_size=6)):
        flat[draw(st.integers(0, x.numel() - 1))] = value
    return x.to(dtype).to(DEVICE)


def _interpreted(x: Tensor) -> bool:
    return x.dtype in dispatch._floats() and x.numel() > 0


@contextmanager
def fused() -> Iterator[list[str]]:
    """The kernels' route, and the names of the kernels' functions that were asked and did it."""
    did: list[str] = []

    def spy(name: str):
        function = getattr(gpu, name)

        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            if result is not None:
                did.append(name)
            return result

        return mock.patch.object(gpu, name, call)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dispatch, "fits", _fits if ON_GPU else _interpreted))
        stack.enter_context(np.errstate(all="ignore"))
        for name in ("clipped", "coded", "moment", "noise", "shift", "top"):
            stack.enter_context(spy(name))
        yield did


@contextmanager
def plain() -> Iterator[None]:
    """Plain torch's route."""
    with mock.patch.object(dispatch, "fits", return_value=False):
        yield


def every_number(dtype: torch.dtype) -> Tensor:
    """Every number of a 16-bit type (every eleventh in the interpreter); of float32 those with the first 16 bits of each."""
    raw = torch.arange(0, 2**16, 1 if ON_GPU else 11, dtype=torch.int32)
    return ((raw << 16).view(torch.float32) if dtype == torch.float32 else raw.to(torch.int16).view(dtype)).to(DEVICE)
