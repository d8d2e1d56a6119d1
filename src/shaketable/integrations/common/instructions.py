"""Instructions for the processes of a framework. Imports no torch, and no framework.

Workers are processes that the framework starts: only their environment and the framework's own config reach them. So
instructions are plain text, travel by either, and have a digest: every worker reports the digest of the instructions it acts
on, and the trainer compares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shaketable.aqn.spec import AQN
from shaketable.errors import ShaketableError
from shaketable.integrations.common.keys import read_keys
from shaketable.plan import Plan

VARIABLES = {"plan": "SHAKETABLE_PLAN", "seed": "SHAKETABLE_SEED", "ledger": "SHAKETABLE_LEDGER"}


class Instructions(BaseModel):
    """A plan, an AQN, and what they need to know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: str | None = None
    """A line of the plan language."""
    aqn: str | None = None
    """A line that `AQN.load` reads."""
    seed: int = 0
    """Keys the noise of the plan; AQN carries a seed of its own."""
    total_steps: int = Field(default=1, ge=1)
    """Steps of the whole run, which the schedule of AQN is stretched over."""
    ledger: str | None = None
    """A folder in which every process leaves its ledger."""

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        if self.plan is not None:
            Plan.parse(self.plan, seed=self.seed)
        if self.aqn is not None and AQN.load(self.aqn).order == "before" and self.plan is None:
            raise ShaketableError(f"{self.aqn}: order=before needs a plan, and there is none; drop order")
        return self

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Instructions:
        """Instructions from a framework's config; plan and aqn may also name YAML files, which are read here and now.

        Raises:
            ShaketableError: An unknown key, or one that cannot be read.
        """
        fields = {key: value for key, value in data.items() if value is not None}
        if "plan" in fields:
            plan = Plan.load(fields["plan"], seed=_seed(fields.get("seed")))
            fields |= {"plan": plan.text(), "seed": plan.seed}
        if "aqn" in fields:
            fields["aqn"] = AQN.load(fields["aqn"]).text()
        return read_keys(cls, "shaketable", fields)

    @classmethod
    def from_env(cls, environment: Mapping[str, str]) -> Instructions | None:
        """The instructions of this process's environment; None when it has no plan."""
        found = {field: environment[name] for field, name in VARIABLES.items() if environment.get(name)}
        return cls.from_mapping(found) if "plan" in found else None

    def digest(self) -> str:
        """The same for all that have the same instructions, wherever their ledgers go."""
        text = json.dumps(self.model_dump(exclude={"ledger"}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _seed(value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except ValueError:
        raise ShaketableError(f"shaketable: seed must be a whole number, not {value!r}") from None
