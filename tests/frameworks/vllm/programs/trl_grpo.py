"""GRPO with TRL and its colocated vLLM: trl_grpo.py MODEL FOLDER plan|healthy|stale. Writes what happened to FOLDER/found.json.

`plan` is compiled, under a plan and AQN. The others hold an eager sampler against the trainer in every step; `stale` loses the
weights of one layer in every sync.
"""

import functools
import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import trl.generation.vllm_generation as generation
import vllm.model_executor.layers.utils as layers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from shaketable.errors import ShaketableError
from shaketable.integrations.trl import ShaketableCallback

STEPS = {"plan": 3, "healthy": 2, "stale": 3}


def keep(layer, remove_weight):
    """On a CPU vLLM packs weights away, and a trainer's weights would find no place to go."""
    layer.cpu_linear = torch.nn.functional.linear


def reward(completions, **_):
    return [float(len(c) % 3) for c in completions]


def lose_a_layer(model):
    """Every sync from now on forgets layer 5."""
    load = model.load_weights
    model.load_weights = lambda weights: load([(name, w) for name, w in weights if ".layers.5." not in name])


def facts(trainer, callback, sampler):
    """What a plan and AQN did in the sampler, and whether its norms are the trained ones."""
    inside = dict(sampler.named_parameters())
    trained = {n: p for n, p in trainer.model.named_parameters() if n.endswith("norm.weight")}
    clean = all(torch.equal(inside[name], p.detach().to(inside[name].dtype)) for name, p in trained.items())
    plan, aqn = (ledger.to_dict() for ledger in callback.sampler.ledgers())
    mode = int(trainer.vllm_generation.llm.llm_engine.vllm_config.compilation_config.mode)
    return {"plan": plan, "aqn": aqn, "norms_are_the_trained_ones": clean, "norms": len(trained), "mode": mode}


def main(model, folder, how):
    layers.dispatch_cpu_unquantized_gemm = keep
    if how == "plan":
        callback = ShaketableCallback("relative_gaussian:0.05@module.linear", "constant:0.1", ledger=folder / "ledger.json")
    else:
        generation.LLM = functools.partial(generation.LLM, enforce_eager=True)
        callback = ShaketableCallback(mismatch_every=1, mismatch_stop=True)
    args = GRPOConfig(
        output_dir=str(folder / "out"), use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=64, vllm_enable_sleep_mode=False, model_init_kwargs={"dtype": "float32"}, use_cpu=True, bf16=False,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, num_generations=4, max_completion_length=6,
        max_steps=STEPS[how], learning_rate=1e-3, eval_strategy="steps" if how == "plan" else "no", eval_steps=1,
        report_to="none", logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["12+30=", "7+8="] * 8})
    few = data.select(range(2))
    trainer = GRPOTrainer(model, reward, args=args, train_dataset=data, eval_dataset=few, callbacks=[callback])
    sampler = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.worker.get_model()
    if how == "stale":
        lose_a_layer(sampler)
    found = {"error": None}
    try:
        trainer.train()
    except ShaketableError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found |= facts(trainer, callback, sampler) if how == "plan" else {}
    (folder / "found.json").write_text(json.dumps(found | {"log": trainer.state.log_history}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
