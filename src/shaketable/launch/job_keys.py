"""`shaketable run` around a job that has its plan among its own arguments: `+shaketable.plan=…` of verl, or the origin's keys.

Such keys are accepted by Hydra whether or not anybody reads them. So nothing is injected from here: `run` sees to it that they
are read, by an integration that injects and proves for itself, and that it is an error when they are not. It puts our plugin
in front of verl, whatever verl's own settings for plugins are; it stops at once where this package cannot be imported
(`startup/`); and it looks in the end for the line that whoever read the keys has written. A job that cannot be shaken is
stopped before, by `integrations/hydra_guard.py`, with 2.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from shaketable.launch.run import NOTHING_INJECTED, STARTUP, run_command

READ = "SHAKETABLE_KEYS_READ"
"""The file that is written to when the keys were read."""
MODULES, PLUGIN = "VERL_USE_EXTERNAL_MODULES", "shaketable.integrations.verl"
_GROUP = r"shaketable|deadzone|aqn|trainer\.(?:noisy_ops|hw_error_injection|noise_injection)"
_KEY = re.compile(rf"\+{{0,2}}((?:(?:{_GROUP})(?:\.[\w.]+)?)|(?:deadzone|aqn)_\w+)=")
_VARIABLE, _VERL = "VERL_NOISY_OPS_ENABLED", "verl.trainer"


def keys_of(command: list[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """The keys among a command's arguments that ask for faults, and, for a job of verl, the origin's variable that does."""
    keys = [found[1] for argument in command if (found := _KEY.match(argument))]
    is_on = (environ or {}).get(_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")
    return [*keys, _VARIABLE] if is_on and any(_VERL in word for word in command) else keys


def run_with_keys(command: list[str], keys: list[str]) -> int:
    """Run a command that asks for faults by itself; its exit code, or 3 when it succeeded and nobody read the keys."""
    with tempfile.TemporaryDirectory(prefix="shaketable-") as folder:
        read = Path(folder) / "read"
        code = run_command(command, _environment(read))
        if code == 0 and not read.exists():
            sys.stderr.write(f"shaketable: nothing was injected: no process of this command has read {', '.join(keys)}\n")
            return NOTHING_INJECTED
    return code if code >= 0 else 128 - code


def _environment(read: Path) -> dict[str, str]:
    path, modules = os.environ.get("PYTHONPATH"), os.environ.get(MODULES)
    chosen = [*(modules.split(",") if modules else []), PLUGIN]
    return os.environ | {
        READ: str(read),
        MODULES: ",".join(dict.fromkeys(chosen)),
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *([path] if path else [])]),
    }
