"""Tensors that many tests need, one step of training, and when two results are the same."""

import torch
from torch import Tensor


def ids(n: int = 8, device: str = "cpu") -> Tensor:
    """Two rows of tokens for the tiny Llamas."""
    return torch.arange(2 * n, device=device).view(2, n) % 64


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normals, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(model, n: int = 8) -> list[Tensor]:
    """Loss and gradients of one training step."""
    tokens = ids(n, model.device)
    model.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def step_logits(function, model, n: int = 8) -> Tensor:
    """The logits of one training step of a function that calls a model; the gradients are in the model."""
    tokens = ids(n, model.device)
    model.zero_grad()
    out = function(input_ids=tokens, labels=tokens)
    out.loss.backward()
    return out.logits.detach()


def same(a, b) -> bool:
    """Whether two lists of tensors are bit for bit the same; a NaN would be no proof of anything, so there may be none."""
    assert all(x.isfinite().all() for x in (*a, *b))
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def bits(x: Tensor) -> Tensor:
    """The representation, so that -0.0 and NaN compare too."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same representation."""
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """The same, any NaN like any other."""
    nan = a.isnan()
    alike = (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(nan, b.isnan())
    return alike and torch.equal(bits(a[~nan]), bits(b[~nan]))
