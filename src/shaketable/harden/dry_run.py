"""Everything about a run of the ladder that can be known before weights are loaded: a mistake costs a second."""

from __future__ import annotations

from pathlib import Path

from shaketable.errors import ShaketableError
from shaketable.harden.config import HardenConfig
from shaketable.harden.scoring import conditions_of, forward_part
from shaketable.harden.sequences import Source
from shaketable.inject import Injection
from shaketable.models import ADAPTER, load_skeleton


def rehearse(config: HardenConfig) -> None:
    """Read the task, match every plan on the model's skeleton; raises whatever would stop the run later."""
    Source.of(config)
    if (Path(config.model).expanduser() / ADAPTER).is_file():
        raise ShaketableError(f"{config.model} is a LoRA adapter, which is not hardened; merge it into its base first")
    skeleton = load_skeleton(config.model)
    for plan in [forward_part(text, 0) for text in config.plans] + [c.plan for c in conditions_of(config) if c.plan]:
        Injection(plan).attach(skeleton)
