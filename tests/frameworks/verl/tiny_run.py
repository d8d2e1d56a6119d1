"""A verl run that fits a CPU: nano and its sums, one sampler, one actor, a few steps of a second each.

Most of a run is start-up: about ten processes, each of which imports torch and vLLM. `RAY_prestart_worker_first_driver=0`
saves Ray's starting one idle process for each of the CPUs that it was told it has. What verl needs on a CPU otherwise
is in `cpu_shims`, and in ENVIRONMENT and CPU below.

    scripts of examples/verl are run with MODEL, DATA and so on in the environment, and CPU as further overrides.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas

from shaketable.evaluate.tasks.arithmetic import Arithmetic
from shaketable.io.cache_folder import cache_folder
from shaketable.models import NANO
from tests import ROOT

HERE = Path(__file__).resolve().parent
SECONDS = 540

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the engine that is registered for cuda, which asks nothing of a GPU
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_DEDUP_LOGS": "0",
    "HYDRA_FULL_ERROR": "1",
}
SIZES = {"BATCH": "4", "GROUP": "4", "MINI": "4", "MICRO": "16", "PROMPT": "16", "ANSWER": "8", "LR": "1e-4"}
SIZES |= {"EPOCHS": "1", "TEST_EVERY": "-1", "SAVE_EVERY": "-1"}
FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
CPU = (
    "trainer.device=cpu",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    *(
        line
        for role in ("actor", "ref")
        for line in (
            f"actor_rollout_ref.{role}.fsdp_config.model_dtype=fp32",
            f"+actor_rollout_ref.{role}.fsdp_config.mixed_precision={FP32}",
            f"actor_rollout_ref.{role}.use_torch_compile=False",
            f"actor_rollout_ref.{role}.fsdp_config.use_torch_compile=False",
        )
    ),
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.free_cache_engine=False",
    "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    "actor_rollout_ref.rollout.max_model_len=128",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "actor_rollout_ref.rollout.max_num_batched_tokens=512",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "ray_kwargs.ray_init.num_cpus=16",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "+ray_kwargs.ray_init.object_store_memory=200000000",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
)
REWARD = '''"""The reward of the tiny run: whether the sum is right."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):
    return float(solution_str.strip() == ground_truth)
'''


def release(version: str) -> Path | None:
    """The folder of a release, to go on PYTHONPATH, fetched once; None for the one that is installed."""
    import verl

    if version == verl.__version__:
        return None
    folder = cache_folder() / "verl-releases" / version
    if not (folder / "verl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"verl=={version}"]
        subprocess.run(command, check=True)
    return folder


def make_tiny(folder: Path, train: int, test: int = 8) -> Path:
    """A folder with nano, which verl can chat with, and its problems."""
    shutil.copytree(NANO, folder / "model")
    settings = folder / "model" / "tokenizer_config.json"
    chat = {"chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | chat))
    for split, count in (("train", train), ("test", test)):
        side, draw = Arithmetic(level=3).problems(split), random.Random(1)
        rows = [_row(side[draw.randrange(len(side))]) for _ in range(count)]
        pandas.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
    (folder / "reward.py").write_text(REWARD)
    return folder


def _row(problem):
    ask = [{"role": "user", "content": problem.question}]
    return {"data_source": "sums", "prompt": ask, "reward_model": {"style": "rule", "ground_truth": problem.answer}}


@dataclass(frozen=True)
class Done:
    """What a run printed and left."""

    exit: int
    text: str
    folder: Path

    @property
    def steps(self) -> list[dict[str, float]]:
        """verl's metrics, by line of its console logger."""
        lines = re.findall(r"step:(\d+ - .*)", self.text)
        return [{k: _number(v) for k, _, v in (part.partition(":") for part in f"step:{line}".split(" - "))} for line in lines]

    def generations(self, kind: str, step: int) -> list[dict[str, object]]:
        """Prompts and answers that verl dumped, in the order of the prompts."""
        lines = (self.folder / kind / f"{step}.jsonl").read_text().splitlines()
        return sorted((json.loads(line) for line in lines), key=lambda row: (row["input"], row["output"]))


def _number(text: str) -> float:
    return float(re.sub(r"^np\.\w+\((.*)\)$", r"\1", text.strip()))


def run_example(
    script: str, folder: Path, *overrides: str, gpus: int = 1, version: str | None = None, **environment: str
) -> Done:
    """Run a script of examples/verl on what `make_tiny` made, with `gpus` workers of each role; all processes end with it."""
    tiny = {"MODEL": str(folder / "model"), "DATA": str(folder), "GPUS": str(gpus), "OUT": str(folder / "out")}
    env = os.environ | ENVIRONMENT | SIZES | tiny | environment
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    other = release(version) if version is not None else None
    paths = [*([str(other)] if other is not None else []), str(HERE / "cpu_shims"), env["PYTHONPATH"]]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    dumps = [f"trainer.validation_data_dir={folder / 'val'}", f"trainer.rollout_data_dir={folder / 'rollouts'}"]
    more = [f"reward.custom_reward_function.path={folder / 'reward.py'}", f"+ray_kwargs.ray_init.num_gpus={gpus}", *dumps]
    command = ["bash", str(ROOT / "examples" / "verl" / script), *CPU, *more, *overrides]
    log = folder / "log.txt"
    with log.open("w") as file:
        program = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True)
        try:
            code = program.wait(SECONDS)
        finally:
            _end(program)
    return Done(code, log.read_text(), folder)


def _end(program: subprocess.Popen[bytes]) -> None:
    """A run that broke may leave Ray's processes waiting: end the whole session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
