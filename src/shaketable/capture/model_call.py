"""How a language model is called with tokens, and where in its answer the logits are, whoever wrote it.

Hugging Face's models take `input_ids` and return an object. A model of somebody's own takes tokens under any name, first in
line, and returns a tensor, a tuple, a mapping or an object of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from inspect import Parameter
from typing import Any

from torch import Tensor, nn

from shaketable.errors import ModelError
from shaketable.sites.nested_tensors import tensors_of

Arguments = Mapping[str, Any]
"""What a model is given besides tokens, by name."""
BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
BEGINNING = {"start_pos": 0}
"""Where a sequence begins, for models that do not know it by themselves."""


def call_with_tokens(model: nn.Module, ids: Tensor, arguments: Arguments | None = None) -> Any:
    """What a model returns for tokens.

    Args:
        model: The model.
        ids: Token ids of shape (1, n): `input_ids` where forward takes that, and the first argument where it does not.
        arguments: What else forward needs.
    """
    parameters = _parameters(model)
    named = {name for name, p in parameters.items() if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    first = next((p for p in parameters.values() if p.kind in BY_POSITION), None)
    given = {name: value for name, value in BEGINNING.items() if name in named and parameters[name].default is Parameter.empty}
    by_name = "input_ids" in named or (takes_any and first is None)
    if "use_cache" in named or (by_name and takes_any):
        given["use_cache"] = False
    given |= arguments or {}
    return model(input_ids=ids, **given) if by_name else model(ids, **given)


def _parameters(model: nn.Module) -> Mapping[str, Parameter]:
    """The parameters of forward; of a wrapper that passes everything on, those of the model in it."""
    parameters = inspect.signature(model.forward).parameters
    inner = list(model.children())
    passes_on = {p.kind for p in parameters.values()} == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}
    return _parameters(inner[0]) if passes_on and len(inner) == 1 else parameters


def logits_of(answer: Any, model: nn.Module) -> Tensor:
    """The logits in what a model returned.

    In an object or a mapping they have that name. In a tuple they are the one tensor of numbers, or the one with a channel
    for each row of an embedding; what lies deeper (a cache, states) is not looked at, nor is a single number, such as a loss.
    """
    if isinstance(answer, Mapping):
        answer = answer.get("logits", {**answer})
    answer = getattr(answer, "logits", answer)
    members = answer if isinstance(answer, tuple | list) else (answer,)
    found = [m for m in members if isinstance(m, Tensor) and m.is_floating_point() and m.dim() > 1]
    sizes = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    fitting = found if len(found) == 1 else [m for m in found if m.shape[-1] in sizes]
    if len(fitting) == 1:
        return fitting[0]
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors_of(answer)) or f"a {type(answer).__name__}"
    raise ModelError(
        f"a plain forward of {type(model).__name__} fails to give logits: it returns {shapes}; "
        "let it return a floating-point tensor, or something with `logits` in it"
    )
