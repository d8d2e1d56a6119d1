"""Checks of a config by verl's driver, of what would fail minutes later in some worker. Imports no torch.

What only a worker can see stops that worker, in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shaketable.errors import ModelError, ShaketableError
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


def check_verl(config: Mapping[str, Any], made: Shaking) -> None:
    """Refuse what our trainer, or a worker, cannot do.

    Raises:
        ShaketableError: One line, with the key to change.
    """
    trainer, model = config["trainer"], config["actor_rollout_ref"]
    _check_mode(trainer)
    if made.instructions("sampler") is not None:
        _check_sampler(trainer, model["rollout"], made)
    strategy = model["actor"]["strategy"]
    if made.instructions("actor") is not None and strategy != "fsdp2":
        raise ShaketableError(f"faults in the actor need FSDP2, not actor.strategy={strategy}; use {FSDP2}")
    for role in ("sampler", "actor"):
        for clause in made.clauses(role):
            _check_size(clause, role, _dtype(model, role))


def check_model(config: Mapping[str, Any], made: Shaking) -> None:
    """Match the actors' plan on the model that verl will train, made without values; nothing where it cannot be made here.

    Raises:
        ShaketableError: A name or a layer that it does not have, which an actor would find a minute later.
    """
    clauses = tuple(clause for clause in made.clauses("actor") if clause.site.level != "op")
    if not clauses or _has_adapters(config["actor_rollout_ref"]):
        return
    try:
        from shaketable.inject.injection import inject
        from shaketable.models import load_skeleton

        empty = load_skeleton(str(config["actor_rollout_ref"]["model"]["path"]))
    except (ImportError, ModelError):  # verl itself says what is wrong with a model that it cannot load
        return
    if empty.config.get_text_config() is empty.config:
        inject(empty, Plan(clauses=clauses), allow_inert=True).close(check=False)


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
    if "shaketable" in (options.get("additional_config") or {}):
        raise ShaketableError(f"{VLLM}.additional_config asks for a plan or AQN too; give it to verl alone: +shaketable.plan=…")
    clauses, aqn = made.clauses("sampler"), made.noise("sampler")
    hooked = [c.text() for c in clauses if c.site.level == "op" or set(c.points) != {"weight"}]
    if aqn is not None and aqn.form == "output":
        hooked.append(aqn.text())
    is_eager = options.get("enforce_eager", rollout["enforce_eager"]) or trainer["device"] == "cpu"
    if hooked and not is_eager and "compilation_config" not in options:  # with one, vLLM's workers say whether it can be
        raise ShaketableError(f"{hooked[0]}: vLLM captures CUDA graphs, in which only faults of weights act; add {EAGER}")
    for clause in clauses:
        for name in (path.rpartition(".")[-1] for path in clause.site.names):
            if clause.site.level == "module" and name in FUSED:
                split = f"module.{FUSED[name]},phase=rollout and module.{name},phase=train"
                raise ShaketableError(f"{clause.text()}: vLLM computes {name} inside of {FUSED[name]}; write {split}")


def vllm_options(rollout: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that the config hands to vLLM as they are."""
    found: Mapping[str, Any] = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    return found


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
