"""A score under a condition: which plan, which problems, which seed; every answer kept, and the faults proven by a ledger.

Answers are greedy. An evaluation is a phase of its own (`eval`), so nothing that was meant for rollouts or training leaks into
it, and a plan that an evaluation asks for acts in it whatever phases its clauses name: the question is what the model is
worth on that hardware. A plan that changed nothing is an error, never a score.

Besides being right or wrong, a faulty model is compared with the clean one token by token: KL(clean‖faulty) and top-1
agreement at every position of the clean model's own answers, read with teacher forcing. An overconfident model can lose
no answer and still be far from itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shaketable.errors import ShaketableError
from shaketable.evaluate.chat_template import chat_tokens
from shaketable.evaluate.decoding.dynamic import Completion, Decoder, Progress, batches, decode_all
from shaketable.evaluate.stats.tests import Interval, wilson
from shaketable.evaluate.tasks import Problem, Task
from shaketable.evaluate.tasks.task import score_of
from shaketable.evaluate.token_loss import Reading, answer_tokens, log_probs, read, right_padded
from shaketable.inject import Ledger, inject
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
    correct: float
    """1 or 0; of a text, the share of its tokens that were foreseen."""
    formatted: bool
    loss: float | None = None
    """Of the right answer, or of the text, in nats per token, where it was read; not finite where the model is broken."""

    def to_dict(self) -> dict[str, Any]:
        """For run records; without a loss where none was read."""
        loss = {} if self.loss is None else {"loss": self.loss if math.isfinite(self.loss) else None}
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
        """Tokens written."""
        return sum(len(c.tokens) for c in self.completions)

    def summary(self) -> dict[str, Any]:
        """The score without its answers."""
        low, high = self.interval.low, self.interval.high
        proof = {"injections": 0, "measured_error": 0.0} if self.ledger is None else proof_of(self.ledger)
        scores = {"accuracy": self.accuracy, "ci_low": low, "ci_high": high, "n": self.n, "formatted": self.formatted}
        loss = {} if self.loss is None else {"loss": self.loss if math.isfinite(self.loss) else None}
        return {**self.condition.to_dict(), **scores, **loss, **proof, "seconds": self.seconds, "batch_size": self.batch_size}

    def to_dict(self) -> dict[str, Any]:
        """All of it, for the run record."""
        return {
            **self.summary(),
            "answers": [a.to_dict() for a in self.answers],
            "ledger": self.ledger and self.ledger.to_dict(),
        }


def arithmetic(device: str, dtype: str) -> AbstractContextManager[Any]:
    """Score in bfloat16 what is trained in it: weights stay float32, and products are cast, as in training."""
    return torch.autocast(torch.device(device).type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def proof_of(ledger: Ledger) -> dict[str, Any]:
    """How often the faults fired, and the largest relative error measured over the clauses."""
    errors = [s.measured("forward").error or s.measured("backward").error or 0.0 for s in ledger.sites]
    return {"injections": ledger.forward + ledger.backward, "measured_error": max(errors)}


class Evaluator:
    """Scores one model on a fixed list of problems, under any number of conditions."""

    def __init__(
        self, model: Any, tokenizer: Any, task: Task, problems: Sequence[Problem], batch_size: int, *, loss: bool = False
    ) -> None:
        """`loss` reads the loss of the right answers too, under the same plan."""
        if task.kind != "generate":
            raise ShaketableError(f"the task {task.name} has no problems to solve; it is for sweeps only")
        self.model, self.tokenizer, self.task, self.problems = model, tokenizer, task, list(problems)
        self.prompts = [prompt_tokens(tokenizer, task, p) for p in self.problems]
        self.decoder = Decoder.of(model, tokenizer, task.max_new_tokens)
        self.batch_size, self.loss = batch_size, loss
        self._check_context()

    def _check_context(self) -> None:
        longest = max(len(p) for p in self.prompts)
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
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
                losses = [found.loss for found in self._read()] if self.loss else [None] * len(done)
        finally:
            self.model.train(was_training)
        rows = zip(self.problems, done, losses, strict=True)
        answers = [replace(scored(self.tokenizer, self.task, p, c), loss=loss) for p, c, loss in rows]
        return Evaluation(condition, answers, done, ledger, time.perf_counter() - start, self.batch_size)

    def _read(self) -> list[Reading]:
        answers = (answer_tokens(self.tokenizer, p.answer) for p in self.problems)
        return read(self.model, list(zip(self.prompts, answers, strict=True)), self.batch_size, self.decoder.pad)


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
    return chat_tokens(tokenizer, text)


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
                ids, mask, read = right_padded(whole, sequences, indices, pad, model.get_input_embeddings().weight.device)
                clean = log_probs(model, ids, mask, read)
                injection.enable()
                faulty = log_probs(model, ids, mask, read)
                injection.disable()
                total += float((clean.exp() * (clean - faulty)).sum(-1).double().sum())
                agree += int((clean.argmax(-1) == faulty.argmax(-1)).sum())
                count += len(clean)
    except BaseException:
        injection.close(check=False)
        raise
    injection.close(check=check)
    return Drift(total / count, agree / count, count), injection.ledger
