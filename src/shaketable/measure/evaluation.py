"""A score under a condition: which plan, which problems, which seed; every answer kept, and the faults proven by a ledger.

Answers are greedy. An evaluation is a phase of its own (`eval`), so nothing that was meant for rollouts or training leaks into
it, and a plan that an evaluation asks for acts in it whatever phases its clauses name: the question is what the model is
worth on that hardware. A plan that changed nothing is an error, never a score.

Besides being right or wrong, a faulty model is compared with the clean one token by token: KL(clean‖faulty) and top-1
agreement at every position of the clean model's own answers, read with teacher forcing. An overconfident model can lose
no answer and still be far from itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shaketable.errors import ModelError, ShaketableError
from shaketable.inject import Ledger, inject
from shaketable.measure.decoding.dynamic import Completion, Decoder, Progress, batches, decode_all
from shaketable.measure.stats.tests import Interval, wilson
from shaketable.measure.tasks import Problem, Task
from shaketable.measure.tasks.task import score_of
from shaketable.plan import Plan
from shaketable.sites.phases import phase


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
        """For run records."""
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
    correct: bool
    formatted: bool


@dataclass(frozen=True)
class Evaluation:
    """A score, its answers and its proof."""

    condition: Condition
    answers: list[Answer]
    completions: list[Completion] = field(repr=False)
    ledger: Ledger | None
    seconds: float
    batch_size: int

    @property
    def n(self) -> int:
        """Problems."""
        return len(self.answers)

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return sum(a.correct for a in self.answers) / self.n

    @property
    def formatted(self) -> float:
        """Share of answers in the form that was asked for."""
        return sum(a.formatted for a in self.answers) / self.n

    @property
    def interval(self) -> Interval:
        """Wilson's, 95 %."""
        return wilson(self.accuracy, self.n)

    @property
    def tokens(self) -> int:
        """Tokens written."""
        return sum(len(c.tokens) for c in self.completions)

    def summary(self) -> dict[str, Any]:
        """The score without its answers."""
        low, high = self.interval.low, self.interval.high
        proof = {"injections": 0, "measured_error": 0.0} if self.ledger is None else proof_of(self.ledger)
        scores = {"accuracy": self.accuracy, "ci_low": low, "ci_high": high, "n": self.n, "formatted": self.formatted}
        return {**self.condition.to_dict(), **scores, **proof, "seconds": self.seconds, "batch_size": self.batch_size}

    def to_dict(self) -> dict[str, Any]:
        """All of it, for the run record."""
        answers = [{"id": a.id, "text": a.text, "correct": a.correct, "formatted": a.formatted} for a in self.answers]
        return {**self.summary(), "answers": answers, "ledger": self.ledger and self.ledger.to_dict()}


def arithmetic(device: str, dtype: str) -> AbstractContextManager[Any]:
    """Score in bfloat16 what is trained in it: weights stay float32, and products are cast, as in training."""
    return torch.autocast(torch.device(device).type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def proof_of(ledger: Ledger) -> dict[str, Any]:
    """How often the faults fired, and the largest relative error measured over the clauses."""
    errors = [s.measured("forward").error or s.measured("backward").error or 0.0 for s in ledger.sites]
    return {"injections": ledger.forward + ledger.backward, "measured_error": max(errors)}


class Evaluator:
    """Scores one model on a fixed list of problems, under any number of conditions."""

    def __init__(self, model: Any, tokenizer: Any, task: Task, problems: Sequence[Problem], batch_size: int) -> None:
        if task.kind != "generate":
            raise ShaketableError(f"the task {task.name} has no problems to solve; it is for sweeps only")
        self.model, self.tokenizer, self.task, self.problems = model, tokenizer, task, list(problems)
        self.prompts = [prompt_tokens(tokenizer, task, p) for p in self.problems]
        self.decoder = Decoder.of(model, tokenizer, task.max_new_tokens)
        self.batch_size = batch_size
        self._check_context()

    def _check_context(self) -> None:
        longest, context = max(len(p) for p in self.prompts), getattr(self.model.config, "max_position_embeddings", None)
        if context is not None and longest + self.task.max_new_tokens > context:
            what = f"a prompt of {longest} tokens and an answer of {self.task.max_new_tokens}"
            raise ShaketableError(f"{self.task.name}: {what} do not fit into the model's context of {context}")

    def score(self, condition: Condition, progress: Progress | None = None, *, during: str = "eval") -> Evaluation:
        """Solve every problem under a condition, in the phase `during`. The model's training flag is left as it was."""
        start, was_training = time.perf_counter(), self.model.training
        shaken = nullcontext() if condition.plan is None else inject(self.model, condition.plan)
        self.model.eval()
        try:
            with phase(during), shaken as ledger:
                done = decode_all(self.decoder, self.model, self.prompts, batch_size=self.batch_size, progress=progress)
        finally:
            self.model.train(was_training)
        answers = [scored(self.tokenizer, self.task, p, c) for p, c in zip(self.problems, done, strict=True)]
        return Evaluation(condition, answers, done, ledger, time.perf_counter() - start, self.batch_size)


def scored(tokenizer: Any, task: Task, problem: Problem, completion: Completion) -> Answer:
    """What was written to a problem, as text and with its score."""
    text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
    score = score_of(task, problem, text)
    return Answer(problem.id, text, score.correct, score.formatted)


def prompt_tokens(tokenizer: Any, task: Task, problem: Problem) -> list[int]:
    """What the model is given of a problem."""
    return tokens_of(tokenizer, task.prompt(problem, chat=tokenizer.chat_template is not None))


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """A prompt as the model is given it: a chat turn if it has a template for one, else the plain text."""
    if tokenizer.chat_template is None:
        found: list[int] = tokenizer(text)["input_ids"]
        return found
    messages = [{"role": "user", "content": text}]
    try:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    except Exception as error:  # a template is a program, and raises what it likes
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ModelError(f"the model's chat template cannot be used: {what}") from error
    return list(rendered["input_ids"])


@dataclass(frozen=True)
class Drift:
    """How far a faulty model is from the clean one on the same tokens."""

    kl: float
    """Mean KL(clean‖faulty), in nats per token."""
    agreement: float
    """Share of tokens whose most likely successor is the same."""
    tokens: int


@torch.no_grad()
def drift(
    model: Any,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    plan: Plan,
    batch_size: int,
    pad: int,
    *,
    check: bool = True,
) -> tuple[Drift, Ledger]:
    """KL and agreement between clean and faulty readings of (prompt, completion) pairs, on the completions.

    `check=False` accepts a plan that changes nothing on these tokens, for callers who have proof of it from others.
    """
    whole = [[*p, *c] for p, c in sequences]
    total, agree, count = 0.0, 0, 0
    injection = inject(model, in_phases(plan, ()))
    try:
        with phase("eval"):
            for indices in batches(whole, batch_size):
                ids, mask, read = _right_padded(whole, sequences, indices, pad, model.get_input_embeddings().weight.device)
                clean = _log_probs(model, ids, mask, read)
                injection.enable()
                faulty = _log_probs(model, ids, mask, read)
                injection.disable()
                total += float((clean.exp() * (clean - faulty)).sum(-1).double().sum())
                agree += int((clean.argmax(-1) == faulty.argmax(-1)).sum())
                count += len(clean)
    except BaseException:
        injection.close(check=False)
        raise
    injection.close(check=check)
    return Drift(total / count, agree / count, count), injection.ledger


def _log_probs(model: Any, ids: Tensor, mask: Tensor, read: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits[:, :-1][read].float().log_softmax(-1)


def _right_padded(
    whole: list[list[int]], sequences: Sequence[tuple[Sequence[int], Sequence[int]]], indices: list[int], pad: int, device: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask, and which positions predict a token of a completion."""
    width = max(len(whole[i]) for i in indices)
    ids = [whole[i] + [pad] * (width - len(whole[i])) for i in indices]
    mask = [[1] * len(whole[i]) + [0] * (width - len(whole[i])) for i in indices]
    read = []
    for i in indices:
        prompt, completion = sequences[i]
        before = len(prompt) - 1
        read.append([False] * before + [True] * len(completion) + [False] * (width - 1 - before - len(completion)))
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device), torch.tensor(read, device=device)
