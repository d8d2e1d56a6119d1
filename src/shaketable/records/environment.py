"""What a run was done with: versions, devices, revisions. Every record begins with it."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "vllm", "verl", "ray", "triton", "numpy")


def gather() -> dict[str, Any]:
    """Versions, devices, and the revision of the repository that we are in."""
    import torch

    import shaketable
    from shaketable.faults.cpu import native

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    facts: dict[str, Any] = {
        "shaketable": shaketable.__version__,
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
        **_revision(None),
        "shaketable revision": _revision(Path(shaketable.__file__).parent)["revision"],
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


def _revision(folder: Path | None) -> dict[str, Any]:
    """The commit of the repository around a folder, or around us, and whether a file that git knows differs from it.

    Files that git does not know make nothing dirty: a run's own folder is often one. None where that is unknown.
    """
    revision = _git(folder, "rev-parse", "--verify", "HEAD")
    changed = _git(folder, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no") if revision else None
    return {"revision": revision or None, "dirty": None if changed is None else bool(changed)}


def _git(folder: Path | None, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, errors="replace", timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
