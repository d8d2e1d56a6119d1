"""Jobs of verl that ask for faults among their own arguments: `+shaketable.plan=…`, or the origin's keys.

Hydra accepts such keys whether or not anything reads them. verl reads ours by a plugin, and only where it has plugins.
Elsewhere the run would be clean, which two things prevent. Neither imports torch or verl.

**`shaketable run --` around the job** (`run_with_keys`) puts our plugin in front of verl, stops where this package cannot be
imported (`launch/startup/`), and looks in the end for the line that the reader of the keys has written.

**A guard in Hydra** (`watch`, by `hydra_plugins/shaketable_guard.py`) ends the job with one line and 2, before Ray starts: when
this program of this verl has no trainer that our plugin replaces, and when nothing has read the keys by `ray.init`. The
origin's own verl reads the origin's keys itself, with a line that says so.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from shaketable.errors import ShaketableError
from shaketable.integrations.common.wrapping import wrap_once
from shaketable.integrations.origin_configs.translate import translate

READ = "SHAKETABLE_KEYS_READ"
"""The file that is written to when the keys were read."""
MODULES = "VERL_USE_EXTERNAL_MODULES"
_GROUP = r"shaketable|deadzone|aqn|trainer\.(?:noisy_ops|hw_error_injection|noise_injection)"
_KEY = re.compile(rf"\+{{0,2}}((?:(?:{_GROUP})(?:\.[\w.]+)?)|(?:deadzone|aqn)_\w+)=")
_VARIABLE, _VERL = "VERL_NOISY_OPS_ENABLED", "verl.trainer"
RELEASES = "0.9.0 and 0.9.1"
"""Releases of verl whose `main_ppo` reads our keys, as far as they were tested."""
PLUGIN = "shaketable.integrations.verl"
"""The module that verl's processes import to obey us."""
OF_THE_ORIGIN = tuple(f"verl.utils.{name}" for name in ("noisy_ops", "hw_error_injection", "noise_injection"))
"""Modules of the origin's own verl, which read its keys."""

_read = False
_asked: list[str] = []
"""The keys of this program's config that must have been read before Ray starts."""


# ---- around the job


def keys_of(command: list[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """The keys among a command's arguments that ask for faults, and, for a job of verl, the origin's variable that does."""
    keys = [found[1] for argument in command if (found := _KEY.match(argument))]
    is_on = (environ or {}).get(_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")
    return [*keys, _VARIABLE] if is_on and any(_VERL in word for word in command) else keys


def run_with_keys(command: list[str], keys: list[str]) -> int:
    """Run a command that asks for faults by itself; its exit code, or 3 when it succeeded and nothing read the keys."""
    from shaketable.launch.run import NOTHING_INJECTED, run_command

    with tempfile.TemporaryDirectory(prefix="shaketable-") as folder:
        read = Path(folder) / "read"
        code = run_command(command, _environment(read))
        if code == 0 and not read.exists():
            sys.stderr.write(f"shaketable: nothing was injected: no process of this command has read {', '.join(keys)}\n")
            return NOTHING_INJECTED
    return code if code >= 0 else 128 - code


def _environment(read: Path) -> dict[str, str]:
    from shaketable.launch.run import STARTUP

    path, modules = os.environ.get("PYTHONPATH"), os.environ.get(MODULES)
    chosen = [*(modules.split(",") if modules else []), PLUGIN]
    return os.environ | {
        READ: str(read),
        MODULES: ",".join(dict.fromkeys(chosen)),
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *([path] if path else [])]),
    }


# ---- inside of the job


def keys_were_read(what: str) -> None:
    """An integration has read the keys of this program's config."""
    global _read
    _read = True
    if path := os.environ.get(READ):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{what}\n")


def watch() -> None:
    """Judge the config when Hydra has made it."""
    from hydra.core.hydra_config import HydraConfig

    wrap_once(HydraConfig, "set_config", _set_and_judge)


def _set_and_judge(set_config: Callable[[Any, Any], None], hydra: Any, config: Any) -> None:
    set_config(hydra, config)
    from omegaconf import OmegaConf

    judge({key: value for key, value in OmegaConf.to_container(config, resolve=False).items() if key != "hydra"})


def judge(config: Mapping[str, Any]) -> None:
    """Let a config pass that asks for nothing, or that will be read; end the program otherwise."""
    global _asked
    asked, plan = asks_for(config, os.environ)
    own = next(filter(_is_here, OF_THE_ORIGIN), None)
    if own is not None and asked and not config.get("shaketable"):
        sys.stderr.write(f"shaketable: {', '.join(asked)}: this verl reads them itself ({own}), and no ledger proves it\n")
    elif asked:
        verl = getattr(sys.modules.get("verl"), "__version__", "?")
        if (problem := unread(config, asked, plan, _program(), verl, PLUGIN in sys.modules)) is not None:
            _end(problem)
        if (ray := sys.modules.get("ray")) is not None:
            _asked = asked
            wrap_once(ray, "init", _check_and_init)


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # one of the packages above it
        return False


def asks_for(config: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[list[str], str | None]:
    """The keys by which a config asks for faults, ours and the origin's, and the plan that they amount to."""
    group = config.get("shaketable")
    if isinstance(group, Mapping) and group:
        return [f"shaketable.{key}" for key in group], group.get("plan")
    if group is not None:
        return ["shaketable"], None
    try:
        origin = translate(config, environ)
    except ShaketableError as error:
        return [str(error).split(" ")[0].rstrip(",:")], None
    on = [line.split(" ")[0] for line in origin.lines if not line.endswith("→ off")]
    return on, None if origin.plan is None else origin.plan.text()


def unread(config: Mapping[str, Any], asked: list[str], plan: str | None, program: str, verl: str, loaded: bool) -> str | None:
    """Why the keys would not be read, in one line with what to do; None when they will be read."""
    trainer = config.get("trainer")
    if not isinstance(trainer, Mapping) or "v1" not in trainer or "actor_rollout_ref" not in config:
        reads = f"{program} of verl {verl} does not read {', '.join(asked)}: nothing would be injected"
        instead = f"shaketable run --plan {shlex.quote(plan or 'PLAN')} -- …, without these keys"
        return f"{reads}; verl.trainer.main_ppo of verl {RELEASES} does, and any job can be run with: {instead}"
    if not loaded:
        chosen = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
        why = "its entry point is not installed" if chosen == "auto" else f"VERL_USE_EXTERNAL_PLUGINS={chosen} leaves it out"
        return f"verl has not loaded {PLUGIN} ({why}): nothing would be injected; set VERL_USE_EXTERNAL_MODULES={PLUGIN}"
    return None


def _check_and_init(init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """verl's main checks its config, where the plugin reads it, and starts Ray then."""
    if not _read:
        _end(f"Ray starts, and nothing has read {', '.join(_asked)}; call verl.utils.config.validate_config(config) before")
    return init(*args, **kwargs)


def _program() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return str(spec.name) if spec is not None else os.path.basename(sys.argv[0])


def _end(problem: str) -> NoReturn:
    sys.stderr.write(f"shaketable: {problem}\n")
    raise SystemExit(2)
