"""Student and clean teacher, and the sequences they read: prompts, and completions that the clean model sampled itself.

The teacher is a frozen copy, or, with LoRA, the same weights with the adapters off. All its completions are kept, right and
wrong: the student is to become the clean model again, not a better one. They are sampled some steps ahead, keyed by seed and
place, so a killed run samples the same ones again and no file is needed.

Of prompts without a task, one in five, by a hash of its text, is kept apart to be scored on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding import Completion, Decoder, batches, tokens_of
from shaketable.evaluate.reading import Pair, Reading, pair_logits, read_pairs
from shaketable.evaluate.score import arithmetic, check_context, prompt_tokens
from shaketable.evaluate.tasks import Problem, Task, load_task, sample
from shaketable.evaluate.tasks.files import side_of, texts_of
from shaketable.faults.rng import key_of
from shaketable.harden.config import HardenConfig
from shaketable.inject import Injection

AHEAD = 1024
"""About so many completions are sampled at a time."""


class Students:
    """The student, its teacher, and how both read sequences."""

    def __init__(self, model: Any, pad: int, device: str, dtype: str, *, lora: bool = False) -> None:
        self.model, self.pad, self.device, self.dtype = model, pad, device, dtype
        self.clean = None if lora else copy.deepcopy(model).requires_grad_(False).eval()

    def arithmetic(self) -> AbstractContextManager[Any]:
        """That of the run."""
        return arithmetic(self.device, self.dtype)

    @contextmanager
    def teacher(self) -> Iterator[Any]:
        """The clean model, for reading only."""
        off = nullcontext() if self.clean is not None else getattr(self.model, "disable_adapter", nullcontext)()
        was_training = self.model.training
        with torch.no_grad(), self.arithmetic(), off:
            if self.clean is None:
                self.model.eval()
            try:
                yield self.model if self.clean is None else self.clean
            finally:
                self.model.train(was_training)

    def logits(self, model: Any, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        """Logits that predict the tokens of the completions, and those tokens."""
        return pair_logits(model, pairs, self.pad, left=True)

    def beside_clean(self, pairs: Sequence[Pair], injection: Injection | None, batch_size: int) -> list[Reading]:
        """The student, under a plan or without one, beside the clean model: KL and agreement of every pair."""
        was_training = self.model.training

        def clean(some: Sequence[Pair]) -> tuple[Tensor, Tensor]:
            with self.teacher() as model:
                return self.logits(model, some)

        def student(some: Sequence[Pair]) -> tuple[Tensor, Tensor]:
            with self.arithmetic(), faults_on(injection):
                return self.logits(self.model, some)

        self.model.eval()
        try:
            return read_pairs(pairs, batch_size, student, clean)
        finally:
            self.model.train(was_training)


@contextmanager
def faults_on(injection: Injection | None) -> Iterator[None]:
    """A plan on for as long as this lasts; its operator mode is left to the model's own calls."""
    if injection is None:
        yield
        return
    injection.enable().drop_mode()
    try:
        yield
    finally:
        injection.disable()


# ---- sequences


@dataclass(frozen=True)
class SequenceSource:
    """Where prompts come from."""

    task: Task | None
    train: Sequence[Problem]
    """May be a million, made when they are asked for."""
    tests: list[Problem]
    limit: int
    """The most tokens of a completion."""

    @classmethod
    def of(cls, config: HardenConfig) -> SequenceSource:
        """Read the task or the file, and draw what is scored."""
        if config.prompts is not None:
            return cls._of_file(Path(config.prompts), config)
        assert config.task is not None
        task = load_task(config.task)
        if task.kind != "generate":
            raise ShaketableError(f"the task {task.name} has no problems to solve; give its file as --prompts instead")
        train = task.problems("train")
        if not train:
            raise ShaketableError(f"the task {task.name} has no train problems")
        return cls(task, train, sample(task, "test", config.eval_n, config.eval_seed), task.max_new_tokens)

    @classmethod
    def _of_file(cls, path: Path, config: HardenConfig) -> SequenceSource:
        sides: dict[str, list[Problem]] = {"train": [], "test": []}
        for number, text in enumerate(texts_of(path, "prompt", "question", "text"), 1):
            sides[side_of(text)].append(Problem(f"prompt-{number}", text, ""))
        if len(sides["test"]) < 2 or not sides["train"]:
            raise ShaketableError(f"{path} has too few prompts to keep one in five apart; give at least twenty")
        return cls(None, sides["train"], sides["test"][: config.eval_n], config.max_new_tokens)

    def tokens(self, tokenizer: Any, problem: Problem) -> list[int]:
        """A prompt as the model is given it."""
        return tokens_of(tokenizer, problem.question) if self.task is None else prompt_tokens(tokenizer, self.task, problem)


class OwnCompletions:
    """The batches of all steps: prompts in random order, each completed by the clean model when its step is near."""

    def __init__(
        self, config: HardenConfig, source: SequenceSource, tokenizer: Any, students: Students, decoder: Decoder
    ) -> None:
        self.config, self.source, self.tokenizer = config, source, tokenizer
        self.students, self.decoder = students, decoder
        self.context: int | None = getattr(students.model.config.get_text_config(), "max_position_embeddings", None)
        self.steps_ahead = max(1, min(config.steps, AHEAD // config.batch))
        self._chunk, self._pairs = -1, list[Pair]()
        self._epoch, self._order = -1, list[int]()

    def at(self, step: int) -> list[Pair]:
        """The sequences of a step."""
        chunk, inside = divmod(step, self.steps_ahead)
        if chunk != self._chunk:
            self._chunk, self._pairs = chunk, self._sampled(chunk)
        return self._pairs[inside * self.config.batch : (inside + 1) * self.config.batch]

    def _sampled(self, chunk: int) -> list[Pair]:
        size = self.steps_ahead * self.config.batch
        problems = [self.source.train[self._drawn(chunk * size + i)] for i in range(size)]
        prompts = [self.source.tokens(self.tokenizer, problem) for problem in problems]
        check_context("the prompts", prompts, self.source.limit, self.context)
        found: dict[int, Completion] = {}
        for n, indices in enumerate(batches(prompts, AHEAD)):
            key = key_of(self.config.seed, "completions", chunk, n) >> 1
            generator = torch.Generator(device=self.students.model.device).manual_seed(key)
            with self.students.teacher() as clean:
                done = self.decoder.decode(clean, [prompts[i] for i in indices], generator=generator)
            found.update(zip(indices, done, strict=True))
        return [(prompts[i], found[i].tokens) for i in range(size)]

    def _drawn(self, place: int) -> int:
        """The prompt at a place of an endless row: all of them in random order, then all in another order."""
        epoch, inside = divmod(place, len(self.source.train))
        if self._epoch != epoch:
            generator = torch.Generator().manual_seed(key_of(self.config.seed, "order", epoch) >> 1)
            self._epoch, self._order = epoch, torch.randperm(len(self.source.train), generator=generator).tolist()
        return self._order[inside]
