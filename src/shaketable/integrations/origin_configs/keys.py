"""Reading one group of the origin's keys: every value checked, every error with the key's full dotted name. Imports no torch.

The origin read its keys with `.get(key, default)` and `getattr(config, key, default)`: a misspelt key was the default, and a
key that got lost on its way to a worker was the default there. Here a key that nobody reads is an error, in a group that is
off too: `enabld: true` is one. So is a group that has keys and no `enabled`, such as the parameters of a test that a document
lists: nobody can tell whether it was meant to be on, and a run that is off would be believed to be shaken.

YAML 1.1 reads `1e-4` (no dot) as text, and Hydra and PyYAML disagree about it, so text that is a number is one. Text that is
a truth value is one in the environment, where all is text, and nowhere else.

**Spellings.** `grouped` brings every spelling that the documents print into the nested groups that the translation reads:

    deadzone_layer: 15                          a flat key: deadzone.layer
    trainer.noise_injection.sigma_start: 0.05   a dotted key of a YAML file: trainer, noise_injection, sigma_start
    actor_rollout_ref.rollout.deadzone_layer    refused: verl builds its rollout from that group and would fail in a worker

Rejected: a pydantic model per group. Its messages name fields, not the dotted keys that a user wrote, and half of what is
checked here (names of modules, what goes with what) would be validators anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shaketable.aqn.spec import AQN
from shaketable.errors import ShaketableError, nearest
from shaketable.plan import Plan

TRUE, FALSE = ("1", "true", "yes"), ("0", "false", "no")
LEFT_OUT = ("lm_head", "embed_tokens", "lora_A", "lora_B", "lora_", "base_layer")
"""What plans and AQN leave out, or meet once, by themselves: excluding it changes nothing."""
GROUPS = ("trainer.hw_error_injection", "trainer.noisy_ops", "trainer.noise_injection", "deadzone", "aqn")
"""All groups of keys that the origin gave to verl."""
FLAT = ("deadzone", "aqn")
"""Groups whose keys the documents also write flat, as `deadzone_layer`."""


@dataclass(frozen=True)
class Found:
    """What one group of keys became: part of a plan, an AQN, or nothing when it is off."""

    name: str
    note: str = "off"
    plan: Plan | None = None
    aqn: AQN | None = None

    @property
    def line(self) -> str:
        """The group, what it became, and what else there is to say."""
        became = self.plan or self.aqn
        if became is None:
            return f"{self.name} → {self.note}"
        return f"{self.name} → {became.text()}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class OriginKeys:
    """The keys of one group; null is a key that is not there."""

    name: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str, valid: tuple[str, ...]) -> OriginKeys | None:
        """The group `name` (dotted) of a config; None when there is none.

        Raises:
            ShaketableError: It is no mapping, or has a key that is not in `valid`.
        """
        found: Any = config
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return None if found is None else cls.inside(found, name, valid)

    @classmethod
    def inside(cls, found: object, name: str, valid: tuple[str, ...]) -> OriginKeys:
        """The group that was found under `name`."""
        if not isinstance(found, Mapping):
            raise ShaketableError(f"{name} is {shown(found)}; it must be a mapping with {', '.join(valid)}")
        if unknown := next((str(key) for key in found if str(key) not in valid), None):
            raise ShaketableError(f"{name}.{unknown}: unknown key; {nearest(unknown, valid, shown=20)}")
        return cls(name, {str(key): value for key, value in found.items() if value is not None})

    def is_on(self) -> bool:
        """What `enabled` says, which a group with any other key must have."""
        if self.values and "enabled" not in self.values:
            what = f"{self.name} has {next(iter(self.values))} and no enabled"
            raise ShaketableError(f"{what}, so it is neither on nor off; add +{self.name}.enabled=True")
        return self.flag("enabled")

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.problem(key, "write true or false")
        return value

    def number(self, key: str, default: float | None = None, *, above: float | None = None, most: float = math.inf) -> float:
        """A finite number of 0 or more, or above `above`; at most `most`. Needed when it has no default."""
        number = as_number(self.value(key, default))
        low = number is not None and (number >= 0 if above is None else number > above)
        if number is None or not low or number > most:
            bound = "of 0 or more" if above is None else f"above {above:g}"
            raise self.problem(key, f"write a number {bound}{'' if most == math.inf else f', at most {most:g}'}")
        return number

    def whole(self, key: str, default: int | None = None, *, least: int, most: int) -> int:
        """A whole number."""
        number = as_number(self.value(key, default))
        if number is None or not least <= number <= most or number != int(number):
            raise self.problem(key, f"write a whole number from {least} to {most}")
        return int(number)

    def word(self, key: str, default: str, valid: tuple[str, ...]) -> str:
        """One of `valid`."""
        return self._checked(key, self.values.get(key, default), valid)

    def words(self, key: str, default: tuple[str, ...], valid: tuple[str, ...]) -> tuple[str, ...]:
        """One or several of `valid`, each once; nothing is the default."""
        found = self.values.get(key) or default
        several = (found,) if isinstance(found, str) else found
        if not isinstance(several, list | tuple):
            raise self.problem(key, f"write a name or a list of names; valid: {', '.join(valid)}")
        return tuple(dict.fromkeys(self._checked(key, word, valid) for word in several))

    def layers(self, key: str) -> tuple[int, ...] | None:
        """Indices of decoder layers: a number or a list of them; None for `all` and for nothing."""
        found = self.values.get(key)
        if found is None or found == "all":
            return None
        found = found.split(",") if isinstance(found, str) else found
        several = found if isinstance(found, list | tuple) else [found]
        numbers = [as_number(layer) for layer in several]
        if not numbers or any(n is None or n < 0 or n != int(n) or n >= 10**6 for n in numbers):
            raise self.problem(key, "write a list of layer indices such as [14, 15], or 'all'")
        return tuple(sorted({int(n) for n in numbers if n is not None}))

    def only(self, key: str, same: tuple[str, ...], accepted: str) -> None:
        """A list of names that changes nothing, because all of them are in `same`."""
        if any(name not in same for name in self.names(key)):
            raise self.problem(key, f"{accepted}; also accepted: {', '.join(same)}")

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names, whatever they are; none when the key is not there."""
        found = self.values.get(key) or ()
        several = (found,) if isinstance(found, str) else found
        if not isinstance(several, list | tuple) or not all(isinstance(name, str) for name in several):
            raise self.problem(key, "write a name or a list of names")
        return tuple(several)

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key that is there, or has a default."""
        if key not in self.values and default is None:
            raise ShaketableError(f"{self.name}.{key} is missing; {self.name} needs it")
        return self.values.get(key, default)

    def problem(self, key: str, accepted: str) -> ShaketableError:
        """The error of a key: its full name, what was found, what is accepted."""
        return ShaketableError(f"{self.name}.{key} is {shown(self.values.get(key))}; {accepted}")

    def _checked(self, key: str, word: object, valid: tuple[str, ...]) -> str:
        if not isinstance(word, str) or word not in valid:
            raise ShaketableError(f"{self.name}.{key} is {shown(word)}; {nearest(str(word), valid, shown=30)}")
        return word


def as_number(value: object) -> float | None:
    """A finite number, also one that is written as text; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def shown(value: object) -> str:
    """A value in an error line, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


@contextmanager
def naming(name: str) -> Iterator[None]:
    """What a plan or an AQN minds is said of the group that it was made from."""
    try:
        yield
    except ShaketableError as error:
        raise ShaketableError(f"{name}: {error}") from None


# ---- spellings


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
