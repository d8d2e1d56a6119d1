"""Engines that can be held against a trainer, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shaketable.errors import ShaketableError, nearest
from shaketable.mismatch.engines.engine import RolloutEngine

NAMES = ("hf", "vllm")


def open_engine(name: str, model: str, arguments: Mapping[str, Any]) -> RolloutEngine:
    """Start an engine.

    Args:
        name: hf or vllm.
        model: What the trainer loads; `arguments` may name another in "model".
        arguments: What `--engine-args` holds; each engine knows its own, and refuses others in one line.
    """
    if name == "hf":
        from shaketable.mismatch.engines.hf import HFEngine

        return HFEngine.open(model, arguments)
    if name == "vllm":
        from shaketable.mismatch.engines.vllm import VLLMEngine

        return VLLMEngine.open(model, arguments)
    raise ShaketableError(f"unknown engine {name!r}; {nearest(name, NAMES)}")
