"""Checks of a config by verl's driver, of what would fail minutes later in some worker. Imports no torch.

vLLM computes q, k and v as one product, and gate and up as another, under names that the trainer's model does not have, and the
other way round. Models that do have them (Phi has `qkv_proj`) take `*qkv_proj`, which is not judged here. FSDP1
(`strategy=fsdp`) keeps the weights of a layer as one flat vector: what is found by the shape of its weight (`module.linear`),
and weights themselves, cannot be hit there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shaketable.errors import ShaketableError
from shaketable.plan import Clause, Plan
from shaketable.sites.engine_modules import FUSED

if TYPE_CHECKING:
    from shaketable.integrations.verl.settings import Shaking

EAGER = "actor_rollout_ref.rollout.enforce_eager=True"
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
FSDP2 = "actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2"
FLOAT32 = (
    "actor_rollout_ref.rollout.dtype=float32 "
    "'++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}'"
)
HALF_STEP = {"bfloat16": 2.0**-9, "bf16": 2.0**-9, "float16": 2.0**-12, "fp16": 2.0**-12, "half": 2.0**-12}
"""Half of the last bit of a result, relative to it, where that is least."""
DEVIATIONS = {"relative_gaussian": 9.0, "gain": 1.0}
"""Faults whose error is relative to each value, and how many magnitudes it can reach: no draw lies beyond nine deviations."""
BY_SHAPE = {"all", "linear", "rmsnorm", "layernorm", "embedding", "lm_head", "router", "lora"}
"""Names of modules that are recognised by the shape of their weight."""


def check_verl(config: Mapping[str, Any], made: Shaking) -> None:
    """Refuse what our trainer, or a worker, cannot do.

    Raises:
        ShaketableError: One line, with the key to change.
    """
    trainer, model = config["trainer"], config["actor_rollout_ref"]
    _check_mode(trainer)
    if made.instructions("sampler", 1) is not None:
        _check_sampler(trainer, model["rollout"], made)
    if made.instructions("actor", 1) is not None:
        _check_strategy(model["actor"]["strategy"], made)
    for role in ("sampler", "actor"):
        for clause in _clauses(made, role):
            _check_names(clause, role)
            _check_size(clause, role, _dtype(model, role))


def check_model(config: Mapping[str, Any], made: Shaking) -> None:
    """Match the actors' plan on the model that verl will train, made without values; nothing where it cannot be made here.

    Raises:
        ShaketableError: A name or a layer that it does not have, which an actor would find a minute later.
    """
    clauses = [clause for clause in _clauses(made, "actor") if clause.site.level != "op"]
    model = config["actor_rollout_ref"]["model"]
    if not clauses or _has_adapters(config["actor_rollout_ref"]):
        return
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = AutoConfig.from_pretrained(str(model["path"]), trust_remote_code=bool(model.get("trust_remote_code")))
        if settings.get_text_config() is not settings:
            return
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(settings)
    except (ImportError, OSError, ValueError, KeyError):  # verl itself says what is wrong with a model that it cannot load
        return
    from shaketable.inject.injection import Injection

    injection = Injection(Plan(clauses=tuple(clauses)), allow_inert=True)
    try:
        injection.attach(empty)
    finally:
        injection.close(check=False)


def check_mismatch(config: Mapping[str, Any]) -> None:
    """Refuse a run whose samplers cannot be compared with its actors.

    Raises:
        ShaketableError: One line, with the key to change.
    """
    _check_mode(config["trainer"])
    model, rollout = config["actor_rollout_ref"], config["actor_rollout_ref"]["rollout"]
    _check_engine(rollout)
    needed = {
        FSDP2: model["actor"]["strategy"] == "fsdp2",
        "actor_rollout_ref.model.lora_rank=0": not _has_adapters(model),
        f"no {VLLM}.worker_extension_cls": vllm_options(rollout).get("worker_extension_cls") is None,
    }
    for size in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        needed[f"actor_rollout_ref.rollout.{size}=1"] = (rollout.get(size) or 1) == 1
    if missing := next((key for key, is_there in needed.items() if not is_there), None):
        raise ShaketableError(f"shaketable.mismatch compares whole weights by name, and needs {missing}")


def _has_adapters(model: Mapping[str, Any]) -> bool:
    return bool(model["model"].get("lora_rank") or (model["model"].get("lora") or {}).get("rank"))


def _check_mode(trainer: Mapping[str, Any]) -> None:
    mode = trainer["v1"]["trainer_mode"] if trainer.get("use_v1") else "the trainer before v1"
    if mode != "sync":
        raise ShaketableError(f"shaketable works with trainer.v1.trainer_mode=sync, not with {mode}")


def _check_engine(rollout: Mapping[str, Any]) -> None:
    if rollout["name"] != "vllm":
        raise ShaketableError(f"shaketable works with rollout.name=vllm, not with {rollout['name']}")


def _check_sampler(trainer: Mapping[str, Any], rollout: Mapping[str, Any], made: Shaking) -> None:
    _check_engine(rollout)
    options = vllm_options(rollout)
    given = options.get("additional_config") or {}
    if "shaketable" in given:
        raise ShaketableError(f"{VLLM}.additional_config asks for a plan or AQN too; give it to verl alone: +shaketable.plan=…")
    hooked = [c.text() for c in _clauses(made, "sampler") if c.site.level == "op" or set(c.points) != {"weight"}]
    if made.aqn is not None and made.aqn.form == "output":
        hooked.append(made.aqn.text())
    if hooked and trainer["device"] != "cpu" and _captures(rollout, options):
        raise ShaketableError(f"{hooked[0]}: vLLM captures CUDA graphs, in which only faults of weights act; add {EAGER}")


def _check_strategy(strategy: str, made: Shaking) -> None:
    if strategy not in ("fsdp", "fsdp2"):
        raise ShaketableError(f"faults in the actor need FSDP, not actor.strategy={strategy}; use {FSDP2}")
    needs_shapes = [
        clause.text()
        for clause in _clauses(made, "actor")
        if "weight" in clause.points or (clause.site.level == "module" and not BY_SHAPE.isdisjoint(clause.site.names))
    ]
    if made.aqn is not None and made.aqn.where == "both" and made.aqn.form != "output":
        needs_shapes.append(made.aqn.text())
    if strategy == "fsdp" and needs_shapes:
        raise ShaketableError(
            f"{needs_shapes[0]}: strategy=fsdp keeps weights as flat vectors, which cannot be told apart; use {FSDP2}"
        )


def vllm_options(rollout: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that the config hands to vLLM as they are."""
    found: Mapping[str, Any] = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    return found


def _captures(rollout: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether vLLM will capture CUDA graphs, which it does unless told otherwise."""
    compilation = options.get("compilation_config") or {}
    compilation = json.loads(compilation) if isinstance(compilation, str) else compilation
    is_eager = options.get("enforce_eager", rollout["enforce_eager"])
    return not is_eager and str(compilation.get("cudagraph_mode", "on")).upper() not in ("NONE", "0")


def _check_names(clause: Clause, role: str) -> None:
    if clause.site.level != "module":
        return
    for name in (path.rpartition(".")[-1] for path in clause.site.names):
        if role == "sampler" and name in FUSED:
            problem = f"vLLM computes {name} inside of {FUSED[name]}"
            whole, parts = FUSED[name], name
        elif role == "actor" and name in FUSED.values():
            whole, parts = name, "+".join(part for part, fused in FUSED.items() if fused == name)
            problem = f"the trainer's model has {parts} in place of {name}"
        else:
            continue
        split = f"module.{whole},phase=rollout and module.{parts},phase=train, or module.*{name} where both have it"
        raise ShaketableError(f"{clause.text()}: {problem}; write {split}")


def _dtype(model: Mapping[str, Any], role: str) -> str:
    """In which the samplers, or the actors, compute."""
    if role == "sampler":
        return str(model["rollout"].get("dtype", "bfloat16"))
    precision = (model["actor"].get("fsdp_config") or {}).get("mixed_precision") or {}
    return str(precision.get("param_dtype", "bfloat16"))


def _check_size(clause: Clause, role: str, dtype: str) -> None:
    """Refuse relative noise that rounding removes. A result in [1, 2)·2^e moves when noise exceeds half of its last bit."""
    if (half := HALF_STEP.get(dtype)) is None or clause.fault.kind not in DEVIATIONS or clause.fault.is_off:
        return
    names = {name.rpartition(".")[-1] for name in clause.site.names}
    known = {"matmul"} if clause.site.level == "op" else {"linear", "rmsnorm", "layernorm", *FUSED, *FUSED.values()}
    if clause.site.level == "layer" or not names <= known or "weight" in clause.points:
        return
    if (asked := clause.fault.asked()) is not None and asked * DEVIATIONS[clause.fault.kind] < half:
        raise ShaketableError(
            f"{clause.text()}: {role}s compute in {dtype}, which rounds {asked:g} away, so nothing would be injected; use a "
            f"magnitude of {half:.1g} or more, or float32 in both: {FLOAT32} (the recipes: DTYPE=float32)"
        )


def _clauses(made: Shaking, role: str) -> tuple[Clause, ...]:
    instructions = made.instructions(role, 1)
    return Plan.parse(instructions.plan).clauses if instructions is not None and instructions.plan is not None else ()
