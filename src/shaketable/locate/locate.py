"""`locate`: does this device compute this model correctly, and if not, where.

One traced forward, then layer by layer: record, repeat, links, twins, checksums, replay, statistics. Each probe is
teacher-forced, so layers are judged one by one and the first one that is wrong is the answer. The parts outside of the
decoder layers (embeddings, rotation, the last norm, the head) are judged by weights, repeat and replay. On the host, a short
batch of two and one decoding step with its cache are traced too, and replayed layer by layer.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import shaketable
from shaketable.capture.recorder import Recording, differing, main_result, same
from shaketable.capture.reference import Reference, check_model, product_name
from shaketable.capture.trace import Arguments, LayerCall, Trace, forward, record_layer, token_batch, trace
from shaketable.errors import InertError, ModelError, ShaketableError
from shaketable.locate import layer_probes, srdd
from shaketable.locate.diagnosis import MODES, Diagnosis, Evidence, LayerReport, Result
from shaketable.locate.foreign_code import foreign_code, unmade
from shaketable.locate.replay import check_products, judge
from shaketable.locate.twins import circuit_of
from shaketable.numerics.intervals import device_precision

Progress = Callable[[int, int, str], None]
T = TypeVar("T")
STATISTICS_TOKENS = 128
BATCH_TOKENS = 32
"""How long the two sequences are that are run as a batch."""
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
NEVER_RUN = ("compiled graphs", "autocast", "training mode", "backward")
USES = {"batch": "a batch of two", "decode": "cached decoding"}


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
        source: The model's name or folder, so that its weights can be read again; without it they are believed.
        plan: A plan to plant first, hidden from the probes. For trying locate out.
        seed: For gauges, the probes of the statistics, and the planted plan.
        quick: On the host, judge products by checksums, and replay only those whose checksum fires. Half the cost; blind
            to errors that drown in the rounding of a sum.
        strict: Believe only the model's own code: hooks and replaced methods of composite modules make HEALTHY INCONCLUSIVE.
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
    ids = input_ids if input_ids is not None else token_batch(tokenizer, prompts, min(tokens, _longest(model)))
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 2:
        raise ShaketableError(f"input_ids has shape {tuple(ids.shape)}; locate runs one sequence of at least 2 tokens")
    try:
        with _still(model):
            locator = Locator(model, mode, source, seed, progress, layers)
            locator.quick, locator.strict, locator.arguments = quick, strict, arguments
            return locator.run(ids, plan)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(f"there is not enough memory on {_device(model)} for one layer's probes; use fewer tokens") from error


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of torch.compile's, DataParallel's and DDP's wrappers."""
    while inner := model._modules.get("_orig_mod") or (isinstance(model, WRAPPERS) and model._modules.get("module")):
        model = inner
    return model


@contextmanager
def _still(model: nn.Module) -> Iterator[None]:
    """Eval mode, no autocast, nothing compiled; every module's mode comes back, and every wrapper of torch.compile."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    compiled = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if "_orig_mod" in child._modules
    ]
    for parent, name, child in compiled:
        parent._modules[name] = child._modules["_orig_mod"]
    try:
        with torch.autocast(_device(model).type, enabled=False), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True
        for parent, name, child in compiled:
            parent._modules[name] = child


def _longest(model: nn.Module) -> int:
    """How many tokens the model has positions for."""
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 1 else 1 << 30


class Locator:
    """One run of locate."""

    def __init__(
        self, model: nn.Module, mode: str, source: str | None, seed: int, progress: Progress | None, layers: str | None = None
    ) -> None:
        self.model = model
        self.mode = mode
        self.seed = seed
        self.tell = progress or (lambda done, total, text: None)
        self.device = _device(model)
        self.dtype = next(model.parameters()).dtype
        self.reference = Reference(model, source, layers)
        precision = device_precision(self.device, self.dtype)
        self.bench = layer_probes.Bench(self.reference, precision, seed)
        self.spent: dict[str, float] = {}
        self.unmade: list[str] = []
        self.on_host = mode in ("host", "all")
        self.on_device = mode in ("device", "all")
        self.quick = False
        self.strict = False
        self.arguments: Arguments | None = None
        self.uses: dict[str, Trace] = {}
        """The model run as it is deployed, where it can be run like that."""
        self.unjudged: dict[str, list[str]] = {}
        """For each of these uses: why it was not run, or why some part of it could not be judged."""

    def run(self, ids: Tensor, plan: Any) -> Diagnosis:
        """Plant the plan if there is one, probe, decide."""
        diagnosis = self._blank(ids)
        if plan is None:
            self._probe(ids.to(self.device), diagnosis)
        else:
            injection = shaketable.inject(self.model, plan, seed=self.seed, allow_inert=True)
            with injection as ledger:
                self._probe(ids.to(self.device), diagnosis)
            if inert := ledger.inert():
                raise InertError(f"{'; '.join(inert)}: there was nothing to find")
            diagnosis.planted = {"plan": injection.plan.text(), "changed": ledger.changed}
        diagnosis.foreign += dict.fromkeys(self.unmade)
        diagnosis.not_run = self._not_run()
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
        if self.on_host:
            self._timed("batch", lambda: self._use(ids.to(self.device)))
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
        diagnosis.srdd = dict(srdd.srdd_verdict(found)) if found else None
        diagnosis.cost = {name: round(seconds / unit, 3) for name, seconds in self.spent.items()}
        diagnosis.device_forwards = self._device_forwards(diagnosis)
        diagnosis.cost_forwards = round(sum(self.spent.values()) / unit, 3)

    def _device_forwards(self, diagnosis: Diagnosis) -> int:
        """One traced and one recorded; where they ran, other uses, a twin, another token, and two of the statistics."""
        ran = {n for p in diagnosis.probes for n, r in p.results.items() if r.status not in ("skipped", "inconclusive")}
        return 2 + 2 * len(self.uses) + ("twin" in ran) + ("causal" in ran) + 2 * (diagnosis.srdd is not None)

    def _use(self, ids: Tensor) -> None:
        """Trace a short batch of two, then one more token of both with the cache, if the model has one."""
        length = min(BATCH_TOKENS, ids.shape[1] - 1)
        pair = torch.cat([ids[:, :length], ids.flip(1)[:, :length]])
        given = dict(self.arguments or {})
        takes = inspect.signature(self.model.forward).parameters
        has_cache = "past_key_values" in takes and "use_cache" in takes
        if has_cache and "past_key_values" in given:
            self.unjudged = {name: ["the caller gives a cache"] for name in USES}
            return
        try:
            self.uses["batch"] = trace(self.model, pair, self.reference, given | ({"use_cache": True} if has_cache else {}))
        except (*FAILURES, ShaketableError) as error:
            self.unjudged = {name: [_failed("the model", error)] for name in USES}
            return
        cache = getattr(self.uses["batch"].answer, "past_key_values", None)
        if cache is None:
            self.unjudged["decode"] = ["the model returns no cache"]
            return
        step = {"past_key_values": cache, "use_cache": True}
        try:
            self.uses["decode"] = trace(self.model, ids[:, length : length + 1].expand(2, 1), self.reference, given | step)
        except (*FAILURES, ShaketableError) as error:
            self.unjudged["decode"] = [_failed("the model", error)]

    def _used(self, report: LayerReport, evidence: list[Evidence]) -> None:
        """Replay a layer, or what is outside of the layers, in the other uses; only where nothing is wrong so far."""
        is_clean = report.results["replay"].status == "pass" and all(e.layer != report.layer for e in evidence)
        for name, traced in self.uses.items() if is_clean else ():
            recording, prefix, skip = traced.outside, "", {call.name for call in traced.calls}
            try:
                if report.layer is not None:
                    recording, prefix, skip = record_layer(traced.calls[report.layer], self.reference), report.name, set()
                judgement = judge(recording, self.reference, prefix, self.bench.precision, skip)
            except FAILURES as error:
                report.results[name] = Result("inconclusive", reason=_failed("the layer", error))
            else:
                report.results[name], found = layer_probes.replay(judgement, recording, report.layer)
                for item in (*layer_probes.links(report.layer, recording)[1], *found):
                    item.place = _place(item, recording, skip) if report.layer is None else report.layer
                    item.probe, item.text = name, f"in {USES[name]}, {item.text}"
                    report.results[name] = Result("fail", 1.0, item.op, item.text)
                    evidence.append(item)
                repeats = report.layer is not None and report.results["repeat"].status == "pass"
                if repeats and not same(traced.calls[report.layer or 0].y, main_result(recording.output)):
                    text = f"in {USES[name]}, the layer's results change from call to call"
                    report.results[name] = Result("suspect", 1.0, reason=text)
            if report.results[name].status == "inconclusive":
                self.unjudged.setdefault(name, []).append(report.results[name].reason)

    def _not_run(self) -> list[str]:
        """Ways to use the model that were not judged, with the reason where there is one."""
        if not self.on_host:
            return [*USES.values(), *NEVER_RUN]
        some = [
            f"{USES[name]} ({'in ' if name in self.uses else ''}{_first_of(reasons)})"
            for name, reasons in self.unjudged.items()
        ]
        return [*some, *NEVER_RUN]

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
            self._timed("batch", lambda: self._used(report, evidence))
        if self.on_device:
            self._causal(call, recording, keep, again, decided)
        has_statistics = self.on_device and call.x.is_floating_point()  # a layer that is given tokens is an embedding
        own = self._timed("statistics", lambda: self._statistics(call, recording.output)) if has_statistics else None
        return report, own

    def _checksum(self, call: LayerCall, recording: Recording) -> tuple[Result, set[str]]:
        """The screen, and the products that need no replay after it."""
        if not self.quick:
            return Result("skipped", reason="replay judges every product"), set()
        scores = self._timed("checksum", lambda: check_products(recording, self.reference, call.name, self.bench.precision))
        return layer_probes.checksum(scores), {path for path, score in scores.items() if score <= 1}

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

    def _circuit(self, call: LayerCall) -> Any:
        """The layer's wiring; or why its symmetries are not known, as those of somebody's own block are not."""
        expected = self.reference.skeleton.get_submodule(call.name)
        for path, block in expected.named_children():
            if any(block.children()) and type(own := call.module.get_submodule(path)) is not type(block):
                return f"{call.name}.{path} is a {type(own).__name__} where the config makes a {type(block).__name__}"
        return circuit_of(expected, getattr(self.model, "config", None))

    def _statistics(self, call: LayerCall, output: Any) -> srdd.LayerStatistics:
        probed, shifted = srdd.probe_input(call.x, self.seed + call.index), srdd.dc_input(call.x)
        answers = self._answers(call, probed, shifted)
        step = max(1, call.x.shape[1] // STATISTICS_TOKENS)
        x, y, again, *rest = (
            t[:, ::step] for t in (call.x, call.y, main_result(output), probed, answers[0], shifted, answers[1])
        )
        return srdd.layer_statistics(x, [y, again], *rest)

    def _answers(self, call: LayerCall, *inputs: Tensor) -> Sequence[Tensor]:
        """A layer's results for several inputs: in one batch, or one by one where its arguments are made for one sequence."""
        try:
            return main_result(call.again(torch.cat(inputs))).chunk(len(inputs))
        except FAILURES:
            return [main_result(call.again(x)) for x in inputs]

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
        for item in found:
            item.place = _place(item, traced.outside, layers)
        evidence.extend(found)
        if self.on_host:
            self._timed("batch", lambda: self._used(report, evidence))
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
            num_layers=len(self.reference.layers),
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
        diagnosis.believed, diagnosis.doubts = self._believed()
        return diagnosis

    def _believed(self) -> tuple[list[str], list[str]]:
        """What could not be checked and is taken as right, and what may be wrong without a place."""
        reference, main = self.reference, str(self.reference.dtype).removeprefix("torch.")
        believed = []
        if self.on_host and not reference.has_file:
            believed.append("the weights and the config against a file, as no source was given")
        if self.on_host and not reference.is_rebuilt:
            why = f"{reference.odd_part} is not what it gives" if reference.odd_part else "the model cannot be built from one"
            believed.append(f"classes, attributes and buffers of its modules against the config ({why})")
        believed += [*reference.odd_ones(reference.layers, reference.paths), *reference.own_switches(self.model)]
        doubts = [f"the model's config is not that of {reference.source}: {text}" for text in reference.other_config]
        for name in reference.lowered():
            text = f"{name} is held in {str(reference.own(name).dtype).removeprefix('torch.')} in a model of {main}"
            (doubts if reference.is_rounded(name) else believed).append(text)
        if reference.has_file and (own := [n for n, _ in self.model.named_parameters() if reference.is_believed(n)]):
            believed.append(f"{own[0]}, which is not in {reference.source}" + (f", and {len(own) - 1} more" if own[1:] else ""))
        return believed, doubts

    def _notes(self) -> list[str]:
        notes = [self.bench.precision.note] if self.bench.precision.note else []
        if any(isinstance(module, nn.MultiheadAttention) for module in self.model.modules()):
            notes.append("the fast path of torch's own attention and encoder layers was off: it was not judged")
        return notes


FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError, AssertionError)
"""What a layer may raise when it is called otherwise than its model calls it; memory that is full is told apart."""


def _failed(what: str, error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    return f"{what} cannot be called: {next(iter(str(error).splitlines()), type(error).__name__)}"


def _place(item: Evidence, outside: Recording, layers: set[str]) -> float:
    """In the order of computation: before the layers, or behind them."""
    last = max(i for i, r in enumerate(outside.records) if r.path in layers)
    orders = {r.path: i for i, r in enumerate(outside.records)}
    by_link = item.probe == "links" and outside.breaks
    late = outside.breaks[0].after > last if by_link else orders.get(item.op or "", last + 1) > last
    return len(layers) if late else -1


def _first_of(reasons: list[str]) -> str:
    return reasons[0] + (f" and {len(reasons) - 1} more" if len(reasons) > 1 else "")


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
