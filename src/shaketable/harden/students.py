"""The model that is repaired and the clean one it is measured by.

The clean model is a frozen copy, or, with LoRA, the same weights with the adapters off: no second copy. Either way it is asked
while every injection is off, and in the arithmetic of the run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding import Completion, Decoder
from shaketable.evaluate.reading import Pair, pair_logits
from shaketable.evaluate.score import arithmetic
from shaketable.inject import Injection


class Students:
    """The student, its teacher, and how both read sequences."""

    def __init__(self, model: Any, pad: int, device: str, dtype: str, *, lora: bool = False) -> None:
        self.model, self.pad, self.device, self.dtype = model, pad, device, dtype
        self.clean = None if lora else _frozen_copy(model)

    def arithmetic(self) -> AbstractContextManager[Any]:
        """That of the run."""
        return arithmetic(self.device, self.dtype)

    @contextmanager
    def teacher(self) -> Iterator[Any]:
        """The clean model, for reading only."""
        off = nullcontext() if self.clean is not None else _adapters_off(self.model)
        was_training = self.model.training
        with torch.no_grad(), self.arithmetic(), off:
            if self.clean is None:
                self.model.eval()
            try:
                yield self.model if self.clean is None else self.clean
            finally:
                self.model.train(was_training)

    def complete(self, decoder: Decoder, prompts: Sequence[Sequence[int]], key: int) -> list[Completion]:
        """Completions of the clean model."""
        generator = torch.Generator(device=self.model.device).manual_seed(key)
        with self.teacher() as model:
            return decoder.decode(model, prompts, generator=generator)

    def logits(self, model: Any, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        """Logits that predict the tokens of the completions, and those tokens."""
        return pair_logits(model, pairs, self.pad, left=True)


def _frozen_copy(model: Any) -> Any:
    try:
        return copy.deepcopy(model).requires_grad_(False).eval()
    except (MemoryError, RuntimeError) as error:  # on a CPU torch says it in a plain RuntimeError
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
        why = "a second copy of the weights is needed as the teacher"
        raise ShaketableError(f"not enough memory: {why}, {size:.1f} GiB; --lora 16 needs none") from error


def _adapters_off(model: Any) -> AbstractContextManager[Any]:
    disable = getattr(model, "disable_adapter", None)
    found: AbstractContextManager[Any] = nullcontext() if disable is None else disable()
    return found


@contextmanager
def shaken(injection: Injection | None) -> Iterator[None]:
    """A plan on for as long as this lasts; its operator mode is left to the model's own calls."""
    if injection is None:
        yield
        return
    injection.enable().drop_mode()
    try:
        yield
    finally:
        injection.disable()
