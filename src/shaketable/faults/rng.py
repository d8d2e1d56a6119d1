"""Own randomness: a counter-based generator, keyed by 64 bits, that touches no global stream.

Element pair `c` of a tensor drawn under key `k` gets two 32-bit hashes of (c, k) (three multiply-xorshift rounds, then
two more), and a Box-Muller transform turns them into two normals. The polynomials are written out, in float32, with a
fixed order of operations and without fused multiply-adds, so that this file (plain torch, any device) and the C++ of
`native.cpp` give the *same bits*: a run does not change its noise because a compiler was missing.

The two of a pair lie side by side, so a kernel that computes element by element makes their hashes once. Keys are made in
Python from (seed, site, pass, rank): see `inject/passes.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shaketable.faults.cpu import native

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_M64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit integers with good avalanche."""
    value = (value + 0x9E3779B97F4A7C15) & _M64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _M64
    return value ^ (value >> 31)


def key_of(*parts: object) -> int:
    """A 64-bit key from anything printable; stable across processes and Python versions."""
    text = "\x1f".join(str(p) for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Draw:
    """The key of one application of a fault, and the fault's statistic."""

    key: int
    """Keys all randomness of this application."""
    reference: Tensor | None = None
    """The statistic of `Fault.reference`, taken at first use."""

    @property
    def normal_key(self) -> int:
        """The key of `normals` and of the kernels, mixed once more."""
        return mix64(self.key ^ 0xD1CE)

    def normal(self, x: Tensor) -> Tensor:
        """Standard normals, float32, in the shape and on the device of `x`."""
        return normals(x.numel(), self.normal_key, x.device).view(x.shape)

    def uniform(self, x: Tensor, stream: int = 0) -> Tensor:
        """Uniforms in [0, 1), float32, in the shape and on the device of `x`."""
        return uniforms(x.numel(), mix64(self.key ^ stream), x.device).view(x.shape)

    def number(self) -> float:
        """One uniform number in [0, 1) for the whole tensor."""
        return (mix64(self.key ^ 0x5EED) >> 11) / (1 << 53)


def signed(word: int, bits: int = 32) -> int:
    """The lowest bits of a number as a signed word, which is what tensors of integers hold."""
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word


def _shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (32 - by)) - 1)


def _hash(counter: Tensor, low: int, high: int) -> Tensor:
    """The first 32-bit hash of each counter (int32, wrapping) under a key of two words."""
    h = counter ^ low
    h = (h ^ _shift(h, 16)) * signed(0x21F0AAAD)
    h = (h ^ _shift(h, 15)) + high
    h = h * signed(0xD35A2D97)
    h = (h ^ _shift(h, 15)) * signed(0x31848BAB)
    return h ^ _shift(h, 16)


def _second_hash(h: Tensor, counter: Tensor, high: int) -> Tensor:
    h = h + counter * signed(0x9E3779B9) + high
    h = (h ^ _shift(h, 16)) * signed(0x7FEB352D)
    h = (h ^ _shift(h, 15)) * signed(0x846CA68B)
    return h ^ _shift(h, 16)


def _box_muller(h1: Tensor, h2: Tensor) -> tuple[Tensor, Tensor]:
    """Two standard normals from two hashes; mirrors `pair` in native.cpp line by line."""
    import torch

    u = (_shift(h1, 1).float() + 0.5) * 4.656612873077393e-10
    bits = u.view(torch.int32)
    e = (bits - 0x3F3504F3) >> 23
    m = (bits - (e << 23)).view(torch.float32) - 1.0
    p = torch.full_like(m, 7.0376836292e-2)
    for c in _LOG:
        p = p * m + c
    m2 = m * m
    ln = (m + (m2 * m * p - 0.5 * m2)) + e.float() * 0.693147180559945
    r = _root((ln * -2.0).clamp_min(0.0))
    t = (h2 << 2).float() * 3.6571409e-10
    t2 = t * t
    s = t * (1.0 + t2 * (-1.6666654611e-1 + t2 * (8.3321608736e-3 + t2 * -1.9515295891e-4)))
    q = 1.0 - 0.5 * t2 + t2 * t2 * (4.166664568e-2 + t2 * (-1.388731625e-3 + t2 * 2.443315711e-5))
    swap = h2 < 0
    a, b = r * torch.where(swap, s, q), r * torch.where(swap, q, s)
    return torch.where((h2 & (1 << 30)) != 0, -a, a), torch.where((h1 & 1) != 0, -b, b)


def _root(x: Tensor) -> Tensor:
    """The correctly rounded square root; torch's own float32 one on a CPU is off by one bit now and then."""
    return x.double().sqrt().float() if x.device.type == "cpu" else x.sqrt()


_LOG = (
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def normals(n: int, key: int, device: torch.device) -> Tensor:
    """`n` standard normals under `key`: the C++ kernel on CPU where there is one, plain torch elsewhere."""
    if device.type == "cpu" and native.available():
        return native.normals(n, key)
    return plain_normals(n, key, device)


def plain_normals(n: int, key: int, device: torch.device) -> Tensor:
    """The reference implementation, in plain torch."""
    import torch

    low, high = signed(key), signed(key >> 32)
    counter = torch.arange((n + 1) // 2, dtype=torch.int32, device=device)
    h1 = _hash(counter, low, high)
    a, b = _box_muller(h1, _second_hash(h1, counter, high))
    return torch.stack([a, b], dim=1).flatten()[:n]


def uniforms(n: int, key: int, device: torch.device) -> Tensor:
    """`n` uniforms in [0, 1) with 24 bits."""
    import torch

    counter = torch.arange(n, dtype=torch.int32, device=device)
    return _shift(_hash(counter, signed(key), signed(key >> 32)), 8).float() * (1.0 / (1 << 24))


def lanes(channels: int, sparsity: float, key: int) -> Tensor:
    """A fixed random set of `sparsity * channels` faulty channels (at least one), as a boolean mask on the CPU."""
    import torch

    count = max(1, round(sparsity * channels))
    order = uniforms(channels, key, torch.device("cpu")).argsort(stable=True)
    mask = torch.zeros(channels, dtype=torch.bool)
    mask[order[:count]] = True
    return mask
