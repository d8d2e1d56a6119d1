"""`shaketable fingerprint`: what this device makes of a model, in a file that other devices are held against."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shaketable.cli.locate import AllowCode, LayersOption, ModelArgument
from shaketable.cli.outputs import OutputFiles
from shaketable.cli.verb import DeviceOption, ForceOption, JsonOption


def fingerprint(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The fingerprint to write, safetensors.")],
    device: DeviceOption = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's own by default.")] = None,
    attention: Annotated[str | None, typer.Option(help="eager or sdpa; the model's own choice by default.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens to run.")] = 64,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to run, one prompt per line.")] = None,
    layers: LayersOption = None,
    allow_code: AllowCode = False,
    json_file: JsonOption = None,
    force: ForceOption = False,
) -> None:
    """Store what every layer and operator reads and makes on this device.

    shaketable fingerprint smollm2-135m -o good.safetensors
    """
    outputs = OutputFiles("fingerprint", model, json_file, others=[out], force=force)

    from shaketable.capture.trace import read_prompts
    from shaketable.cli.locate import load, progress_bar, token_ids

    texts = None if prompts is None else read_prompts(prompts)
    loaded, tokenizer = load(model, device, dtype, attention, allow_code)
    ids = token_ids(loaded, tokenizer, texts, tokens)

    from shaketable.compare.fingerprint import fingerprint as take

    with progress_bar() as tell:
        made = take(loaded, input_ids=ids, name=model, prompts=texts, layers=layers, progress=tell)
    made.save(out)
    outputs.save(lambda: made.about.model_dump(mode="json", by_alias=True))
    about = made.about
    ops = sum(len(labels) for labels in (*about.layers, about.before, about.after))
    typer.echo(
        f"{about.model}, {about.dtype} on {about.device}, {about.attention} attention, {about.tokens} tokens: "
        f"{about.num_layers} layers and {ops} operators, {made.bytes / 1e6:.1f} MB in {out}"
    )
