"""What every verb shares: two groups of help, `--config` and `--show-config`.

    @options_of(SweepConfig, "task", "plan")
    def sweep(models, *, out: OutOption = None, **fields): ...

    app.command()(as_verb(sweep, basic=("models", "task", "plan")))

`options_of` adds options that are written once, as the fields of a config. `as_verb` adds what is common. Both change only
the signature that typer reads, so the verbs themselves know nothing of it. Imports no torch.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
import yaml

from shaketable.errors import ShaketableError, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

Command = Callable[..., None]
Flags = str | tuple[str, ...]
ADVANCED = "Advanced"
COMMON = ("config_file", "show_config", "help")

DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, npu, xpu or mps; auto takes this machine's accelerator.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write the result as one HTML page.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
RunFolderOption = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="DIR", help="Run folder; a new one under runs/ by default.")
]
ResumeOption = Annotated[
    Path | None, typer.Option("--resume", metavar="DIR", help="Resume the run recorded there, as it was configured.")
]
PlanOutOption = Annotated[
    Path | None, typer.Option("--plan-out", metavar="FILE", help="Write the measured errors as a plan, YAML.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=lambda context, file: _read_config(context, file),
        rich_help_panel=ADVANCED,
        help="Read options from YAML, by their long names; the command line overrides them.",
    ),
]
ShowConfigOption = Annotated[
    bool, typer.Option("--show-config", rich_help_panel=ADVANCED, help="Print all options as such a file, and stop.")
]


def as_verb(command: Command, basic: Collection[str], *, takes_config: bool = True) -> Callable[..., None]:
    """A command with everything that verbs share.

    Args:
        command: The verb's function.
        basic: Parameters that help shows first; all others are "Advanced".
        takes_config: Whether the verb has enough options for a file of them.
    """
    wanted = inspect.signature(command, eval_str=True).parameters
    own = [p for name, p in wanted.items() if name != "context"]
    found = [_keyword("context", typer.Context, inspect.Parameter.empty)]
    found += [_arranged(p, p.name in basic) for p in own]
    if takes_config:
        found += [_keyword("config_file", ConfigOption, None), _keyword("show_config", ShowConfigOption, False)]

    def verb(context: typer.Context, **given: Any) -> None:
        if given.get("show_config"):
            typer.echo(_shown(context), nl=False)
            return
        with_context = {"context": context} if "context" in wanted else {}
        command(**with_context, **{p.name: given[p.name] for p in own})

    verb.__name__, verb.__doc__ = command.__name__, command.__doc__
    verb.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    verb.__annotations__ = {}
    return verb


def options_of(
    config: type[BaseModel],
    *names: str,
    metavar: Mapping[str, str] = {},
    default: Mapping[str, Any] = {},
    flag: Mapping[str, Flags] = {},
    text: Collection[str] = (),
) -> Callable[[Command], Command]:
    """Give a command that takes `**fields` one option for each named field, in this order.

    Name, type, default and help are the field's. The config checks values, not typer, so that a bad value gets the same
    line from a study file and from a command.

    Args:
        config: The config whose fields they are.
        names: The fields.
        metavar: What help calls a value whose type says too little.
        default: Defaults that differ from the config's.
        flag: Options that are not spelled like their field; several are alternatives.
        text: Fields that the config parses from text.
    """

    def given(command: Command) -> Command:
        own = list(inspect.signature(command, eval_str=True).parameters.values())
        made = [
            _option_of(name, config.model_fields[name], metavar.get(name), default, flag.get(name), name in text)
            for name in names
        ]
        first = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        rest = [p for p in own if p.kind is p.KEYWORD_ONLY]
        command.__signature__ = inspect.Signature([*first, *made, *rest])  # type: ignore[attr-defined]
        return command

    return given


def given_options(context: typer.Context, without: Collection[str]) -> list[str]:
    """Options and arguments that were set on the command line or in the file of --config."""

    def is_set(name: str | None) -> bool:
        source = context.get_parameter_source(name or "")
        return source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")

    def spelled(parameter: Any) -> str:
        return next((o for o in parameter.opts if o.startswith("--")), None) or str(parameter.metavar or parameter.name).strip(
            "…"
        )

    return [spelled(p) for p in context.command.params if is_set(p.name) and p.name not in (*without, *COMMON)]


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option_of(
    name: str, field: FieldInfo, metavar: str | None, default: Mapping[str, Any], flag: Flags | None, is_text: bool
) -> inspect.Parameter:
    kind: Any = field.annotation
    own: Any = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
    value = default.get(name, own)
    if is_text or get_origin(kind) is Literal:
        kind = str
    elif get_origin(kind) is tuple:
        kind, value = list[str], list(value)
    if value is None and type(None) not in getattr(kind, "__args__", ()):
        kind = kind | None
    shown = str(own) if value is None and own not in (None, {}) else True
    flags = (flag,) if isinstance(flag, str) else flag or (f"--{name.replace('_', '-')}",)
    option = typer.Option(*flags, metavar=metavar, help=field.description, show_default=shown)
    return _keyword(name, Annotated[kind, option], value)


def _arranged(parameter: inspect.Parameter, is_basic: bool) -> inspect.Parameter:
    """The parameter by keyword, in its group of the help."""
    kind, given = get_args(parameter.annotation)
    info = copy.copy(given)
    if isinstance(info, typer.models.OptionInfo) and not is_basic:
        info.rich_help_panel = ADVANCED
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info])


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
            values[known[name].name] = _as_words(value, known[name])
    context.default_map = values


def _as_words(value: Any, parameter: Any) -> Any:
    """A value of YAML as it would be written on the command line."""
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
        if p.name not in COMMON and not getattr(p, "hidden", False):
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
