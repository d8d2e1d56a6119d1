"""What every verb shares: options of the same name, options that are the fields of a config, two groups of help.

    @options_of(SweepConfig, "task", "plan")
    def sweep(models, *, out: OutOption = None, **fields): ...

    app.command()(as_verb(sweep, basic=("models", "task", "plan")))

Both functions change only the signature that typer reads. Imports no torch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

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
PlanOutOption = Annotated[
    Path | None, typer.Option("--plan-out", metavar="FILE", help="Write the measured errors as a plan, YAML.")
]


def as_verb(command: Command, basic: Collection[str]) -> Callable[..., None]:
    """A command whose help shows the `basic` parameters first, and all others as "Advanced"."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()

    def verb(**given: Any) -> None:
        command(**given)

    verb.__name__, verb.__doc__ = command.__name__, command.__doc__
    verb.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p if p.name in basic else _advanced(p) for p in parameters]
    )
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
    """Options and arguments that were set on the command line."""

    def is_set(name: str | None) -> bool:
        source = context.get_parameter_source(name or "")
        return source is not None and source.name == "COMMANDLINE"

    def spelled(parameter: Any) -> str:
        long = next((o for o in parameter.opts if o.startswith("--")), None)
        return long or str(parameter.metavar or parameter.name).strip("…")

    return [spelled(p) for p in context.command.params if is_set(p.name) and p.name not in without]


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
