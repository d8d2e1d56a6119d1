"""The mapping from statistics to noise, as data: what `mapping.yaml`, and any file that replaces it, may say.

A rule is a comparison and a factor and nothing else. Rejected: expressions or Python functions in the file. A mapping is quoted
in results and compared between studies; that needs something that can be read at a glance and printed back.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shaketable.errors import ShaketableError, first_problem
from shaketable.io.yaml_file import read_yaml

T = TypeVar("T", bound=BaseModel)
ORIGIN = Path(__file__).with_name("mapping.yaml")


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Rule(_Data):
    """One statistic of a layer, compared; when it is met, the layer's σ is multiplied."""

    field: str
    """The statistic: a key of the diagnosis's `statistics`."""
    when: Literal["below", "above"]
    """Which side of the bound meets the rule. The bound itself does not."""
    threshold: float
    """The bound, or the multiple of the median that is the bound."""
    unit: Literal["median", "absolute"]
    """`median`: the bound is threshold · the median over all layers. `absolute`: it is the threshold."""
    factor: float = Field(gt=0)
    """Multiplies σ."""
    why: str
    """Shown beside each layer that meets the rule."""

    def bound(self, medians: Mapping[str, float | None]) -> float | None:
        """The number that is compared with; None where the median gives no scale."""
        if self.unit == "absolute":
            return self.threshold
        middle = medians[self.field]
        return None if middle is None or middle <= 0 else middle * self.threshold

    def met(self, value: float, bound: float) -> bool:
        """Whether a value lies on the rule's side of the bound."""
        return value < bound if self.when == "below" else value > bound

    def text(self, value: float, medians: Mapping[str, float | None]) -> str:
        """What was compared and what it did, for people."""
        scale = f" × the median {medians[self.field]:.4g}" if self.unit == "median" else ""
        return f"{self.field} {value:.4g} is {self.when} {self.threshold:g}{scale}: {self.why} (×{self.factor:g})"


class LocatedRule(_Data):
    """Multiplies σ of the layer that the verdict names, when the fault is of this class."""

    fault_class: str
    factor: float = Field(gt=0)
    instead_of: str | None = None
    """A statistic that should have told the same: the rule is left out where the layer has met one on that statistic."""
    why: str


class Clamp(_Data):
    """Bounds of every σ."""

    low: float = Field(ge=0)
    high: float = Field(gt=0)

    @model_validator(mode="after")
    def _is_ordered(self) -> Clamp:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        return self


class Labels(_Data):
    """A layer is HIGH above `high` · base σ, LOW below `low` · base σ, else BASE."""

    high: float = Field(ge=1)
    low: float = Field(gt=0, le=1)


class SigmaMapping(_Data):
    """From statistics to σ, as data."""

    name: str
    """Written into the AQN file, to tell which mapping made it."""
    rules: tuple[Rule, ...]
    located: tuple[LocatedRule, ...] = ()
    clamp: Clamp
    labels: Labels

    @classmethod
    def load(cls, path: Path = ORIGIN) -> SigmaMapping:
        """The mapping of a YAML file; the origin's by default."""
        data = read_yaml(path, "the mapping")
        return checked(cls, data, f"the mapping {path}")


def checked(model: type[T], data: object, name: str) -> T:
    """Validated data, or one line that says where it is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ShaketableError(f"{name}: {first_problem(error)}") from None
