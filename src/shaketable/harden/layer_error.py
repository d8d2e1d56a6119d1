"""One decoder layer at a time: its inputs on recorded sequences, and the error that a fault makes in its output.

A repair of one layer is judged at that layer. The sequences pass through the model once, whole, to record what each layer is
given beside its hidden state (masks, positions); from then on a layer is called by itself, with faults or without, and a
candidate costs the n-th part of a pass. The error of a token is |found − expected|² / |expected|², and errors are means over
tokens: relative by token, because the norm of the next layer is, and because a few first tokens are a thousand times larger
than all others and would be all that a plain mean square sees.

The noise of a batch is the same at every call of the same layer (its number keys it), so that candidates differ by what
they are and not by their luck, and another in every other batch, so that nothing is fitted to the noise that it is judged by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.evaluate.decoding import batches, padded, positions
from shaketable.evaluate.reading import Pair
from shaketable.harden.students import Students, shaken
from shaketable.inject import Injection
from shaketable.sites.nested_tensors import tensors_of
from shaketable.sites.structure import find_layers

BATCH = 16
"""Sequences that pass through a layer together."""
LOWER = 0.98
"""A change is kept when what is left of the error is less than this, on sequences that it was not chosen by."""


@dataclass(frozen=True)
class Batch:
    """Sequences on their way through the layers."""

    number: int
    """Keys the noise."""
    fits: bool
    """Whether repairs are fitted to these sequences; to the others they are held up."""
    real: Tensor
    """Which tokens are no padding."""
    state: Tensor
    """The hidden state that the next layer is given."""
    beside: list[tuple[tuple[Any, ...], dict[str, Any]]]
    """What each layer is given besides."""


@dataclass
class Stream:
    """All sequences on their way through one model, under one plan or under none."""

    students: Students
    layers: list[nn.Module]
    injection: Injection | None
    batches: list[Batch]

    def run(self, index: int, batch: Batch, *, clean: bool = False) -> Tensor:
        """What a layer makes of a batch, all of it; `clean` leaves the plan out."""
        args, kwargs = batch.beside[index]
        with self.students.arithmetic(), same_noise(None if clean else self.injection, batch.number):
            return next(tensors_of(self.layers[index](batch.state, *args, **kwargs)))

    def is_touched(self, index: int) -> bool:
        """Whether the plan changes anything of what a layer makes."""
        return any(not torch.equal(self.run(index, b)[b.real], self.run(index, b, clean=True)[b.real]) for b in self.batches)

    def advance(self, index: int) -> None:
        """Every batch goes through a layer."""
        self.batches = [replace(b, state=self.run(index, b)) for b in self.batches]


def record(students: Students, model: Any, pairs: Sequence[Pair], injection: Injection | None) -> Stream:
    """Sequences in front of the first layer: every second one is fitted to, the others are held out."""
    found: list[Batch] = []
    for fits in (True, False):
        chosen = [[*p, *c] for p, c in pairs[0 if fits else 1 :: 2]]
        for indices in batches(chosen, BATCH):
            found.append(_recorded(students, model, [chosen[i] for i in indices], injection, len(found), fits))
    return Stream(students, find_layers(model)[0], injection, found)


def _recorded(
    students: Students, model: Any, rows: list[list[int]], injection: Injection | None, number: int, fits: bool
) -> Batch:
    first: list[Tensor] = []
    beside: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(kwargs)
        state, *rest = args or (given.pop("hidden_states"),)
        if not beside:
            first.append(state)
        beside.append((tuple(rest), given))

    ids, mask = padded(rows, students.pad, model.get_input_embeddings().weight.device)
    masked = {} if mask is None else {"attention_mask": mask, "position_ids": positions(mask)}
    with students.arithmetic(), same_noise(injection, number), ExitStack() as hooks:
        for layer in find_layers(model)[0]:
            hooks.callback(layer.register_forward_pre_hook(note, prepend=True, with_kwargs=True).remove)
        model(input_ids=ids, use_cache=False, logits_to_keep=1, **masked)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    return Batch(number, fits, real, first[0], beside)


@contextmanager
def same_noise(injection: Injection | None, number: int) -> Iterator[None]:
    """A plan on, with noise that depends on the number and the module alone."""
    with shaken(injection):
        if injection is not None:
            injection.step = number
        yield


@contextmanager
def reading(students: Students, injections: Sequence[Injection]) -> Iterator[None]:
    """Nothing is trained in here; the plans are at their own steps again afterwards."""
    steps, was_training = [i.step for i in injections], students.model.training
    students.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        students.model.train(was_training)
        for injection, step in zip(injections, steps, strict=True):
            injection.step = step


def error_of(found: Tensor, expected: Tensor, real: Tensor) -> tuple[float, int]:
    """Summed over the tokens of a batch, and their number; infinite where a value is not finite."""
    f, e = found[real].float(), expected[real].float()
    share = (f - e).square().sum(-1) / e.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(share.nan_to_num(nan=float("inf")).sum()), len(share)


def mean_error(parts: Sequence[tuple[float, int]]) -> float:
    """Over all tokens."""
    return sum(e for e, _ in parts) / max(1, sum(n for _, n in parts))
