"""A model that solves problems inside of vLLM, as a sweep measures it.

The same problems, prompts, scoring and statistics as with Hugging Face's own model (`solve.py`); only the tokens come
from vLLM, with vLLM's kernels, its fused projections and its batching. The engine is started once, with the first faulty plan
in its workers (so that a plan about weights finds them unpacked), and every point is a live change: clean is a worker with
nothing on it. Eager, because a compiled engine keeps its sites, and on a GPU its faults. Scores are proven by the workers'
own ledgers.

How vLLM puts prompts into batches is its own affair, and noise is keyed by the call: under a plan that draws noise the two
engines agree in law, not in bits. vLLM does not hand out whole distributions, so there is no KL; agreement is that of the most
likely token on the clean answers.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shaketable.errors import InertError, ShaketableError
from shaketable.evaluate.decoding.dynamic import Completion, Progress
from shaketable.evaluate.evaluation import Condition, Evaluation, prompt_tokens, scored
from shaketable.evaluate.sweep.config import Setting, SweepConfig
from shaketable.evaluate.sweep.solve import READ
from shaketable.evaluate.tasks import Problem, Task
from shaketable.inject import Ledger
from shaketable.models import load_skeleton, servable_path

LARGEST_BATCH = 256


class VllmSolving:
    """One model in vLLM and the problems it solves."""

    def __init__(self, name: str, task: Task, problems: Sequence[Problem], config: SweepConfig, batch_size: int | None) -> None:
        if task.kind != "generate":
            raise ShaketableError(f"the task {task.name} is read, not solved: use --engine hf")
        self.task, self.problems = task, list(problems)
        self.batch_size = batch_size or min(LARGEST_BATCH, len(self.problems))
        self.path, self.skeleton = servable_path(name), load_skeleton(name)
        self.llm = self._start(config)
        self.tokenizer = self.llm.get_tokenizer()
        self.prompts = [prompt_tokens(self.tokenizer, task, p) for p in self.problems]
        self._check_context()
        self.clean: list[list[int]] = []

    def _start(self, config: SweepConfig) -> Any:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from vllm import LLM
        except ImportError:
            raise ShaketableError("--engine vllm needs vLLM in this environment: pip install vllm") from None
        from shaketable.integrations.vllm import connect, options

        plan = next(s.plan for s in config.settings() if s.plan is not None)
        instructions = options(Condition.of("", plan).plan)
        own = str(next(self.skeleton.parameters()).dtype).removeprefix("torch.")
        usual = {"dtype": config.dtype or own, "max_num_seqs": self.batch_size, "disable_log_stats": True, "seed": 0}
        try:
            llm = LLM(self.path, enforce_eager=True, **{**usual, **config.engine_args, **instructions})
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ShaketableError(f"vLLM could not start {self.path}: {reason}") from error
        self.sampler = connect(llm)
        return llm

    def _check_context(self) -> None:
        longest, context = max(len(p) for p in self.prompts), self.llm.model_config.max_model_len
        if longest + self.task.max_new_tokens > context:
            what = f"a prompt of {longest} tokens and an answer of {self.task.max_new_tokens}"
            raise ShaketableError(f"{self.task.name}: {what} do not fit into the model's context of {context}")

    def facts(self) -> dict[str, Any]:
        """What the record says about the model."""
        config = self.llm.model_config
        return {
            "class": type(self.skeleton).__name__,
            "parameters": sum(p.numel() for p in self.skeleton.parameters()),
            "dtype": str(config.dtype).removeprefix("torch."),
            "device": "vllm",
            "weights": files_hash(self.path),
            "batch_size": self.batch_size,
        }

    def remember(self, clean: dict[str, Any]) -> None:
        """Take the clean answers from the record."""
        self.clean = clean["completions"]

    def measure(self, setting: Setting, progress: Progress | None = None) -> dict[str, Any]:
        """One run over all problems, as the record keeps it."""
        condition = Condition.of(setting.name, setting.plan)
        start = time.perf_counter()
        self._shake(condition)
        before = self._fires()
        done = self._solve(progress)
        ledger = self._ledger(condition, before)
        answers = [scored(self.tokenizer, self.task, p, c) for p, c in zip(self.problems, done, strict=True)]
        found = Evaluation(condition, answers, done, ledger, time.perf_counter() - start, self.batch_size)
        facts = {**found.to_dict(), "tokens": found.tokens}
        if setting.plan is None:
            self.clean = [c.tokens for c in done[:READ]]
            return {**facts, "completions": self.clean}
        return {**facts, "drift": self._drift() if setting.is_first else None}

    def _shake(self, condition: Condition) -> None:
        self.sampler.set_phase("eval")
        if condition.plan is None:
            self.sampler.clear()
        else:
            self.sampler.set_plan(condition.plan.text(), condition.plan.seed)

    def _solve(self, progress: Progress | None) -> list[Completion]:
        from vllm import SamplingParams

        choose = SamplingParams(temperature=0, max_tokens=self.task.max_new_tokens, logprobs=0, detokenize=False)
        done: list[Completion] = []
        for start in range(0, len(self.prompts), self.batch_size):
            some = [{"prompt_token_ids": p} for p in self.prompts[start : start + self.batch_size]]
            for request in self.llm.generate(some, choose, use_tqdm=False):
                best = request.outputs[0]
                chosen = [row[token].logprob for row, token in zip(best.logprobs, best.token_ids, strict=True)]
                done.append(Completion(list(best.token_ids), chosen))
            if progress is not None:
                progress(len(done), len(self.prompts))
        return done

    def _fires(self) -> int:
        return sum(report["plan"]["forward"] for report in self.sampler.ledger() if report["plan"] is not None)

    def _ledger(self, condition: Condition, before: int) -> Ledger | None:
        """What the workers did; raises when a clause did nothing, or when clean was not clean."""
        if condition.plan is None:
            if self._fires() != before:
                raise ShaketableError("a clean score was asked for, and a worker of vLLM was shaken")
            return None
        reports = [report["plan"] for report in self.sampler.ledger() if report["plan"] is not None]
        if not reports:
            raise InertError("no worker of vLLM has the plan")
        ledger = Ledger.merge([Ledger.from_dict(report) for report in reports])
        ledger.check()
        return ledger

    def _drift(self) -> dict[str, Any]:
        """Agreement of the most likely tokens on the clean answers; on these few a rare fault may do nothing."""
        from vllm import SamplingParams

        read = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        whole = [[*p, *c] for p, c in zip(self.prompts, self.clean, strict=False)]
        agree = count = 0
        for prompt, request in zip(
            self.prompts, self.llm.generate([{"prompt_token_ids": w} for w in whole], read, use_tqdm=False), strict=False
        ):
            tokens = request.prompt_token_ids[len(prompt) :]
            rows = request.prompt_logprobs[len(prompt) :]
            agree += sum(row[token].rank == 1 for row, token in zip(rows, tokens, strict=True))
            count += len(tokens)
        return {"kl": None, "agreement": agree / count if count else None, "tokens": count}


def files_hash(path: str) -> str:
    """A hash of a folder's weights, as they are on disk; the name of a model that is not here."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        return f"hub:{path}"
    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()
