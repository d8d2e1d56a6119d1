"""Every operator of a vLLM model with its inputs and its result, in the terms of `numerics/decoder_operators.py`.

Hooks on vLLM's modules. Inputs are copied before the call, because norms and rotary embeddings write into them. Fused
projections are recorded one by one. A rotary embedding is one module for all layers; its layer is that of the attention that
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shaketable.integrations.vllm.observe.weights import fused
from shaketable.sites.engine_modules import is_engine_experts
from shaketable.sites.structure import Anatomy, Part


@dataclass
class _Call:
    name: str
    kind: str
    layer: int | None
    inputs: dict[str, Tensor]
    output: Tensor
    number: int
    """Number of the model's pass."""


@dataclass
class WorkerRecorder:
    """Records from its creation to `close`."""

    model: nn.Module
    calls: list[_Call] = field(default_factory=list)
    passes: int = 0
    routed: dict[str, Tensor] = field(default_factory=dict)
    """Chosen experts: pass and layer, as `result` names them."""

    def __post_init__(self) -> None:
        self.hooks: list[Any] = []
        self.routers: list[Any] = []
        self.attention: Part | None = None
        self.fused = fused(self.model)
        anatomy = Anatomy.of(self.model)
        self.places = {id(part.module): part for part in anatomy.parts}
        for part in anatomy.parts:
            self._watch(part)

    def _watch(self, part: Part) -> None:
        module, kind = part.module, type(part.module).__name__.lower()
        if part.role == "embedding":
            self._hook(part, self._embedding)
        elif "rmsnorm" in kind:
            self._hook(part, self._norm)
        elif "rotary" in kind:
            self._hook(part, self._rotary)
        elif kind == "attention":
            self._hook(part, self._attention)
        elif kind.endswith("andmul"):
            self._hook(part, self._activation)
        elif kind == "logitsprocessor":
            self._hook(part, self._head)
        elif part.role == "router" or (part.role == "linear" and hasattr(module, "output_size")):
            self._hook(part, self._linear)
        elif any(is_engine_experts(child) for child in module.children()):
            self._hook(part, self._experts)
        if "rotary_emb" in module._modules:
            self.hooks.append(module.register_forward_pre_hook(lambda *_, part=part: setattr(self, "attention", part)))
        if (router := getattr(module, "router", None)) is not None and hasattr(router, "set_capture_fn"):
            self._watch_router(part, router)

    def _watch_router(self, part: Part, router: Any) -> None:
        self.routers.append((router, router.capture_fn))

        def capture(ids: Tensor) -> None:
            self.routed[f"{self.passes}/{part.layer}"] = ids.detach().cpu().long().clone()

        router.set_capture_fn(capture)

    def _hook(self, part: Part, add: Callable[[Part, list[Tensor], tuple[Tensor, ...]], None]) -> None:
        read: list[Tensor] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            read[:] = [_copy(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if part.role == "embedding":
                self.passes += 1

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            made = output if isinstance(output, tuple) else (output,)
            add(part, read, tuple(_copy(x) for x in made if isinstance(x, Tensor)))

        self.hooks += [
            part.module.register_forward_pre_hook(before, with_kwargs=True),
            part.module.register_forward_hook(after, with_kwargs=True),
        ]

    def _add(self, name: str, kind: str, layer: int | None, output: Tensor, **inputs: Tensor) -> None:
        self.calls.append(_Call(name, kind, layer, inputs, output, self.passes))

    def _embedding(self, part: Part, read: list[Tensor], made: tuple[Tensor, ...]) -> None:
        self._add(part.name, "embedding", part.layer, made[0], ids=read[0])

    def _norm(self, part: Part, read: list[Tensor], made: tuple[Tensor, ...]) -> None:
        if len(read) == 1:
            self._add(part.name, "rms_norm", part.layer, made[0], x=read[0])
            return
        name, layer = self._sum(part)
        self._add(name, "residual", layer, made[1], x=read[0], residual=read[1])
        self._add(part.name, "rms_norm", part.layer, made[0], x=read[0], residual=read[1])

    def _sum(self, part: Part) -> tuple[str, int]:
        """The sum of a norm that adds first: after the attention of its own layer, or after the MLP of the one before."""
        words = part.name.split(".")
        if part.layer is not None and words[-1] == "post_attention_layernorm":
            return ".".join([*words[:-1], "attention_residual"]), part.layer
        above = words[:-2] if part.layer is not None else [*words[:-1], "layers"]
        before = (part.layer if part.layer is not None else self._layers()) - 1
        return ".".join([*above, str(before), "mlp_residual"]), before

    def _layers(self) -> int:
        return 1 + max(part.layer for part in self.places.values() if part.layer is not None)

    def _linear(self, part: Part, read: list[Tensor], made: tuple[Tensor, ...]) -> None:
        above, _, last = part.name.rpartition(".")
        kind = "router" if part.role == "router" else "linear"
        if (names := self.fused.get(last)) is None or not hasattr(part.module, "output_sizes"):
            self._add(part.name, kind, part.layer, made[0], x=read[0])
            return
        sizes: Any = part.module.output_sizes
        for name, output in zip(names, made[0].split(list(sizes), -1), strict=True):
            self._add(f"{above}.{name}", kind, part.layer, output, x=read[0])

    def _rotary(self, part: Part, read: list[Tensor], made: tuple[Tensor, ...]) -> None:
        assert self.attention is not None
        rotary: Any = part.module
        for name, before, after in zip(("rotary_q", "rotary_k"), read[1:3], made, strict=True):
            heads = (-1, before[0].numel() // rotary.head_size, rotary.head_size)
            path = f"{self.attention.name}.{name}"
            self._add(path, "rotary", self.attention.layer, after.view(heads), x=before.view(heads), positions=read[0])

    def _attention(self, part: Part, read: list[Tensor], made: tuple[Tensor, ...]) -> None:
        module: Any = part.module
        q = read[0].view(-1, module.num_heads, module.head_size)
        k = read[1].view(-1, module.num_kv_heads, module.head_size)
        v = read[2].view(-1, module.num_kv_heads, module.head_size_v)
        name = part.name.rpartition(".")[0]
        self._add(name, "attention", part.layer, made[0].reshape(len(q), -1), q=q, k=k, v=v)

    def _activation(self, part: Part, read: list[Tensor], made: tuple[Tensor, ...]) -> None:
        gate, up = read[0].chunk(2, -1)
        self._add(part.name, "activation", part.layer, made[0], x=gate, up=up)

    def _experts(self, part: Part, read: list[Tensor], made: tuple[Tensor, ...]) -> None:
        self._add(part.name, "experts", part.layer, made[0], x=read[0])

    def _head(self, part: Part, read: list[Tensor], made: tuple[Tensor, ...]) -> None:
        self._add("lm_head", "lm_head", None, made[0], x=read[0])

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self.hooks:
            hook.remove()
        for router, capture in self.routers:
            router.set_capture_fn(capture)

    def result(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors by number, and the calls that they belong to."""
        tensors: dict[str, Tensor] = {f"routed/{key}": ids for key, ids in self.routed.items()}
        calls: list[dict[str, Any]] = []
        for number, call in enumerate(self.calls):
            tensors |= {f"{number}/{key}": value.contiguous().clone() for key, value in call.inputs.items()}
            tensors[f"{number}/output"] = call.output.contiguous().clone()
            about = {"name": call.name, "kind": call.kind, "layer": call.layer, "pass": call.number}
            calls.append(about | {"inputs": list(call.inputs)})
        return tensors, {"calls": calls, "routed": list(self.routed)}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
