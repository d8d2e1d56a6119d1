"""A short supervised phase before a run, so that all arms begin with a model that can do a part of the task.

From 0 % the first steps of GRPO are a lottery: as long as no answer is right there is nothing to learn from, and when the first
one is depends on the seed. In runs from zero, the step at which learning took off (50 to 100 and more) made most of the
difference between seeds, and none of it was about the recipe.

The phase is the same for every arm and seed of a study: its problems and their order come from a seed of its own, its learning
rate from the size of the model, its loss is on the answers (the task's own, and the end token), and no fault acts in it. It is
kept in the cache under the hash of all that determines it, weights and installation included: the first run makes it, behind
a lock, and all others load it and check the hash of its weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model

from shaketable.capture.reference import device_name
from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding import Decoder
from shaketable.evaluate.reading import Pair, pair_logits
from shaketable.evaluate.score import answer_tokens, arithmetic, prompt_tokens
from shaketable.evaluate.tasks import Problem, Task, digest, sample, score_of
from shaketable.evaluate.tasks.task import train_problems
from shaketable.faults.rng import key_of
from shaketable.io.cache_folder import cache_folder
from shaketable.io.locks import take
from shaketable.io.replacing import replacing
from shaketable.records.weight_hash import weights_hash
from shaketable.train.config import RunConfig

Tell = Callable[[str, dict[str, Any]], None]
"""Called with what happens in a run: `stage`, `step`, `evaluation`, `warning`."""
SEED, BATCH, SCHEMA = 20_261_115, 64, 1
RATES = ((10_000_000, 1e-3), (1_000_000_000, 1e-4))
"""Learning rates by size; 1e-5 above the last."""


def check_answers(task: Task) -> None:
    """Refuse a task whose own answers, written out as they stand, would not be right: they would teach a wrong form."""
    have = len(task.problems("train"))
    for problem in sample(task, "train", min(have, 16), SEED):
        if not score_of(task, problem, problem.answer).correct:
            what = f"{problem.answer!r}, its own answer to {problem.id}"
            raise ShaketableError(f"no warm start on {task.name}: {what}, is not scored as right")


def warm_start(config: RunConfig, task: Task, model: Any, tokenizer: Any, tell: Tell) -> dict[str, Any]:
    """Give the model the weights after the supervised phase; returns what the record says of it.

    Raises:
        ShaketableError: The task has no answers to learn from, or the phase does not end in numbers.
    """
    check_answers(task)
    rows = train_problems(task, config.warm_start * BATCH, lambda i: key_of(SEED, "warm", i))
    made_of = _made_of(config, task, model, rows)
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]
    file = cache_folder() / "warm-starts" / f"{key}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:  # one process at a time makes or loads it
        if not take(lock):
            tell("stage", {"text": "waiting for the warm start of another run"})
            take(lock, math.inf)
        if file.exists():
            return {**_load(file, model), "cached": True}
        pairs: list[Pair] = [(prompt_tokens(tokenizer, task, p), answer_tokens(tokenizer, p.answer)) for p in rows]
        losses = _train(config, model, tokenizer, pairs, made_of["lr"], tell)
        facts = {"key": key, **made_of, "first_loss": losses[0], "last_loss": losses[-1], "weights": weights_hash(model)}
        _keep(model, facts, file)
        return {**facts, "cached": False}


def _made_of(config: RunConfig, task: Task, model: Any, rows: list[Problem]) -> dict[str, Any]:
    """All that the weights after the phase depend on."""
    size = sum(p.numel() for p in model.parameters())
    return {
        "schema": SCHEMA,
        "before": weights_hash(model),
        "task": task.describe(),
        "problems": digest(rows),
        "steps": config.warm_start,
        "batch": BATCH,
        "lr": next((rate for limit, rate in RATES if size < limit), 1e-5),
        "dtype": config.dtype,
        "device": device_name(model.device),
        "threads": torch.get_num_threads() if model.device.type == "cpu" else 0,
        "torch": str(torch.__version__),
        "transformers": metadata.version("transformers"),
    }


def _train(config: RunConfig, model: Any, tokenizer: Any, pairs: list[Pair], lr: float, tell: Tell) -> list[float]:
    """AdamW, the rate falling to nothing in a line; the global random state is left as it was."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    pad, losses = Decoder.of(model, tokenizer, 1).pad, []
    devices = [] if model.device.type == "cpu" else [model.device]
    model.train()
    with torch.random.fork_rng(devices, device_type=model.device.type):
        torch.manual_seed(SEED)
        for step in range(config.warm_start):
            tell("stage", {"text": "warm start", "done": step, "total": config.warm_start})
            optimizer.param_groups[0]["lr"] = lr * (1 - step / config.warm_start)
            with arithmetic(config.device, config.dtype):
                logits, targets = pair_logits(model, pairs[step * BATCH : (step + 1) * BATCH], pad, left=True)
                loss = torch.nn.functional.cross_entropy(logits.float(), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
    model.eval()
    found: list[float] = torch.stack(losses).tolist()
    if not all(map(math.isfinite, found)):
        raise ShaketableError(f"the warm start of {config.warm_start} steps does not end in numbers")
    return found


def _load(file: Path, model: Any) -> dict[str, Any]:
    """Give the model the weights of a file; returns what it says of itself."""
    try:
        with safe_open(file, "pt") as opened:
            facts: dict[str, Any] = json.loads(opened.metadata()["facts"])
        load_model(model, file, device=str(model.device))
        is_whole = weights_hash(model) == facts["weights"]
    except (OSError, ValueError, LookupError, RuntimeError, SafetensorError):
        is_whole = False
    if not is_whole:
        raise ShaketableError(f"the warm start in {file} is broken; remove it, and it is made again")
    return facts


def _keep(model: Any, facts: dict[str, Any], file: Path) -> None:
    try:
        with replacing(file, lasting=True) as draft:
            save_model(model, str(draft), {"facts": json.dumps(facts)})
    except (OSError, SafetensorError) as error:
        raise ShaketableError(f"cannot keep the warm start in {file}: {error}; make room") from error
