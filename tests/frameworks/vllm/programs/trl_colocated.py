"""GRPO with TRL and its colocated vLLM, compiled: trl_colocated.py MODEL FOLDER. Writes what happened to FOLDER/found.json."""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import vllm.model_executor.layers.utils as layers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from shaketable.integrations.trl import ShaketableCallback


def keep(layer, remove_weight):
    """On a CPU vLLM packs weights away, and a trainer's weights would find no place to go."""
    layer.cpu_linear = torch.nn.functional.linear


def reward(completions, **_):
    return [float(len(c) % 3) for c in completions]


def main(model, folder):
    layers.dispatch_cpu_unquantized_gemm = keep
    callback = ShaketableCallback(
        plan="relative_gaussian:0.05@module.linear", aqn="constant:0.1", ledger=folder / "ledger.json"
    )
    args = GRPOConfig(
        output_dir=str(folder / "out"), use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=64, vllm_enable_sleep_mode=False, model_init_kwargs={"dtype": "float32"}, use_cpu=True, bf16=False,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, num_generations=4, max_completion_length=6, max_steps=3,
        learning_rate=1e-3, eval_strategy="steps", eval_steps=1, report_to="none", logging_steps=1, save_strategy="no",
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["12+30=", "7+8="] * 8})
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(2)),
        callbacks=[callback],
    )
    trainer.train()
    engine = trainer.vllm_generation.llm.llm_engine.engine_core.engine_core
    inside = dict(engine.model_executor.driver_worker.worker.model_runner.get_model().named_parameters())
    trained = {n: p for n, p in trainer.model.named_parameters() if n.endswith("norm.weight")}
    clean = all(torch.equal(inside[name], p.detach().to(inside[name].dtype)) for name, p in trained.items())
    (plan, aqn) = callback.sampler.ledgers()
    mode = int(engine.vllm_config.compilation_config.mode)
    found = {
        "plan": plan.to_dict(),
        "aqn": aqn.to_dict(),
        "norms_are_the_trained_ones": clean,
        "norms": len(trained),
        "mode": mode,
    }
    (folder / "found.json").write_text(json.dumps(found | {"log": trainer.state.log_history}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
