"""Load the model that a verb was given, and choose the tokens it runs; imports torch late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shaketable.errors import ShaketableError

DTYPES = ("float32", "bfloat16", "float16")

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder, a Hugging Face id, nano, smollm2-135m, or my_model.py:load, which returns a model."
    ),
]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's own by default.")]
AttentionOption = Annotated[str | None, typer.Option(help="eager or sdpa; the model's own choice by default.")]
PromptsOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Text to run, one prompt per line.")]
LayersOption = Annotated[
    str | None, typer.Option(metavar="PATH", help="Module that holds the decoder layers, where they are not found.")
]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Run the Python file that MODEL names.")]


def load(model: str, device: str, dtype: str | None, attention: str | None, allow_code: bool = False) -> tuple[Any, Any]:
    """A model on a device, and its tokenizer. What torch refuses in many lines is one line."""
    if dtype is not None and dtype not in DTYPES:
        raise ShaketableError(f"unknown dtype {dtype!r}; valid: {', '.join(DTYPES)}")
    from shaketable.models import load_own, names_code

    if names_code(model) and not allow_code:
        raise ShaketableError(f"{model} runs Python code; read it, and allow it with --allow-code")
    import torch

    from shaketable.models import chosen_device, load_model, quieten

    device = chosen_device(device)
    chosen = None if dtype is None else getattr(torch, dtype)
    if names_code(model):
        return load_own(model, device=device, dtype=chosen)
    quieten()
    try:
        loaded, tokenizer = load_model(model, device=device, dtype=chosen)
        if attention is not None:
            loaded.set_attn_implementation(attention)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ShaketableError(f"{model} does not fit into the memory of {device}") from error
    except ShaketableError:
        raise
    except (ValueError, ImportError) as error:
        raise ShaketableError(f"attention {attention!r}: {str(error).splitlines()[0]}") from error
    return loaded, tokenizer


def token_ids(model: Any, tokenizer: Any, prompts: list[str] | None, tokens: int) -> Any:
    """Token ids to run: the prompts', those that came with the model, or random ones where there is no tokenizer."""
    import torch

    from shaketable.capture.reference import input_embedding
    from shaketable.capture.trace import token_batch

    if isinstance(tokenizer, torch.Tensor):
        return tokenizer[:, :tokens]
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tokens = min(tokens, limit) if isinstance(limit, int) and limit > 1 else tokens
    if tokenizer is not None or prompts is not None:
        return token_batch(tokenizer, prompts, tokens)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, input_embedding(model).num_embeddings, (1, tokens), generator=generator)
