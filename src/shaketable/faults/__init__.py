"""What happens to a tensor. The union below is the registry: a new fault is one class, and its name here."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import Field, TypeAdapter

from shaketable.faults.base import FaultBase, MagnitudeFault
from shaketable.faults.bits import BitFlip, Spike, StuckBit, Truncation
from shaketable.faults.clipping import DeadZone, Saturation
from shaketable.faults.formats import FP8E4M3, FP8E5M2, MXFP4, NVFP4, Format
from shaketable.faults.noise import (
    AbsoluteGaussian,
    Bias,
    Gain,
    Noise,
    NonDeterminism,
    RelativeGaussian,
    RMSGaussian,
    SystematicBias,
)
from shaketable.faults.rng import Draw

AnyFault = (
    RelativeGaussian
    | AbsoluteGaussian
    | Noise
    | RMSGaussian
    | SystematicBias
    | Bias
    | Gain
    | NonDeterminism
    | DeadZone
    | Saturation
    | Spike
    | BitFlip
    | StuckBit
    | Truncation
    | MXFP4
    | NVFP4
    | FP8E4M3
    | FP8E5M2
)
Fault = Annotated[AnyFault, Field(discriminator="kind")]

KINDS: dict[str, type[FaultBase]] = {c.model_fields["kind"].default: c for c in get_args(AnyFault)}
_adapter: TypeAdapter[Any] = TypeAdapter(Fault)


def make_fault(fields: dict[str, Any]) -> FaultBase:
    """A fault from its fields, `kind` among them; raises pydantic's ValidationError."""
    fault: FaultBase = _adapter.validate_python(fields)
    return fault


__all__ = ["KINDS", "Draw", "Fault", "FaultBase", "Format", "MagnitudeFault", "make_fault"]
