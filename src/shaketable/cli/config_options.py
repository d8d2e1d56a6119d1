"""Options of a command that are the fields of a config: name, type, default and help are written once, in the config.

    @options_of(TrainConfig, "task", "steps", metavar={"task": "TASK"})
    def train(model, *, out=None, **fields): ...

Typer reads the signature that is made here: the command's own arguments, then the options, then its keyword-only parameters.
What a value may be is checked by the config and not by typer, so that it is the same line from a study file and from a command.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

Command = Callable[..., None]
Flags = str | tuple[str, ...]


def options_of(
    config: type[BaseModel],
    *names: str,
    metavar: Mapping[str, str] = {},
    default: Mapping[str, Any] = {},
    flag: Mapping[str, Flags] = {},
    text: Collection[str] = (),
) -> Callable[[Command], Command]:
    """Give a command that takes `**fields` one option for each field that is named, in this order.

    Args:
        config: Whose fields they are; what is written under a field is the help of its option.
        names: The fields.
        metavar: What help calls a value, where its type says too little.
        default: Where a command begins with another value than the config.
        flag: Options that are not called like their field; several are spellings of one.
        text: Fields that the config reads from a word.
    """

    def given(command: Command) -> Command:
        own = list(inspect.signature(command, eval_str=True).parameters.values())
        made = [
            _parameter(name, config.model_fields[name], metavar.get(name), default, flag.get(name), name in text)
            for name in names
        ]
        first = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        rest = [p for p in own if p.kind is p.KEYWORD_ONLY]
        command.__signature__ = inspect.Signature([*first, *made, *rest])  # type: ignore[attr-defined]
        return command

    return given


def _parameter(
    name: str,
    field: FieldInfo,
    metavar: str | None,
    default: Mapping[str, Any],
    flag: str | tuple[str, ...] | None,
    is_text: bool,
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
