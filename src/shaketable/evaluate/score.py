"""The scorer: one model (Hugging Face here, vLLM in `vllm.py`) on fixed problems or texts, under any number of conditions.

Answers are greedy. An evaluation is a phase of its own (`eval`), so noise for rollouts or training never leaks into it; the
plan of a condition acts whatever phases its clauses name. Every answer is kept, and a plan that changed nothing is an error,
never a score.

Texts are read, not solved: the score of a text is the share of its tokens that were foreseen, and its loss is the mean per
token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding import Completion, Decoder, Progress, decode_all, probe_batch_size, tokens_of
from shaketable.evaluate.reading import Pair, Reading, pair_logits, read_pairs
from shaketable.evaluate.statistics import Interval, wilson
from shaketable.evaluate.tasks import Problem, Task, score_of
from shaketable.inject import Injection, Ledger, inject
from shaketable.plan import Plan
from shaketable.sites.phases import phase

LONGEST_TEXT = 2048
"""Tokens of a text, for a model that names no limit."""
LARGEST_READING = 64
LOGITS = 2**26
"""The most logits of one reading: a quarter of a GiB in float32, of which some copies are needed."""


@dataclass(frozen=True)
class Condition:
    """The state under which a score is taken."""

    name: str
    plan: Plan | None = None
    """None is clean. Phases of its clauses are dropped."""

    @classmethod
    def of(cls, name: str, plan: Plan | None) -> Condition:
        """A condition whose plan acts in evaluations."""
        return cls(name, None if plan is None else in_phases(plan, ()))

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "plan": self.plan and self.plan.text(), "plan_seed": self.plan and self.plan.seed}


def in_phases(plan: Plan, phases: tuple[str, ...]) -> Plan:
    """The plan with every clause in these phases; in all when there are none."""
    clauses = [c.model_copy(update={"site": c.site.model_copy(update={"phase": phases})}) for c in plan.clauses]
    return plan.model_copy(update={"clauses": tuple(clauses)})


@dataclass(frozen=True)
class Answer:
    """What the model wrote to one problem, and its score."""

    id: str
    text: str
    correct: float
    """1 or 0; for a text, the share of its tokens that were foreseen."""
    formatted: bool
    loss: float | None = None
    """Of the right answer, or of the text, in nats per token, where it was read; not finite where the model is broken."""

    def to_dict(self) -> dict[str, Any]:
        loss = {} if self.loss is None else {"loss": self.loss}
        return {"id": self.id, "text": self.text, "correct": self.correct, "formatted": self.formatted, **loss}


@dataclass(frozen=True)
class Evaluation:
    """A score, its answers and its proof."""

    condition: Condition
    answers: list[Answer]
    completions: list[Completion] = field(repr=False)
    ledger: Ledger | None
    seconds: float
    batch_size: int
    readings: list[Reading] = field(default_factory=list, repr=False)
    """Of texts, beside the clean model."""

    @property
    def n(self) -> int:
        return len(self.answers)

    @property
    def accuracy(self) -> float:
        return sum(a.correct for a in self.answers) / self.n

    @property
    def formatted(self) -> float:
        return sum(a.formatted for a in self.answers) / self.n

    @property
    def loss(self) -> float | None:
        """Mean over the problems; None where it was not read."""
        read = [a.loss for a in self.answers if a.loss is not None]
        return sum(read) / self.n if read else None

    @property
    def interval(self) -> Interval:
        """Wilson's, 95 %."""
        return wilson(self.accuracy, self.n)

    @property
    def tokens(self) -> int:
        return sum(len(c.tokens) for c in self.completions)

    def summary(self) -> dict[str, Any]:
        low, high = self.interval.low, self.interval.high
        scores = {"accuracy": self.accuracy, "ci_low": low, "ci_high": high, "n": self.n, "formatted": self.formatted}
        loss = {} if self.loss is None else {"loss": self.loss}
        spent = {"seconds": self.seconds, "batch_size": self.batch_size}
        return {**self.condition.to_dict(), **scores, **loss, **proof_of(self.ledger), **spent}

    def to_dict(self) -> dict[str, Any]:
        answers = [a.to_dict() for a in self.answers]
        return {**self.summary(), "answers": answers, "ledger": self.ledger and self.ledger.to_dict()}


def arithmetic(device: str, dtype: str) -> AbstractContextManager[Any]:
    """Score in bfloat16 what is trained in it: weights stay float32, and products are cast, as in training."""
    return torch.autocast(torch.device(device).type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def proof_of(ledger: Ledger | None) -> dict[str, Any]:
    """How often the faults fired, and the largest relative error measured over the clauses."""
    if ledger is None:
        return {"injections": 0, "measured_error": 0.0}
    errors = [s.measured("forward").error or s.measured("backward").error or 0.0 for s in ledger.sites]
    return {"injections": ledger.forward + ledger.backward, "measured_error": max(errors)}


class Evaluator:
    """Scores one Hugging Face model on a fixed list of problems, or of texts."""

    def __init__(
        self, model: Any, tokenizer: Any, task: Task, problems: Sequence[Problem], batch_size: int = 0, *, loss: bool = False
    ) -> None:
        """Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        task: What to solve or read.
        problems: Problems, or texts as `draw` gives them.
        batch_size: Problems at a time; 0 is what fits into memory.
        loss: Read the loss of the right answers too, under the same plan.
        """
        self.model, self.tokenizer, self.task, self.problems, self.loss = model, tokenizer, task, list(problems), loss
        self.decoder = Decoder.of(model, tokenizer, task.max_new_tokens)
        self.cut = 0
        """Texts that are longer than the model's context, whose beginning is read."""
        self.context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None) or None
        if task.kind == "text":
            self.prompts, self.rest = self._texts()
        else:
            self.prompts, self.rest = [prompt_tokens(tokenizer, task, p) for p in self.problems], []
            check_context(task.name, self.prompts, task.max_new_tokens, self.context)
        if not batch_size and self.rest:
            batch_size = reading_batch(model, [[*p, *r] for p, r in zip(self.prompts, self.rest, strict=True)])
        self.batch_size = batch_size or probe_batch_size(self.decoder, model, self.prompts)

    def _texts(self) -> tuple[list[list[int]], list[list[int]]]:
        """First token and the rest of every text, as far as the context goes."""
        limit = self.context or LONGEST_TEXT
        whole = [self.tokenizer(t.question, truncation=True, max_length=limit + 1)["input_ids"] for t in self.problems]
        if short := next((t for t, ids in zip(self.problems, whole, strict=True) if len(ids) < 2), None):
            raise ShaketableError(f"{short.id} is shorter than two tokens: one to read and one to foresee")
        self.cut = sum(len(ids) > limit for ids in whole)
        return [ids[:1] for ids in whole], [ids[1:limit] for ids in whole]

    def score(
        self, condition: Condition, progress: Progress | None = None, *, during: str = "eval", beside: bool = False
    ) -> Evaluation:
        """Score under a condition, in the phase `during`; the model's training flag is left as it was.

        `beside` reads every batch of texts clean too, for KL and agreement.
        """
        start, was_training = time.perf_counter(), self.model.training
        self.model.eval()
        try:
            with phase(during), injected(self.model, condition.plan, on=not beside) as injection:
                found = self._read(injection if beside else None, progress) if self.rest else self._solve(progress)
        finally:
            self.model.train(was_training)
        ledger = None if injection is None else injection.ledger
        answers, done, readings = found
        return Evaluation(condition, answers, done, ledger, time.perf_counter() - start, self.batch_size, readings)

    def _solve(self, progress: Progress | None) -> tuple[list[Answer], list[Completion], list[Reading]]:
        done = decode_all(self.decoder, self.model, self.prompts, batch_size=self.batch_size, progress=progress)
        answers = [scored(self.tokenizer, self.task, p, c) for p, c in zip(self.problems, done, strict=True)]
        if self.loss:
            right = [answer_tokens(self.tokenizer, p.answer) for p in self.problems]
            losses = read_pairs(list(zip(self.prompts, right, strict=True)), self.batch_size, self._logits)
            answers = [replace(a, loss=r.loss / r.tokens) for a, r in zip(answers, losses, strict=True)]
        return answers, done, []

    def _read(
        self, injection: Injection | None, progress: Progress | None
    ) -> tuple[list[Answer], list[Completion], list[Reading]]:
        pairs = list(zip(self.prompts, self.rest, strict=True))
        faulty = self._logits if injection is None else partial(self._faulty_logits, injection)
        found = read_pairs(pairs, self.batch_size, faulty, None if injection is None else self._logits, progress)
        rows = zip(self.problems, found, strict=True)
        answers = [Answer(p.id, "", r.foreseen / r.tokens, True, r.loss / r.tokens) for p, r in rows]
        return answers, [Completion(rest, []) for rest in self.rest], found

    def drift(self, completions: Sequence[Sequence[int]], plan: Plan) -> dict[str, Any]:
        """KL(clean‖faulty) per token, in nats, and top-1 agreement on completions of the first problems.

        A plan that changes nothing on these few tokens is accepted: callers have proof of it from their scores.
        """
        pairs: list[Pair] = list(zip(self.prompts, completions, strict=False))
        size = min(self.batch_size, reading_batch(self.model, [[*p, *c] for p, c in pairs]))
        with phase("eval"), injected(self.model, in_phases(plan, ()), on=False, check=False) as injection:
            assert injection is not None
            found = read_pairs(pairs, size, partial(self._faulty_logits, injection), self._logits)
        tokens = sum(r.tokens for r in found)
        kl, agree = sum(r.kl for r in found), sum(r.agree for r in found)
        return {"kl": kl / tokens, "agreement": agree / tokens, "tokens": tokens}

    def _logits(self, pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
        return pair_logits(self.model, pairs, self.decoder.pad)

    def _faulty_logits(self, injection: Injection, pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
        injection.enable()
        found = self._logits(pairs)
        injection.disable()
        return found


@contextmanager
def injected(
    model: Any, plan: Plan | None, *, on: bool, check: bool = True, allow_inert: bool = False
) -> Iterator[Injection | None]:
    """An injection for as long as this lasts, switched on or not; checked at the end. None without a plan."""
    if plan is None:
        yield None
        return
    injection = inject(model, plan, allow_inert=allow_inert)
    try:
        if on:
            injection.enable()
        yield injection
    except BaseException:
        injection.close(check=False)
        raise
    injection.close(check=check)


def check_context(name: str, prompts: Sequence[Sequence[int]], limit: int, context: int | None) -> None:
    """Refuse prompts whose completions, of `limit` tokens, do not fit into the model's context."""
    longest = max(map(len, prompts))
    if context is not None and longest + limit > context:
        what = f"a prompt of {longest} tokens and a completion of {limit}"
        raise ShaketableError(f"{name}: {what} do not fit into the model's context of {context}")


def reading_batch(model: Any, sequences: Sequence[Sequence[int]]) -> int:
    """Rows of one reading. Follows from the model and the texts alone, so that a resumed sweep reads in the same batches."""
    width = max(len(s) for s in sequences)
    return max(1, min(LARGEST_READING, LOGITS // (width * int(model.get_output_embeddings().weight.shape[0]))))


def scored(tokenizer: Any, task: Task, problem: Problem, completion: Completion) -> Answer:
    text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
    score = score_of(task, problem, text)
    return Answer(problem.id, text, score.correct, score.formatted)


def prompt_tokens(tokenizer: Any, task: Task, problem: Problem) -> list[int]:
    return tokens_of(tokenizer, task.prompt(problem, chat=tokenizer.chat_template is not None))


def answer_tokens(tokenizer: Any, answer: str) -> list[int]:
    """An answer as the model should write it: its tokens and the end token."""
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return [*tokenizer(answer, add_special_tokens=False)["input_ids"], *end]
