"""Another plan at the sites of the one that is there: hooks, taps and compiled graphs stay as they are.

A graph knows its taps by their numbers and asks each of them, when it runs, what it is to do (`compile/custom_ops.py`). So what
happens at a site is free to change while a compiled model lives: fault, magnitude, phase, seed. Where it happens is in the
graph. What was counted stays in the ledger of the old plan, which nobody writes to any more; the new plan has its own.

On a GPU kernels read the rows of a table, and noise is arithmetic that the compiler has put into the graph: both are of one
fault. There only magnitudes can change.

Rejected: a second injection whose taps take over the numbers of the first. Modules that an engine does not compile would go
on calling the hooks of the first one.
"""

from __future__ import annotations

from shaketable.faults.cpu import native
from shaketable.inject.counters import HostTable
from shaketable.inject.inert import InertCheck
from shaketable.inject.injection import Injection
from shaketable.ledger.ledger import LiveLedger
from shaketable.ledger.spot import Spot
from shaketable.plan import Clause, Plan


def has_same_sites(plan: Plan, other: Plan) -> bool:
    """Whether two plans hit the same places, clause by clause; when they do is theirs."""
    return [_place(clause) for clause in plan.clauses] == [_place(clause) for clause in other.clauses]


def _place(clause: Clause) -> object:
    return clause.site.model_copy(update={"phase": (), "point": ()}), clause.points


def exchange(injection: Injection, plan: Plan, rank: int) -> None:
    """Put a plan with the same sites in place of the one there is. The injection is off afterwards."""
    assert has_same_sites(plan, injection.plan)
    assert not injection.tables.all
    injection.disable()
    injection.settle()
    injection.ledger.settle = injection.ledger.forget = None
    injection.plan, injection.rank = plan, rank
    injection.faults = [clause.fault for clause in plan.clauses]
    injection.ledger = LiveLedger.for_plan(plan, native.name())
    injection.sites = injection.ledger.sites
    injection.ledger.settle, injection.ledger.forget = injection.settle, injection.forget
    injection.counters = HostTable()
    for tap in injection.taps:
        spot = Spot(tap.spot.name, tap.spot.layer)
        tap.begin(injection.sites[tap.clause].spots.setdefault(spot.name, spot))
        injection.counters.add_tap()
    for attached in injection.models:
        attached.note_hidden()
    injection.references, injection.compiled_pass = {}, None
    injection.inert_check = InertCheck(injection)
    injection.calls.set_step(injection.calls.step)
