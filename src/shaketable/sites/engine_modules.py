"""Models of sampling engines: how vLLM's own modules differ from others.

An engine's classes are known by the package they were defined in. vLLM's linears are one matrix product each, of several
projections at once (`qkv_proj`, `gate_up_proj`); on a CPU it packs their weights after loading and leaves an empty parameter,
so the shape of a weight does not tell a linear. Its attention is a leaf.

Imports no torch: configs are checked with `FUSED` where there may be none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

ENGINES = ("vllm",)
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""The module that an engine has in place of a projection of the checkpoint."""

_WHOLE = {
    "output": ("rowparallel", "replicated"),
    "input": ("columnparallel", "qkvparallel", "replicated"),
    "weight": ("replicated",),
}
"""Linears that hold a whole tensor on every rank, by point."""


def is_engine_module(module: nn.Module) -> bool:
    """Whether a module's class belongs to a sampling engine; a subclass that we made has its original's module."""
    return type(module).__module__.partition(".")[0] in ENGINES


def is_engine_linear(module: nn.Module) -> bool:
    """Whether a module is an engine's linear, also after its weight was packed or quantized away."""
    return is_engine_module(module) and "linear" in type(module).__name__.lower() and hasattr(module, "output_size")


def is_engine_experts(module: nn.Module) -> bool:
    """Whether a module is all experts of an engine's mixture, as one kernel: the module that is called."""
    return is_engine_module(module) and type(module).__name__.lower().endswith(("fusedmoe", "moerunner"))


def holder_of(module: nn.Module) -> nn.Module:
    """The module that holds the weights of another: vLLM's experts keep theirs in a child whose `forward` is never called."""
    held = module._modules.get("routed_experts") if is_engine_experts(module) else None
    return module if held is None else held


def why_not_experts(module: nn.Module, point: str) -> str | None:
    """Why the experts of an engine cannot be faulty at a point; None when they can, or when these are no experts.

    vLLM hands the router to its experts, which call it on their own input: a fault there would be one on the router too. And
    on a CPU it packs their weights into an order of its own, in which neither blocks nor channels are where a format looks.
    """
    if not is_engine_experts(module):
        return None
    if point == "input" and module._modules.get("gate") is not None:
        return "the router reads the same input inside of it; use point=output"
    packed = point == "weight" and any(p is not None and p.device.type == "cpu" for p in holder_of(module)._parameters.values())
    return "on a CPU the engine packs its weights into an order of its own; use point=output" if packed else None


def shard_of(module: nn.Module, point: str) -> str:
    """A suffix that keys the noise of each shard of a tensor; empty where all ranks hold the same tensor.

    Under tensor parallelism each rank holds some columns of the output of a column-parallel linear, or of the input of a
    row-parallel one: those need noise of their own. Tensors that every rank holds whole (norms, layers, the sum that a
    row-parallel linear returns) must be the same everywhere, and so must their noise.
    """
    size, kind = getattr(module, "tp_size", 1), type(module).__name__.lower()
    if not is_engine_module(module) or size == 1:
        return ""
    return "" if any(word in kind for word in _WHOLE[point]) else f"#{module.tp_rank}"


def is_packed(module: nn.Module, name: str) -> bool:
    """Whether a parameter is the empty remainder of a weight that an engine packed away."""
    parameter = module._parameters.get(name)
    return is_engine_module(module) and parameter is not None and parameter.numel() == 0


def reads_weight_of(module: nn.Module, name: str, model: nn.Module) -> str | None:
    """Another module of the model that reads the same parameter (tied embeddings), by its name."""
    own = module._parameters[name]
    others = ((path, m) for path, m in model.named_modules() if m is not module)
    return next((path for path, m in others if any(p is own for p in m._parameters.values())), None)
