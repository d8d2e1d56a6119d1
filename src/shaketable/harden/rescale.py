"""Rescale: the same function with numbers that the fault harms less. Powers of two along the exact symmetries of a layer.

The spaces inside a layer (a norm's output, the values, the keys, the hidden channels of the MLP) may be scaled channel by
channel if what writes them is multiplied and what reads them is divided (`locate/twins.py`). Powers of two change no
rounding, so healthy hardware returns the same bits and nothing is added to the work; under a fault a value leaves a
saturation or a dead zone, an outlier no longer sets the scale of its block.

Candidates of a space, after SmoothQuant (Xiao et al. 2023): the activation is divided by 2^e with

    e = α·log2(largest activation) − (1 − α)·log2(largest weight that reads it),     α = 1/4, 1/2, 3/4, 1

rounded and centred by its median; and one power of two for all channels. Space by space, the candidate with the lowest error
of the layer (with the fault against without, from the same hidden state) is taken, if it leaves less than `LOWER` of the
error on sequences that it was not chosen by, and if the layer without the fault returns the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shaketable.capture.recorder import watched
from shaketable.capture.reference import rebuilt
from shaketable.evaluate.reading import Pair
from shaketable.harden.calibrate import LOWER, Stream, error_of, mean_error, reading, record
from shaketable.harden.students import Students
from shaketable.inject import Injection
from shaketable.locate.twins import Circuit, Gauge, Map, circuit_of, free_spaces, gauge_of, gauged, rescaled
from shaketable.sites.structure import find_layers

ALPHAS = (0.25, 0.5, 0.75, 1.0)
UNIFORM = (2, -2, 6, -6)
"""Exponents of all channels."""
FARTHEST = 12
"""No channel moves by more powers of two than this."""
READ_AS = {"v": "mixed", "up": "hidden", "shared up": "shared hidden"}
"""Under which name modules read a space; the others have one name."""


def rescale(
    students: Students, injections: Sequence[Injection], pairs: Sequence[Pair], tell: Callable[[int, int], None]
) -> dict[str, Any]:
    """Scale the model's layers by powers of two so that the plans do less harm, without a change on healthy hardware.

    Args:
        students: The model that is changed.
        injections: The plans, switched off.
        pairs: Sequences to look at: every second one chooses, the others decide.
        tell: Called with how many layers are done, of how many.

    Returns:
        What was done: how many layers were changed, of how many, which spaces, and one sentence.
    """
    circuits = circuits_of(students.model)
    touched = 0
    chosen: list[list[str]] = []
    if any(isinstance(c, Circuit) for c in circuits):
        with reading(students, injections):
            plain = record(students, students.model, pairs, None)
            streams = [record(students, students.model, pairs, injection) for injection in injections]
            for index, circuit in enumerate(circuits):
                if isinstance(circuit, Circuit) and any(s.is_touched(index) for s in streams):
                    touched += 1
                    if spaces := _Search(index, circuit, plain, streams).rescale():
                        chosen.append(spaces)
                for stream in (plain, *streams):
                    stream.advance(index)
                tell(index + 1, len(circuits))
    return {
        "layers": len(chosen),
        "of": len(circuits),
        "flops_added": 0.0,
        "spaces": dict(Counter(space for spaces in chosen for space in spaces)),
        "sentence": _sentence(len(chosen), touched, circuits),
    }


def _sentence(changed: int, touched: int, circuits: list[Circuit | str]) -> str:
    reasons = [c for c in circuits if isinstance(c, str)]
    if len(reasons) == len(circuits):
        return reasons[0] if reasons else "the model has no decoder layers"
    if not touched:
        return "no layer is touched by the fault: nothing to rescale"
    if not changed:
        return "no scaling by powers of two lowers the error of a layer: the weights are as they were"
    return f"{changed} of {len(circuits)} layers scaled by powers of two; without the fault the same bits come out"


def circuits_of(model: Any) -> list[Circuit | str]:
    """The wiring of every layer, from the model's class rebuilt, which no plan has touched; or why there is none."""
    plain = rebuilt(model)
    if plain is None:
        return [f"no rescaling is known for a {type(model).__name__}"]
    return [circuit_of(layer, model.config) for layer in find_layers(plain)[0]]


def _gauge(circuit: Circuit, exponents: dict[str, Tensor]) -> Gauge:
    return gauge_of(circuit, {space: torch.exp2(e) for space, e in exponents.items()})


class _Search:
    """The search for the scales of one layer."""

    def __init__(self, index: int, circuit: Circuit, plain: Stream, streams: Sequence[Stream]) -> None:
        self.index, self.circuit, self.plain, self.streams = index, circuit, plain, streams
        self.layer = plain.layers[index]
        self.expected = [[s.run(index, b, clean=True) for b in s.batches] for s in streams]
        self.outputs, self.active = self._activations()

    def rescale(self) -> list[str]:
        """Write the scales with the least error into the weights; returns the spaces that they scale."""
        exponents: dict[str, Tensor] = {}
        least = self._error(fits=False)
        for space in free_spaces(self.circuit):
            tried = exponents | {space: self._best(space, exponents)}
            with gauged(self.layer, self.circuit, _gauge(self.circuit, tried)):
                error = self._error(fits=False)
            if error < LOWER * least and self._is_exact(tried):
                exponents, least = tried, error
        if exponents:
            for path, value in rescaled(self.layer, self.circuit, _gauge(self.circuit, exponents)).items():
                self.layer.get_parameter(path).copy_(value)
        return list(exponents)

    def _best(self, space: str, others: dict[str, Tensor]) -> Tensor:
        """The exponents with the least error on the sequences that choose, beside those that other spaces have already."""

        def error(exponents: Tensor) -> float:
            with gauged(self.layer, self.circuit, _gauge(self.circuit, others | {space: exponents})):
                return self._error(fits=True)

        none = torch.zeros(self.circuit.sizes[space])
        return min((none, *self._smooth(space), *(none + n for n in UNIFORM)), key=error)

    def _smooth(self, space: str) -> Iterator[Tensor]:
        """SmoothQuant's exponents, where activations of the space are seen."""
        name = READ_AS.get(space, space)
        if name not in self.active:
            return
        active, other = self._by_channel(space, self.active[name]), self._by_channel(space, self._read_by(name))
        for alpha in ALPHAS:
            wanted = alpha * active.log2() - (1 - alpha) * other.log2()
            usable = wanted.isfinite()
            if usable.any():
                centred = (wanted - wanted[usable].median()).where(usable, 0.0)
                yield -centred.round().clamp(-FARTHEST, FARTHEST)

    def _read_by(self, name: str) -> Tensor:
        """By channel, the largest number that the activation is multiplied with: a weight, or a query for a key."""
        if name == "k":
            return self.active["q"]
        maps = [m for m in self.circuit.maps if m.reads == name]
        return torch.stack([_columns(self.layer.get_parameter(m.parameter), m) for m in maps]).amax(0)

    def _by_channel(self, space: str, largest: Tensor) -> Tensor:
        """One number for each channel of the space: the largest over those that must be scaled alike."""
        head, half = self.circuit.head, self.circuit.rotary // 2
        if space in ("v", "k"):
            largest = largest.view(self.circuit.sizes[space] // head, -1, head).amax(1)
        if space == "k" and half:
            largest = _of_pairs(largest, half)
        return largest.flatten()

    def _error(self, *, fits: bool) -> float:
        """Of the layer with the weights that it has now, over plans; one batch is enough to choose by."""
        found = [
            error_of(stream.run(self.index, batch), expected, batch.real)
            for stream, outputs in zip(self.streams, self.expected, strict=True)
            for batch, expected in zip(stream.batches, outputs, strict=True)
            if (batch.number == 0 if fits else not batch.fits)
        ]
        return mean_error(found)

    def _is_exact(self, exponents: dict[str, Tensor]) -> bool:
        """Whether the layer without the fault returns the bits that it returned before, and has its weights back if asked."""
        before = dict(self.layer.named_parameters())
        with gauged(self.layer, self.circuit, _gauge(self.circuit, exponents)):
            back = rescaled(self.layer, self.circuit, _gauge(self.circuit, {s: -e for s, e in exponents.items()}))
            found = [self.plain.run(self.index, batch) for batch in self.plain.batches]
        same = (torch.equal(f[b.real], o[b.real]) for f, o, b in zip(found, self.outputs, self.plain.batches, strict=True))
        return all(same) and all(torch.equal(value, before[path]) for path, value in back.items())

    def _activations(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The layer's outputs without a fault, and the largest activation of every channel that modules are seen to read."""
        largest: dict[str, Tensor] = {}
        real = torch.empty(0)

        def note(space: str, x: Tensor) -> None:
            rows = x.detach().reshape(-1, x.shape[-1])
            top = rows[real.flatten()].abs().amax(0).float().cpu()
            largest[space] = torch.maximum(largest[space], top) if space in largest else top

        maps = {m.module: m for m in self.circuit.maps if m.layout != "expert,out,in"}

        def look(path: str, x: Tensor, y: Tensor) -> None:
            note(maps[path].reads, x)
            writes = maps[path].writes
            for space, part in zip(writes, y.split([self.circuit.sizes[s] for s in writes], -1), strict=True):
                if space in ("q", "k"):
                    note(space, part)

        outputs = []
        with watched({path: self.layer.get_submodule(path) for path in maps}, look):
            for batch in self.plain.batches:
                real = batch.real
                outputs.append(self.plain.run(self.index, batch))
        return outputs, largest


def _of_pairs(largest: Tensor, half: int) -> Tensor:
    """The larger of both channels of a rotated pair."""
    both = torch.maximum(largest[:, :half], largest[:, half : 2 * half])
    return torch.cat([both, both, largest[:, 2 * half :]], 1)


def _columns(weight: Tensor, m: Map) -> Tensor:
    """The largest weight that reads each channel."""
    size = weight.detach().abs().float().cpu()
    return size.amax(1) if m.layout == "in,out" else size.flatten(0, -2).amax(0)
