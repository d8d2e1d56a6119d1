"""The calls that a vLLM worker answers for `shaketable mismatch`: its weights, its operators, its routing.

vLLM makes its worker a subclass of `Observer` (`worker_extension_cls`), and the front end calls it by `collective_rpc`. Tensors
come back through safetensors files in a folder that the front end names: vLLM does not pickle what a call returns.

**Weights** have the names and the shapes that Hugging Face has for them. vLLM holds several projections as one matrix, experts
as `w13` and `w2`, pads vocabularies and, on a CPU, packs a weight into a kernel's own order. A packed or quantized linear is
asked for the product with the identity matrix, which is its weight, bit for bit. Experts have a nonlinearity inside: their
order is a permutation, which is learned by packing labels, undone, and proven by packing again.

**Operators** are recorded by hooks on vLLM's modules. A compiled model calls none of them, so meanwhile it runs as it was
written; what compiling changes is a variant of its own (`graphs off`). Inputs are copied before the call, because norms and
rotary embeddings write into them. A rotary embedding is one module for all layers; its layer is that of the attention that
runs.

**Teacher-forced decoding.** vLLM has no way to set the next token (`trace_decode_token_ids` is not for the CPU's runner). So
the sampler's output is replaced by the token that the request carries, and the log-probability by that of this token, by the
sampler's own function, on the logits as the model gave them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.errors import ShaketableError
from shaketable.integrations.common.mismatch import digest
from shaketable.integrations.vllm.engine import FORCED
from shaketable.sites.engine_modules import is_engine_experts, is_engine_linear
from shaketable.sites.structure import Anatomy, Part

SHARD = 2**30
"""Bytes of weights that are kept before they are written."""
ROWS = 1024
"""Rows of the identity matrix that are multiplied at once."""
LABEL = 128
"""Labels are written in this base: bfloat16 holds whole numbers up to 256."""


class Observer:
    """Calls that a worker answers; the names are long because vLLM refuses one that its worker has already."""

    def shaketable_facts(self) -> dict[str, Any]:
        """Facts that a front end cannot see: whether graphs are captured, how many workers share the model, …"""
        from vllm.platforms import current_platform

        config = self.vllm_config  # type: ignore[attr-defined]
        return {
            "compiled": bool(_compiled(self)),
            "captured": bool(config.compilation_config.cudagraph_mode) and not current_platform.is_cpu(),
            "dtype": str(config.model_config.dtype),
            "workers": config.parallel_config.world_size,
            "caches_prefixes": bool(config.cache_config.enable_prefix_caching),
            "block": int(config.cache_config.block_size),
            "longest": int(config.model_config.max_model_len),
            "logits_scale": float(getattr(getattr(_model(self), "logits_processor", None), "scale", 1.0)),
        }

    def shaketable_digests(self) -> dict[str, str]:
        """The digest of every weight, under the trainer's name."""
        return {name: digest(weight) for name, weight in weights(_model(self))}

    def shaketable_weights(self, folder: str) -> int:
        """Write weights, under the trainer's names, into numbered safetensors files; how many files."""
        from safetensors.torch import save_file

        shard: dict[str, Tensor] = {}
        files = size = 0
        for name, weight in weights(_model(self)):
            shard[name] = weight
            size += weight.nbytes
            if size > SHARD:
                save_file(shard, Path(folder) / f"weights-{files}.safetensors")
                shard, files, size = {}, files + 1, 0
        save_file(shard, Path(folder) / f"weights-{files}.safetensors")
        return files + 1

    def shaketable_record(self) -> None:
        """Start to record every operator."""
        self.shaketable_graphs(False)
        self.__dict__["_shaketable_recorder"] = WorkerRecorder(_model(self))

    def shaketable_recorded(self, file: str) -> None:
        """Stop, and write the recording."""
        recorder: WorkerRecorder = self.__dict__.pop("_shaketable_recorder")
        recorder.close()
        self.shaketable_graphs(True)
        torch.save({"calls": recorder.calls, "routed": recorder.routed}, file)

    def shaketable_graphs(self, on: bool) -> None:
        """Run what was compiled, or the modules as they were written."""
        compiled = self.__dict__.setdefault("_shaketable_compiled", _compiled(self))
        for module in compiled:
            module.do_not_compile = not on

    def shaketable_force(self, on: bool) -> None:
        """Make requests that carry tokens decode those."""
        for hook in self.__dict__.pop("_shaketable_forcing", ()):
            hook.remove()
        if on:
            sampler = self.model_runner.sampler  # type: ignore[attr-defined]
            self.__dict__["_shaketable_forcing"] = _forcing(self.model_runner, sampler)  # type: ignore[attr-defined]

    def shaketable_logprobs_mode(self, mode: str) -> None:
        """Set which log-probabilities are returned with sampled tokens: raw_logprobs or processed_logprobs."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        runner.sampler = type(runner.sampler)(logprobs_mode=mode, use_fp64_gumbel=runner.sampler.use_fp64_gumbel)


def observe(worker: Any) -> None:
    """Add these calls to a worker in this process that was made without this extension."""
    for name in [name for name in vars(Observer) if name.startswith("shaketable_")]:
        worker.__dict__[name] = functools.partial(getattr(Observer, name), worker)


def _model(worker: Any) -> torch.nn.Module:
    found: torch.nn.Module = worker.get_model()
    return found


def _compiled(worker: Any) -> list[Any]:
    """The modules that vLLM compiled."""
    return [m for m in _model(worker).modules() if m.__dict__.get("do_not_compile") is False]


def _forcing(runner: Any, sampler: Any) -> list[Any]:
    """Hooks on the sampler that put a request's own tokens in place of sampled ones."""
    raw: list[Tensor] = []

    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        raw[:] = [sampler.compute_logprobs(kwargs["logits"] if "logits" in kwargs else args[0])]

    def after(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        tokens = output.sampled_token_ids.flatten().long()
        for row, request in enumerate(runner.input_batch.req_ids):
            state = runner.requests[request]
            forced = (state.sampling_params.extra_args or {}).get(FORCED)
            if forced is not None and len(state.output_token_ids) < len(forced):
                tokens[row] = forced[len(state.output_token_ids)]
        output.sampled_token_ids = tokens.to(torch.int32).unsqueeze(-1)
        output.logprobs_tensors = sampler.gather_logprobs(raw.pop(), 0, tokens)

    return [sampler.register_forward_pre_hook(before, with_kwargs=True), sampler.register_forward_hook(after, with_kwargs=True)]


# ---- weights


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight, on the CPU, in the dtype the engine computes with."""
    for path, module in model.named_modules():
        if type(module).__name__ == "RoutedExperts":
            yield from _experts(path, module)
            continue
        for key in [key for key, p in module._parameters.items() if p is not None]:
            for name, part in parts(path, module, key, model, _value(module, key)):
                yield name, _home(part)
    if (head := getattr(model, "lm_head", None)) is not None and hasattr(head, "quant_method"):
        yield "lm_head.weight", _home(_product(head)[: head.org_vocab_size])


def parts(path: str, module: nn.Module, key: str, model: nn.Module, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A fused parameter as its projections; rows are outputs. Every other one as it is, without the padding of a vocabulary."""
    above, _, last = path.rpartition(".")
    names = fused(model).get(last)
    if names is None or not hasattr(module, "output_sizes"):
        yield f"{path}.{key}".lstrip("."), value[: module.org_vocab_size] if hasattr(module, "org_vocab_size") else value
        return
    sizes: Any = module.output_sizes
    for name, part in zip(names, value.split(list(sizes)), strict=True):
        yield f"{above}.{name}.{key}", part


def fused(model: nn.Module) -> dict[str, list[str]]:
    """Which projections a fused module holds, as the model's own class says it."""
    return dict(getattr(model, "packed_modules_mapping", {}))


def _home(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _value(module: nn.Module, key: str) -> Tensor:
    parameter = module._parameters[key]
    assert parameter is not None
    packed = (
        key == "weight" and is_engine_linear(module) and (hasattr(module, "cpu_linear") or not parameter.is_floating_point())
    )
    return _product(module) if packed else parameter


def _product(module: Any) -> Tensor:
    """The weight that a linear multiplies with, (out, in)."""
    width = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None) or module.embedding_dim
    dtype = module.weight.dtype if module.weight.is_floating_point() else module.params_dtype
    rows = torch.eye(width, dtype=dtype, device=module.weight.device)
    with torch.inference_mode():
        found = [module.quant_method.apply(module, some, bias=None) for some in rows.split(ROWS)]
    return torch.cat(found).t()


def _experts(path: str, experts: Any) -> Iterator[tuple[str, Tensor]]:
    kernel = experts.quant_method.moe_kernel.fused_experts
    inner, padded = experts.moe_config.intermediate_size_per_partition, experts.w2_weight.shape[-1]
    first, second = _unpacked(experts.w13_weight, kernel), _unpacked(experts.w2_weight, kernel)
    gate, up = first[:, :inner], first[:, padded : padded + inner]
    above = path.removesuffix(".routed_experts")
    yield f"{above}.gate_up_proj", _home(torch.cat([gate, up], 1))
    yield f"{above}.down_proj", _home(second[:, :, :inner])


def _unpacked(packed: Tensor, kernel: Any) -> Tensor:
    if packed.device.type != "cpu" or getattr(kernel, "_use_zentorch", False):
        return packed
    from vllm._custom_ops import cpu_prepack_moe_weight

    return undone(packed.detach(), lambda weight: cpu_prepack_moe_weight(weight.contiguous(), kernel.isa))


def undone(packed: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """The weights before packing, where packing only moves the numbers of each expert.

    Raises:
        ShaketableError: Packing does more than that.
    """
    one = packed[:1]
    labels = torch.arange(one.numel()).view(one.shape)
    order = torch.zeros_like(labels)
    for digit in range(5):
        scale = LABEL**digit
        order += pack((labels // scale % LABEL).to(packed.dtype)).long() * scale
    found = torch.empty_like(packed)
    found.view(len(packed), -1)[:, order.flatten()] = packed.reshape(len(packed), -1)
    if not torch.equal(pack(found).view(torch.uint8), packed.contiguous().view(torch.uint8)):
        raise ShaketableError("this vLLM packs its experts in a way that cannot be undone: their weights cannot be read")
    return found


# ---- operators


@dataclass
class WorkerRecorder:
    """Records from its creation to `close`."""

    model: nn.Module
    calls: list[dict[str, Any]] = field(default_factory=list)
    passes: int = 0
    routed: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)
    """Chosen experts, by pass and layer."""

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
            self.routed[self.passes, part.layer] = ids.detach().cpu().long().clone()

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
        row = {"name": name, "kind": kind, "layer": layer, "pass": self.passes}
        self.calls.append(row | {"inputs": inputs, "output": output})

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


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
