"""The structure of a model: its decoder layers, the role of every module, dense or mixture of experts.

Roles are read from class names and weight shapes, never with isinstance on one library's class: Hugging Face, vLLM and others
each have their own RMSNorm. Names are canonical, without what wrappers put into a path (`module.`, `_orig_mod.`,
`base_model.model.`, `.base_layer`, …): a plan and its noise do not depend on DDP, torch.compile or PEFT.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shaketable.errors import ModelError
from shaketable.sites.engine_modules import holder_of, is_engine_experts, is_engine_linear, is_engine_module

ROLES = ("linear", "rmsnorm", "layernorm", "attention", "mlp", "embedding", "lm_head", "router", "lora")
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
_MOE = re.compile(r"(^|[._])(experts|shared_expert|num_experts)([._]|$)|expert_")
_ROUTER_NAMES = {"gate", "router", "shared_expert_gate"}
_LAYER_LISTS = {"layers", "layer", "h", "blocks", "block", "decoder_layers"}
_HEADS = {"lm_head", "embed_out", "output_projection"}


@dataclass(frozen=True)
class Part:
    """One module of the model, seen once however often it is shared."""

    module: nn.Module
    name: str
    """Canonical name."""
    layer: int | None
    """Index of the decoder layer it belongs to."""
    role: str | None
    weights: tuple[str, ...] = ()
    """Names of its own matrix or scale parameters, the ones a weight fault acts on."""

    @property
    def holder(self) -> nn.Module:
        """The module whose parameters they are; itself, but for the experts of an engine."""
        return holder_of(self.module)


@dataclass
class Anatomy:
    """The structure of a model."""

    model: nn.Module
    parts: list[Part] = field(default_factory=list)
    layers: list[nn.Module] = field(default_factory=list)
    is_moe: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Anatomy:
        """Read a model's anatomy."""
        layers, paths = find_layers(model)
        places = {path: i for i, path in enumerate(paths)}
        # FSDP1 puts a module without a name of its own around a layer
        self = cls(model=model, layers=[layer._modules.get("_fsdp_wrapped_module") or layer for layer in layers])
        named = list(_canonical_modules(model))
        self.is_moe = any(_MOE.search(name) for _, name, _ in named)
        head = _output_head(model) or _head_by_shape(named, places)
        outer: dict[str, str] = {}
        for module, name, raw in named:
            role = _role(module, name, self.is_moe, head)
            if role in ("attention", "mlp"):
                if raw in places or not name or any(outer.get(above) == role for above in _above(name)):
                    role = None
                else:
                    outer[name] = role
            self.parts.append(Part(module, name, _layer_of(raw, places), role, _weights(module, role)))
        return self

    def heads_without_a_module(self) -> list[Part]:
        """Embeddings whose weight is the head's too: a model that has no module for its head multiplies by them itself."""
        has_head = any(part.role == "lm_head" for part in self.parts)
        return [] if has_head else [p for p in self.parts if p.role == "embedding" and p.layer is None]

    def excluded(self, part: Part) -> str | None:
        """The reason a part is left out unless `include=` names it: lm_head, embedding, router or lora."""
        return part.role if part.role in ("lm_head", "embedding", "router", "lora") else None


def _above(name: str) -> Iterator[str]:
    """The paths above a module's, the root excepted."""
    words = name.split(".")
    return (".".join(words[:i]) for i in range(1, len(words)))


def canonical(name: str) -> str:
    """A module path without what wrappers put into it."""
    parts = [p for p in name.split(".") if p not in _WRAPPERS]
    while parts[:1] == ["module"]:
        parts = parts[1:]
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    return ".".join(parts)


def _canonical_modules(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Each module once, with canonical and raw name; wrappers that share a name with what they wrap are skipped."""
    named = dict(model.named_modules())
    for raw, module in named.items():
        if any(f"{raw}.{w}".lstrip(".") in named for w in (*_WRAPPERS, "module")) and not _is_container(module):
            continue
        yield module, canonical(raw), raw


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def class_name(module: nn.Module) -> str:
    """The name of a module's class as it was before FSDP2's `fully_shard` made it a class of its own."""
    fsdp, kinds = sys.modules.get("torch.distributed.fsdp"), type(module).__mro__
    return kinds[kinds.index(fsdp.FSDPModule) + 1 if fsdp is not None and fsdp.FSDPModule in kinds else 0].__name__


def _kind(module: nn.Module) -> str:
    return class_name(module).lower()


def _dims(module: nn.Module) -> int:
    """Dimensions of the module's own weight, 0 when it has none; an engine's linear has two, wherever its weight went."""
    weight = module._parameters.get("weight")
    return 2 if is_engine_linear(module) else 0 if weight is None else weight.dim()


def _output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes logits, as the model itself names it; without PEFT's wrappers."""
    for module in model.modules():
        if callable(ask := getattr(module, "get_output_embeddings", None)):
            head: Any = ask()
            while isinstance(head, nn.Module) and isinstance(inner := head._modules.get("base_layer"), nn.Module):
                head = inner
            return head if isinstance(head, nn.Module) else None
    return None


def _head_by_shape(named: list[tuple[nn.Module, str, str]], places: dict[str, int]) -> nn.Module | None:
    """The last linear outside of the layers whose weight is shaped like an embedding's, when no module is called a head."""
    if any(name.rsplit(".", 1)[-1] in _HEADS for _, name, _ in named):
        return None
    outside = [m for m, _, raw in named if _layer_of(raw, places) is None and _dims(m) == 2]
    shapes = {tuple(m._parameters["weight"].shape) for m in outside if "embedding" in _kind(m)}  # type: ignore[union-attr]
    heads = [m for m in outside if is_linear(m) and not is_engine_module(m) and tuple(m._parameters["weight"].shape) in shapes]  # type: ignore[union-attr]
    return heads[-1] if heads else None


def _role(module: nn.Module, name: str, is_moe: bool, head: nn.Module | None) -> str | None:
    kind, dims, last = _kind(module), _dims(module), name.rsplit(".", 1)[-1]
    if ".lora_" in f".{name}":
        return "lora" if dims >= 1 else None
    if module is head or (dims == 2 and (last in _HEADS or "lmhead" in kind)):
        return "lm_head"
    if is_moe and ("router" in kind or (last in _ROUTER_NAMES and dims == 2)):
        return "router"
    if "rmsnorm" in kind and dims == 1:
        return "rmsnorm"
    if "layernorm" in kind and dims == 1:
        return "layernorm"
    if "embedding" in kind and dims == 2:
        return "embedding"
    if is_linear(module):
        return "linear"
    if "attention" in kind and any(module.children()):
        return "attention"
    return "mlp" if _is_mlp(module, kind, last, name) else None


def is_rotary(module: nn.Module) -> bool:
    """Whether a module makes rotary angles out of positions; transformers 5.17 does so with a matrix product, 5.22 without."""
    return "rotary" in _kind(module) and not is_engine_module(module)


def is_linear(module: nn.Module) -> bool:
    """A matrix product with a weight of its own: Linear of any library, GPT-2's Conv1D, stacked experts."""
    kind, dims = _kind(module), _dims(module)
    if is_engine_experts(module):
        return True
    if kind.endswith("experts"):
        return not is_engine_module(module) and any(p is not None and p.dim() == 3 for p in module._parameters.values())
    return dims == 2 and ("linear" in kind or kind == "conv1d")


def _is_mlp(module: nn.Module, kind: str, last: str, name: str) -> bool:
    named = last in ("mlp", "feed_forward", "ffn", "block_sparse_moe") or kind.endswith(("mlp", "feedforward", "moeblock"))
    return named and any(module.children())


def _weights(module: nn.Module, role: str | None) -> tuple[str, ...]:
    own = {k: p for k, p in holder_of(module)._parameters.items() if p is not None}
    if role in ("linear", "lm_head", "router") and "weight" not in own:
        return tuple(k for k, p in own.items() if p.dim() >= 2 and "bias" not in k)
    return ("weight",) if "weight" in own else ()


def find_layers(model: nn.Module, stack: str | None = None) -> tuple[list[nn.Module], list[str]]:
    """The decoder layers and their raw paths; nothing when the model has none.

    Args:
        model: The model.
        stack: Path of the module whose children are the layers; found by itself when None.

    Among all lists that look like a stack of layers, and are not inside another, language models win over vision
    towers, decoders over encoders, then the one with the most parameters. Stacks of the same shape beside it count too, one
    after another: a hierarchical model (HRM) has two, which it calls in turn.
    """
    if stack is not None:
        return _layers_in(model, stack)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(above in found for above in _above(name))
        if not inside and _looks_like_layers(name, module):
            found[name] = module
    if not found:
        return _numbered_layers(model)
    best = max(found, key=lambda n: (_preference(n), sum(p.numel() for p in found[n].parameters())))
    stacks = [name for name in found if name == best or _are_beside(name, best, found)]
    layers = {f"{name}.{key}".lstrip("."): layer for name in stacks for key, layer in found[name].named_children()}
    return list(layers.values()), list(layers)


def _layers_in(model: nn.Module, stack: str) -> tuple[list[nn.Module], list[str]]:
    """The children of a module that have names; a module that holds other things too has numbered ones."""
    modules = dict(model.named_modules())
    if stack not in modules:
        near = difflib.get_close_matches(stack, modules, 1)
        raise ModelError(f"layers={stack!r}: the model has no such module" + (f"; did you mean {near[0]!r}?" if near else ""))
    children = dict(modules[stack].named_children())
    if not _is_container(modules[stack]):
        children = _numbered(modules[stack]) or children
    paths = [f"{stack}.{name}".lstrip(".") for name in children]
    if not children:
        raise ModelError(f"layers={stack!r}: that {type(modules[stack]).__name__} holds no modules")
    return list(children.values()), paths


def _numbered_layers(model: nn.Module) -> tuple[list[nn.Module], list[str]]:
    """Layers that are attributes of one module, as in `self.layer_0`, `self.layer_1`."""
    for path, module in model.named_modules():
        if layers := _numbered(module):
            return list(layers.values()), [f"{path}.{name}".lstrip(".") for name in layers]
    return [], []


def _numbered(module: nn.Module) -> dict[str, nn.Module]:
    """Children of one class, with parts of their own, whose names differ in the number at their end."""
    if _is_container(module):
        return {}
    found: dict[tuple[str, type], dict[int, str]] = {}
    for name, child in module.named_children():
        if (match := re.fullmatch(r"(.*?)(\d+)", name)) and any(child.children()):
            found.setdefault((match[1], type(child)), {})[int(match[2])] = name
    best = max(found.values(), key=len, default={})
    return {best[i]: module._modules[best[i]] for i in sorted(best)} if len(best) > 1 else {}  # type: ignore[misc]


def _are_beside(one: str, other: str, found: dict[str, nn.Module]) -> bool:
    """Whether two lists of one name, in two modules of one module, are the same stack but for the values of its parameters.

    BLT has four stacks of one class and of four lengths: two that read and write bytes, one that cuts them into patches, and
    the model between them, whose layers alone are meant.
    """
    (*above, _, name), (*above_other, _, name_other) = (["", *path.split(".")] for path in (one, other))
    alike = (above, name, _preference(one)) == (above_other, name_other, _preference(other))
    return alike and _shape(found[one]) == _shape(found[other])


def _shape(stack: nn.Module) -> list[tuple[str, int]]:
    return [(class_name(layer), sum(p.numel() for p in layer.parameters())) for layer in stack.children()]


def _looks_like_layers(name: str, module: nn.Module) -> bool:
    if not _is_container(module) or not (members := list(module.children())):
        return False
    several_alike = len(members) > 1 and len({type(m) for m in members}) == 1
    named = name.rsplit(".", 1)[-1] in _LAYER_LISTS
    if isinstance(module, nn.ModuleDict):
        is_stack = named and several_alike
    else:  # a Sequential of Sequentials is an MLP as likely as not
        is_stack = named or (several_alike and (isinstance(module, nn.ModuleList) or not _is_container(members[0])))
    return is_stack and all(any(m.children()) for m in members)


def _preference(name: str) -> int:
    path = name.lower()
    if any(word in path for word in ("vision", "visual", "audio", "image")):
        return 0
    return 1 if "encoder" in path and "decoder" not in path else 2


def _layer_of(raw: str, places: dict[str, int]) -> int | None:
    """Which layer a raw path is, or is inside of."""
    return next((places[path] for path in (*_above(raw), raw) if path in places), None)
