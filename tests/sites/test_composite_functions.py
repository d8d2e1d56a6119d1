"""Functions of torch that are written in Python, opened so that a mode meets what they call."""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from shaketable.sites.composite_functions import is_composite, opened


class Names(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.met = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.met.append(func.__name__)
        return func(*args, **kwargs or {})


def test_only_python_functions_that_ask_for_overrides_are_composite():
    assert all(is_composite(f) for f in (F.multi_head_attention_forward, F.normalize, F.softmax, F.leaky_relu))
    assert not any(is_composite(f) for f in (F.linear, F.gelu, torch.matmul, torch.Tensor.norm, torch.einsum, is_composite))


def test_what_an_opened_function_calls_is_met_and_it_makes_the_same():
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    with Names() as closed:
        whole = F.normalize(x, p=2.0, dim=-1)
    with Names() as open_:
        same = opened(F.normalize)(x, p=2.0, dim=-1)
    assert closed.met == ["normalize"]
    assert open_.met[0] == "norm" and "normalize" not in open_.met
    assert torch.equal(whole, same)
    assert opened(F.normalize) is opened(F.normalize)
