"""Every arithmetic result of a forward rounded at random, to measure how far rounding alone moves its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

ACCUMULATION = 8.0 * 2.0**-24
"""Of a product's size, its error in float32: partial sums are larger than the sum."""
HALF = 2.0**-14
"""Units above it, of float16 and bfloat16, leave nothing to see of an error of accumulation in float32."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear", "matmul", "convolution")
ARITHMETIC = ("add", "sub", "mul", "div", "silu", "gelu", "tanh", "sigmoid", "_softmax", "add_", "mul_", "index_add_")
ATTENTION = "_scaled_dot_product"


class RandomRounding(TorchDispatchMode):
    """Every arithmetic result of a forward is rounded at random, as a program in `dtype` might have rounded it."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit = torch.finfo(dtype).eps / 2
        self.seed = seed
        self.bytes = np.random.default_rng(seed)
        self.generators: dict[torch.device, torch.Generator] = {}
        self.in_rotary = 0
        self.hooks: list[Any] = []

    def __enter__(self) -> RandomRounding:
        """Begin; angles of a rotation are computed in float32 by every program, whatever its dtype."""
        self.hooks = [
            register_module_forward_pre_hook(lambda module, args: self._pass_rotary(module, 1)),
            register_module_forward_hook(lambda module, args, out: self._pass_rotary(module, -1)),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()

    def _pass_rotary(self, module: nn.Module, step: int) -> None:
        self.in_rotary += step * ("rotary" in type(module).__name__.lower())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_product = name in PRODUCTS or name.startswith(ATTENTION)
        if self.in_rotary or (not is_product and name not in ARITHMETIC):
            return out
        first = out[0] if isinstance(out, tuple) else out
        if not isinstance(first, Tensor) or not first.is_floating_point() or first.dim() == 0 or first.shape[-1] == 1:
            return out
        rounded = self._rounded(first, is_product)
        if name.endswith("_"):
            first.copy_(rounded)
            return out
        return (rounded, *out[1:]) if isinstance(out, tuple) else rounded

    def _rounded(self, x: Tensor, is_product: bool) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        noise = self._uniform(wide, self.unit).mul_(wide)
        if is_product and self.unit < HALF:
            noise += self._uniform(wide, ACCUMULATION).mul_(wide.square().mean(-1, keepdim=True).sqrt_())
        if x.dtype in (torch.bfloat16, torch.float16):  # values on the grid of the dtype need noise that leaves it
            noise += self._uniform(wide, torch.finfo(x.dtype).eps / 2).mul_(wide)
        if not is_product:  # masked scores are infinite, or as large as can be
            noise.masked_fill_(~(wide.abs() < 1e30), 0.0)
        return noise.add_(wide).to(x.dtype)

    def _uniform(self, like: Tensor, width: float) -> Tensor:
        """Between minus and plus a width; on a CPU one of 256 values, since drawing is what takes the time."""
        if like.device.type == "cpu":
            drawn = torch.from_numpy(self.bytes.integers(-128, 128, tuple(like.shape), np.int8))
            return drawn.to(like.dtype).add_(0.5).mul_(width / 128)
        if like.device not in self.generators:
            self.generators[like.device] = torch.Generator(like.device).manual_seed(self.seed)
        return torch.empty_like(like).uniform_(-width, width, generator=self.generators[like.device])
