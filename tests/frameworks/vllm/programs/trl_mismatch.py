"""GRPO with TRL and its colocated vLLM, whose sampler is held against the trainer: trl_mismatch.py MODEL FOLDER healthy|stale.

`stale` loses the weights of one layer in every sync. Writes FOLDER/found.json.
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

SIZES = {"healthy": (2, 4, 6, 1), "stale": (3, 4, 6, 1)}
"""Steps, completions a step, tokens of each, steps from one check to the next."""


def keep(layer, remove_weight):
    """On a CPU vLLM packs weights away, and a trainer's weights would find no place to go."""
    layer.cpu_linear = torch.nn.functional.linear


def reward(completions, **_):
    return [float(len(c) % 3) for c in completions]


def lose_a_layer(model):
    """Every sync from now on forgets layer 5."""
    load = model.load_weights
    model.load_weights = lambda weights: load([(name, w) for name, w in weights if ".layers.5." not in name])


def main(model, folder, how):
    layers.dispatch_cpu_unquantized_gemm = keep
    generation.LLM = functools.partial(generation.LLM, enforce_eager=True)
    steps, completions, tokens, every = SIZES[how]
    callback = ShaketableCallback(mismatch_every=every, mismatch_stop=True)
    args = GRPOConfig(
        output_dir=str(folder / "out"), use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=64, vllm_enable_sleep_mode=False, model_init_kwargs={"dtype": "float32"}, use_cpu=True, bf16=False,
        per_device_train_batch_size=completions, num_generations=4, max_completion_length=tokens, max_steps=steps,
        learning_rate=1e-3, report_to="none", logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["12+30=", "7+8="] * 8})
    trainer = GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=data, callbacks=[callback])
    if how == "stale":
        lose_a_layer(trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.worker.get_model())
    error = None
    try:
        trainer.train()
    except ShaketableError as raised:
        error = f"{type(raised).__name__}: {raised}"
    (folder / "found.json").write_text(json.dumps({"log": trainer.state.log_history, "error": error}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
