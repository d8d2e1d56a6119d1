"""One device against another: fingerprints, teacher forcing, and the error model that fits.

`shaketable.compare` is this package and can be called, as `shaketable.locate` can: `shaketable.compare(...)` is
`shaketable.compare.compare.compare(...)`.
"""

import sys
from types import ModuleType
from typing import Any


def _compare(*args: Any, **kwargs: Any) -> Any:
    from shaketable.compare.compare import compare

    return compare(*args, **kwargs)


class _ComparePackage(ModuleType):
    __call__ = staticmethod(_compare)


sys.modules[__name__].__class__ = _ComparePackage
