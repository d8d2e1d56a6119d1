"""Thresholds of least squares, found by a scan over all of their values: the cost changes only where a value crosses.

Both take every value as a share of its maximum (`part`), and sums over the sorted values give the cost of every threshold at
once, so the optimum is global and costs one sort.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dead_zone(part: Tensor, c: Tensor, f: Tensor) -> float:
    """The t for which f is best described by c, and 0 where part < t; halfway between two values.

    Values below cost f², those above (f − c)².
    """
    order = part.sort()
    below, above = f.square()[order.indices].cumsum(0), (f - c).square()[order.indices]
    cost = below + (above.sum() - above.cumsum(0))
    last = int(cost.argmin())
    low = float(order.values[last])
    high = float(order.values[last + 1]) if last + 1 < len(cost) else low
    return min(1.0, (low + high) / 2 if high > low else low * (1 + 1e-6))


def saturation(part: Tensor, ceiling: Tensor, c: Tensor, f: Tensor) -> float:
    """The t for which f is best described by c cut at ±t·ceiling.

    With the k largest cut, t = Σ f·ceiling / Σ ceiling², kept between the k-th value and its neighbour.
    """
    order = part.sort(descending=True)
    size, u = (f * c.sign())[order.indices], ceiling[order.indices]
    d = (f - c).square()[order.indices]
    fu, uu, ff = (size * u).cumsum(0), u.square().cumsum(0), f.square()[order.indices].cumsum(0)
    low = torch.cat([order.values[1:], order.values.new_zeros(1)])
    t = torch.minimum(torch.maximum(fu / uu.clamp_min(1e-300), low), order.values)
    cost = ff - 2 * t * fu + t.square() * uu + (d.sum() - d.cumsum(0))
    return float(t[int(cost.argmin())])
