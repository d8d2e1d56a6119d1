"""The base of all faults: a frozen description, one pure method, and a way to read its magnitude back.

A fault knows nothing of models. It is a pydantic model, so a plan is validated without importing torch, with

* `apply(x, draw)`: the faulty tensor. Pure: the same tensor and the same `Draw` give the same bits.
* `gradient(g, x, draw)`: the vector-Jacobian product of `apply`; straight-through by default.
* `read_back(clean, faulty, lanes)`: the magnitude measured from a before/after pair, which the ledger compares with the plan's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from torch import Tensor

    from shaketable.faults.rng import Draw

Magnitude = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FaultBase(BaseModel):
    """A fault without a magnitude (a format). Most faults derive from `MagnitudeFault`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    random: ClassVar[bool] = False
    """Whether two calls on the same tensor differ."""
    alike: ClassVar[bool] = False
    """Whether it acts on each value by itself, so that a sample of the values suffices to measure it."""
    saves_input: ClassVar[bool] = False
    """Whether `gradient` looks at the clean input."""
    points: ClassVar[tuple[str, ...]] = ("output",)
    """Where the fault acts when a plan does not say."""

    kind: str
    sparsity: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    """Share of the channels that is faulty: a fixed random set, the same at every call (a broken lane stays broken)."""

    @property
    def is_off(self) -> bool:
        """True when the fault is the identity and must cost and change nothing."""
        return False

    @property
    def is_steady(self) -> bool:
        """True when the same tensor always gives the same result, so that it can be kept."""
        return not self.random

    @property
    def tells(self) -> Literal["values", "rows", "whole"]:
        """The sample that measures it: some values, some whole rows, or the whole tensor."""
        return "values" if self.alike else "whole"

    def apply(self, x: Tensor, draw: Draw) -> Tensor:
        """The faulty tensor; `x` itself is left alone."""
        raise NotImplementedError

    def gradient(self, g: Tensor, x: Tensor | None, draw: Draw) -> Tensor:
        """Gradient with respect to the clean tensor, given the gradient with respect to the faulty one."""
        return g

    def reference(self, x: Tensor) -> Tensor | None:
        """A statistic taken at first use and kept from then on (the `bias` fault's standard deviation)."""
        return None

    def asked(self) -> float | None:
        """The magnitude that `read_back` should find; None for a fault without one."""
        return None

    def magnitude_of(self, sums: Tensor) -> Tensor | None:
        """The magnitude, where the sums of `faults/sums.py` tell it; None where they do not."""
        return None

    def read_back(self, clean: Tensor, faulty: Tensor, lanes: Tensor | None = None) -> Tensor | None:
        """The magnitude measured from a before/after pair: one number on its device, NaN when this pair does not tell.

        Args:
            clean: The tensor before, or the rows of it that `tells` asks for.
            faulty: The same after.
            lanes: Which values can be faulty (broadcastable); all when None.

        Returns:
            None for a fault without a magnitude. Nothing here waits for a device.
        """
        from shaketable.faults.sums import sums

        return self.magnitude_of(sums(clean, faulty, lanes)) if self.asked() is not None else None

    def text(self) -> str:
        """The fault as the plan language writes it."""
        parts = [f"{k}={v}" for k, v in self.params().items()]
        return ",".join([self.kind, *parts])

    def params(self) -> dict[str, Any]:
        """Fields that differ from their defaults, without `kind` and `magnitude`."""
        fields = type(self).model_fields
        skip = {"kind", "magnitude"}
        return {k: getattr(self, k) for k in fields if k not in skip and getattr(self, k) != fields[k].default}


class MagnitudeFault(FaultBase):
    """A fault with a magnitude; 0 is off, bit for bit."""

    magnitude: Magnitude

    @property
    def is_off(self) -> bool:
        return self.magnitude == 0

    def with_magnitude(self, magnitude: float) -> Self:
        """The same fault, stronger or weaker, validated again."""
        return self.model_validate(self.model_dump() | {"magnitude": magnitude})

    def asked(self) -> float | None:
        return float(self.magnitude)

    def text(self) -> str:
        parts = [f"{k}={v}" for k, v in self.params().items()]
        return ",".join([f"{self.kind}:{self.magnitude!r}".removesuffix(".0"), *parts])
