"""`locate`: does this device compute this model correctly, and if not, where.

One traced forward, then layer by layer: record, repeat, links, twins, checksums, replay, statistics. Each probe is
teacher-forced, so layers are judged one by one and the first one that is wrong is the answer. What is not a decoder
layer (embeddings, rotation, the last norm, the head) is judged by weights, repeat and replay.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import shaketable
from shaketable.errors import InertError, ModelError, ShaketableError
from shaketable.locate import srdd
from shaketable.locate.capture.foreign_code import foreign_code, unmade
from shaketable.locate.capture.model_call import Arguments
from shaketable.locate.capture.model_identity import product_name
from shaketable.locate.capture.prompts import token_batch
from shaketable.locate.capture.recorder import Recording, differing, same
from shaketable.locate.capture.reference import Reference, check_model
from shaketable.locate.capture.trace import LayerCall, Trace, forward, record_layer, trace
from shaketable.locate.diagnosis import MODES, Diagnosis, Evidence, LayerReport, Result
from shaketable.locate.probes import layer_probes
from shaketable.locate.probes.checksums import check_products
from shaketable.locate.probes.documented_precision import device_precision
from shaketable.locate.probes.replay import judge
from shaketable.locate.probes.wiring import circuit_of
from shaketable.sites.nested_tensors import tensors_of

Progress = Callable[[int, int, str], None]
T = TypeVar("T")
STATISTICS_TOKENS = 128


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
    scans: srdd.Scans | None = None,
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
        source: The model's name or folder, so that its weights can be read again; without it they are believed.
        plan: A plan to plant first, hidden from the probes. For trying locate out.
        seed: For gauges, permutations, the probes of the statistics, and the planted plan.
        quick: On the host, judge products by checksums, and replay only those whose checksum fires. Half the cost; blind
            to errors that drown in the rounding of a sum.
        strict: Believe only the model's own code: hooks and replaced methods of composite modules make HEALTHY INCONCLUSIVE.
        scans: Scale and trials of the statistics' gain and ambient scans; they decide nothing.
        progress: Called with (layers done, layers, what is being done).

    Returns:
        The diagnosis. `str()` of it is the verdict in one sentence.

    Raises:
        ShaketableError: When the model or the input cannot be judged.
        InertError: When a clause of the plan changed no value.
    """
    if mode not in MODES:
        raise ShaketableError(f"unknown mode {mode!r}; valid: {', '.join(MODES)}")
    check_model(model)
    ids = input_ids if input_ids is not None else token_batch(tokenizer, prompts, min(tokens, _longest(model)))
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 2:
        raise ShaketableError(f"input_ids has shape {tuple(ids.shape)}; locate runs one sequence of at least 2 tokens")
    try:
        with _still(model):
            locator = Locator(model, mode, source, seed, progress)
            locator.quick, locator.strict, locator.scans = quick, strict, scans or srdd.Scans()
            locator.arguments = arguments
            return locator.run(ids, plan)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(f"there is not enough memory on {_device(model)} for one layer's probes; use fewer tokens") from error


@contextmanager
def _still(model: nn.Module) -> Iterator[None]:
    """Eval mode, no autocast, nothing compiled; every module's mode comes back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.autocast(_device(model).type, enabled=False), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


def _longest(model: nn.Module) -> int:
    """How many tokens the model has positions for."""
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 1 else 1 << 30


class Locator:
    """One run of locate."""

    def __init__(self, model: nn.Module, mode: str, source: str | None, seed: int, progress: Progress | None) -> None:
        self.model = model
        self.mode = mode
        self.seed = seed
        self.tell = progress or (lambda done, total, text: None)
        self.device = _device(model)
        self.dtype = next(model.parameters()).dtype
        self.reference = Reference(model, source)
        precision = device_precision(self.device, self.dtype)
        self.bench = layer_probes.Bench(self.reference, precision, seed)
        self.spent: dict[str, float] = {}
        self.unmade: list[str] = []
        self.on_host = mode in ("host", "all")
        self.on_device = mode in ("device", "all")
        self.quick = False
        self.strict = False
        self.scans = srdd.Scans()
        self.arguments: Arguments | None = None
        self.thorough = False
        """Run tests with a tolerance also where an exact one has decided; for benchmarks."""

    def run(self, ids: Tensor, plan: Any) -> Diagnosis:
        """Plant the plan if there is one, probe, decide."""
        diagnosis = self._blank(ids)
        if plan is None:
            self._probe(ids.to(self.device), diagnosis)
            diagnosis.foreign += dict.fromkeys(self.unmade)
        else:
            injection = shaketable.inject(self.model, plan, seed=self.seed, allow_inert=True)
            with injection as ledger:
                self._probe(ids.to(self.device), diagnosis)
            if inert := ledger.inert():
                raise InertError(f"{'; '.join(inert)}: there was nothing to find")
            diagnosis.planted = {"plan": injection.plan.text(), "changed": ledger.changed}
        diagnosis.decide(self.reference.has_file)
        return diagnosis

    def _probe(self, ids: Tensor, diagnosis: Diagnosis) -> None:
        total = diagnosis.num_layers
        self.reference.note_numbers(self.model)
        self.tell(0, total, "a plain forward")
        logits, unit = self._plain_forwards(ids)
        self.tell(0, total, "trace")
        traced = self._timed("trace", lambda: trace(self.model, ids, self.reference, self.arguments))
        self.reference.written |= traced.outside.written
        found: list[srdd.LayerStatistics] = []
        for call in traced.calls:
            recording = self._timed("repeat", functools.partial(record_layer, call, self.reference))
            self.unmade += unmade(recording, call.name)
            self.reference.written |= recording.written
            report, own = self.layer(call, recording, diagnosis.evidence)
            diagnosis.probes.append(report)
            if own is not None:
                found.append(own)
                report.statistics = own.as_dict()
            self.reference.forget()
            self.tell(call.index + 1, total, f"layer {call.index}")
        self.unmade += unmade(traced.outside)
        diagnosis.probes.append(self._outside(traced, logits, diagnosis.evidence))
        self.reference.forget()
        diagnosis.srdd = {**srdd.srdd_verdict(found), "scans": asdict(self.scans)} if found else None
        diagnosis.cost = {name: round(seconds / unit, 3) for name, seconds in self.spent.items()}
        diagnosis.device_forwards = self._device_forwards(diagnosis)
        diagnosis.cost_forwards = round(sum(self.spent.values()) / unit, 3)

    def _device_forwards(self, diagnosis: Diagnosis) -> int:
        """One traced and one recorded; where they ran, a twin, another token, a permuted pair, and two of the statistics."""
        ran = {n for p in diagnosis.probes for n, r in p.results.items() if r.status not in ("skipped", "inconclusive")}
        return 2 + ("twin" in ran) + ("causal" in ran) + 2 * ("permutation" in ran) + 2 * (diagnosis.srdd is not None)

    def _plain_forwards(self, ids: Tensor) -> tuple[list[Tensor], float]:
        """The unit of cost: the faster of two plain forwards. They are not counted themselves."""
        times, logits = [], []
        try:
            for _ in range(2):
                start = self._now()
                logits.append(forward(self.model, ids, self.arguments))
                times.append(self._now() - start)
        except (torch.OutOfMemoryError, ShaketableError):
            raise
        except Exception as error:
            line = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelError(f"a plain forward of {type(self.model).__name__} fails on these tokens: {line}") from error
        return logits, min(times)

    def layer(
        self, call: LayerCall, recording: Recording, evidence: list[Evidence]
    ) -> tuple[LayerReport, srdd.LayerStatistics | None]:
        """Every probe of one layer."""
        report = LayerReport(call.index, call.name)

        def keep(name: str, finding: layer_probes.Finding) -> Result:
            result, found = finding
            report.results[name] = result
            for item in found:
                item.place = call.index
            evidence.extend(found)
            return result

        if self.on_host:
            names = [f"{call.name}.{n}" for n, _ in call.module.named_parameters()]
            self._run("weights", keep, lambda: layer_probes.weights(names, self.model, self.bench, call.index, call.name))
            keep("weights", layer_probes.attributes(report.results["weights"], call.module, call.name, self.bench, call.index))
        again = self._run("repeat", keep, lambda: layer_probes.repeat(call, recording, self.bench))
        self._run("links", keep, lambda: layer_probes.links(call.index, recording))
        if self.on_device:
            report.coverage = self._twin(call, recording, keep, again)
        decided = False
        if self.on_host:
            report.results["checksum"], passed = self._checksum(call, recording)
            judgement = self._timed("replay", lambda: judge(recording, self.reference, call.name, self.bench.precision, passed))
            decided = keep("replay", layer_probes.replay(judgement, recording, call.index)).status != "inconclusive"
            report.coverage = judgement.coverage | layer_probes.by_checksums(recording, passed)
            self._excuse(call, recording, report, evidence)
        if self.on_device:
            self._causal(call, recording, keep, again, decided and not self.thorough)
            report.results["permutation"] = self._permutation(call, recording, again, decided and not self.thorough)
            if self.mode == "device" and report.results["permutation"].status in ("pass", "suspect"):
                layer_probes.by_permutation(report.coverage)
        has_statistics = self.on_device and call.x.is_floating_point()  # a layer that is given tokens is an embedding
        own = self._timed("statistics", lambda: self._statistics(call, recording.output)) if has_statistics else None
        return report, own

    def _checksum(self, call: LayerCall, recording: Recording) -> tuple[Result, set[str]]:
        """The screen, and the products that need no replay after it."""
        if not (self.quick or self.thorough):
            return Result("skipped", reason="replay judges every product"), set()
        scores = self._timed("checksum", lambda: check_products(recording, self.reference, call.name, self.bench.precision))
        return layer_probes.checksum(scores), {path for path, score in scores.items() if score <= 1} if self.quick else set()

    def _excuse(self, call: LayerCall, recording: Recording, report: LayerReport, evidence: list[Evidence]) -> None:
        """An accelerator may sum in another order at every call. If every result is right, that is no fault."""
        again, judged = report.results["repeat"], report.results["replay"]
        if again.status != "fail" or judged.status != "pass" or self.device.type == "cpu":
            return
        if layer_probes.is_within_summation(call, recording, self.bench):
            again.status = "inconclusive"
            again.reason += ", no more than another order of summation explains"
            evidence[:] = [e for e in evidence if not (e.layer == call.index and e.probe == "repeat")]

    def _twin(self, call: LayerCall, recording: Recording, keep: Any, again: Result) -> dict[str, dict[str, int]]:
        """The exact twin, and what it covers."""
        if again.status != "pass":
            keep("twin", (Result("inconclusive", reason="the layer's results change from call to call"), []))
            return {}
        circuit = self._circuit(call)
        try:
            finding, _ = self._timed("twin", lambda: layer_probes.twin(call, recording, circuit, self.bench))
        except FAILURES as error:
            finding = Result("inconclusive", reason=_failed("the twin", error)), []
        return {} if keep("twin", finding).status == "inconclusive" else layer_probes.by_twin(recording, circuit)

    def _causal(self, call: LayerCall, recording: Recording, keep: Any, again: Result, decided: bool) -> None:
        finding: layer_probes.Finding = Result("skipped", reason="replay has judged this layer, and sees more"), []
        if not decided and again.status != "pass":
            finding = Result("inconclusive", reason="the layer's results change from call to call"), []
        elif not decided:
            try:
                circuit = self._circuit(call)
                finding = self._timed("causal", lambda: layer_probes.causal(call, recording, circuit, self.bench))
            except FAILURES as error:
                finding = Result("inconclusive", reason=_failed("the layer with another token", error)), []
        keep("causal", finding)

    def _permutation(self, call: LayerCall, recording: Recording, again: Result, decided: bool) -> Result:
        if decided:
            return Result("skipped", reason="replay has judged this layer, and sees more")
        if again.status != "pass":
            return Result("inconclusive", reason="the layer's results change from call to call")
        try:
            return self._timed(
                "permutation", lambda: layer_probes.permutation(call, recording, self._circuit(call), self.bench)
            )
        except FAILURES as error:
            return Result("inconclusive", reason=_failed("the permuted pair", error))

    def _circuit(self, call: LayerCall) -> Any:
        """The layer's wiring; or why its symmetries are not known, as those of somebody's own block are not."""
        expected = self.reference.skeleton.get_submodule(call.name)
        for path, block in expected.named_children():
            if any(block.children()) and type(own := call.module.get_submodule(path)) is not type(block):
                return f"{call.name}.{path} is a {type(own).__name__} where the config makes a {type(block).__name__}"
        return circuit_of(expected, getattr(self.model, "config", None))

    def _statistics(self, call: LayerCall, output: Any) -> srdd.LayerStatistics:
        scans, key = self.scans, self.seed + call.index
        probes = [srdd.probe_input(call.x, key + (n << 20), scans.gain_scale) for n in range(scans.gain_trials)]
        shifted = srdd.dc_input(call.x, scans.gain_scale)
        answers = self._answers(call, *probes, shifted)
        again = [next(tensors_of(call.again(call.x))) for _ in range(scans.ambient_trials - 2)]
        step = max(1, call.x.shape[1] // STATISTICS_TOKENS)
        x, y, *repeats = (t[:, ::step] for t in (call.x, call.y, next(tensors_of(output)), *again))
        inputs, outputs = ([t[:, ::step] for t in row] for row in ([*probes, shifted], answers))
        found = srdd.layer_statistics(x, [y, *repeats], inputs[0], outputs[0], inputs[-1], outputs[-1])
        gains = [srdd.gain(x, y, *pair) for pair in zip(inputs[:-1], outputs[:-1], strict=True)]
        return found if len(gains) == 1 else replace(found, gain=sum(gains) / len(gains))

    def _answers(self, call: LayerCall, *inputs: Tensor) -> Sequence[Tensor]:
        """A layer's results for several inputs: in one batch, or one by one where its arguments are made for one sequence."""
        try:
            return next(tensors_of(call.again(torch.cat(inputs)))).chunk(len(inputs))
        except FAILURES:
            return [next(tensors_of(call.again(x))) for x in inputs]

    def _outside(self, traced: Trace, logits: list[Tensor], evidence: list[Evidence]) -> LayerReport:
        """Embeddings, rotation, last norm, head."""
        report = LayerReport(None, "")
        layers = {call.name for call in traced.calls}
        found: list[Evidence] = []
        if self.on_host:
            inside = tuple(f"{name}." for name in layers)
            names = [n for n, _ in self.model.named_parameters() if not n.startswith(inside)]
            report.results["weights"], more = self._timed(
                "weights", lambda: layer_probes.weights(names, self.model, self.bench, None, "")
            )
            found += more
            attributes = layer_probes.attributes(report.results["weights"], self.model, "", self.bench, None, layers)
            report.results["weights"], more = attributes
            found += more
        report.results["repeat"] = self._logits(logits, traced)
        report.results["links"], broken = layer_probes.links(None, traced.outside)
        found += broken
        if self.on_host:
            work = lambda: judge(traced.outside, self.reference, "", self.bench.precision, layers)  # noqa: E731
            judgement = self._timed("replay", work)
            report.results["replay"], more = layer_probes.replay(judgement, traced.outside, None)
            report.coverage = judgement.coverage
            found += more
        last = max(i for i, r in enumerate(traced.outside.records) if r.path in layers)
        orders = {r.path: i for i, r in enumerate(traced.outside.records)}
        for item in found:
            late = (
                traced.outside.breaks[0].after > last if item.probe == "links" else orders.get(item.op or "", last + 1) > last
            )
            item.place = len(layers) if late else -1
        evidence.extend(found)
        return report

    def _logits(self, logits: list[Tensor], traced: Trace) -> Result:
        """Three whole forwards. A difference is found in its layer, or nowhere."""
        others = [one for one in logits if not same(one, traced.logits)]
        if not others:
            return Result("pass", 0.0)
        differs = torch.stack([differing(one, traced.logits) for one in others]).any(0)
        rows = int(differs.reshape(-1, differs.shape[-1]).any(1).sum())
        text = f"three forwards of the whole model differ in the logits of {rows} of {differs.shape[-2]} tokens"
        return Result("suspect", float(differs.double().mean()), reason=text)

    # ---- time

    def _run(
        self, name: str, keep: Callable[[str, layer_probes.Finding], Result], work: Callable[[], layer_probes.Finding]
    ) -> Result:
        return keep(name, self._timed(name, work))

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        start = self._now()
        result = work()
        self.spent[name] = self.spent.get(name, 0.0) + self._now() - start
        return result

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def _blank(self, ids: Tensor) -> Diagnosis:
        config = getattr(self.model, "config", None)
        packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        diagnosis = Diagnosis(
            model=str(self.reference.source or getattr(config, "name_or_path", "") or type(self.model).__name__),
            model_class=type(self.model).__name__,
            num_layers=sum(1 for _ in _layers(self.model)),
            dtype=str(self.dtype).removeprefix("torch."),
            device=product_name(self.device) or str(self.device),
            attention=str(getattr(config, "_attn_implementation", None) or "unknown"),
            mode=self.mode,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"shaketable": shaketable.__version__, **packages, "python": platform.python_version()},
            sequences=ids.shape[0],
            tokens=ids.shape[1],
            seed=self.seed,
            strict=self.strict,
            foreign=foreign_code(self.model, self.reference),
        )
        text = "a fault that changes a layer's result in a share p of its calls is seen with probability 1-(1-p)^2"
        diagnosis.detectable_rate = {"repeats": 2, "text": text}
        diagnosis.notes += self._notes()
        return diagnosis

    def _notes(self) -> list[str]:
        notes = [self.bench.precision.note] if self.bench.precision.note else []
        if self.on_host and not self.reference.has_file:
            notes.append("the weights were not compared with a file: none was given")
        if not self.reference.is_rebuilt:
            notes.append("the model could not be built anew from its config: its own modules define what is right")
        if any(isinstance(module, nn.MultiheadAttention) for module in self.model.modules()):
            notes.append("the fast path of torch's own attention and encoder layers was off: it was not judged")
        return notes


FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError, AssertionError)
"""What a layer may raise when it is called otherwise than its model calls it; memory that is full is told apart."""


def _failed(what: str, error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    return f"{what} cannot be called: {next(iter(str(error).splitlines()), type(error).__name__)}"


def _layers(model: nn.Module) -> list[nn.Module]:
    from shaketable.sites.structure import find_layers

    return find_layers(model)[0]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
