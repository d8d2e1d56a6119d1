"""Which taps an operator has: by its family, and by the model and the layer that call it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shaketable.plan import OPS

if TYPE_CHECKING:
    from shaketable.inject.calls import Entry, Frame
    from shaketable.inject.injection import Injection
    from shaketable.inject.taps import Tap


class OperatorTaps:
    """The operator clauses of one injection, as taps."""

    def __init__(self, injection: Injection) -> None:
        self.injection = injection
        self.loose: Entry | None = None
        """Who calls an operator of a compiled graph that no model is in; None where that is nobody's business."""
        self._taps: dict[tuple[int, int | None, str, str | None], list[Tap]] = {}

    def make(self, owner: int, prefix: str, layers: range) -> None:
        """Taps for every operator family of every layer of a model, and for operators outside of layers."""
        for i, clause in enumerate(self.injection.plan.clauses):
            if clause.site.level != "op":
                continue
            for family in families(clause.site.names):
                for layer in [None, *layers]:
                    if clause.site.layers is not None and layer not in clause.site.layers:
                        continue
                    name = f"{prefix}{family}" if layer is None else f"{prefix}layer.{layer}.{family}"
                    tap = self.injection.make_tap(i, name, "output", layer)
                    for excluded in (None, *clause.site.include):
                        self._taps.setdefault((owner, layer, family, excluded), []).append(tap)

    def at(self, family: str, frame: Frame) -> list[Tap]:
        """Taps for an operator called in `frame`."""
        return self._taps.get((frame.entry.owner, frame.layer, family, frame.excluded), [])

    def of(self, family: str, entry: Entry) -> list[Tap]:
        """Taps for an operator called by `entry` itself."""
        return self._taps.get((entry.owner, entry.layer, family, entry.excluded), [])

    def traced(self, family: str) -> list[Tap]:
        """Taps for an operator of the graph that is being compiled."""
        entry = self.injection.tracing[-1] if self.injection.tracing else self.loose
        return [] if entry is None or entry.atomic == family else self.of(family, entry)

    def reach(self, family: str, frame: Frame) -> bool:
        """Whether an operator of this family would be struck here and now."""
        return any(t.is_active and t.acts_in(frame.phase) for t in self.at(family, frame))

    def note_fused(self, frame: Frame) -> None:
        """Count an attention call whose inner products cannot be reached."""
        for tap in self.at("matmul", frame):
            if tap.is_active and not frame.recomputing:
                self.injection.sites[tap.clause].fused += 1


def families(names: tuple[str, ...]) -> tuple[str, ...]:
    """The operator families a site names."""
    return OPS if "all" in names else names
