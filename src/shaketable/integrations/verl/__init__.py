"""verl: a plan in its samplers and its actors, AQN in its samplers, without a change to verl (docs/frameworks.md has the keys).

verl imports this module in each of its processes (entry point `verl.plugins`, or `VERL_USE_EXTERNAL_MODULES`). It waits for two
modules of verl: the one that checks configs, where an error ends the program before Ray is started, and the one that chooses
the trainer, where a config with our keys gets a trainer that obeys them (`verl/trainer.py`). verl swallows what plugins raise
while they are loaded, so there is nothing here that could: standard library only.

**A run that trains clean although the driver has printed a plan** is the worst failure. It happens where the process of verl's
task runner does not load our plugin. So the driver puts a prefix before the name of the trainer, which verl knows only where
our plugin is loaded.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shaketable.integrations.common.wrapping import wrap_once
from shaketable.launch import import_hooks

if TYPE_CHECKING:
    from shaketable.integrations.verl.settings import Shaking

OURS = "shaketable_"
"""Before the name of a trainer: the one that obeys us, on top of that of the name."""
_announced: set[str] = set()
"""Folders of ledgers of the runs that this process drives."""


def _on_config(module: ModuleType) -> None:
    """`verl.utils.config`: verl's driver checks every config with it."""
    _accept_keys_without_plus()
    if hasattr(module, "validate_config"):  # otherwise nobody reads the keys, and the guard of Hydra ends a job that has them
        wrap_once(module, "validate_config", _validate_and_announce)


def _validate_and_announce(validate: Callable[..., None], config: Any, *args: Any, **kwargs: Any) -> None:
    validate(config, *args, **kwargs)
    _announce(config)


def _accept_keys_without_plus() -> None:
    """verl's programs import this module before Hydra reads their arguments, and Hydra refuses keys that no config has."""
    if not any(argument.startswith(("trainer.", "deadzone", "aqn")) for argument in sys.argv[1:]):
        return
    from shaketable.integrations.origin_configs.command_line import accepted

    sys.argv[1:], changed = accepted(sys.argv[1:])
    if changed:
        print(f"shaketable: put ++ in front of {', '.join(changed)}, which verl's own config does not have", flush=True)


def _announce(config: Any) -> None:
    """Say what will be done, or end the program with the one line that says why not."""
    from omegaconf import OmegaConf, open_dict

    from shaketable.errors import ShaketableError
    from shaketable.integrations.job_keys import keys_were_read
    from shaketable.integrations.verl.checks import check_model
    from shaketable.integrations.verl.settings import keep_record

    if OmegaConf.select(config, "shaketable.resolved.ledger") in _announced:
        return
    try:
        if OmegaConf.select(config, "shaketable.resolved") is not None:
            raise ShaketableError("shaketable.resolved was written by another run; remove it from the config")
        plain = OmegaConf.to_container(config, resolve=True)
        found = asked(config)
        if found is not None:
            check_model(plain, found)
        keep_record(plain, found)
    except ShaketableError as error:
        sys.stderr.write(f"shaketable: {error}\n")
        raise SystemExit(2) from None
    keys_were_read("nothing was asked for" if found is None else str(found.ledger))
    if found is not None:
        print(*found.lines, sep="\n", flush=True)
        with open_dict(config):  # the trainer reads it in another process, where the environment and the folder may be others
            OmegaConf.update(config, "shaketable.resolved", found.model_dump(mode="json"), force_add=True)
            config.trainer.v1.trainer_mode = OURS + config.trainer.v1.trainer_mode
        _announced.add(str(found.ledger))


def _on_trainers(module: ModuleType) -> None:
    """`verl.trainer.ppo.v1`: verl's task runner asks it for a trainer class by name, and calls that with the config."""
    if hasattr(module, "get_trainer_cls"):  # otherwise verl ends at the trainer's name, which the driver has changed
        wrap_once(module, "get_trainer_cls", _choose_trainer)


def _choose_trainer(choose: Callable[[str], Callable[..., Any]], name: str) -> Callable[..., Any]:
    return functools.partial(_make_trainer, choose(name.removeprefix(OURS)))


def _make_trainer(chosen: Any, config: Any) -> Any:
    found = asked(config)
    if found is None:
        return chosen(config=config)
    from shaketable.integrations.verl.trainer import on_top_of

    config.trainer.v1.trainer_mode = config.trainer.v1.trainer_mode.removeprefix(OURS)
    if found.mismatch is not None:
        from shaketable.integrations.verl.mismatch import MeasuringTrainer as Ours
    else:
        from shaketable.integrations.verl.trainer import ShakenTrainer as Ours
    return on_top_of(chosen, Ours)(config=config, shaking=found)


def asked(config: Any) -> Shaking | None:
    """The faults that a config of verl asks for; None without any."""
    from omegaconf import OmegaConf

    from shaketable.integrations.verl.settings import shaking_of

    return shaking_of(OmegaConf.to_container(config, resolve=True), os.environ)


WATCHED: dict[str, Callable[[ModuleType], None]] = {
    "verl.utils.config": _on_config,
    "verl.trainer.ppo.v1": _on_trainers,
}
import_hooks.install(WATCHED)
