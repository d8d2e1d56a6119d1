"""What the workers of one role did between two readings of their reports.

A ledger only grows. "It has hit something" is then true for ever after the first step, and an error that is averaged over
the whole run hides the step in which it went wrong. So what is said of a step is the difference of two readings: fires by
clause and phase for each worker, and the error from the sums that were added, not from two averages.

A ledger measures the 1st, 2nd, 4th, 8th, … hit of a spot, so there are steps in which nothing was measured. Such a step has
no error, which is not an error of 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shaketable.integrations.common.worker_report import merged
from shaketable.ledger.ledger import Measured

BOTH = ("forward", "backward")
WHATS = ("plan", "aqn")


@dataclass(frozen=True)
class Span:
    """Two readings of a role's reports."""

    before: Sequence[dict[str, Any]]
    now: Sequence[dict[str, Any]]

    def fires(
        self,
        report: Mapping[str, Any],
        what: str,
        phase: str | None = None,
        ways: Iterable[str] = BOTH,
        clause: int | None = None,
    ) -> int:
        """Of one worker: by plan or aqn, in a phase or all, in some directions, of one clause or all."""
        earlier = [old for old in self.before if _who(old) == _who(report)]
        counts = [_count(found, what, phase, tuple(ways), clause) for found in (report, *earlier)]
        return counts[0] - sum(counts[1:])

    def total(self, what: str, phase: str | None = None, ways: Iterable[str] = BOTH, clause: int | None = None) -> int:
        """Of all workers."""
        return sum(self.fires(report, what, phase, tuple(ways), clause) for report in self.now)

    def error(self, what: str) -> float | None:
        """The largest relative RMS error of a clause; None when nothing was measured."""
        ledger, earlier = merged(self.now, what), merged(self.before, what)
        if ledger is None:
            return None
        old = [site.measured() for site in earlier.sites] if earlier is not None else [Measured()] * len(ledger.sites)
        errors = [_since(site.measured(), sums).error for site, sums in zip(ledger.sites, old, strict=True)]
        return max((error for error in errors if error is not None), default=None)


def _who(report: Mapping[str, Any]) -> tuple[Any, ...]:
    return report["pid"], report["rank"], report["started"]


def _count(report: Mapping[str, Any], what: str, phase: str | None, ways: tuple[str, ...], clause: int | None) -> int:
    sites = report[what]["sites"] if report.get(what) else []
    chosen = sites if clause is None else sites[clause : clause + 1]
    rows = [row for site in chosen for name, row in site["phases"].items() if phase in (None, name)]
    return sum(row[way] for row in rows for way in ways)


def _since(now: Measured, before: Measured) -> Measured:
    return Measured(**{name: value - getattr(before, name) for name, value in asdict(now).items()})
