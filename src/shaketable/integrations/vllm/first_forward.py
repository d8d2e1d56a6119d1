"""Every clause must strike in the first forward in which it acts.

The study we come from reported "0 % degradation" of a vLLM in which nothing had been injected. A hook that is never called
leaves no trace of its own, so the worker compares the ledger before and after each request, clause by clause, until each has
been seen; from then on it compares nothing.
"""

from __future__ import annotations

from shaketable.errors import InertError
from shaketable.inject.injection import Injection
from shaketable.integrations.vllm.refusals import is_written


class FirstStrikes:
    """The clauses of a plan that have not been seen to strike yet."""

    def __init__(self, plan: Injection) -> None:
        self.plan = plan
        self.unproven = {i for i, clause in enumerate(plan.plan.clauses) if not is_written(clause)}

    def expected(self) -> dict[int, int]:
        """Clauses that act now and have not been seen to, with their fires so far."""
        sites = self.plan.ledger.sites
        return {i: sites[i].forward for i in self.unproven if self._acts(i)} if self.plan.enabled else {}

    def check(self, before: dict[int, int]) -> None:
        """Raise when a clause that was expected to strike did not."""
        for i, fires in before.items():
            if self.plan.ledger.sites[i].forward == fires:
                text = self.plan.plan.clauses[i].text()
                raise InertError(f"{text} is on in this vLLM worker, and its first forward struck nothing")
        self.unproven -= before.keys()

    def _acts(self, clause: int) -> bool:
        site = self.plan.plan.clauses[clause].site
        here = not site.phase or self.plan.phase in site.phase
        return here and "forward" in site.directions and not self.plan.faults[clause].is_off
