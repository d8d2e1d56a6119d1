"""What `compare` found: the divergence per layer and operator, the first beyond its dtype, and a plan that makes it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from shaketable.faults.noise import rms
from shaketable.numerics.fit import ROUNDING, Fit
from shaketable.plan import Plan

SCHEMA = 1
CASES = {"here": "on this device", "stored": "in the fingerprint", "both": "on both devices"}


@dataclass(frozen=True)
class Difference:
    """How far two results of the same operator are apart."""

    values: int
    differing: int
    max_abs: float
    relative: float
    """rms of the difference over rms of the stored values; of the difference itself where those are all zero."""
    not_finite: int
    """Values that are a number on one device only."""

    @classmethod
    def of(cls, stored: Tensor, here: Tensor) -> Difference:
        """Measure it, on the host and in float64."""
        a, b = stored.detach().cpu(), here.detach().cpu()
        a, b = (a, b) if a.dtype == b.dtype else (a.double(), b.double())
        differs = ~((a == b) | (a.isnan() & b.isnan()))
        known = a.isfinite() & b.isfinite()
        gap, size = (b.double() - a.double())[known], rms(a[known])
        top = float(gap.abs().max()) if gap.numel() else 0.0
        return cls(a.numel(), int(differs.sum()), top, rms(gap) / (size or 1.0), int((differs & ~known).sum()))

    @property
    def share(self) -> float:
        """Share of the values that differ."""
        return self.differing / self.values if self.values else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"share": self.share}


@dataclass
class ComparisonRow:
    """One operator, or what lies between operators."""

    layer: int | None
    op: str | None
    """Path in the layer (in the model, outside of the layers); None for the layer's own output."""
    point: str
    """`output`: what the operator made of its stored input. `input`: what reached it from the stored results before it."""
    site: str
    """As the plan language names it."""
    difference: Difference
    here: int | None = 0
    """Values of this device that a correct device cannot return; None when nobody can tell."""
    stored: int | None = 0
    """The same for the values in the file."""
    remark: str = ""
    fits: list[Fit] = field(default_factory=list)

    @property
    def beyond(self) -> str:
        """Whose result the dtype does not explain: here, stored, both, or nobody's (empty)."""
        sides = [name for name, count in (("here", self.here), ("stored", self.stored)) if count]
        return "both" if len(sides) == 2 else "".join(sides)

    @property
    def place(self) -> str:
        """The operator in words."""
        if self.op is None:
            return "the layer's own output"
        return self.op if self.point == "output" else f"what reaches {self.op}"

    @property
    def fit(self) -> Fit | None:
        """The best error model."""
        return self.fits[0] if self.fits else None

    @property
    def injectable(self) -> Fit | None:
        """The best error model that a plan can hold; None when rounding is the best."""
        if self.fit is None or self.fit.kind == ROUNDING:
            return None
        return next((f for f in self.fits if f.fault is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        facts: dict[str, Any] = {"layer": self.layer, "op": self.op, "point": self.point, "site": self.site}
        facts |= self.difference.to_dict()
        facts |= {"outside_here": self.here, "outside_stored": self.stored, "beyond": self.beyond or None}
        fit = self.fit
        return facts | {"remark": self.remark, "fit": None if fit is None else fit.to_dict()}


@dataclass
class LayerRow:
    """One decoder layer: as a whole, and its operators one by one."""

    layer: int
    name: str
    whole: Difference
    """The layer called with its stored input, nothing inside of it forced."""
    rows: list[ComparisonRow]

    @property
    def beyond(self) -> ComparisonRow | None:
        """Its first operator beyond the dtype."""
        return next((r for r in self.rows if r.beyond), None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        facts = {"layer": self.layer, "name": self.name, "whole": self.whole.to_dict(), "beyond": self.beyond is not None}
        return facts | {"ops": [r.to_dict() for r in self.rows]}


@dataclass
class DeviceComparison:
    """A fingerprint against this device."""

    stored: dict[str, Any]
    """Model, device, dtype, attention, versions and date of the fingerprint."""
    here: dict[str, Any]
    before: list[ComparisonRow]
    layers: list[LayerRow]
    after: list[ComparisonRow]
    notes: list[str] = field(default_factory=list)
    rounds_factors: bool = False
    """Whether one of the devices rounds the factors of its products below their dtype, as TF32 does."""

    @property
    def rows(self) -> Iterator[ComparisonRow]:
        """Every row in the order of computation."""
        yield from self.before
        for layer in self.layers:
            yield from layer.rows
        yield from self.after

    @property
    def first(self) -> ComparisonRow | None:
        """The first row beyond what the dtype explains."""
        return next((r for r in self.rows if r.beyond), None)

    @property
    def exit_code(self) -> int:
        """0 within what the dtype explains, 1 beyond."""
        return 0 if self.first is None else 1

    @property
    def sentence(self) -> str:
        """The result in one line."""
        pair = f"{self.stored['dtype']} on {self.stored['device']} and {self.here['dtype']} on {self.here['device']}"
        differing = sum(1 for r in self.rows if r.difference.differing)
        total = sum(1 for _ in self.rows)
        if self.first is None and not differing:
            return f"SAME: {total} operators in {len(self.layers)} layers agree bit for bit, {pair}."
        if self.first is None:
            return f"EXPLAINED: {differing} of {total} operators differ, none beyond what rounding explains, {pair}."
        return f"BEYOND: {self._blame(self.first)}"

    def _blame(self, row: ComparisonRow) -> str:
        where = "the first is outside of the layers" if row.layer is None else f"layer {row.layer} is the first"
        count = max(row.here or 0, row.stored or 0)
        fit = row.fit
        model = "" if fit is None or fit.kind == ROUNDING else f", best described as {fit.kind}:{fit.magnitude:.3g}"
        share = f"{count} of {row.difference.values} values {CASES[row.beyond]} are not what rounding allows"
        return f"{where}, {row.place}: {share} (relative error {row.difference.relative:.2e}{model})."

    def to_dict(self) -> dict[str, Any]:
        """What `--json` writes."""
        first = self.first
        return {
            "schema": SCHEMA,
            "kind": "comparison",
            "sentence": self.sentence,
            "beyond": first is not None,
            "first": None if first is None else first.to_dict(),
            "fingerprint": self.stored,
            "here": self.here,
            "layers": [layer.to_dict() for layer in self.layers],
            "before": [r.to_dict() for r in self.before],
            "after": [r.to_dict() for r in self.after],
            "plan": [f"{fit.fault.text()}@{row.site}" for row, fit in self.clauses() if fit.fault is not None],
            "notes": self.notes,
        }

    def clauses(self) -> Iterator[tuple[ComparisonRow, Fit]]:
        """Sites with an error that can be injected, and that the dtype does not explain."""
        for row in self.rows:
            explained = not row.beyond and row.here is not None and not self.rounds_factors
            if not explained and (fit := row.injectable) is not None:
                yield row, fit

    def plan_text(self) -> str | None:
        """The measured errors as a plan file; None when there is nothing to inject."""
        lines: list[str] = []
        for row, fit in self.clauses():
            assert fit.fault is not None
            lines.append(f"  # measured relative error {row.difference.relative:.3e}; {fit.goodness()}")
            if fit is not row.fit and row.fit is not None:
                lines.append(f"  # next best: {row.fit.kind}:{row.fit.magnitude:.4g} fits better, and no plan can say it")
            lines.append(f'  - "{fit.fault.text()}@{row.site}"')
        if not lines:
            return None
        stored, here = (f"{d['model']}, {d['dtype']} on {d['device']}, {d['date']}" for d in (self.stored, self.here))
        head = ["# Errors measured by shaketable compare, one clause per site.", f"# good: {stored}", f"# here: {here}"]
        text = "\n".join([*head, "seed: 0", "plan:", *lines, ""])
        _check(text)
        return text


def _check(text: str) -> None:
    """What is written can be read."""
    import yaml

    Plan.from_data(yaml.safe_load(text), name="the measured plan")
