"""The scorer's counterpart inside vLLM: the same problems, prompts and scoring; the tokens come from vLLM's own kernels.

The engine is started once, with the first faulty plan in its workers (so that a plan about weights finds them unpacked), and
every condition is a live change. Eager, because a compiled engine keeps its sites, and on a GPU its faults. Scores are proven
by the workers' own ledgers.

vLLM batches prompts as it likes, so under a random fault the two engines agree in law, not in bits. It returns no whole
distributions, so there is no KL; agreement is that of the most likely token.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shaketable.errors import InertError, ShaketableError
from shaketable.evaluate.decoding import Completion, Progress
from shaketable.evaluate.score import Condition, Evaluation, check_context, prompt_tokens, scored
from shaketable.evaluate.tasks import Problem, Task
from shaketable.inject import Ledger
from shaketable.models import load_skeleton, servable_path
from shaketable.plan import Plan

LARGEST_BATCH = 256


class VllmEvaluator:
    """Scores one model in vLLM on a fixed list of problems."""

    def __init__(
        self,
        name: str,
        task: Task,
        problems: Sequence[Problem],
        plan: Plan,
        *,
        batch_size: int = 0,
        dtype: str | None = None,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        """`plan` is what the workers start with; the rest is as for `Evaluator`, and vLLM's own `engine_args`."""
        if task.kind != "generate":
            raise ShaketableError(f"the task {task.name} is read, not solved: use --engine hf")
        self.task, self.problems = task, list(problems)
        self.batch_size = batch_size or min(LARGEST_BATCH, len(self.problems))
        self.path, self.skeleton = servable_path(name), load_skeleton(name)
        own = str(next(self.skeleton.parameters()).dtype).removeprefix("torch.")
        usual = {"dtype": dtype or own, "max_num_seqs": self.batch_size, "disable_log_stats": True, "seed": 0}
        self.llm, self.sampler = self._start({**usual, **(engine_args or {})}, plan)
        self.tokenizer = self.llm.get_tokenizer()
        self.prompts = [prompt_tokens(self.tokenizer, task, p) for p in self.problems]
        check_context(task.name, self.prompts, task.max_new_tokens, self.llm.model_config.max_model_len)

    def _start(self, arguments: dict[str, Any], plan: Plan) -> tuple[Any, Any]:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from vllm import LLM
        except ImportError:
            raise ShaketableError("--engine vllm needs vLLM in this environment: pip install vllm") from None
        from shaketable.integrations.vllm import connect, options

        try:
            llm = LLM(self.path, enforce_eager=True, **options(Condition.of("", plan).plan), **arguments)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ShaketableError(f"vLLM could not start {self.path}: {reason}") from error
        return llm, connect(llm)

    def facts(self) -> dict[str, Any]:
        return {
            "class": type(self.skeleton).__name__,
            "parameters": sum(p.numel() for p in self.skeleton.parameters()),
            "dtype": str(self.llm.model_config.dtype).removeprefix("torch."),
            "device": "vllm",
            "weights": files_hash(self.path),
        }

    def score(self, condition: Condition, progress: Progress | None = None) -> Evaluation:
        """Solve every problem under a condition."""
        start = time.perf_counter()
        self.sampler.set_phase("eval")
        if condition.plan is None:
            self.sampler.clear()
        else:
            self.sampler.set_plan(condition.plan.text(), condition.plan.seed)
        before = self._fires()
        done = self._solve(progress)
        ledger = self._ledger(condition, before)
        answers = [scored(self.tokenizer, self.task, p, c) for p, c in zip(self.problems, done, strict=True)]
        return Evaluation(condition, answers, done, ledger, time.perf_counter() - start, self.batch_size)

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
        """The workers' ledger; raises when a clause did nothing, or when a fault fired in a clean score."""
        if condition.plan is None:
            if self._fires() != before:
                raise ShaketableError("a clean score was asked for, and a fault fired in a worker of vLLM")
            return None
        reports = [report["plan"] for report in self.sampler.ledger() if report["plan"] is not None]
        if not reports:
            raise InertError("no worker of vLLM has the plan")
        ledger = Ledger.merge([Ledger.from_dict(report) for report in reports])
        ledger.check()
        return ledger

    def agreement(self, completions: Sequence[Sequence[int]]) -> tuple[float | None, int]:
        """Under the plan of the last score: share of clean tokens that are the most likely ones, and the number of tokens."""
        from vllm import SamplingParams

        read = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        whole = [{"prompt_token_ids": [*p, *c]} for p, c in zip(self.prompts, completions, strict=False)]
        agree = count = 0
        for prompt, request in zip(self.prompts, self.llm.generate(whole, read, use_tqdm=False), strict=False):
            tokens = request.prompt_token_ids[len(prompt) :]
            rows = request.prompt_logprobs[len(prompt) :]
            agree += sum(row[token].rank == 1 for row, token in zip(rows, tokens, strict=True))
            count += len(tokens)
        return (agree / count if count else None), count


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
