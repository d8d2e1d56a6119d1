"""The one judge of "this clause did nothing": `close`, `step`, `shaketable run`, the TRL callback, and the workers of engines.

A run that is **over** is judged by its ledger. While it **runs**, a clause is left alone if it may still act: it was not on
in enough passes (`inject/inert.py` counts them), or too few values were seen (a bit flip of one in a billion; an adapter whose
output is still all zeros). Clipping at an absolute ceiling is judged at the end, because an overflow may come late.

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shaketable.faults.base import FaultBase
from shaketable.faults.bits import BitFlip, Spike
from shaketable.faults.clipping import DeadZone, Saturation

if TYPE_CHECKING:
    from shaketable.ledger.ledger import SiteLedger

ENOUGH = 256
"""Changes to be expected of a fault that has made none, for it to be called inert; rounding swallows some."""
NEVER = 1e-6
"""Fewer than this: a million times as many values would not show one either."""


def why_inert(site: SiteLedger, fault: FaultBase | None = None, passes: int | None = None, least: int = 1) -> str | None:
    """One line about a clause that did nothing; None if it did something, or may still.

    Args:
        site: Its counts and measurements.
        fault: Its fault during the run; None when the run is over.
        passes: Passes in which it was on, during the run; None where they were not counted.
        least: Passes in which it must have been on to be called inert.
    """
    fires, sums = site.forward + site.backward, site.measured()
    if fires == 0 and fault is None:
        why = f"matched {site.matched} spots and never fired" + (f" ({'; '.join(site.notes)})" if site.notes else "")
    elif fires == 0 and passes is not None and passes >= least:
        why = f"was on in {passes} {'pass' if passes == 1 else 'passes'} and never fired"
    elif fires and sums.changed == 0 and (fault is None or changes_nothing(fault, sums.alive)):
        why = f"fired {fires} times and changed no value"
    else:
        return None
    return f"{site.fault}@{site.site} {why}"


def changes_nothing(fault: FaultBase, values: int) -> bool:
    """Whether a fault that has changed none of so many values that were not 0 can be said to change none at all."""
    if values == 0 or (isinstance(fault, Saturation) and fault.scope == "absolute"):
        return False
    share = fault.rate if isinstance(fault, Spike) else fault.magnitude if isinstance(fault, BitFlip | DeadZone) else 1.0
    expected = values * fault.sparsity * share
    return expected >= ENOUGH or expected < NEVER
