"""Calibrate: what is systematically off in a layer, channel by channel, is measured and folded into its weights. No gradients.

The clean model's layer and the student's, under the fault and with its own hidden states, are called on the same tokens. For
each channel of each matrix product, the faulty value is regressed on the clean one,

    f = g·c + o + noise          so the product is given     W ← W/g,   b ← (b − o)/g

The noise is in f and not in c, so noise alone gives g = 1 and o = 0: dividing by the slope of c on f would instead shrink
every channel by its signal-to-noise ratio. Only what lies beyond three standard errors is corrected (HC3, which knows that
the noise of large values is larger; a token that has most of a channel's variance is left out of it), and only slopes that
are not near 0: a dead channel stays dead. Products are corrected in the order of computation, those with the same input
together, each after those before it, so that none makes up for what was put right already. At last the mean error of the
layer's output goes into the bias of the product that comes last.

Two things are tried: gains and offsets, and offsets alone (a format rounds a scaled weight to other values, so that its gain is
another one then). The better one on the sequences that were fitted is kept if it leaves less than `LOWER` of the error of
the layer's output on those that were not.

Offsets need a bias. Where a product has none, one is added only if the config has a flag that gives it one wherever the folder
is loaded (Llama's attention_bias and mlp_bias); then all products of that flag have one, and one addition per channel and token
is what it costs.

The fault is made up for, so hardware without the fault now sees the inverse of it: calibrate fits a model to a device, and what
that costs without the fault has to be measured.

Rejected: the offset that a fault has at zero input (it is not the mean one: think of clipping); correcting all layers from one
recording (later layers would make up for earlier ones twice); comparing with the clean layer at the student's own hidden states
(one run each on nano, KL that is left: 0.18 in place of 0.58 under a saturation, but 0.0036 in place of 0.0031 under MXFP4 and
0.43 in place of 0.15 under a systematic bias; without the fault it was no better); layers that the fault does not touch, which
could make up for errors of those before them (on nano, behind a dead zone, that took a fifth off the last layer's error and
raised the KL by half).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.capture.recorder import watched
from shaketable.evaluate.reading import Pair
from shaketable.harden.config_biases import add_biases, keep_biases
from shaketable.harden.layer_error import LOWER, Stream, error_of, mean_error, reading, record
from shaketable.harden.students import Students
from shaketable.inject import Injection

SURE = 3.0
"""Standard errors."""
SMALLEST = 1e-3
"""Of a channel's size: what is less is not corrected."""
SLOPES = (0.1, 10.0)
"""Slopes that can be divided by."""
LONELY = 0.5
"""Share of a channel's variance that one token may have."""


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
        What was done: how many layers were changed, the error at the last layer before and after, and one sentence.
    """
    with reading(students, injections):
        before = _last_error(students, injections, pairs)
        biases = add_biases(students.model)
        plain = record(students, students.clean, pairs, None)
        streams = [record(students, students.model, pairs, injection) for injection in injections]
        changed = 0
        for index in range(len(plain.layers)):
            changed += _Layer(index, plain, streams).repair()
            for stream in (plain, *streams):
                stream.advance(index)
            tell(index + 1, len(plain.layers))
        after = mean_error(list(_errors(plain, streams))) if changed else before
    added = keep_biases(students.model, biases)
    return {
        "layers": changed,
        "of": len(plain.layers),
        "flops_added": float(sum(m.out_features for m in added)),
        "biases_added": len(added),
        "error_before": before,
        "error_after": after,
        "sentence": _sentence(changed, len(plain.layers), len(added), before, after),
    }


def _sentence(changed: int, layers: int, added: int, before: float, after: float) -> str:
    if not changed:
        return "no gain or offset of a channel lowers the error of a layer: the weights are as they were"
    new = f", {added} of which are new" if added else ""
    folded = f"gains and offsets of channels folded into the weights and biases{new}, of {changed} of {layers} layers"
    return f"{folded}: {after / before:.0%} of the error at the last layer is left"


def _errors(plain: Stream, streams: Sequence[Stream]) -> Iterator[tuple[float, int]]:
    """Of the hidden states, by plan and batch, on sequences that nothing is fitted to."""
    for stream in streams:
        for batch, expected in zip(stream.batches, plain.batches, strict=True):
            if not batch.fits:
                yield error_of(batch.state, expected.state, batch.real)


def _last_error(students: Students, injections: Sequence[Injection], pairs: Sequence[Pair]) -> float:
    plain = record(students, students.clean, pairs, None)
    streams = [record(students, students.model, pairs, injection) for injection in injections]
    for stream in (plain, *streams):
        for index in range(len(stream.layers)):
            stream.advance(index)
    return mean_error(list(_errors(plain, streams)))


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
        error = self._error(fits=False)
        groups, clean = self._groups(), self._products(self.plain)
        both = [partial(self._correct, groups, clean, gains=gains) for gains in (True, False)]
        kept = self._kept(error, both)
        last = self.layer.get_submodule(groups[-1][-1]) if groups else None
        if last is not None and last.bias is not None:
            kept |= self._kept(self._error(fits=False), [partial(self._shift, last)])
        return kept

    def _kept(self, error: float, corrections: Sequence[Callable[[], None]]) -> bool:
        """Make the best of some corrections, and keep it if it lowers the error."""
        start = self._weights()
        best, least = start, self._error(fits=True)
        for correct in corrections:
            correct()
            if (now := self._error(fits=True)) < least:
                best, least = self._weights(), now
            self._write(start)
        self._write(best)
        if best is start or self._error(fits=False) < LOWER * error:
            return best is not start
        self._write(start)
        return False

    def _correct(self, groups: list[list[str]], clean: dict[str, Tensor], *, gains: bool) -> None:
        """Products in the order of computation, each after those before it."""
        for group in groups:
            found = self._products(*self.streams)
            for path in group:
                many = clean[path].repeat(len(self.streams), 1)
                slope, offset = regression(many, found[path], gains=gains)
                fold(self.layer.get_submodule(path), slope, offset)

    def _shift(self, last: Any) -> None:
        """The mean error of the layer's output, taken from the bias of its last product."""
        found = [s.run(self.index, b)[b.real] for s in self.streams for b in s.batches if b.fits]
        expected = [e[b.real] for _ in self.streams for e, b in zip(self.expected, self.plain.batches, strict=True) if b.fits]
        _, offset = regression(torch.cat(expected).float(), torch.cat(found).float(), gains=False)
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
        """What every product makes of the tokens that are fitted to, a row each."""
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

    def _error(self, *, fits: bool) -> float:
        """Of the layer's output against the clean one, with the weights that it has now."""
        parts = [
            error_of(stream.run(self.index, batch), expected, batch.real)
            for stream in self.streams
            for batch, expected in zip(stream.batches, self.expected, strict=True)
            if batch.fits is fits
        ]
        return mean_error(parts)

    def _weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.layer.named_parameters()}

    def _write(self, values: dict[str, Tensor]) -> None:
        for name, p in self.layer.named_parameters():
            p.copy_(values[name])


def _products_of(layer: nn.Module) -> dict[str, nn.Module]:
    return {path: m for path, m in layer.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}


def regression(clean: Tensor, faulty: Tensor, *, gains: bool) -> tuple[Tensor, Tensor]:
    """Slope and offset of each column of faulty values over clean ones; 1 and 0 where they are not sure or do not matter.

    Args:
        clean: Tokens by channels, in float32.
        faulty: The same under the fault.
        gains: Whether slopes are fitted; else they are 1.
    """
    rows, size = len(clean), clean.square().mean(0).sqrt()
    slope = torch.ones_like(size)
    if gains:
        some, same = _without_lonely(clean, faulty)
        x = some - some.mean(0)
        total = x.square().sum(0).clamp_min(torch.finfo(x.dtype).tiny)
        fitted = (x * same).sum(0) / total
        rest = same - same.mean(0) - fitted * x
        apart = rest / (1 - 1 / rows - x.square() / total).clamp_min(0.1)
        unsure = (x * apart).square().sum(0).sqrt() / total
        sure = ((fitted - 1).abs() > (SURE * unsure).clamp_min(SMALLEST)) & (SLOPES[0] < fitted) & (fitted < SLOPES[1])
        slope = fitted.where(sure, 1.0)
    rest = faulty - slope * clean
    offset = rest.mean(0)
    unsure = (rest - offset).square().sum(0).sqrt() / rows
    sure = offset.abs() > torch.maximum(SURE * unsure, SMALLEST * size)
    return slope, offset.where(sure, 0.0)


def _without_lonely(clean: Tensor, faulty: Tensor) -> tuple[Tensor, Tensor]:
    """Where one token has most of a channel's variance, it is put at the mean of the others: it proves no slope."""
    share = (clean - clean.mean(0)).square()
    lonely = share > LONELY * share.sum(0)
    others = (~lonely).sum(0).clamp_min(1)
    middles = (x.where(~lonely, 0.0).sum(0) / others for x in (clean, faulty))
    some, same = (x.where(~lonely, middle) for x, middle in zip((clean, faulty), middles, strict=True))
    return some, same


def fold(product: nn.Module, slope: Tensor, offset: Tensor) -> None:
    """Let a product return (y − offset) / slope where it returned y; offsets only where it has a bias."""
    weight = product.get_parameter("weight")
    gain = (1 / slope).to(weight)
    weight.mul_(gain[:, None] if isinstance(product, nn.Linear) else gain)
    if product._parameters.get("bias") is not None:
        bias = product.get_parameter("bias")
        bias.sub_(offset.to(bias)).mul_(gain)
