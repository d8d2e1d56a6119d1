"""The origin's keys in every spelling that its documents print, brought into the nested groups that the translation reads.

    deadzone_layer: 15                          a flat key: deadzone.layer
    trainer.noise_injection.sigma_start: 0.05   a dotted key of a YAML file: trainer, noise_injection, sigma_start
    actor_rollout_ref.rollout.deadzone_layer    refused: verl builds its rollout from that group and would fail in a worker

Imports no torch. Rejected: flat keys inside of any group. verl's own groups are checked by verl, and a key that only some of
them let through would be found by accident.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shaketable.errors import ShaketableError

GROUPS = ("trainer.hw_error_injection", "trainer.noisy_ops", "trainer.noise_injection", "deadzone", "aqn")
"""All groups of keys that the origin gave to verl."""
FLAT = ("deadzone", "aqn")
"""Groups whose keys the documents also write flat, as `deadzone_layer`."""


def grouped(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with every key of the origin where the translation looks for it; other keys are left alone.

    Raises:
        ShaketableError: A key is written twice, in two spellings, or in a group that verl checks.
    """
    _refuse_in_rollout(config)
    whole = dict(config)
    for key in [str(key) for key in config]:
        if (path := _path(key)) is not None:
            _put(whole, path, whole.pop(key), key)
    return whole


def dotted(key: str) -> str | None:
    """The key as a dotted path to or into one of the origin's groups; None where it is not the origin's, or has no dots."""
    group, _, rest = key.partition("_")
    full = f"{group}.{rest}" if group in FLAT and rest else key
    whole = full in GROUPS and "." in full
    return full if whole or any(full.startswith(f"{name}.") for name in GROUPS) else None


def _path(key: str) -> list[str] | None:
    full = dotted(key)
    return None if full is None else full.split(".")


def _put(whole: dict[str, Any], path: list[str], value: Any, written: str) -> None:
    """Put a value at a path; mappings on the way are copied, for they are the caller's."""
    at = whole
    for part in path[:-1]:
        inner = at.get(part)
        if inner is not None and not isinstance(inner, Mapping):
            raise ShaketableError(f"{written} is there and {part} is {inner!r}; write {'.'.join(path)} alone")
        at[part] = dict(inner or {})
        at = at[part]
    if at.get(path[-1]) is not None:
        raise ShaketableError(f"{written} and {'.'.join(path)} are the same key; write one of them")
    at[path[-1]] = value


def _refuse_in_rollout(config: Mapping[str, Any]) -> None:
    """A sampler's own group is checked by verl, key by key, when a worker is made of it."""
    found: Any = config
    for part in ("actor_rollout_ref", "rollout"):
        found = found.get(part) if isinstance(found, Mapping) else None
    for key, value in found.items() if isinstance(found, Mapping) else ():
        if (full := dotted(str(key))) is not None:
            where = f"actor_rollout_ref.rollout.{key}"
            raise ShaketableError(f"{where}: verl's rollout has no such key; write +{full}={value} instead")
