"""Shaketable: inject the numerical errors of other hardware into a model, and prove that the errors were there.

Names are imported when they are first used, so that plans can be read, and `--help` answered, without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shaketable.aqn.schedules import Constant, EpochAware, GlobalDecay, LinearDecay
    from shaketable.aqn.spec import AQN
    from shaketable.compare.compare import compare
    from shaketable.compare.fingerprint import fingerprint
    from shaketable.errors import InertError, ModelError, NoMatchError, PlanError, ShaketableError
    from shaketable.evaluate.tasks import Problem, Score, Task, load_task
    from shaketable.inject import Injection, Ledger, inject
    from shaketable.locate.diagnosis import Diagnosis
    from shaketable.locate.locate import locate
    from shaketable.models import load_model
    from shaketable.plan import Plan
    from shaketable.sites.phases import phase

__version__ = "0.1.0"

_HOMES = {
    "Plan": "shaketable.plan",
    "inject": "shaketable.inject.injection",
    "Injection": "shaketable.inject.injection",
    "Ledger": "shaketable.ledger.ledger",
    "locate": "shaketable.locate.locate",
    "Diagnosis": "shaketable.locate.diagnosis",
    "fingerprint": "shaketable.compare.fingerprint",
    "compare": "shaketable.compare.compare",
    "phase": "shaketable.sites.phases",
    "AQN": "shaketable.aqn.spec",
    "GlobalDecay": "shaketable.aqn.schedules",
    "LinearDecay": "shaketable.aqn.schedules",
    "EpochAware": "shaketable.aqn.schedules",
    "Constant": "shaketable.aqn.schedules",
    "load_model": "shaketable.models",
    "load_task": "shaketable.evaluate.tasks",
    "Task": "shaketable.evaluate.tasks",
    "Problem": "shaketable.evaluate.tasks",
    "Score": "shaketable.evaluate.tasks",
    "ShaketableError": "shaketable.errors",
    "PlanError": "shaketable.errors",
    "NoMatchError": "shaketable.errors",
    "InertError": "shaketable.errors",
    "ModelError": "shaketable.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shaketable' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])


__all__ = [
    "AQN",
    "Constant",
    "Diagnosis",
    "EpochAware",
    "GlobalDecay",
    "InertError",
    "Injection",
    "Ledger",
    "LinearDecay",
    "ModelError",
    "NoMatchError",
    "Plan",
    "PlanError",
    "Problem",
    "Score",
    "ShaketableError",
    "Task",
    "compare",
    "fingerprint",
    "inject",
    "load_model",
    "load_task",
    "locate",
    "phase",
]
