"""`shaketable fingerprint`: what this device makes of a model, in a file that other devices are held against."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shaketable.cli.locate import AllowCode, LayersOption, ModelArgument
from shaketable.io.output_files import check_free, write


def fingerprint(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The fingerprint to write, safetensors.")],
    device: Annotated[str, typer.Option(help="The device that is trusted: cpu, cuda, npu, xpu, mps.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's own by default.")] = None,
    attention: Annotated[str | None, typer.Option(help="eager or sdpa; the model's own choice by default.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens to run.")] = 64,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to run, one prompt per line.")] = None,
    layers: LayersOption = None,
    allow_code: AllowCode = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the metadata as JSON.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Store what every layer and operator reads and makes on this device.

    shaketable fingerprint smollm2-135m -o good.safetensors
    """
    check_free([f for f in (output, json_file) if f is not None], [], force)

    from shaketable.capture.trace import read_prompts
    from shaketable.cli.locate import load, progress_bar, token_ids

    texts = None if prompts is None else read_prompts(prompts)
    loaded, tokenizer = load(model, device, dtype, attention, allow_code)
    ids = token_ids(loaded, tokenizer, texts, tokens)

    from shaketable.compare.fingerprint import fingerprint as take

    with progress_bar() as tell:
        made = take(loaded, input_ids=ids, name=model, prompts=texts, layers=layers, progress=tell)
    made.save(output)
    if json_file is not None:
        write(json_file, made.about.model_dump_json(by_alias=True, indent=2) + "\n")
    about = made.about
    ops = sum(len(labels) for labels in (*about.layers, about.before, about.after))
    typer.echo(
        f"{about.model}, {about.dtype} on {about.device}, {about.attention} attention, {about.tokens} tokens: "
        f"{about.num_layers} layers and {ops} operators, {made.bytes / 1e6:.1f} MB in {output}"
    )
