"""Defects in a vLLM worker, each put in by its own hand and taken out again: none of them uses a plan.

`DEFECTS` says what each is, how prompts are sampled with it, and what the ladder has to say. The engine is eager and in this process, a
Llama of the size of nano; the expert is in a small mixture.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shaketable.mismatch.engine import Sampling


@dataclass(frozen=True)
class Defect:
    """What is wrong, and what must be said of it."""

    says: str
    plant: Callable[[Any], AbstractContextManager[None]]
    """Given the engine; wrong inside, right again behind."""
    rung: str
    words: tuple[str, ...]
    """All of them are in the verdict's sentence."""
    sampling: dict[str, Any] = field(default_factory=dict)
    trainer: str = "as loaded"
    """Or 'a step on': weights that have moved, and the engine got them, all but what is stale."""
    model: str = "nano"
    unseen: str = ""
    """Why it may go unnamed in bfloat16; empty where it must not."""


def worker_of(engine: Any) -> Any:
    return engine.llm.llm_engine.model_executor.driver_worker.worker


def model_of(engine: Any) -> Any:
    return worker_of(engine).get_model()


@contextmanager
def attribute(thing: Any, name: str, value: Any):
    """Another value of an attribute of the instance."""
    had, before = name in vars(thing), vars(thing).get(name)
    is_parameter = isinstance(thing, nn.Module) and name in thing._parameters
    before = thing._parameters[name] if is_parameter else before
    setattr(thing, name, value)
    try:
        yield
    finally:
        if had or is_parameter:
            setattr(thing, name, before)
        else:
            delattr(thing, name)


@contextmanager
def weights(engine: Any, state: dict[str, torch.Tensor]):
    """Other weights in the worker, by the trainer's names: what a sync would bring; packed as vLLM packs them."""
    model = model_of(engine)
    before = {name: value for name, value in engine.parameters() if name in state}
    load(model, before | state)
    try:
        yield
    finally:
        load(model, before)


def load(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Write weights into vLLM's model and pack its linears again."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm as pack

    fused = model.packed_modules_mapping
    for path, module in model.named_modules():
        above, _, last = path.rpartition(".")
        names = [f"{above}.{part}.weight".lstrip(".") for part in fused.get(last, [last])]
        if not all(name in state for name in names):
            continue
        value = torch.cat([state[name] for name in names]) if len(names) > 1 else state[names[0]]
        if hasattr(module, "org_vocab_size"):
            module.weight.data[: module.org_vocab_size] = value
            if hasattr(module, "cpu_linear"):
                pack(module, remove_weight=False)
        elif hasattr(module, "cpu_linear"):
            module.weight = nn.Parameter(value.clone(), requires_grad=False)
            pack(module, remove_weight=True)
        else:
            module.weight.data.copy_(value)


# ---- the defects


@contextmanager
def rope_base(engine):
    rotary = model_of(engine).model.layers[0].self_attn.rotary_emb
    kept = rotary.cos_sin_cache.clone()
    with attribute(rotary, "base", 500_000.0):
        rotary.cos_sin_cache.copy_(rotary._compute_cos_sin_cache().to(kept.dtype))
    yield
    rotary.cos_sin_cache.copy_(kept)


def norm_eps(engine):
    return attribute(model_of(engine).model.layers[3].post_attention_layernorm, "variance_epsilon", 1e-6)


@contextmanager
def stale_layer(engine):
    kept = {name: value for name, value in engine.parameters() if ".layers.5." in name}
    with weights(engine, a_step_on(dict(engine.parameters())) | kept):
        yield


def a_step_on(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All weights, moved a little, by what their names say."""
    moved = {}
    for name, value in state.items():
        tied = name.replace("lm_head", "model.embed_tokens")
        generator = torch.Generator().manual_seed(sum(tied.encode()))
        moved[name] = value * (1 + 1e-3 * torch.randn(value.shape, generator=generator)).to(value.dtype)
    return moved


@contextmanager
def swapped_heads(engine):
    state = dict(engine.parameters())
    size, swapped = model_of(engine).model.layers[2].self_attn.head_dim, {}
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.2.self_attn.{part}.weight"
        heads = state[name].view(-1, size, state[name].shape[-1])
        order = list(range(len(heads)))
        if part != "v_proj":
            order[:2] = [1, 0]
        swapped[name] = heads[order].reshape(state[name].shape)
    with weights(engine, swapped):
        yield


def head_in_bfloat16(engine):
    def product(x, weight, bias):
        return nn.functional.linear(x.bfloat16(), model.lm_head.weight.bfloat16()).to(x.dtype)

    model = model_of(engine)
    return attribute(model.lm_head, "cpu_linear", product)


@contextmanager
def cache_in_fp8(engine):
    impl = model_of(engine).model.layers[1].self_attn.attn.impl
    update = impl.do_kv_cache_update

    def rounding(layer, key, value, *rest, **more):
        coarse = [x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value)]
        return update(layer, *coarse, *rest, **more)

    with attribute(impl, "do_kv_cache_update", rounding):
        yield


@contextmanager
def processed_logprobs(engine):
    from vllm.v1.sample.sampler import Sampler

    engine.sample([[3]], Sampling(1))  # from here on the engine believes that its log-probabilities are raw
    runner = worker_of(engine).model_runner
    with attribute(runner, "sampler", Sampler(logprobs_mode="processed_logprobs")):
        yield


def temperature_not_applied(engine):
    sampler = type(worker_of(engine).model_runner.sampler)
    return attribute(sampler, "apply_temperature", staticmethod(lambda logits, *_: logits))


def shifted_log_softmax(engine):
    sampler = worker_of(engine).model_runner.sampler
    normalise = sampler.compute_logprobs
    return attribute(sampler, "compute_logprobs", lambda logits: normalise(logits) - 1e-3)


def scale_of_softmax(engine):
    impl = model_of(engine).model.layers[4].self_attn.attn.impl
    return attribute(impl, "scale", impl.scale * 1.01)


@contextmanager
def swapped_experts(engine):
    experts = next(m for n, m in model_of(engine).named_modules() if n.endswith("layers.1.mlp.experts.routed_experts"))
    kept = [experts.w13_weight.clone(), experts.w2_weight.clone()]
    for parameter in (experts.w13_weight, experts.w2_weight):
        parameter.data[:2] = parameter.data[[1, 0]]
    yield
    for parameter, before in zip((experts.w13_weight, experts.w2_weight), kept, strict=True):
        parameter.data.copy_(before)


@contextmanager
def shifted_after_a_hit(engine):
    """Positions of a request whose front came from the prefix cache are one too large."""
    runner, model = worker_of(engine).model_runner, model_of(engine)
    execute, hits = runner.execute_model, set()

    def watching(scheduled, *args, **kwargs):
        hits.update(r.req_id for r in scheduled.scheduled_new_reqs if r.num_computed_tokens > 0)
        return execute(scheduled, *args, **kwargs)

    def shift(module, args, kwargs):
        positions, starts = kwargs["positions"].clone(), runner.query_start_loc.np
        for row, request in enumerate(runner.input_batch.req_ids):
            if request in hits:
                positions[starts[row] : starts[row + 1]] += 1
        return args, kwargs | {"positions": positions}

    hook = model.register_forward_pre_hook(shift, with_kwargs=True)
    with attribute(runner, "execute_model", watching):
        yield
    hook.remove()


WARM = {"temperature": 1.5}
FLOOR = "on so few tokens its gap is within three floors of bfloat16"
DEFECTS = {
    "rope_base": Defect("the base of RoPE is 500,000, not 10,000", rope_base, "operators", ("layers.0", "rotary")),
    "norm_eps": Defect("eps of one norm is 1e-6, not 1e-5", norm_eps, "operators", ("layers.3.post_attention_layernorm",),
                       unseen="no value leaves its rounding interval in bfloat16"),
    "stale_layer": Defect(
        "layer 5 missed the last sync", stale_layer, "weights", ("layers.5.", "step 0"), trainer="a step on"
    ),
    "swapped_heads": Defect("two q heads and two k heads of layer 2 are swapped", swapped_heads, "weights", ("layers.2.", "rows differ")),
    "head_in_bfloat16": Defect("lm_head multiplies in bfloat16", head_in_bfloat16, "weights", ("lm_head", "bfloat16"),
                               unseen="all of the engine multiplies in bfloat16: nothing is planted"),
    "cache_in_fp8": Defect("the KV cache of layer 1 holds FP8", cache_in_fp8, "operators", ("layers.1.self_attn", "attention")),
    "processed_logprobs": Defect(
        "processed log-probabilities come back, not raw ones", processed_logprobs, "semantics", ("processed",), WARM, unseen=FLOOR
    ),
    "temperature_not_applied": Defect(
        "the temperature is not applied", temperature_not_applied, "semantics", ("temperature",),
        WARM | {"top_p": 0.6, "logprobs_mode": "processed"}, unseen=FLOOR,
    ),
    "top_p_renormalised": Defect(
        "log-probabilities are renormalised over top-p", processed_logprobs, "semantics", ("top p",), {"top_p": 0.5}, unseen=FLOOR
    ),
    "swapped_experts": Defect(
        "two experts of layer 1 have each other's weights", swapped_experts, "weights", ("layers.1.mlp.experts",), model="moe"
    ),
    "scale_of_softmax": Defect(
        "the softmax of layer 4 has a scale 1 % too large", scale_of_softmax, "operators", ("layers.4.self_attn", "1.01")
    ),
    "shifted_after_a_hit": Defect(
        "positions are off by one after a prefix-cache hit", shifted_after_a_hit, "operators",
        ("layers.0", "rotary", "decode", "positions off by +1"),
    ),
    "shifted_log_softmax": Defect(
        "log-probabilities are 0.001 too small", shifted_log_softmax, "operators", ("the engine's log_softmax",)
    ),
}  # fmt: skip
