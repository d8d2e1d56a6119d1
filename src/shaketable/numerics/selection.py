"""Operators that select values: where an index points must be the value that the operator selects.

Equal values may be selected in any order, unless the call asks for a stable one. No place may be selected twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shaketable.numerics.intervals import Allowed, RoundingInterval
from shaketable.numerics.operators import Call
from shaketable.sites.nested_tensors import tensors_of

SORTING = ("topk", "sort", "argsort")
SELECTING = (*SORTING, "argmax", "argmin", "max", "min", "mode", "kthvalue")


@dataclass(frozen=True)
class Selection:
    """Indices along a dimension that point to given values."""

    x: Tensor
    dim: int
    index: Tensor
    """As the host selects."""
    values: Tensor
    distinct: bool
    """Whether a place may be selected only once."""

    def outside(self, got: Tensor) -> Tensor:
        """Where an index points to another value, to no value, or to a place that was selected before."""
        size = self.x.shape[self.dim]
        index = got.view(self.values.shape)
        pointed = self.x.gather(self.dim, index.clamp(0, size - 1))
        wrong = (
            (index < 0) | (index >= size) | ((pointed != self.values) & ~((pointed != pointed) & (self.values != self.values)))
        )
        if self.distinct and index.shape[self.dim] > 1:
            ordered, order = index.sort(self.dim)
            again = ordered.diff(dim=self.dim) == 0
            wrong = wrong | torch.zeros_like(wrong).scatter(self.dim, order.narrow(self.dim, 1, again.shape[self.dim]), again)
        return wrong.view(got.shape)

    def ends(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """The host's indices at some places, as the lowest and the highest."""
        index = self.index.view(where.shape)[where]
        return index, index


def selected(call: Call, name: str, results: list[Tensor]) -> list[Allowed | Selection] | None:
    """What the results of one call may be; None where they hold no indices."""
    x = call.args[0]
    has_indices = len(results) == 2 or name.startswith("arg")  # the maximum of whole numbers has none
    if not has_indices or not isinstance(x, Tensor) or not x.dim():
        return None
    expected = list(tensors_of(call.func(*call.args, **call.kwargs)))
    if call.kwargs.get("stable"):
        return [RoundingInterval.exactly(t) for t in expected]
    index = expected[-1]
    if name in ("argmax", "argmin") and call.get(1, "dim", call.kwargs.get("axis")) is None:
        x, dim = x.flatten(), 0
        index = index.view(1)
    else:
        place = 2 if name in ("topk", "kthvalue") else 1
        dim = int(call.get(place, "dim", call.kwargs.get("axis", -1))) % x.dim()
        index = index if index.dim() == x.dim() else index.unsqueeze(dim)
    values = x.gather(dim, index)
    first: list[Allowed | Selection] = [RoundingInterval.exactly(t) for t in expected[:-1]]
    if name == "topk" and not call.get(4, "sorted", True):
        order = results[0].argsort(dim, descending=True)  # in any order, so the host's are put into the device's
        back = order.argsort(dim)
        values, index = values.sort(dim, descending=True).values.gather(dim, back), index.gather(dim, back)
        first = [RoundingInterval.exactly(values)]
    return [*first, Selection(x, dim, index, values, name in SORTING)]
