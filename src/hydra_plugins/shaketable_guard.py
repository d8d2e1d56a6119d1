"""Hydra imports this module because of where it is: it looks through the namespace package `hydra_plugins` in every program.

All programs of verl are Hydra's, and Hydra accepts `+shaketable.plan=…` whether or not anybody reads it. verl before 0.9 has no
plugins, and `VERL_USE_EXTERNAL_PLUGINS=none` switches them off: only Hydra is always there. What is done then is in
`shaketable.integrations.job_keys`; a Hydra program without verl never gets so far.
"""

from __future__ import annotations

import sys
from typing import Any

from hydra.plugins.search_path_plugin import SearchPathPlugin


class ShaketableGuard(SearchPathPlugin):  # type: ignore[misc]
    """Leaves the search path alone. Hydra calls it before it reads the overrides."""

    def manipulate_search_path(self, search_path: Any) -> None:
        """Watch this program if it is one of verl's."""
        if "verl" in sys.modules:
            from shaketable.integrations.job_keys import watch

            watch()
