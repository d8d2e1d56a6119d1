"""The ledger: how often each fault of a plan fired, and the error that was measured there.

A plan's clause is a site; a site has spots (a module at a point, or an operator of a layer). Each spot counts its
fires per phase and direction, and some of its fires are measured by comparing the tensor before and after
(`inject/counters.py` says which, and alone writes here).

Spots hold sums, not averages: ledgers of many processes are merged by adding them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from shaketable.errors import InertError
from shaketable.ledger.inert import why_inert

if TYPE_CHECKING:
    from shaketable.plan import Plan

SCHEMA = "shaketable.ledger/1"
TOLERANCE = 0.1
"""How far the measured magnitude may be from the one asked for before the ledger says why."""


@dataclass
class Measured:
    """Sums over the measured fires of one spot in one direction."""

    fires: int = 0
    square: float = 0.0
    """Sum of squared relative RMS errors."""
    values: int = 0
    changed: int = 0
    alive: int = 0
    """Values that were not zero before."""
    survived: int = 0
    """Those that were not zero after."""
    magnitudes: int = 0
    magnitude: float = 0.0
    """Sum of the magnitudes read back."""
    magnitude_square: float = 0.0
    """Sum of their squares."""

    def add(self, other: Measured) -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def take(self, numbers: list[float]) -> None:
        for name, number in zip(_SUMS, numbers, strict=True):
            before = getattr(self, name)
            setattr(self, name, before + (round(number) if isinstance(before, int) else number))

    @property
    def uncertainty(self) -> float:
        """Standard error of the mean magnitude read back."""
        if self.magnitudes < 2:
            return math.inf
        mean = self.magnitude / self.magnitudes
        return math.sqrt(max(0.0, self.magnitude_square / self.magnitudes - mean * mean) / (self.magnitudes - 1))

    @property
    def error(self) -> float | None:
        return math.sqrt(self.square / self.fires) if self.fires else None


_SUMS = tuple(f.name for f in fields(Measured))


@dataclass
class Spot:
    """One module at one point, or one operator of one layer."""

    name: str
    layer: int | None
    counts: dict[str, list[int]] = field(default_factory=dict)
    """Fires per phase: [forward, backward]."""
    recomputed: int = 0
    """Forward fires repeated by activation checkpointing; not among the counts."""
    seconds: float = 0.0
    forward: Measured = field(default_factory=Measured)
    backward: Measured = field(default_factory=Measured)
    lock: Any = field(default_factory=Lock, repr=False, compare=False)

    def fires(self, backward: bool) -> int:
        """Fires in one direction, over all phases."""
        return sum(c[backward] for c in self.counts.values())

    def add(self, other: Spot) -> None:
        for phase, (forward, backward) in other.counts.items():
            mine = self.counts.setdefault(phase, [0, 0])
            mine[0] += forward
            mine[1] += backward
        self.recomputed += other.recomputed
        self.seconds += other.seconds
        self.forward.add(other.forward)
        self.backward.add(other.backward)

    def copy(self) -> Spot:
        counts = {phase: list(both) for phase, both in self.counts.items()}
        return Spot(self.name, self.layer, counts, self.recomputed, self.seconds, replace(self.forward), replace(self.backward))

    def to_dict(self) -> dict[str, Any]:
        sums = {k: dict(vars(v)) for k, v in (("forward", self.forward), ("backward", self.backward)) if v.fires}
        return {
            "layer": self.layer,
            "counts": {k: list(v) for k, v in self.counts.items()},
            "recomputed": self.recomputed,
            "seconds": self.seconds,
            "measured": sums,
        }

    @classmethod
    def from_dict(cls, name: str, data: dict[str, Any]) -> Spot:
        spot = cls(name, data["layer"], data["counts"], data["recomputed"], data["seconds"])
        for direction, sums in data["measured"].items():
            setattr(spot, direction, Measured(**sums))
        return spot


@dataclass
class SiteLedger:
    """The record of one clause of the plan."""

    site: str
    fault: str
    asked: float | None
    spots: dict[str, Spot] = field(default_factory=dict)
    static: bool = True
    """Whether the spots are known beforehand (modules); operators are counted as they are hit."""
    fused: int = 0
    """Attention calls whose inner products no backend exposed."""
    notes: list[str] = field(default_factory=list)

    @property
    def named(self) -> str:
        """The fault as the plan writes it, and its magnitude beside that where it has been set to another one since."""
        written = re.match(r"\w+:([^,]+)", self.fault)
        same = self.asked is None or written is None or float(written[1]) == self.asked
        return self.fault if same else f"{self.fault}, now {self.asked:g}"

    @property
    def matched(self) -> int:
        """Modules matched, or operators met."""
        return sum(1 for s in self.spots.values() if self.static or s.counts)

    @property
    def forward(self) -> int:
        return sum(s.fires(False) for s in self.spots.values())

    @property
    def backward(self) -> int:
        return sum(s.fires(True) for s in self.spots.values())

    def measured(self, direction: str | None = None) -> Measured:
        """Sums over all spots, in one direction or both."""
        total = Measured()
        for spot in self.spots.values():
            for name in ("forward", "backward"):
                if direction in (None, name):
                    total.add(getattr(spot, name))
        return total

    @property
    def magnitude(self) -> float | None:
        """The magnitude as read back, averaged over the measured fires."""
        sums = self.measured()
        return sums.magnitude / sums.magnitudes if sums.magnitudes else None

    def remark(self) -> str | None:
        """Why the measured magnitude is not the one asked for; None when it is."""
        found = self.magnitude
        if not self.asked or found is None:
            return None
        slack = TOLERANCE * self.asked + 3 * self.measured().uncertainty
        if abs(found - self.asked) <= slack:
            return None
        was_set = "the magnitude was changed in between"
        why = was_set if self.named != self.fault else "the tensor's own type rounds, or the fault is data-dependent"
        return f"asked for {self.asked:g}, measured {found:.3g}: {why}"

    def summary(self) -> str:
        """One line: how often it fired, and whether what was measured is what was asked for."""
        known = self.magnitude is not None and self.asked is not None
        size = f", {self.magnitude:.3g} measured of {self.asked:.3g} asked for" if known else ""
        where = "1 site" if self.matched == 1 else f"{self.matched:,} sites"
        return f"{self.named}@{self.site} fired {self.forward + self.backward:,} times at {where}{size}"

    def by(self, what: str) -> dict[str, dict[str, int]]:
        """Fires per `phase` or per `layer`."""
        table: dict[str, dict[str, int]] = {}
        for spot in self.spots.values():
            for phase, (forward, backward) in spot.counts.items():
                key = phase if what == "phase" else str(spot.layer)
                row = table.setdefault(key, {"forward": 0, "backward": 0})
                row["forward"] += forward
                row["backward"] += backward
        return table

    def to_dict(self) -> dict[str, Any]:
        both, forward, backward = self.measured(), self.measured("forward"), self.measured("backward")
        return {
            "site": self.site,
            "fault": self.fault,
            "matched": self.matched,
            "forward": self.forward,
            "backward": self.backward,
            "recomputed": sum(s.recomputed for s in self.spots.values()),
            "measured_error": forward.error if forward.fires else backward.error,
            "measured_error_backward": backward.error,
            "changed_fraction": both.changed / both.values if both.values else None,
            "survival_rate": both.survived / both.alive if both.alive else None,
            "asked": self.asked,
            "measured_magnitude": self.magnitude,
            "remark": self.remark(),
            "seconds": sum(s.seconds for s in self.spots.values()),
            "fused": self.fused,
            "static": self.static,
            "notes": list(self.notes),
            "phases": self.by("phase"),
            "layers": self.by("layer"),
            "spots": {name: s.to_dict() for name, s in self.spots.items() if self.static or s.counts},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SiteLedger:
        spots = {name: Spot.from_dict(name, s) for name, s in data["spots"].items()}
        notes = list(data.get("notes", []))
        return cls(data["site"], data["fault"], data["asked"], spots, data["static"], data["fused"], notes)

    def add(self, other: SiteLedger) -> None:
        """Add the same clause of another process, or of the run before it was resumed; a magnitude that changed is averaged."""
        mine, theirs = self.measured().magnitudes, other.measured().magnitudes
        if self.asked is not None and other.asked is not None and mine + theirs:
            self.asked += (other.asked - self.asked) * theirs / (mine + theirs)
        self.fused += other.fused
        self.notes += [note for note in other.notes if note not in self.notes]
        for name, spot in other.spots.items():
            if name in self.spots:
                self.spots[name].add(spot)
            else:
                self.spots[name] = spot.copy()

    def copy(self) -> SiteLedger:
        """The same, to be added to; of operators only those that were met."""
        met = {name: spot.copy() for name, spot in self.spots.items() if self.static or spot.counts}
        return SiteLedger(self.site, self.fault, self.asked, met, self.static, self.fused, list(self.notes))


@dataclass
class Ledger:
    """The record of a plan: one `SiteLedger` per clause."""

    plan: str
    seed: int
    sites: list[SiteLedger]
    kernel: str = "torch"
    """The code that drew the noise: the compiled kernels (`native`) or plain `torch`."""
    processes: int = 1
    settle: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    """Called before the ledger of a live plan is read: it brings what was counted on every device."""
    forget: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    """Called when the ledger of a live plan is cleared: counters begin at zero too."""

    @classmethod
    def for_plan(cls, plan: Plan, kernel: str) -> Ledger:
        sites = [SiteLedger(c.site.text(), c.fault.text(), c.fault.asked(), static=c.site.level != "op") for c in plan.clauses]
        return cls(plan.text(), plan.seed, sites, kernel)

    @property
    def forward(self) -> int:
        """Fires forward, over all sites."""
        return sum(s.forward for s in self.sites)

    @property
    def backward(self) -> int:
        """Fires backward, over all sites."""
        return sum(s.backward for s in self.sites)

    @property
    def changed(self) -> int:
        """Values seen to change in the measured fires."""
        return sum(s.measured().changed for s in self.sites)

    def inert(self) -> list[str]:
        """One line per clause that did nothing, now that the run is over."""
        return [line for site in self.sites if (line := why_inert(site)) is not None]

    def check(self) -> None:
        """Raise `InertError` when a clause never fired or changed nothing."""
        if lines := self.inert():
            raise InertError("; ".join(lines) + " (allow_inert=True accepts this)")

    def to_dict(self) -> dict[str, Any]:
        """The ledger as versioned data."""
        return {
            "schema": SCHEMA,
            "plan": self.plan,
            "seed": self.seed,
            "kernel": self.kernel,
            "processes": self.processes,
            "forward": self.forward,
            "backward": self.backward,
            "sites": [s.to_dict() for s in self.sites],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Ledger:
        """The inverse of `to_dict`; refuses another schema."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"this is not a ledger of schema {SCHEMA!r}: {data.get('schema')!r}")
        sites = [SiteLedger.from_dict(s) for s in data["sites"]]
        return cls(data["plan"], data["seed"], sites, data["kernel"], data["processes"])

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Ledger:
        """Read what `save` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    @classmethod
    def merge(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """One ledger for many processes that ran the same plan."""
        every = list(ledgers)
        head = every[0]
        first = cls(head.plan, head.seed, [site.copy() for site in head.sites], head.kernel, head.processes)
        for other in every[1:]:
            if (other.plan, other.seed) != (first.plan, first.seed):
                raise ValueError(f"ledgers of different plans do not merge: {first.plan!r} and {other.plan!r}")
            for mine, theirs in zip(first.sites, other.sites, strict=True):
                mine.add(theirs)
            first.processes += other.processes
        first.kernel = "+".join(sorted({name for x in every for name in x.kernel.split("+")}))
        return first

    def clear(self) -> None:
        """Forget every count, keep the spots (a forked child starts from zero)."""
        if self.forget is not None:
            self.forget()
        for site in self.sites:
            site.fused, site.notes = 0, []
            for name, spot in site.spots.items():
                spot.__dict__.update(Spot(name, spot.layer).__dict__)

    def __str__(self) -> str:
        from shaketable.ledger.table import ledger_table

        return ledger_table(self)


class LiveLedger(Ledger):
    """The ledger of a plan that is active: brought up to date whenever it is read."""

    @property
    def sites(self) -> list[SiteLedger]:
        """The record of each clause, brought up to date."""
        if self.settle is not None:
            self.settle()
        return self._sites

    @sites.setter
    def sites(self, sites: list[SiteLedger]) -> None:
        self._sites = sites
