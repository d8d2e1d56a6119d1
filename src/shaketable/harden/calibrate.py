"""Calibrate: fold the systematic part of a fault, channel by channel, into the weights of a layer. No gradients.

The sequences pass through the clean model and through the student once, whole; from then on a layer is called by itself, so a
candidate costs the n-th part of a pass. For each channel of each matrix product the faulty value is regressed on the clean
one,

    f = g·c + o + noise          so the product is given     W ← W/g,   b ← (b − o)/g

Noise alone gives g = 1 and o = 0. Only what lies beyond three standard errors (HC3) is corrected, and only slopes that are
not near 0. Products are corrected in the order of computation, each after those before it; at last the mean error of the
layer's output goes into the bias of its last product. Each of the two is kept if it leaves less than `LOWER` of the error on
sequences that it was not fitted to.

The error of a token is |found − expected|² / |expected|², relative by token because a few first tokens are a thousand times
larger than all others. The noise of a batch is the same at every call of a layer, and another in every other batch.

Where a product has no bias, one is added only if a config flag (`attention_bias`, `mlp_bias`) gives it one wherever the
folder is loaded; the products that a flag concerns are read from the model's class built with the flag set.

Hardware without the fault now sees the inverse of it: what that costs has to be measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.capture.recorder import watched
from shaketable.capture.reference import rebuilt
from shaketable.evaluate.decoding import batches, padded, positions
from shaketable.evaluate.reading import Pair
from shaketable.harden.students import Students, faults_on
from shaketable.inject import Injection
from shaketable.sites.nested_tensors import tensors_of
from shaketable.sites.structure import find_layers

BATCH = 16
"""Sequences that pass through a layer together."""
LOWER = 0.98
"""A change is kept when what is left of the error is less than this, on sequences that it was not chosen by."""
SURE = 3.0
"""Standard errors."""
SMALLEST = 1e-3
"""Of a channel's size: what is less is not corrected."""
SLOPES = (0.1, 10.0)
"""Slopes that can be divided by."""
FLAGS = ("attention_bias", "mlp_bias")
"""Settings of a config that give products a bias."""


def calibrate(
    students: Students, injections: Sequence[Injection], pairs: Sequence[Pair], tell: Callable[[int, int], None]
) -> dict[str, Any]:
    """Fold gains and offsets that undo what the plans systematically do into the model's weights and biases.

    Args:
        students: The model that is changed, and the clean one.
        injections: The plans, switched off.
        pairs: Sequences to look at: every second one is fitted to, the others decide.
        tell: Called with how many layers are done, of how many.

    Returns:
        What was done: how many layers were changed, of how many, what it adds to the work, and one sentence.
    """
    changed = 0
    with reading(students, injections):
        biases = add_biases(students.model)
        plain = record(students, students.clean, pairs, None)
        streams = [record(students, students.model, pairs, injection) for injection in injections]
        for index in range(len(plain.layers)):
            changed += _Layer(index, plain, streams).repair()
            for stream in (plain, *streams):
                stream.advance(index)
            tell(index + 1, len(plain.layers))
    added = keep_biases(students.model, biases)
    sentence = "no gain or offset of a channel lowers the error of a layer: the weights are as they were"
    if changed:
        new = f", {len(added)} of which are new" if added else ""
        sentence = f"gains and offsets folded into the weights and biases{new}, of {changed} of {len(plain.layers)} layers"
    flops = float(sum(m.out_features for m in added))
    facts = {"layers": changed, "of": len(plain.layers), "flops_added": flops, "biases_added": len(added)}
    return {**facts, "sentence": sentence}


# ---- one layer


class _Layer:
    """One layer of the student beside the clean one."""

    def __init__(self, index: int, plain: Stream, streams: Sequence[Stream]) -> None:
        self.index, self.plain, self.streams = index, plain, streams
        self.layer = plain.layers[index] if not streams else streams[0].layers[index]
        self.expected = [plain.run(index, batch) for batch in plain.batches]

    def repair(self) -> bool:
        """Correct the layer; whether anything was kept."""
        if not any(s.is_touched(self.index) for s in self.streams):
            return False
        groups = self._groups()
        kept = self._kept(partial(self._correct, groups))
        last = self.layer.get_submodule(groups[-1][-1]) if groups else None
        if last is not None and last.bias is not None:
            kept |= self._kept(partial(self._shift, last))
        return kept

    def _kept(self, correct: Callable[[], None]) -> bool:
        """Make a correction, and keep it if it lowers the error."""
        error, before = self._error(), {name: p.detach().clone() for name, p in self.layer.named_parameters()}
        correct()
        if self._error() < LOWER * error:
            return True
        for name, p in self.layer.named_parameters():
            p.copy_(before[name])
        return False

    def _correct(self, groups: list[list[str]]) -> None:
        """Products in the order of computation, each after those before it."""
        clean = self._products(self.plain)
        for group in groups:
            found = self._products(*self.streams)
            for path in group:
                slope, offset = regression(clean[path].repeat(len(self.streams), 1), found[path])
                fold(self.layer.get_submodule(path), slope, offset)

    def _shift(self, last: Any) -> None:
        """The mean error of the layer's output, taken from the bias of its last product."""
        found = [s.run(self.index, b)[b.real] for s in self.streams for b in s.batches if b.fits]
        expected = [e[b.real] for _ in self.streams for e, b in zip(self.expected, self.plain.batches, strict=True) if b.fits]
        offset = sure_mean(torch.cat(found).float() - torch.cat(expected).float(), torch.cat(expected).float())
        if len(offset) == len(last.bias):
            last.bias.sub_(offset)

    def _groups(self) -> list[list[str]]:
        """The products in the order of computation; those that are given the same tensor are together."""
        found: list[tuple[Tensor, list[str]]] = []

        def note(path: str, given: Tensor, output: Tensor) -> None:
            if found and found[-1][0] is given:
                found[-1][1].append(path)
            else:
                found.append((given, [path]))

        with watched(_products_of(self.plain.layers[self.index]), note):
            self.plain.run(self.index, self.plain.batches[0])
        return [paths for _, paths in found]

    def _products(self, *streams: Stream) -> dict[str, Tensor]:
        """The output of every product for the fitted tokens, a row each."""
        found: dict[str, list[Tensor]] = {}
        for stream in streams:
            for batch in stream.batches:
                if not batch.fits:
                    continue

                def note(path: str, given: Tensor, output: Tensor, real: Tensor = batch.real) -> None:
                    found.setdefault(path, []).append(output.reshape(-1, output.shape[-1])[real.flatten()].float())

                with watched(_products_of(stream.layers[self.index]), note):
                    stream.run(self.index, batch)
        return {path: torch.cat(parts) for path, parts in found.items()}

    def _error(self) -> float:
        """Of the layer's output against the clean one, on sequences that nothing is fitted to."""
        parts = [
            error_of(stream.run(self.index, batch), expected, batch.real)
            for stream in self.streams
            for batch, expected in zip(stream.batches, self.expected, strict=True)
            if not batch.fits
        ]
        return mean_error(parts)


def _products_of(layer: nn.Module) -> dict[str, nn.Module]:
    return {path: m for path, m in layer.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}


def regression(clean: Tensor, faulty: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and offset of each column of faulty values over clean ones; 1 and 0 where they are not sure or do not matter.

    Args:
        clean: Tokens by channels, in float32.
        faulty: The same under the fault.
    """
    x, y = clean - clean.mean(0), faulty - faulty.mean(0)
    total = x.square().sum(0).clamp_min(torch.finfo(x.dtype).tiny)
    fitted = (x * y).sum(0) / total
    apart = (y - fitted * x) / (1 - 1 / len(x) - x.square() / total).clamp_min(0.1)
    unsure = (x * apart).square().sum(0).sqrt() / total
    sure = ((fitted - 1).abs() > (SURE * unsure).clamp_min(SMALLEST)) & (SLOPES[0] < fitted) & (fitted < SLOPES[1])
    slope = fitted.where(sure, 1.0)
    return slope, sure_mean(faulty - slope * clean, clean)


def sure_mean(error: Tensor, clean: Tensor) -> Tensor:
    """Mean of each column of an error; 0 where it is not sure or is small beside the clean values."""
    offset = error.mean(0)
    unsure = (error - offset).square().sum(0).sqrt() / len(error)
    sure = offset.abs() > torch.maximum(SURE * unsure, SMALLEST * clean.square().mean(0).sqrt())
    return offset.where(sure, 0.0)


def fold(product: nn.Module, slope: Tensor, offset: Tensor) -> None:
    """Let a product return (y − offset) / slope where it returned y; offsets only where it has a bias."""
    weight = product.get_parameter("weight")
    gain = (1 / slope).to(weight)
    weight.mul_(gain[:, None] if isinstance(product, nn.Linear) else gain)
    if product._parameters.get("bias") is not None:
        bias = product.get_parameter("bias")
        bias.sub_(offset.to(bias)).mul_(gain)


# ---- one layer at a time


@dataclass(frozen=True)
class Batch:
    """Sequences on their way through the layers."""

    number: int
    """Keys the noise."""
    fits: bool
    """Whether repairs are fitted to these sequences; to the others they are held up."""
    real: Tensor
    """Which tokens are not padding."""
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
        """A layer's output for a batch, all of it; `clean` leaves the plan out."""
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
    with faults_on(injection):
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


# ---- biases that config flags enable


def flags(model: Any) -> dict[str, bool]:
    """The values of these settings, for models that have them."""
    config = model.config.get_text_config()
    return {name: getattr(config, name) for name in FLAGS if hasattr(config, name)}


def set_flags(model: Any, values: dict[str, bool]) -> None:
    """Restore these settings."""
    for name, value in values.items():
        setattr(model.config.get_text_config(), name, value)


def add_biases(model: Any) -> dict[str, list[nn.Linear]]:
    """Biases of 0 for products that a flag of the config can give one, by flag."""
    config = model.config.get_text_config()
    found: dict[str, list[nn.Linear]] = {}
    for flag in FLAGS:
        if getattr(config, flag, None) is not False:
            continue
        other = copy.deepcopy(model.config)
        setattr(other.get_text_config(), flag, True)
        skeleton = rebuilt(model, other)
        assert skeleton is not None
        with_bias = [n for n, m in skeleton.named_modules() if isinstance(m, nn.Linear) and m.bias is not None]
        found[flag] = [m for m in map(model.get_submodule, with_bias) if m.bias is None]
    for module in (m for modules in found.values() for m in modules):
        module.bias = nn.Parameter(module.weight.new_zeros(module.out_features))
    return found


def keep_biases(model: Any, added: dict[str, list[nn.Linear]]) -> list[nn.Linear]:
    """Switch on the flags whose biases are of use, and take the others off again; those that stayed."""
    kept: list[nn.Linear] = []
    for flag, modules in added.items():
        if any(bool(m.bias.any()) for m in modules):
            setattr(model.config.get_text_config(), flag, True)
            kept += modules
        else:
            for module in modules:
                module.register_parameter("bias", None)
    return kept
