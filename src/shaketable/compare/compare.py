"""A fingerprint replayed on this device, operator by operator, teacher-forced.

Every layer is called twice. Once with its stored input and nothing else changed: how far the layer as a whole is off. Once
with every operator held to the file: it reads its stored input, what it makes is kept, and its stored output goes on in its
place. So each operator is compared on equal inputs, and what lies *between* operators (rotation, attention, the residual
additions) is computed here from the file's own numbers and compared where it arrives: at the input of the next operator, or
at the layer's output. An error shows up at the one place that makes it.

Where bits differ, the question is whether the dtype explains it. For an operator each side is judged by the rounding interval
that the host computes from that side's input. Between operators this device is judged function by function (`replay`); the
file holds only the end of the chain: it must be bit-equal when the chain consists of IEEE operations, and otherwise, with
attention in it, within

    (16u + (1024 + 64·tokens)·2^-24) · max|y| of its token

which allows for the angle of the rotation being off by an ulp at the last position. Where bits agree nothing is judged.

What a layer is given besides hidden states comes from a forward here: it depends on the tokens and the config alone, which
`fingerprint` checks; where it does not, a note says so. When the dtype differs from the file's, its tensors are cast, and
only this device is judged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.capture.model_call import Arguments
from shaketable.capture.model_identity import describe
from shaketable.capture.recorder import Record, Recording, main_result
from shaketable.capture.reference import Reference
from shaketable.capture.trace import LayerCall, record_layer, trace
from shaketable.compare.fingerprint import Fingerprint, Progress
from shaketable.compare.fingerprint_file import check_same_model, read_fingerprint
from shaketable.compare.result import ComparisonRow, DeviceComparison, Difference, LayerRow
from shaketable.compare.teacher_forcing import Forcing
from shaketable.locate.replay import Judgement, judge
from shaketable.numerics import operators as operator_rounding
from shaketable.numerics.fit import fit_all
from shaketable.numerics.intervals import ACCUMULATION, TINY, UNIT, Precision
from shaketable.numerics.operators import Call
from shaketable.numerics.precision import device_precision
from shaketable.sites.nested_tensors import tensors_of
from shaketable.sites.structure import Anatomy

SHOWN = ("model", "device", "dtype", "attention", "tokens", "versions", "date", "switches")


def compare(
    fingerprint: Fingerprint | Path | str,
    model: nn.Module,
    *,
    arguments: Arguments | None = None,
    layers: str | None = None,
    progress: Progress | None = None,
) -> DeviceComparison:
    """Replay a fingerprint on the device that a model is on.

    Args:
        fingerprint: A good device's results, or the file they are in.
        model: The same model; in the file's dtype, or in another to which the file's tensors are cast.
        arguments: What `forward` needs besides tokens, by name.
        layers: Path of the module that holds the decoder layers, where they are not found by themselves.
        progress: Called with (layers done, layers in all, what is done).

    Raises:
        FingerprintError: The fingerprint is of another model.
    """
    made = fingerprint if isinstance(fingerprint, Fingerprint) else read_fingerprint(Path(fingerprint))
    check_same_model(made.about, model, layers)
    return _Replay(made, model, arguments, layers).run(progress)


class _Replay:
    def __init__(self, fingerprint: Fingerprint, model: nn.Module, arguments: Arguments | None, layers: str | None) -> None:
        self.file = fingerprint
        self.arguments = arguments
        self.model = model
        self.reference = Reference(model, layers=layers)
        self.layers = layers
        self.parts = {id(p.module): p for p in Anatomy.of(model).parts}
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.casts = fingerprint.about.torch_dtype != self.dtype
        self.precision = device_precision(self.device, self.dtype)
        self.stored_precision = Precision(fingerprint.about.product_input)
        self.notes: list[str] = []

    def run(self, progress: Progress | None) -> DeviceComparison:
        about = self.file.about
        here = describe(self.model, self.layers) | {"model": about.model, "tokens": about.tokens}
        self._note_conditions(here)
        with torch.no_grad():
            calls = trace(self.model, self.file.tensor("ids").to(self.device), self.reference, self.arguments).calls
            before = [self._outside(label) for label in about.before]
            layers = []
            for call in calls:
                if progress is not None:
                    progress(call.index, len(calls), f"layer {call.index}")
                layers.append(self._layer(call))
                self.reference.forget()
            after = [self._outside(label) for label in about.after]
        stored = about.model_dump()
        pair = [{key: side[key] for key in SHOWN} for side in (stored, here)]
        rounds = bool(self.precision.product_input or self.stored_precision.product_input)
        return DeviceComparison(pair[0], pair[1], before, layers, after, self.notes, rounds)

    def _note_conditions(self, here: dict[str, Any]) -> None:
        about = self.file.about
        if self.casts:
            self.notes.append(
                f"the fingerprint is {about.dtype} and was cast to {here['dtype']}: only this device is judged by its dtype"
            )
        if about.attention != here["attention"]:
            self.notes.append(f"attention is {here['attention']} here and was {about.attention} in the fingerprint")
        for name in ("torch", "transformers"):
            if about.versions.get(name) != here["versions"][name]:
                self.notes.append(f"{name} is {here['versions'][name]} here and was {about.versions.get(name)}")
        if about.unsteady:
            given = ", ".join(about.unsteady)
            self.notes.append(
                f"layers are given {given}, made from hidden states: layers as a whole are not purely teacher-forced"
            )
        self.notes += [f"here: {self.precision.note}"] if self.precision.note else []
        if about.product_input:
            self.notes.append(f"fingerprint: factors of float32 products may be rounded to {about.product_input:.1e}")

    def bring(self, tensor: Tensor) -> Tensor:
        """A stored tensor on this device, in this model's dtype where it had the other model's."""
        dtype = self.dtype if tensor.dtype == self.file.about.torch_dtype else tensor.dtype
        return tensor.to(self.device, dtype)

    # ---- layers

    def _layer(self, call: LayerCall) -> LayerRow:
        index = call.index
        x, y = (self.file.tensor(f"layer.{index}.{end}") for end in ("input", "output"))
        whole = Difference.of(y, main_result(call.again(self.bring(x))))
        ops = {label: self.file.op(index, label) for label in self.file.about.layers[index]}
        forcing = Forcing(call.module, {label: (self.bring(a), self.bring(b)) for label, (a, b) in ops.items()})
        with forcing.active():
            recording = record_layer(call, self.reference, self.bring(x))
        between = _Between(self, call, recording, {label.partition("#")[0] for label in ops})
        rows = []
        for label, (a, b) in ops.items():
            if label not in forcing.made:
                self.notes.append(f"{call.name}.{label} was not called here")
                continue
            if (row := between.row(label, a, forcing.arrived[label])) is not None:
                rows.append(row)
            rows.append(self._operator(index, label, f"{call.name}.{label}", a, b, forcing.made[label]))
        own = between.row(None, y, main_result(recording.output))
        rows.append(own or ComparisonRow(index, None, "output", f"layer.{index}", Difference.of(y, y)))
        return LayerRow(index, call.name, whole, rows)

    # ---- operators

    def _outside(self, label: str) -> ComparisonRow:
        x, y = self.file.op(None, label)
        module = self.model.get_submodule(label.partition("#")[0])
        return self._operator(None, label, label, x, y, next(tensors_of(module(self.bring(x)))))

    def _operator(self, layer: int | None, label: str, name: str, x: Tensor, y: Tensor, made: Tensor) -> ComparisonRow:
        path = name.partition("#")[0]
        row = ComparisonRow(layer, label, "output", self.site(path, "output"), Difference.of(y, made))
        if not row.difference.differing:
            return row
        row.here = self._outside_of_interval(path, self.bring(x).cpu(), made.cpu(), self.precision)
        row.stored = None if self.casts else self._outside_of_interval(path, x, y, self.stored_precision)
        row.fits = fit_all(y, made.cpu())
        return row

    def _outside_of_interval(self, path: str, x: Tensor, y: Tensor, precision: Precision) -> int | None:
        leaf = self.reference.leaf(path)
        if leaf is None:
            return None
        call = Call(None, (x,), {}, y.dtype, precision, lambda tensor: tensor.double())
        with torch._C.DisableTorchFunction():
            allowed = leaf.allowed(call, lambda name: self.reference.weight(f"{path}.{name}"))
            return int(allowed.outside(y).sum())

    def site(self, path: str, point: str) -> str:
        """The plan language's name of exactly this module."""
        part = self.parts[id(self.model.get_submodule(path))]
        include = f",include={part.role}" if part.role in ("lm_head", "embedding", "router", "lora") else ""
        return f"module.{part.name}{',point=input' if point == 'input' else ''}{include}"


class _Between:
    """What one forced call computed between its operators.

    A tensor is followed from the function that made it through the functions that read it; operators end the chase, because
    what they made was replaced by the file's. So an error belongs to the places it really reaches.
    """

    def __init__(self, replay: _Replay, call: LayerCall, recording: Recording, forced: set[str]) -> None:
        self.replay = replay
        self.call = call
        self.recording = recording
        self.forced = forced
        self.inexact = self._reached_from(lambda i, r: r.function not in operator_rounding.ROUNDED_ONCE, set())
        """Tensors that a correct device may make otherwise."""
        self._judgement: Judgement | None = None

    def row(self, label: str | None, stored: Tensor, arrived: Tensor) -> ComparisonRow | None:
        """The row of what reaches an operator, or the layer's output; None when it is what the file holds, cast if need be."""
        stored = self.replay.bring(stored).cpu()
        difference = Difference.of(stored, arrived)
        if not difference.differing:
            return None
        point = "output" if label is None else "input"
        path = "" if label is None else f"{self.call.name}.{label.partition('#')[0]}"
        site = f"layer.{self.call.index}" if label is None else self.replay.site(path, "input")
        row = ComparisonRow(self.call.index, label, point, site, difference, fits=fit_all(stored, arrived.cpu()))
        row.remark = self._wrong_here(arrived)
        row.here = difference.differing if row.remark else 0
        row.stored = None if self.replay.casts else 0 if row.here else self._wrong_in_file(stored, arrived)
        return row

    def _reached_from(self, starts: Callable[[int, Record], bool], ids: set[int]) -> set[int]:
        """Tensors (by id: the recording keeps them) that some functions made, or that were made from those."""
        for i, record in enumerate(self.recording.records):
            if record.func is None and record.path in self.forced:
                continue
            if starts(i, record) or any(id(t) in ids for t in tensors_of((record.args, record.kwargs))):
                ids.update(id(t) for t in tensors_of(record.output))
        return ids

    def _wrong_here(self, arrived: Tensor) -> str:
        """What this device did wrong on the way to a tensor; empty when nothing."""
        for v in self.judgement.violations:
            if not v.got.is_floating_point():  # sorted indices: equal keys may come in any order
                continue
            if id(arrived) in self._reached_from(lambda i, r, at=v.order: i == at, set()):  # type: ignore[misc]
                return f"{v.path or 'the layer'}:{v.function}"
        for gap in self.recording.breaks:
            if id(arrived) in self._reached_from(lambda i, r: False, {id(gap.got)}):
                return f"changed at the {gap.door} of {gap.path or 'the layer'}"
        return ""

    @property
    def judgement(self) -> Judgement:
        """Every function of the call replayed on the host, once."""
        if self._judgement is None:
            replay = self.replay
            self._judgement = judge(self.recording, replay.reference, self.call.name, replay.precision, self.forced)
        return self._judgement

    def _wrong_in_file(self, stored: Tensor, arrived: Tensor) -> int:
        """Values of the file that these functions cannot have made, given that this device made them right."""
        if id(arrived) not in self.inexact:
            return Difference.of(stored, arrived).differing
        roundoff = max(UNIT[stored.dtype], self.replay.precision.product_input, self.replay.stored_precision.product_input)
        gap = (stored.double() - arrived.cpu().double()).abs()
        return int((~(gap <= closeness(stored, self.replay.file.about.tokens, roundoff))).sum())


def closeness(stored: Tensor, tokens: int, roundoff: float) -> Tensor:
    """How far a correct result of attention may be off, per token."""
    size = stored.double().abs().amax(-1, keepdim=True)
    return (16 * roundoff + (1024 + 64 * tokens) * ACCUMULATION) * size + TINY
