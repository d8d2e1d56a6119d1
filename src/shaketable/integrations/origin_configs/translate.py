"""Configs of the study that this project re-implements, as a plan and an AQN. Imports neither torch nor verl.

    found = translate(OmegaConf.to_container(config, resolve=True), os.environ)
    print(*found.lines, sep="\\n")        # trainer.noisy_ops → relative_gaussian:0.05@op.matmul,phase=rollout+train
    found.plan, found.aqn                # or None

That study patched verl and gave it keys of its own: `trainer.hw_error_injection`, `trainer.noisy_ops`,
`trainer.noise_injection`, `deadzone`, `aqn`, and `VERL_NOISY_OPS_*` in the environment. Whoever has such configs keeps them.
docs/origin-configs.md has the table.

A translation is not a replay. Where the origin did something that it did not mean to (noise in validation, a dead zone that
destroyed the model), what it meant is done, and the line that is printed at the start says so. What cannot be done is an
error that names the key: the origin's runs were lost to keys that were accepted and did nothing.

One AQN acts in a run, so two that are both on are an error; faults add up, in the order modules, operators, dead zone: noise
in front may lift a signal over the dead zone, which is the effect that the origin looked for.

Rejected: translating to `+shaketable.plan=…` on the command line. A user would then have two places that say what a run
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shaketable.aqn.spec import AQN
from shaketable.errors import ShaketableError
from shaketable.integrations.origin_configs import aqn as origin_aqn
from shaketable.integrations.origin_configs import faults as origin_faults
from shaketable.integrations.origin_configs.keys import Found, grouped
from shaketable.plan import Plan


@dataclass(frozen=True)
class Translation:
    """What an origin config asks for."""

    plan: Plan | None = None
    """The faults; None without any."""
    aqn: AQN | None = None
    """The noise in the sampler; None without any."""
    lines: tuple[str, ...] = ()
    """One line per group of keys that was found, to print at the start: what it became, or that it is off."""


def translate(config: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Translation:
    """The plan and the AQN of a verl config with the origin's keys; empty when it has none, or all are off.

    Args:
        config: The whole config as plain nested mappings, lists and values.
        environ: The environment, for `VERL_NOISY_OPS_*`; none by default.

    Raises:
        ShaketableError: A key is unknown or cannot be honoured, two AQNs are on, or config and environment disagree.
    """
    config = grouped(config)
    noises = [found for found in (origin_aqn.weights(config), origin_aqn.outputs(config)) if found]
    faults = [origin_faults.hardware(config), origin_faults.operators(config, environ or {}), origin_faults.dead_zone(config)]
    groups = [found for found in faults if found] + noises
    clauses = tuple(clause for found in groups if found.plan for clause in found.plan.clauses)
    return Translation(Plan(clauses=clauses) if clauses else None, _only(noises), tuple(found.line for found in groups))


def _only(noises: list[Found]) -> AQN | None:
    on = [found for found in noises if found.aqn]
    if len(on) > 1:
        names = " and ".join(found.name for found in on)
        raise ShaketableError(f"{names} are both on; a run has one AQN: set enabled: false in one of them")
    return on[0].aqn if on else None
