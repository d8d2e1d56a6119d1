"""`locate`: does this device compute this model correctly, and if not, where.

One traced forward, then layer by layer: record, repeat, links, twins, replay, statistics. Each probe is
teacher-forced, so layers are judged one by one and the first one that is wrong is the answer. The parts outside of the
decoder layers (embeddings, rotation, the last norm, the head) are judged by weights, repeat and replay. On the host, a short
batch of two and one decoding step with its cache are traced too, and replayed layer by layer.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

import shaketable
from shaketable.capture.recorder import Recording, main_result
from shaketable.capture.reference import Reference, check_model, product_name
from shaketable.capture.trace import (
    Arguments,
    LayerCall,
    Trace,
    as_deployed,
    forward,
    one_sequence,
    record_layer,
    token_batch,
    trace,
    unwrapped,
)
from shaketable.errors import InertError, ModelError, ShaketableError
from shaketable.locate import srdd
from shaketable.locate.diagnosis import MODES, Diagnosis, LayerStatistics
from shaketable.locate.foreign_code import foreign_code, unmade
from shaketable.locate.layer_probes import (
    FAILURES,
    LAYER_PROBES,
    ON_DEVICE,
    ON_HOST,
    OUTSIDE_PROBES,
    USES,
    Probe,
    ProbedPart,
    failure,
)
from shaketable.locate.verdict import decide
from shaketable.numerics.intervals import device_precision

Progress = Callable[[int, int, str], None]
STATISTICS_TOKENS = 128
QUICK_TOKENS = 64
BATCH_TOKENS = 32
"""Length of the two sequences that are run as a batch."""
NEVER_RUN = ("compiled graphs", "autocast", "training mode", "backward", "padding", "other tokens, lengths and batch sizes")
FAST_PATH = "the fast path of torch's own attention and encoder layers"


def locate(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    mode: str = "all",
    prompts: Sequence[str] | None = None,
    input_ids: Tensor | None = None,
    arguments: Arguments | None = None,
    tokens: int = 256,
    source: str | None = None,
    plan: Any = None,
    seed: int = 0,
    quick: bool = False,
    strict: bool = False,
    layers: str | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Find out whether a device computes a model correctly, and where it does not.

    Args:
        model: A causal language model, on the device to be judged: any module that is called with tokens.
        tokenizer: Its tokenizer; not needed with `input_ids`.
        mode: `device` uses no host arithmetic; `host` trusts the host's arithmetic and the file's weights; `all` does both.
        prompts: Texts to run; a built-in text by default.
        input_ids: Token ids of shape (1, n) instead of prompts.
        arguments: What `forward` needs besides tokens, by name.
        tokens: How many tokens to run.
        source: The model's name or folder, so that its weights can be read again; without it they are trusted.
        plan: A plan to plant first, hidden from the probes. For trying locate out.
        seed: Of the twins, the probes of the statistics, and the planted plan.
        quick: Run at most 64 tokens, and neither a batch nor cached decoding; the verdict says so.
        strict: Trust only the model's own code: hooks and replaced methods of composite modules make HEALTHY INCONCLUSIVE.
        layers: Path of the module whose children are the decoder layers, where they are not found by themselves.
        progress: Called with (layers done, layers, what is being done).

    Returns:
        The diagnosis. `str()` of it is the verdict in one sentence.

    Raises:
        ShaketableError: When the model or the input cannot be judged.
        InertError: When a clause of the plan changed no value.
    """
    if mode not in MODES:
        raise ShaketableError(f"unknown mode {mode!r}; valid: {', '.join(MODES)}")
    model = unwrapped(model)
    check_model(model, layers)
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tokens = min(tokens, longest) if isinstance(longest, int) and longest > 1 else tokens
    ids = one_sequence(token_batch(tokenizer, prompts, tokens) if input_ids is None else input_ids)
    ids = ids[:, :QUICK_TOKENS] if quick else ids
    try:
        with as_deployed(model):
            return Locator(model, mode, source, seed, progress, layers, arguments, quick, strict).run(ids, plan)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(f"there is not enough memory on {_device(model)} for one layer's probes; use fewer tokens") from error


@dataclass
class Locator:
    """One run of locate: the model and its reference. The arguments are those of `locate`."""

    model: nn.Module
    mode: str = "all"
    source: str | None = None
    seed: int = 0
    progress: Progress | None = None
    layers: str | None = None
    arguments: Arguments | None = None
    quick: bool = False
    strict: bool = False
    uses: dict[str, Trace] = field(default_factory=dict)
    """The model run in the other ways of `USES`."""
    not_used: dict[str, str] = field(default_factory=dict)
    """Why it could not be run in some of them."""

    def __post_init__(self) -> None:
        self.tell = self.progress or (lambda done, total, text: None)
        self.device, self.dtype = _device(self.model), next(self.model.parameters()).dtype
        self.reference = Reference(self.model, self.source, self.layers)
        self.precision = device_precision(self.device, self.dtype)

    def run(self, ids: Tensor, plan: Any) -> Diagnosis:
        """Plant the plan if there is one, probe, decide."""
        diagnosis = self._describe(ids)
        if plan is None:
            self._probe(ids.to(self.device), diagnosis)
        else:
            injection = shaketable.inject(self.model, plan, seed=self.seed, allow_inert=True)
            with injection as ledger:
                self._probe(ids.to(self.device), diagnosis)
            if inert := ledger.inert():
                raise InertError(f"{'; '.join(inert)}: there was nothing to find")
            diagnosis.planted = {"plan": injection.plan.text(), "changed": ledger.changed}
        decide(diagnosis, self.reference.has_file)
        return diagnosis

    def _probe(self, ids: Tensor, diagnosis: Diagnosis) -> None:
        """Trace a forward, probe layer by layer, then what is outside of the layers."""
        total = diagnosis.num_layers
        self.reference.note_deviations(self.model)
        self.tell(0, total, "a plain forward")
        logits, unit = self._plain_forwards(ids)
        self.tell(0, total, "trace")
        start = self._now()
        traced = trace(self.model, ids, self.reference, self.arguments)
        self.reference.written |= traced.outside.written
        if self.quick:
            self.not_used = dict.fromkeys(USES, "quick")
        elif self.mode in ON_HOST:
            self._trace_uses(ids)
        for call in traced.calls:
            recording = record_layer(call, self.reference)
            self.reference.written |= recording.written
            part = self.judge(self.part(traced, recording, call), LAYER_PROBES)
            part.report.statistics = self.statistics(part)
            self._keep(part, diagnosis)
            self.tell(call.index + 1, total, f"layer {call.index}")
        outside = self.part(traced, traced.outside, None)
        outside.logits = logits
        self._keep(self.judge(outside, OUTSIDE_PROBES), diagnosis)

        if statistics := [report.statistics for report in diagnosis.probes if report.statistics is not None]:
            srdd.note_drops(statistics)
        diagnosis.not_run = self._not_run(diagnosis)
        diagnosis.cost_forwards = round((self._now() - start) / unit, 3)

    def part(self, traced: Trace, recording: Recording, call: LayerCall | None) -> ProbedPart:
        """A layer, or with no call what is outside of the layers."""
        known = (self.model, self.reference, self.precision, self.seed)
        return ProbedPart(*known, recording, traced, call, self.uses)

    def judge(self, part: ProbedPart, probes: Sequence[Probe]) -> ProbedPart:
        """Run the probes of this mode, one after another."""
        for probe in probes:
            if self.mode in probe.modes and (finding := probe.run(part)) is not None:
                part.take(probe.name, finding)
        return part

    def _keep(self, part: ProbedPart, diagnosis: Diagnosis) -> None:
        """Put a part's findings into the diagnosis and let go of its tensors."""
        diagnosis.probes.append(part.report)
        diagnosis.evidence += part.evidence
        diagnosis.foreign += [one for one in unmade(part.recording, part.prefix) if one not in diagnosis.foreign]
        self.reference.forget()

    def _trace_uses(self, ids: Tensor) -> None:
        """Trace a short batch of two, then one more token of both with the cache, if the model has one."""
        length = min(BATCH_TOKENS, ids.shape[1] - 1)
        given, takes = dict(self.arguments or {}), inspect.signature(self.model.forward).parameters
        has_cache = "past_key_values" in takes and "use_cache" in takes
        if has_cache and "past_key_values" in given:
            self.not_used = dict.fromkeys(USES, "the caller gives a cache")
            return
        cached = given | ({"use_cache": True} if has_cache else {})
        try:
            self.uses["batch"] = trace(self.model, torch.cat([ids, ids.flip(1)])[:, :length], self.reference, cached)
        except (*FAILURES, ShaketableError) as error:
            self.not_used = dict.fromkeys(USES, failure("the model", error))
            return
        cache = getattr(self.uses["batch"].answer, "past_key_values", None)
        if cache is None:
            self.not_used["decode"] = "the model returns no cache"
            return
        try:
            token = ids[:, length : length + 1].expand(2, 1)
            self.uses["decode"] = trace(self.model, token, self.reference, cached | {"past_key_values": cache})
        except (*FAILURES, ShaketableError) as error:
            self.not_used["decode"] = failure("the model", error)

    def _not_run(self, diagnosis: Diagnosis) -> list[str]:
        """Ways to use the model that were not judged, with the reason where there is one."""
        has_fast_path = any(isinstance(module, nn.MultiheadAttention) for module in self.model.modules())
        never = [FAST_PATH, *NEVER_RUN] if has_fast_path else NEVER_RUN
        if self.mode not in ON_HOST:
            return [*USES.values(), *never]
        found = []
        for name, words in USES.items():
            results = [p.results[name] for p in diagnosis.probes if name in p.results]
            reasons = [r.reason for r in results if r.status == "inconclusive"]
            if name in self.not_used:
                found.append(f"{words} ({self.not_used[name]})")
            elif reasons:
                more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
                found.append(f"{words} (in {reasons[0]}{more})")
        return [*found, *never]

    def _plain_forwards(self, ids: Tensor) -> tuple[list[Tensor], float]:
        """Logits of two plain forwards, and the unit of cost: the faster of them. They are not counted themselves."""
        times, logits = [], []
        for _ in range(2):
            start = self._now()
            logits.append(forward(self.model, ids, self.arguments))
            times.append(self._now() - start)
        return logits, min(times)

    def statistics(self, part: ProbedPart) -> LayerStatistics | None:
        """SRDD's numbers of a layer; None without the device's modes, and of a layer that is given tokens."""
        call = part.layer
        if self.mode not in ON_DEVICE or not call.x.is_floating_point():
            return None
        inputs = srdd.probe_input(call.x, self.seed + call.index), srdd.dc_input(call.x)
        try:
            answers = main_result(call.again(torch.cat(inputs))).chunk(2)
        except FAILURES:  # its arguments are made for one sequence
            answers = tuple(main_result(call.again(x)) for x in inputs)
        again = main_result(part.recording.output)
        step = max(1, call.x.shape[1] // STATISTICS_TOKENS)
        tensors = (call.x, call.y, again, inputs[0], answers[0], inputs[1], answers[1])
        x, y, second, *rest = (t[:, ::step] for t in tensors)
        return srdd.layer_statistics(x, [y, second], *rest)

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    # ---- the facts of a diagnosis

    def _describe(self, ids: Tensor) -> Diagnosis:
        config = getattr(self.model, "config", None)
        packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        return Diagnosis(
            model=str(self.reference.source or getattr(config, "name_or_path", "") or type(self.model).__name__),
            model_class=type(self.model).__name__,
            num_layers=len(self.reference.layers),
            dtype=str(self.dtype).removeprefix("torch."),
            device=product_name(self.device) or str(self.device),
            attention=str(getattr(config, "_attn_implementation", None) or "unknown"),
            mode=self.mode,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"shaketable": shaketable.__version__, **packages, "python": platform.python_version()},
            tokens=ids.shape[1],
            seed=self.seed,
            strict=self.strict,
            foreign=foreign_code(self.model, self.reference),
            notes=[self.precision.note] if self.precision.note else [],
            believed=self._unchecked(),
            doubts=self._doubts(),
        )

    def _unchecked(self) -> list[str]:
        """Facts that could not be checked and are taken as right."""
        reference = self.reference
        found = []
        if self.mode in ON_HOST and not reference.has_file:
            found.append("the weights and the config against a file, as no source was given")
        if self.mode in ON_HOST and not reference.is_rebuilt:
            unexplained = reference.unexplained
            why = f"{unexplained} is not what it gives" if unexplained else "the model cannot be built from one"
            found.append(f"classes, attributes and buffers of its modules against the config ({why})")
        unchecked = [one for one in reference.unlike(self.model) if one.status == "unchecked"]
        found += [f"{one.path or 'the model'}: {one.text}" for one in unchecked]
        found += [text for text, is_rounded in reference.lowered() if not is_rounded]
        if reference.has_file and (own := [n for n, _ in self.model.named_parameters() if reference.is_trusted(n)]):
            found.append(f"{own[0]}, which is not in {reference.source}" + (f", and {len(own) - 1} more" if own[1:] else ""))
        return found

    def _doubts(self) -> list[str]:
        """Facts that may be wrong, and have no place in the model."""
        doubts = [f"the model's config is not that of {self.reference.source}: {text}" for text in self.reference.other_config]
        return doubts + [text for text, is_rounded in self.reference.lowered() if is_rounded]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
