"""What every verb shares: two groups of help, `--config` and `--show-config`, and options that are the fields of a config.

    @options_of(SweepConfig, "task", "plan")
    def sweep(models, *, out: OutOption = None, **fields): ...

    app.command()(as_verb(sweep, basic=("models", "task", "plan")))

Both functions change only the signature that typer reads. Imports no torch.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Collection, Mapping
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


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=lambda context, file: _read_config(context, file),
        help="Read options from YAML, by their long names; the command line overrides them.",
    ),
]
ShowConfigOption = Annotated[bool, typer.Option("--show-config", help="Print all options as such a file, and stop.")]


def as_verb(command: Command, basic: Collection[str]) -> Callable[..., None]:
    """A command whose help shows the `basic` parameters first and all others as "Advanced", and that reads a config."""
    wanted = inspect.signature(command, eval_str=True).parameters

    def verb(
        context: typer.Context, *, config_file: ConfigOption = None, show_config: ShowConfigOption = False, **given: Any
    ) -> None:
        if show_config:
            typer.echo(_as_config(context), nl=False)
        else:
            command(**given, **({"context": context} if "context" in wanted else {}))

    shared = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [p for name, p in wanted.items() if name != "context"]
    verb.__name__, verb.__doc__ = command.__name__, command.__doc__
    verb.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [(p if p.name in basic else _advanced(p)).replace(kind=p.KEYWORD_ONLY) for p in [*own, *shared]]
    )
    verb.__annotations__ = {}
    return verb


def _read_config(context: typer.Context, file: Path | None) -> None:
    """Make the values of a file the defaults of this call, so that the command line still overrides them."""
    if file is None or context.resilient_parsing:
        return
    from shaketable.io.yaml_file import read_yaml

    data = read_yaml(file, "the config")
    if not isinstance(data, dict):
        raise ShaketableError(f"the config {file} must hold a mapping of options, not {type(data).__name__}")
    known, found = _by_key(context), {}
    for key, value in data.items():
        parameter = known.get(str(key).replace("-", "_"))
        if parameter is None:
            raise ShaketableError(f"the config {file}: unknown key {key!r}; {nearest(str(key), known, shown=12)}")
        if value is not None:
            takes_several = parameter.nargs == -1 or getattr(parameter, "multiple", False)
            words = [_word(v) for v in (value if isinstance(value, list) else [value])]
            found[parameter.name] = words if takes_several else words[0] if len(words) == 1 else ",".join(map(str, words))
    context.default_map = found


def _word(value: Any) -> Any:
    """A value of YAML as it would be written on the command line."""
    return value if isinstance(value, bool) else json.dumps(value) if isinstance(value, dict) else str(value)


def _as_config(context: typer.Context) -> str:
    """All options as YAML that `--config` reads; null is what the verb chooses by itself."""
    values = {}
    for key, parameter in _by_key(context).items():
        value = context.params.get(parameter.name)
        if isinstance(value, list | tuple):
            value = [str(v) for v in value] or None
        values[key] = str(value) if isinstance(value, Path) else value
    return yaml.safe_dump(values, width=10_000, allow_unicode=True, sort_keys=False)


def _by_key(context: typer.Context) -> dict[str, Any]:
    """Each option by its long name, each argument by its own."""
    own = [p for p in context.command.params if p.name not in ("config_file", "show_config", "help")]
    long = {p: next((o for o in p.opts if o.startswith("--")), str(p.name)) for p in own if not getattr(p, "hidden", False)}
    return {name.lstrip("-").replace("-", "_"): p for p, name in long.items()}


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
        long = next((o for o in parameter.opts if o.startswith("--")), None)
        return long or str(parameter.metavar or parameter.name).strip("…")

    return [spelled(p) for p in context.command.params if is_set(p.name) and p.name not in (*without, "config_file")]


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
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=Annotated[kind, option])


def _advanced(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter in the second group of the help, if it is an option."""
    kind, info = get_args(parameter.annotation) or (None, None)
    if not isinstance(info, typer.models.OptionInfo):
        return parameter
    moved = copy.copy(info)
    moved.rich_help_panel = ADVANCED
    return parameter.replace(annotation=Annotated[kind, moved])
