"""What a device is documented to do, by torch's switches, and the host's own arithmetic amid modes of torch."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shaketable.numerics.intervals import Precision, device_precision, host_arithmetic

EXACT = Precision()
TF32 = Precision(2.0**-10, "float32 products may use TF32: their factors are taken as rounded to 10 bits")
BFLOAT = Precision(2.0**-8, "float32 products may use bfloat16: their factors are taken as rounded to 8 bits")


@pytest.mark.parametrize(
    ("device", "asked", "tf32", "expected"),
    [
        ("cuda", "highest", False, EXACT),
        ("cuda", "highest", True, TF32),
        ("cuda", "high", False, TF32),
        ("cuda", "medium", False, TF32),
        ("cuda:1", "high", True, TF32),
        ("cpu", "highest", True, EXACT),
        ("cpu", "high", True, EXACT),
        ("cpu", "medium", False, BFLOAT),
        ("xpu", "medium", False, BFLOAT),
        ("xpu", "high", False, EXACT),
    ],
)
def test_either_switch_allows_short_factors_on_the_device_that_it_is_for(monkeypatch, device, asked, tf32, expected):
    class Switch:
        allow_tf32 = tf32

    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: asked)
    monkeypatch.setattr(torch.backends.cuda, "matmul", Switch)
    assert device_precision(torch.device(device), torch.float32) == expected
    for dtype in (torch.bfloat16, torch.float16):
        assert device_precision(torch.device(device), dtype) == EXACT


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return 2 * made if func is torch.add else made


class Tripling(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * 3 if "add" in str(func) else made


def one_plus_one():
    return float(torch.add(torch.ones(()), torch.ones(())))


@pytest.mark.parametrize(("mode", "usual"), [(Doubling, 4.0), (Tripling, 6.0)])
def test_the_host_computes_by_itself_whatever_mode_is_active(mode, usual):
    with mode():
        assert one_plus_one() == usual
        with host_arithmetic():
            assert one_plus_one() == 2.0
        assert one_plus_one() == usual
        with pytest.raises(KeyError), host_arithmetic():
            raise KeyError
        assert one_plus_one() == usual
    assert one_plus_one() == 2.0


@pytest.mark.parametrize("before", [True, False])
def test_the_host_builds_no_graph_and_puts_gradients_back(before):
    with torch.set_grad_enabled(before):
        with host_arithmetic():
            assert not torch.is_grad_enabled()
            assert not (torch.ones(1, requires_grad=True) * 2).requires_grad
        assert torch.is_grad_enabled() is before
