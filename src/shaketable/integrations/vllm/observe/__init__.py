"""The calls that a vLLM worker answers for `shaketable mismatch`: its weights, its operators, its routing.

vLLM makes its worker a subclass of `Observer` (`worker_extension_cls`), and the front end calls it by `collective_rpc`. Tensors
come back through safetensors files in a folder that the front end names: vLLM does not pickle what a call returns.

A compiled model calls none of its modules, so while operators are recorded it runs as it was written, with the same weights
and the same kernels of attention; what compiling changes is a variant of its own (`graphs off`). Rejected: recording inside of
the compiled graph, where most operators no longer exist.

Teacher-forced decoding: vLLM has no way to set the next token (`trace_decode_token_ids` is for one of its runners, and not
the CPU's). So the sampler's output is replaced by the token that the request carries, and the log-probability by that of this
token, by the sampler's own function, on the logits as the model gave them.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shaketable.integrations.common.mismatch import digest
from shaketable.integrations.vllm.engine import FORCED
from shaketable.integrations.vllm.observe.operators import WorkerRecorder
from shaketable.integrations.vllm.observe.weights import weights

SHARD = 2**30
"""Bytes of weights that are kept before they are written."""


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

    def shaketable_digests(self) -> dict[str, tuple[str, str]]:
        """The dtype and the digest of every weight, under the trainer's name."""
        return {name: (str(weight.dtype).removeprefix("torch."), digest(weight)) for name, weight in weights(_model(self))}

    def shaketable_weights(self, folder: str, names: list[str] | None = None) -> int:
        """Write weights, under the trainer's names, into numbered safetensors files; how many files."""
        from safetensors.torch import save_file

        shard: dict[str, Tensor] = {}
        files = size = 0
        for name, weight in weights(_model(self)):
            if names is not None and name not in names:
                continue
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

    def shaketable_recorded(self, folder: str) -> None:
        """Stop, and write the recording: `calls.json`, and the tensors it numbers."""
        from safetensors.torch import save_file

        recorder: WorkerRecorder = self.__dict__.pop("_shaketable_recorder")
        recorder.close()
        self.shaketable_graphs(True)
        tensors, calls = recorder.result()
        save_file(tensors, Path(folder) / "tensors.safetensors")
        (Path(folder) / "calls.json").write_text(json.dumps(calls), encoding="utf-8")

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
