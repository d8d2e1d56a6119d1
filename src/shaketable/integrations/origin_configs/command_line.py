"""The origin's command lines: its keys without `+` accepted, its scripts answered with the command to use. Imports no torch.

Its scripts and the commands that do the same here are in `documents.yaml`. Nothing is run: a script of that name in another
checkout may do something else.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.integrations.origin_configs.translate import dotted, translate
from shaketable.io.yaml_file import read_yaml

DOCUMENTS = Path(__file__).with_name("documents.yaml")
RECIPES = Path(__file__).parents[2] / "data" / "verl"
SHOWN = "examples/verl/"
"""The path of `RECIPES` in a checkout."""
BFLOAT16_SCALE = 2e-3
"""Relative noise below it is rounded away in bfloat16, so a recipe computes in float32."""
TRAIN_PPO = "train_ppo.py"
EAGER = "actor_rollout_ref.rollout.enforce_eager=True"


def accepted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments of verl with `++` in front of the origin's keys, and the keys that were given it.

    The origin had put its keys into verl's own config, and Hydra refuses a key that the config does not have.
    """
    found, changed = [], []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and (path := dotted(key)) is not None:
            changed.append(key)
            argument = f"++{path}={value}"
        found.append(argument)
    return found, changed


def answer(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The commands to use in place of one of the origin's, for people to read; None for every other command.

    Args:
        command: A program with its arguments.
        environ: Its environment, for `VERL_NOISY_OPS_*` and for what the origin's scripts read.

    Raises:
        ShaketableError: The command is the origin's, and a value in it cannot be read.
    """
    known = {entry["script"] for entry in _scripts()} | {TRAIN_PPO}
    for at, word in enumerate(command[:2]):
        if (name := PurePath(word).name) in known:
            use = [_reachable(line) for line in instead(command[at:], environ)]
            head = f"{name} is a script of the origin study, and needs its verl; here:"
            return f"{head} {use[0]}" if len(use) == 1 else "\n  ".join([head, *use])
    if any("verl.trainer" in word for word in command):
        return None
    return variables_answer(environ, f" -- {shlex.join(command)}")


def _scripts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_yaml(DOCUMENTS, "the origin's documents")["scripts"]
    return found


def _reachable(command: str) -> str:
    """A command whose recipes can be started from here: by their path in the package, outside of a checkout."""
    if Path(SHOWN).is_dir():
        return command
    return re.sub(rf"{SHOWN}([\w.]+)", lambda found: shlex.quote(str(RECIPES / found[1])), command)


def variables_answer(environ: Mapping[str, str], command: str = " …") -> str | None:
    """The plan to use in place of `VERL_NOISY_OPS_*`, which only verl reads; None where they ask for nothing."""
    if (plan := translate({}, environ).plan) is None:
        return None
    text = plan.text().replace(",phase=rollout+train", "")
    use = f"unset them and write --plan {shlex.quote(text)}{command}"
    return f"VERL_NOISY_OPS_* are read in a job of verl and nowhere else; {use}"


def instead(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The commands that do here what a script of the origin did with these arguments."""
    name, given = PurePath(words[0]).name, list(words[1:])
    plain, options = (given, {}) if name.endswith(".sh") else ([], _options(given, name))
    if name == TRAIN_PPO:
        environ = {**environ, "MODEL_PATH": options.pop("model_path", environ.get("MODEL_PATH", ""))}
        return [" ".join([*_recipe_variables(environ), _train_ppo(options)])]
    entries = [entry for entry in _scripts() if entry["script"] == name]
    for entry in entries:
        if "first" in entry and plain[:1] == [entry["first"]]:
            return _filled(entry, [], {}, environ)
        if "first" not in entry and entry.get("needs") in (None, *options):
            return _filled(entry, plain, options, environ)
    return _filled(entries[-1], plain, options, environ)


def _filled(
    entry: Mapping[str, Any], plain: Sequence[str], options: Mapping[str, str], environ: Mapping[str, str]
) -> list[str]:
    """An entry's commands with the values of the arguments, and of the variables that the script read."""
    usual = {key: str(value) for key, value in (entry.get("arguments") or {}).items()}
    if len(plain) > len(usual) or not options.keys() <= usual.keys():
        raise ShaketableError(f"{entry['script']} of the origin study takes other arguments: {', '.join(usual)}")
    values = {**usual, **dict(zip(usual, plain, strict=False)), **options}
    for key, words in (entry.get("words") or {}).items():
        if values[key] not in words:
            raise ShaketableError(f"{entry['script']}: {key} is {values[key]!r}; valid: {', '.join(words)}")
        values[key] = words[values[key]]
    before = _recipe_variables(environ)
    if "scale" in values:
        try:
            scale = float(values["scale"])
        except ValueError:
            raise ShaketableError(f"{entry['script']}: the scale is {values['scale']!r}; write a number") from None
        values["scale"] = f"{scale:g}"
        before += ["DTYPE=float32"] if scale < BFLOAT16_SCALE else []
    values["model"] = shlex.quote(environ.get("MODEL_PATH") or "Qwen/Qwen2.5-1.5B-Instruct")
    commands = [entry["command"]] if isinstance(entry["command"], str) else entry["command"]
    return [" ".join([*(before if ".sh" in command else []), command.format(**values)]) for command in commands]


def _recipe_variables(environ: Mapping[str, str]) -> list[str]:
    """`MODEL_PATH` and `TRAIN_DATA`, which the origin's scripts read, as the recipes call them."""
    model = [f"MODEL={shlex.quote(environ['MODEL_PATH'])}"] if environ.get("MODEL_PATH") else []
    file = environ.get("TRAIN_DATA")
    return model + ([f"DATA={shlex.quote(str(PurePath(file).parent))}"] if file else [])


def _train_ppo(options: dict[str, str]) -> str:
    """`train_ppo.py` of the experiment design: its flat options are the groups `deadzone` and `aqn`; by epochs, as it says."""
    if (file := options.pop("aqn_config", None)) is not None:
        if options.pop("aqn_schedule", "epoch_aware") != "epoch_aware" or options:
            raise ShaketableError(f"{TRAIN_PPO}: --aqn_config is a file with layers, σ and schedule; write the rest there")
        return shlex.join(["bash", "examples/verl/baseline.sh", EAGER, f"+shaketable.aqn={file}"])
    truth = {"true": True, "false": False}
    found = translate({key: truth.get(text.lower(), text) for key, text in options.items()} | {"trainer": {"total_epochs": 2}})
    plan = "" if found.plan is None else found.plan.text().replace(",phase=rollout+train", "")
    aqn = "" if found.aqn is None else found.aqn.text()
    if not plan:
        return " ".join(["bash examples/verl/baseline.sh", *([EAGER, f"\"+shaketable.aqn='{aqn}'\""] if aqn else [])])
    asked = [f"{name}={shlex.quote(value)}" for name, value in (("PLAN", plan), ("AQN", aqn)) if value]
    return " ".join([*asked, f"bash examples/verl/{'aqn_epoch_aware' if aqn else 'operator_noise'}.sh"])


def _options(words: Sequence[str], name: str) -> dict[str, str]:
    """`--key value` pairs."""
    keys, values = words[::2], words[1::2]
    if len(keys) != len(values) or not all(key.startswith("--") for key in keys):
        raise ShaketableError(f"{name} of the origin study takes --option VALUE pairs")
    found = {key[2:]: value for key, value in zip(keys, values, strict=True)}
    if name == TRAIN_PPO and (unknown := next((k for k in found if k != "model_path" and dotted(k) is None), None)):
        raise ShaketableError(f"{name} of the origin study has no --{unknown}; it has --model_path, --deadzone_… and --aqn_…")
    return found
