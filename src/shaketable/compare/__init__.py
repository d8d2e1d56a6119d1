"""One device against another: fingerprints, teacher forcing, and the error model that fits.

The package can be called, as `inject` can: `shaketable.compare(…)`.
"""

import sys
from types import ModuleType
from typing import Any


class _ComparePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from shaketable.compare.compare import compare

        return compare(*args, **kwargs)


sys.modules[__name__].__class__ = _ComparePackage
