"""What a device is documented to do, by torch's switches."""

import pytest
import torch

from shaketable.numerics.intervals import Precision, device_precision

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
        ("cpu", "highest", True, EXACT),
        ("cpu", "medium", False, BFLOAT),
        ("xpu", "medium", False, BFLOAT),
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
