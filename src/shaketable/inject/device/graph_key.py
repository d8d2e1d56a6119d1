"""What a captured CUDA graph of a model depends on, for those who keep graphs.

The switch, magnitudes of noise and AQN's σ are read at every replay and need no other graph. What was not there when the graph
was captured does: a plan that was off left nothing in it, and neither did a σ of 0; and a fault without noise that takes
several operators is in it with the magnitude of that moment.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from shaketable.faults.gpu.recipes import recipe

if TYPE_CHECKING:
    from torch import nn

    from shaketable.inject.injection import Injection

_injections: weakref.WeakSet[Injection] = weakref.WeakSet()


def watch(injection: Injection) -> None:
    """Count an injection among those that a fingerprint is made of."""
    _injections.add(injection)


def injections() -> list[Injection]:
    """Every injection that is alive."""
    return list(_injections)


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Equal as long as a captured graph of the model is still right."""
    own = {id(p) for p in model.parameters()}
    acting = [i for i in _injections if not i.closed and _is_on(i, own)]
    return tuple(sorted((i.handle, i.enabled, *(_frozen(i, k) for k in range(len(i.faults)))) for i in acting))


def _is_on(injection: Injection, parameters: set[int]) -> bool:
    return any(id(p) in parameters for attached in injection.models for p in attached.model.parameters())


def _frozen(injection: Injection, clause: int) -> str:
    """What of a clause is in a graph: whether it is there at all, and all of it where its kernels read nothing."""
    fault, site = injection.faults[clause], injection.plan.clauses[clause].site
    if fault.is_off:
        return "off"
    held = injection.hold and "weight" in (site.point or fault.points)
    return "on" if held or recipe(fault) is not None else fault.text()
