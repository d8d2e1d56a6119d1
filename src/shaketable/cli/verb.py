"""What every verb has in common: two groups of help, `--config`, `--show-config`, completion, and answers to old spellings.

    app.command()(as_verb(sweep, basic=("models", "task", "plan")))

`as_verb` changes only the signature that typer reads, so a verb itself knows nothing of all this. Imports no torch.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
import yaml

from shaketable.cli.outputs import QUESTION, digest
from shaketable.errors import ShaketableError, nearest

Command = Callable[..., None]
ADVANCED = "Advanced"
OWN = ("config_file", "show_config", "help")

DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, npu, xpu or mps; auto is what this machine has.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON too.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the result as one HTML page too.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace files that are no earlier output of this command.")]


def as_verb(
    command: Command, basic: Collection[str], *, moved: Mapping[str, str] = {}, takes_config: bool = True
) -> Callable[..., None]:
    """A command with all that verbs share.

    Args:
        command: The verb's function.
        basic: Parameters that help shows first; all others are "Advanced".
        moved: Old spellings of options, and what to write instead.
        takes_config: Whether the verb has enough options for a file of them.
    """
    context = inspect.Parameter("shared_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    found = [context, *(_arranged(p, p.name in basic) for p in own)]
    found += [_refusing(old, new) for old, new in moved.items()]
    if takes_config:
        found += [_CONFIG, _SHOW]
    names = [p.name for p in own]

    def verb(shared_context: typer.Context, **given: Any) -> None:
        if given.get("show_config"):
            typer.echo(_shown(shared_context), nl=False)
            return
        QUESTION.set(digest(given))
        command(**{name: given[name] for name in names})

    verb.__name__, verb.__doc__ = command.__name__, command.__doc__
    verb.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    verb.__annotations__ = {}
    return verb


def _arranged(parameter: inspect.Parameter, is_basic: bool) -> inspect.Parameter:
    """The parameter by keyword, in its group of the help, with completion for the words that we know."""
    from shaketable.cli.completion import COMPLETIONS

    if get_origin(parameter.annotation) is not Annotated:  # the context
        return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    kind, given = get_args(parameter.annotation)
    info = copy.copy(given)
    if isinstance(info, typer.models.OptionInfo) and not is_basic:
        info.rich_help_panel = ADVANCED
    if info.autocompletion is None:
        info.autocompletion = COMPLETIONS.get(parameter.name)
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info])


def _refusing(old: str, new: str) -> inspect.Parameter:
    """A hidden option that answers with the spelling to use."""

    def refuse(value: str | None) -> None:
        if value is not None:
            raise ShaketableError(f"{old} is spelled {new} now")

    option = typer.Option(old, hidden=True, is_eager=True, callback=refuse)
    name = f"old_{old.strip('-').replace('-', '_')}"
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option])


def _read_config(context: typer.Context, file: Path | None) -> None:
    """Make the values of a file the defaults of this call, so that the command line still overrides them."""
    if file is None or context.resilient_parsing:
        return
    from shaketable.io.yaml_file import read_yaml

    data = read_yaml(file, "the config")
    if not isinstance(data, dict):
        raise ShaketableError(f"the config {file} must hold a mapping of options, not {type(data).__name__}")
    known = dict(_keys(context.command.params))
    values = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ShaketableError(f"the config {file}: unknown key {key!r}; {nearest(name, known, shown=12)}")
        if value is not None:
            values[known[name].name] = _given(value, known[name])
    context.default_map = values


def _given(value: Any, parameter: Any) -> Any:
    """A value of YAML as the words that the command line would have."""
    if parameter.nargs == -1 or getattr(parameter, "multiple", False):
        return [_word(v) for v in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        return ",".join(str(_word(v)) for v in value)
    return _word(value)


def _word(value: Any) -> Any:
    return value if isinstance(value, bool) else json.dumps(value) if isinstance(value, dict) else str(value)


def _keys(parameters: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    """Each option by its long name, each argument by its own."""
    for p in parameters:
        if p.name not in OWN and not getattr(p, "hidden", False):
            long = next((o for o in p.opts if o.startswith("--")), p.name)
            yield long.lstrip("-").replace("-", "_"), p


def _shown(context: typer.Context) -> str:
    """All options as YAML that `--config` reads; null is what the verb chooses by itself."""
    lines = []
    for key, parameter in _keys(context.command.params):
        value = context.params.get(parameter.name)
        plain = [str(v) for v in value] if isinstance(value, list | tuple) else str(value) if isinstance(value, Path) else value
        text = yaml.safe_dump({key: None if plain == [] else plain}, width=10_000, allow_unicode=True)
        lines.append(text)
    return "".join(lines)


_CONFIG = inspect.Parameter(
    "config_file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            is_eager=True,
            callback=_read_config,
            rich_help_panel=ADVANCED,
            help="Read options from YAML, by their long names; the command line overrides them.",
        ),
    ],
)
_SHOW = inspect.Parameter(
    "show_config",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--show-config", rich_help_panel=ADVANCED, help="Print all options as such a file, and stop.")
    ],
)
