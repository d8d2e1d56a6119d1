"""A card played by the CPU, for the short ways of training: the raw launch is the plain fault on the memory it is told of."""

import ctypes

import pytest
import torch

from shaketable.faults import AbsoluteGaussian, Draw, RelativeGaussian, gpu
from shaketable.faults.generator import mix64
from shaketable.inject.short import keyed


class Launch:
    """`KeyedLaunch`, with its arguments."""

    device, alone, at = -1, True, 0

    def __init__(self, x, kind, scale, launched):
        self.dtype, self.size, self.launched = x.dtype, x.numel() * x.itemsize, launched
        self.fault = (RelativeGaussian if kind == gpu.RELATIVE else AbsoluteGaussian)(magnitude=scale)

    def go(self, at, source, target, key, moment, stream):
        before, after = (self._at(address) for address in (source, target))
        after.copy_(self.fault.apply(before, Draw(mix64(key ^ mix64(moment)))))
        self.launched.append("in place" if source == target else "beside")
        return 0

    def _at(self, address):
        return torch.frombuffer((ctypes.c_char * self.size).from_address(address), dtype=self.dtype)


@pytest.fixture
def card(monkeypatch):
    """While it is there, tensors of the CPU are a card's; the launches that were made."""
    launched = []

    def prepare(x, kind, scale):
        fits = type(x) in (torch.Tensor, torch.nn.Parameter) and x.dtype.itemsize < 8 and x.numel()
        return Launch(x, kind, scale, launched) if fits else None

    monkeypatch.setattr(gpu, "prepare_keyed", prepare)
    monkeypatch.setattr(keyed, "on_card", lambda x: True)
    monkeypatch.setattr(keyed, "raw_stream", lambda device: 0)
    monkeypatch.setattr(keyed, "is_capturing", lambda: False)
    return launched
