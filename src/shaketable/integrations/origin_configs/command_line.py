"""The origin's command lines: its keys without `+` accepted, its scripts answered with the command to use. Imports no torch.

**Keys without `+`.** The origin had put its keys into verl's own config, so its commands write
`trainer.hw_error_injection.enabled=True`. Hydra refuses a key that the config does not have, before anybody of us is asked. But
verl loads its plugins before Hydra reads the arguments, so `accepted` can put `++` in front of such keys, which Hydra takes
whether or not a config has them. What was done is printed; only keys that the translation reads are touched.

**Scripts.** `answer` knows the scripts that the origin's documents call, from `documents.yaml`, and says in one line what does
the same here. It runs nothing: what a script of that name does in somebody's checkout is not known, and a guess would be a
silent replacement.

Rejected: a search path or a config store of ours that gives Hydra the keys. It would have to be named in verl's config, or
shadow that config by one of the same name, which then misses what the next release adds.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.integrations.origin_configs.keys import as_number
from shaketable.integrations.origin_configs.spelling import dotted
from shaketable.io.yaml_file import read_yaml

DOCUMENTS = Path(__file__).with_name("documents.yaml")
TRAIN_PPO = "train_ppo.py"
EAGER = "actor_rollout_ref.rollout.enforce_eager=True"
VERL = "verl.trainer"


class NotTheirsError(ShaketableError):
    """A script has one of the origin's names and arguments that the origin's never took."""


def accepted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments of verl with `++` in front of the origin's keys that have no prefix, and the keys that were given one."""
    changed = [argument for argument in arguments if _is_bare(argument)]
    found = [f"++{_path(argument)}={argument.partition('=')[2]}" if _is_bare(argument) else argument for argument in arguments]
    return found, [argument.partition("=")[0] for argument in changed]


def _is_bare(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    return bool(equals) and key.replace(".", "").isidentifier() and dotted(key) is not None


def _path(argument: str) -> str:
    return dotted(argument.partition("=")[0]) or ""


def answer(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """One line with the command to use in place of one of the origin's; None for every other command.

    Args:
        command: A program with its arguments.
        environ: Its environment, for `VERL_NOISY_OPS_*` and for what the origin's scripts read.

    Raises:
        ShaketableError: The command is the origin's, and a value in it cannot be read.
    """
    words, variables = _without_assignments(command, environ)
    if (at := _script(words)) is not None:
        name = PurePath(words[at]).name
        try:
            return f"{name} is a script of the origin study, and needs its verl; here: {instead(words[at:], variables)}"
        except NotTheirsError:
            return None
    if words and not any(VERL in word for word in words):
        return variables_answer(variables, f" -- {_shown(words)}")
    return None


def variables_answer(environ: Mapping[str, str], command: str = " …") -> str | None:
    """What to write in place of `VERL_NOISY_OPS_*`, which verl reads and nobody else; None where they ask for nothing."""
    if not any(name.startswith("VERL_NOISY_OPS_") for name in environ):
        return None
    from shaketable.integrations.origin_configs.translate import translate

    plan = translate({}, environ).plan
    if plan is None:
        return None
    text = plan.text().replace(",phase=rollout+train", "")
    use = f"unset them and write --plan {_quoted(text)}{command}"
    return f"VERL_NOISY_OPS_* are read in a job of verl and nowhere else; {use}"


def instead(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """The command that does here what a script of the origin did with these arguments."""
    name, given = PurePath(words[0]).name, list(words[1:])
    if name == TRAIN_PPO:
        return _train_ppo(_options(given, name))
    entries = [entry for entry in _scripts() if entry["script"] == name]
    plain = [word for word in given if not word.startswith("-")] if name.endswith(".sh") else []
    options = {} if plain or name.endswith(".sh") else _options(given, name)
    entry = next((e for e in entries if _fits(e, plain, options)), entries[-1])
    return _filled(entry, plain, options, environ)


def _fits(entry: Mapping[str, Any], plain: Sequence[str], options: Mapping[str, str]) -> bool:
    """Whether an entry is for these arguments: by its first word, or by an option that must be there."""
    return plain[:1] == [entry["first"]] if "first" in entry else entry.get("needs") in (None, *options)


def _filled(entry: Mapping[str, Any], plain: Sequence[str], options: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """An entry's command with the values of the arguments, and of the variables that the script read."""
    usual = {key: str(value) for key, value in (entry.get("arguments") or {}).items()}
    if len(plain) > len(usual) and "first" not in entry:
        raise NotTheirsError(f"{entry['script']} takes {len(usual)} arguments ({', '.join(usual)}), not {len(plain)}")
    if unknown := next((key for key in options if key not in usual), None):
        raise NotTheirsError(f"{entry['script']} has no option --{unknown}; it has {', '.join(f'--{key}' for key in usual)}")
    values = {**usual, **dict(zip(usual, plain, strict=False)), **options}
    for key, words in (entry.get("words") or {}).items():
        if values[key] not in words:
            raise ShaketableError(f"{entry['script']}: {key} is {values[key]!r}; valid: {', '.join(words)}")
        values[key] = words[values[key]]
    if "scale" in values:
        values["scale"] = _scale(values["scale"], entry["script"])
    return " ".join([*_recipe_variables(environ, entry["command"]), str(entry["command"]).format(**values)])


def _scale(text: str, script: str) -> str:
    number = as_number(text)
    if number is None or number <= 0:
        raise ShaketableError(f"{script}: the scale is {text!r}; write a number above 0 such as 1e-4")
    return f"{number:g}"


def _recipe_variables(environ: Mapping[str, str], command: str) -> list[str]:
    """`MODEL_PATH` and `TRAIN_DATA`, which the origin's scripts read, as the recipes of examples/verl call them."""
    if "examples/verl/" not in command:
        return []
    model = [f"MODEL={_quoted(environ['MODEL_PATH'])}"] if environ.get("MODEL_PATH") else []
    files = environ.get("TRAIN_DATA") or environ.get("VAL_DATA") or environ.get("TEST_DATA")
    return model + ([f"DATA={_quoted(str(PurePath(files).parent))}"] if files else [])


def _train_ppo(options: dict[str, str]) -> str:
    """`train_ppo.py` of the experiment design: its flat options are the groups `deadzone` and `aqn`; by epochs, as it says."""
    from shaketable.integrations.origin_configs.translate import translate

    model = [f"MODEL={_quoted(options.pop('model_path'))}"] if "model_path" in options else []
    if unknown := next((key for key in options if dotted(key) is None), None):
        raise NotTheirsError(f"{TRAIN_PPO} has no option --{unknown}; it has --model_path, --deadzone_… and --aqn_…")
    if "aqn_config" in options:
        keys = [_quoted(f"+{dotted(key)}={value}") for key, value in options.items()]
        return " ".join([*model, "bash examples/verl/baseline.sh", EAGER, *keys])
    usual = {"aqn_schedule": "epoch_aware"} if options.get("aqn_enabled") else {}
    config = {key: _value(text) for key, text in (usual | options).items()}
    found = translate(config | {"trainer": {"total_epochs": 2}})
    plan = "" if found.plan is None else found.plan.text().replace(",phase=rollout+train", "")
    aqn = "" if found.aqn is None else found.aqn.text()
    if not plan:
        return " ".join([*model, "bash examples/verl/baseline.sh", *([EAGER, f"\"+shaketable.aqn='{aqn}'\""] if aqn else [])])
    asked = [f"{name}={_quoted(value)}" for name, value in (("PLAN", plan), ("AQN", aqn)) if value]
    return " ".join([*model, *asked, f"bash examples/verl/{'aqn_epoch_aware' if aqn else 'operator_noise'}.sh"])


def _value(text: str) -> bool | str:
    return text.lower() == "true" if text.lower() in ("true", "false") else text


def _options(words: Sequence[str], name: str) -> dict[str, str]:
    """`--key value` and `--key=value`, each once."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if not key.startswith("--") or key[2:] in found or (not equals and not rest):
            raise NotTheirsError(f"{name}: {key} is not --option VALUE, each option once")
        found[key[2:].replace("-", "_")] = value if equals else rest.pop(0)
    return found


def _script(words: Sequence[str]) -> int | None:
    """Where the name of one of the origin's scripts stands: as the program, or as what an interpreter is given."""
    names = {entry["script"] for entry in _scripts()} | {TRAIN_PPO}
    for at, word in enumerate(words[:3]):
        if PurePath(word).name in names:
            return at
        if at and not word.startswith("-"):
            return None
    return None


def _without_assignments(command: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command after `env NAME=value …`, and the environment with those values."""
    words, variables = list(command), dict(environ)
    while words and (words[0] == "env" or (words[0].partition("=")[0].isidentifier() and "=" in words[0])):
        name, _, value = words.pop(0).partition("=")
        variables |= {name: value} if name != "env" else {}
    return words, variables


def _scripts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_yaml(DOCUMENTS, "the origin's documents")["scripts"]
    return found


def _quoted(text: str) -> str:
    return shlex.quote(text)


def _shown(words: Sequence[str]) -> str:
    text = shlex.join(words)
    return text if len(text) <= 80 else f"{text[:77]}…"
