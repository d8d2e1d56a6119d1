"""Plans made active: modules, operators (forward and backward, eager and compiled), weights; and the ledger.

The room and its verb share a name, and Python keeps a package's submodules as its attributes. So this module can be
called: `shaketable.inject(model, plan)` is `shaketable.inject.injection.inject(model, plan)`.
"""

import sys
from types import ModuleType

from shaketable.inject.injection import Injection, inject
from shaketable.ledger.ledger import Ledger


class _InjectPackage(ModuleType):
    __call__ = staticmethod(inject)


sys.modules[__name__].__class__ = _InjectPackage

__all__ = ["Injection", "Ledger", "inject"]
