"""`shaketable env`: what this machine has, for bug reports and run records."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "vllm", "verl", "ray", "triton", "numpy")


def env(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Show versions, devices and which noise kernels this machine can use."""
    facts = gather()
    if json_file is not None:
        json_file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    width = max(len(k) for k in facts)
    for key, value in facts.items():
        typer.echo(f"{key:<{width}}  {value}")


def gather() -> dict[str, Any]:
    """Versions and devices."""
    import torch

    import shaketable
    from shaketable.faults import native

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    facts: dict[str, Any] = {
        "shaketable": shaketable.__version__,
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(accelerator or "cpu"),
        "threads": torch.get_num_threads(),
        "noise kernels": native.name(),
        "compiler": Path(native.compiler() or "none").name,
    }
    for package in PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    return facts
