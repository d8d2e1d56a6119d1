"""Plant faults in SmolLM2-135M, and see who finds them.

    python benchmarks/locate.py                 the whole grid (about an hour on one core)
    python benchmarks/locate.py --sample 400    a seeded sample, as CI runs it; exits 1 when something must not have happened

Every fault is planted through the injection engine (or, for wrong weights and swapped functions, by hand) in one layer,
and the layer is probed as `shaketable locate` probes it. Probes are teacher-forced: the layers before the fault are those
of the healthy model, bit for bit, and are judged in the healthy runs. So a fault is located when its own layer fails an
exact probe. A part of the faults is run through `locate` on the whole model, together with the baselines that need it.

A fault that changed no result of any operator is inert. It is counted apart and never scored.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import shaketable as st
from shaketable.capture.recorder import Recording, same
from shaketable.capture.trace import LayerCall, forward, record_layer, token_batch, trace
from shaketable.locate.diagnosis import Diagnosis, Evidence, LayerReport, LayerStatistics
from shaketable.locate.layer_probes import LAYER_PROBES, ProbedPart
from shaketable.locate.locate import Locator
from shaketable.locate.verdict import decide
from shaketable.models import load_model
from shaketable.sites.nested_tensors import tensors_of

HERE = Path(__file__).parent
TOKENS = 32
LEAVES = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.act_fn", "mlp.down_proj",
)  # fmt: skip
SITES = ("layer", "core", *LEAVES)
SPARSITIES = (1.0, 0.1, 0.01, 0.0)
"""0 is one lane."""
MAGNITUDES = {
    "dead_zone": ("0.01,scope=token", "0.1,scope=token", "0.05,scope=tensor"),
    "saturation": ("0.5,scope=token", "0.1,scope=token", "0.3,scope=tensor"),
    "noise": ("0.01", "0.1"),
    "spike": ("8,rate=0.01", "64,rate=0.01"),
    "bias": ("0.01", "0.1"),
    "non_determinism": ("1.1", "2,mode=amplified"),
    "gain": ("0.02", "0.2"),
    "truncation": ("2", "4"),
    "stuck_bit": ("1", "3"),
}
FLIPS = {torch.float32: (0, 12, 22, 24), torch.bfloat16: (0, 3, 6, 8), torch.float16: (0, 4, 9, 11)}
PRODUCTS = tuple(leaf for leaf in LEAVES if leaf.endswith("_proj"))
WORDS = (
    "harbour", "copper", "42", "window", "and", "to", "heavy", "0.8", "slowly", "+", "]", "east", "1e-3", "true", "façade",
    "水", "ledger", "orbit", "seven", "if",
)  # fmt: skip
"""Of the healthy texts: other words and another seed than those that the tolerances were set with."""
ON_STREAM = ("layer", "self_attn.o_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Case:
    """One fault to plant."""

    kind: str
    magnitude: str
    site: str
    layer: int
    sparsity: float = 1.0
    seed: int = 0

    @property
    def plan(self) -> str:
        """In the plan language."""
        sparse = "" if self.sparsity == 1 else f",sparsity={self.sparsity or 1e-6:g}"
        fault = f"{self.kind}:{self.magnitude}{sparse}"
        if self.site == "layer":
            return f"{fault}@layer.{self.layer}"
        if self.site == "core":
            return f"{fault}@op.sdpa,layers={self.layer},direction=forward"
        if self.site == "mlp.act_fn":
            return f"{fault}@op.silu,layers={self.layer},direction=forward"
        return f"{fault}@module.model.layers.{self.layer}.{self.site}"

    @property
    def expected(self) -> str | None:
        """The op that has to be named."""
        return {"layer": None, "core": "self_attn"}.get(self.site, self.site)

    def is_symmetric(self, dtype: str) -> bool:
        """Whether device mode may miss the fault, as docs/locate.md says.

        It misses a fault that commutes with every symmetry. A threshold on few channels is seen by an exact twin only if the
        gauge carries a value across it.
        """
        token = "scope=token" in self.magnitude
        if self.kind in ("weight", "eps", "fast_silu"):
            return True
        if self.kind in ("noise", "spike", "non_determinism"):
            return False
        if dtype == "float16" and self.kind in ("dead_zone", "saturation"):
            return True
        on_stream = self.site in ON_STREAM and (token or self.site != "layer" or self.sparsity < 1)
        commutes = (
            self.kind in ("gain", "truncation", "stuck_bit")
            or self.site in ("mlp.gate_proj", "mlp.act_fn")
            or (self.kind in ("dead_zone", "saturation") and on_stream)
        )
        reduced = dtype in ("bfloat16", "float16")
        by_chance = reduced and self.sparsity < 1 and self.kind in ("dead_zone", "saturation")
        return by_chance or commutes


def grid(seeds: int, layers: int) -> list[Case]:
    """Every kind, magnitude, site and sparsity, at every layer that the seeds reach; boundary layers at the first seed."""
    cases: list[Case] = []
    cells = [
        (kind, magnitude, site, sparsity)
        for kind, magnitudes in MAGNITUDES.items()
        for magnitude, site, sparsity in itertools.product(magnitudes, SITES, SPARSITIES)
    ]
    step = max(1, layers // max(seeds, 1))
    for number, (kind, magnitude, site, sparsity) in enumerate(cells):
        for seed in range(seeds):
            cases.append(Case(kind, magnitude, site, (number + seed * step) % layers, sparsity, seed))
    for layer in range(layers):
        cases += [Case("weight", str(bit), site, layer, 0.0, layer) for bit in range(4) for site in PRODUCTS]
        cases += [
            Case("eps", f, site, layer) for f in ("100", "1e4") for site in ("input_layernorm", "post_attention_layernorm")
        ]
        cases += [Case("fast_silu", form, "mlp.act_fn", layer) for form in ("hard", "short_exp")]
    return cases


@contextlib.contextmanager
def planted(model: nn.Module, case: Case) -> Iterator[None]:
    """The model with the fault in it."""
    layer = model.get_submodule(f"model.layers.{case.layer}")
    if case.kind == "weight":
        yield from _flipped(layer.get_parameter(f"{case.site}.weight"), case)
    elif case.kind in ("eps", "fast_silu"):
        yield from _swapped(layer.get_submodule(case.site), case)
    else:
        with st.inject(model, case.plan, seed=case.seed, allow_inert=True):
            yield


def _flipped(weight: nn.Parameter, case: Case) -> Iterator[None]:
    """One bit of one weight is wrong."""
    whole = torch.int32 if weight.dtype == torch.float32 else torch.int16
    place = random.Random(f"{case.seed}/{case.site}").randrange(weight.numel())
    bit = FLIPS[weight.dtype][int(case.magnitude)]
    flat = weight.data.view(whole).view(-1)
    flat[place] ^= 1 << bit
    yield
    flat[place] ^= 1 << bit


def _swapped(module: nn.Module, case: Case) -> Iterator[None]:
    """A kernel that computes another function than the module says."""

    def norm(x: Tensor) -> Tensor:
        eps = module.variance_epsilon * float(case.magnitude)
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        return module.weight * normed.to(x.dtype)

    def silu(x: Tensor) -> Tensor:
        if case.magnitude == "hard":
            return nn.functional.hardswish(x)
        power = torch.round((-x.float()).exp() * 256) / 256
        return (x.float() / (1 + power)).to(x.dtype)

    module.forward = norm if case.kind == "eps" else silu  # type: ignore[method-assign]
    yield
    del module.forward


@dataclass
class Outcome:
    """What the probes said of one fault."""

    case: Case
    inert: bool
    failed: list[str]
    suspected: list[str]
    op: str | None
    op_right: bool
    fault_class: str | None
    srdd: int | None
    lanes_right: bool
    lanes: int
    effect: float
    """Of another eps: the largest relative change of a result, before anything is rounded."""
    seconds: float


class Bench:
    """One model with its healthy trace."""

    def __init__(self, dtype: torch.dtype, device: str, attention: str, tokens: int) -> None:
        self.model, self.tokenizer = load_model("smollm2-135m", device=device, dtype=dtype)
        self.model.set_attn_implementation(attention)
        self.tokens = tokens
        self.ids = token_batch(self.tokenizer, None, tokens).to(device)
        self.locator = Locator(self.model, "all", "smollm2-135m")
        self.device = Locator(self.model, "device")
        self.trace = trace(self.model, self.ids, self.locator.reference)
        self.clean: dict[int, Recording] = {}
        self.statistics: list[LayerStatistics] = []
        for call in self.trace.calls:
            part = self.judged(self.locator, call, self.recording(call))
            own = self.locator.statistics(part)
            assert own is not None
            assert not any(r.status in ("fail", "suspect") for r in part.report.results.values()), part.report
            self.statistics.append(own)
            self.locator.reference.forget()

    def judged(self, locator: Locator, call: LayerCall, recording: Recording) -> ProbedPart:
        return locator.judge(locator.part(self.trace, recording, call), LAYER_PROBES)

    def recording(self, call: LayerCall) -> Recording:
        if call.index not in self.clean:
            self.clean = {call.index: record_layer(call, self.locator.reference)}
        return self.clean[call.index]

    def run(self, case: Case) -> Outcome:
        """Plant, probe, compare with what should have been said."""
        start = time.perf_counter()
        healthy = self.trace.calls[case.layer]
        clean = self.recording(healthy)
        with planted(self.model, case):
            call = LayerCall(healthy.index, healthy.name, healthy.module, healthy.args, healthy.kwargs, healthy.again())
            recording = record_layer(call, self.locator.reference)
            inert = case.kind != "weight" and same(call.y, healthy.y) and _is_same(clean, recording)
            effect = _effect(clean, healthy.module, case) if case.kind == "eps" else 1.0
            part = self.judged(self.locator, call, recording)
            own, report = self.locator.statistics(part), part.report
            report.results["causal"] = self.judged(self.device, call, recording).report.results["causal"]
        self.locator.reference.forget()
        assert own is not None
        host = [e for e in part.evidence if e.probe in ("weights", "replay", "links", "repeat")]
        blamed = self._blamed(host, report)
        return Outcome(
            case,
            inert,
            [name for name, r in report.results.items() if r.status == "fail"],
            [name for name, r in report.results.items() if r.status == "suspect"],
            blamed.op if blamed else None,
            blamed is not None and blamed.op == case.expected,
            blamed.fault_class if blamed else None,
            blamed_by_srdd([*self.statistics[: case.layer], own, *self.statistics[case.layer + 1 :]]),
            blamed is not None and _lanes_right(blamed, case, clean, recording),
            len(blamed.lanes) if blamed else 0,
            effect,
            time.perf_counter() - start,
        )

    def _blamed(self, evidence: list[Evidence], report: LayerReport) -> Diagnosis | None:
        if not evidence:
            return None
        diagnosis = Diagnosis("", "", 0, "", "", "", "host", "", {}, 1, 1, 0, evidence=evidence, probes=[report])
        decide(diagnosis, has_file=True)
        return diagnosis

    def baselines(self, case: Case) -> dict[str, bool]:
        """Fingerprints of a good device, free-running, and locate on the whole model."""
        healthy = [c.y for c in self.trace.calls]
        with planted(self.model, case):
            outputs: list[Tensor] = []
            hooks = [
                c.module.register_forward_hook(lambda m, a, o: outputs.append(next(tensors_of(o)))) for c in self.trace.calls
            ]
            forward(self.model, self.ids)
            for hook in hooks:
                hook.remove()
            whole = st.locate(self.model, input_ids=self.ids, mode="host", source="smollm2-135m")
        sizes = [_rms(a.double() - b.double()) / max(_rms(b.double()), 1e-30) for a, b in zip(outputs, healthy, strict=True)]
        steps = [sizes[0], *(b - a for a, b in itertools.pairwise(sizes))]
        floor = 10 * {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}[outputs[0].dtype]
        first = next((i for i, size in enumerate(sizes) if size > floor), None)
        return {
            "fingerprint, free running, largest step": max(range(len(steps)), key=steps.__getitem__) == case.layer,
            "fingerprint, free running, first difference": first == case.layer,
            "locate on the whole model, host": whole.layer == case.layer and whole.op == case.expected,
        }


def _effect(clean: Recording, layer: nn.Module, case: Case) -> float:
    """How much another eps changes an exact norm: sqrt((var + eps) / (var + other)) − 1, for the token it changes most."""
    record = next(r for r in clean.records if r.func is None and r.path == case.site)
    variance = next(tensors_of((record.args, record.kwargs))).double().square().mean(-1)
    eps = float(layer.get_submodule(case.site).variance_epsilon)
    other = eps * float(case.magnitude)
    return float((((variance + eps) / (variance + other)).sqrt() - 1).abs().max())


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _is_same(a: Recording, b: Recording) -> bool:
    pairs = zip(a.records, b.records, strict=True)
    return all(same(x, y) for r, s in pairs for x, y in zip(tensors_of(r.output), tensors_of(s.output), strict=True))


def _lanes_right(diagnosis: Diagnosis, case: Case, clean: Recording, recording: Recording) -> bool:
    """Whether every lane that is named was really changed, and at least half of the changed ones are named."""
    for r, s in zip(clean.records, recording.records, strict=True):
        named = (r.path or None) == diagnosis.op and r.function == diagnosis.function
        x, y = next(tensors_of(r.output), None), next(tensors_of(s.output), None)
        if named and x is not None and y is not None and not same(x, y):
            differs = (x != y).reshape(-1, x.shape[-1]).any(0).nonzero().flatten().tolist()
            return set(diagnosis.lanes) <= set(differs) and 2 * len(diagnosis.lanes) >= len(differs)
    return case.kind == "weight"


def blamed_by_srdd(statistics: list[LayerStatistics]) -> int | None:
    """The layer that SRDD's statistics alone would blame, as a baseline.

    The first unstable layer (none, if all are equally unstable), else a gain near 0 or far below the median, else the
    sharpest fall of the kurtosis, else a pile-up. These thresholds blame fewer healthy layers than the published ones.
    """
    names = ("instability", "gain", "kurtosis", "pile_up")
    instability, gains, kurtosis, piles = (np.array([getattr(s, name) for s in statistics]) for name in names)
    instability = np.nan_to_num(instability)
    falls = np.nan_to_num(np.diff(np.log(np.maximum(kurtosis + 3, 1.0)), prepend=math.log(max(kurtosis[0] + 3, 1.0))))
    quiet = 5 * instability.min()
    if 0 < instability.max() <= quiet:
        return None
    rises = np.maximum(np.diff(instability, prepend=0.0), 0)  # after a teacher-forced faulty layer it is gone again
    edge = (_robust_z(rises, 1e-30) > 2) & (instability > quiet)
    if edge.any():
        return int(edge.argmax())
    lowest = int(np.nanargmin(gains))
    if gains[lowest] < 0.1 or (_robust_z(gains)[lowest] < -2 and gains[lowest] < 0.8 * np.nanmedian(gains)):
        return lowest
    sharpest = int(falls.argmin())
    if falls[sharpest] < 0 and _robust_z(falls)[sharpest] < -2:
        return sharpest
    highest = int(np.nanargmax(piles))
    is_pile = piles[highest] > 10 * np.nanmedian(piles) and _robust_z(piles)[highest] > 2
    return highest if is_pile else None


def _robust_z(values: np.ndarray, tiny: float = 1e-6) -> np.ndarray:
    """z by median and MAD of what is finite."""
    finite = values[np.isfinite(values)]
    median = np.median(finite)
    spread = max(float(np.median(np.abs(finite - median))), 0.01 * abs(float(median)), tiny)
    return (values - median) / (1.4826 * spread)


def healthy_runs(dtypes: list[str], device: str, prompts: int, counts: str, console: Console) -> list[dict[str, object]]:
    """Prompts × dtype × attention × threads on the model as it is: nothing may be flagged."""
    texts = _texts(prompts)
    threads = tuple(map(int, counts.split(","))) if device == "cpu" else (torch.get_num_threads(),)
    rows: list[dict[str, object]] = []
    for dtype, attention in itertools.product(dtypes, ("sdpa", "eager")):
        model, tokenizer = load_model("smollm2-135m", device=device, dtype=torch_dtype(dtype))
        model.set_attn_implementation(attention)
        for count in threads:
            torch.set_num_threads(count)
            flags = 0
            for text in track(texts, f"healthy {dtype} {attention} {count}", console=console, transient=True):
                for mode in ("device", "all"):
                    found = st.locate(model, tokenizer, mode=mode, prompts=[text], tokens=TOKENS, source="smollm2-135m")
                    flags += found.verdict != "HEALTHY"
            rows.append({"dtype": dtype, "attention": attention, "threads": count, "runs": 2 * len(texts), "flags": flags})
    torch.set_num_threads(threads[0])
    return rows


def measured_costs(dtypes: list[str], device: str, runs: int, console: Console) -> list[dict[str, object]]:
    """What a run with the default options costs, in plain forwards; the median of a few."""
    rows: list[dict[str, object]] = []
    for dtype in track(dtypes, "costs", console=console, transient=True):
        model, tokenizer = load_model("smollm2-135m", device=device, dtype=torch_dtype(dtype))
        for mode in ("device", "host", "all"):
            found = [st.locate(model, tokenizer, mode=mode, source="smollm2-135m") for _ in range(runs)]
            middle = sorted(found, key=lambda d: d.cost_forwards)[len(found) // 2]
            rows.append({"dtype": dtype, "mode": mode, "tokens": middle.tokens, "forwards": middle.cost_forwards})
    return rows


def _texts(n: int) -> list[str]:
    """Texts that have nothing to do with the built-in one."""
    source = random.Random(2026)
    return [" ".join(source.choices(WORDS, k=60)) for _ in range(n)]


UNRESOLVED = {"float32": 1e-6, "tf32": 1e-6, "bfloat16": 2.0**-8 / 1000, "float16": 2.0**-11 / 200}
"""Another eps that changes exact results by less than this is below the accuracy of a norm's kernel: 16 units of float32, or a
change that moves only values that lie on the edge of their rounding."""


EXACT_ON_DEVICE = {"repeat", "twin", "links", "causal"}


def is_live(outcome: Outcome, dtype: str) -> bool:
    """Whether a fault is to be scored: it changed something, and by more than the accuracy of a correct kernel."""
    return not outcome.inert and outcome.effect >= UNRESOLVED[dtype]


def table(outcomes: list[Outcome], dtype: str) -> list[dict[str, object]]:
    """One row per test: how many of the faults that did something it located."""
    live = [o for o in outcomes if is_live(o, dtype)]
    tests = {
        "repeat": lambda o: "repeat" in o.failed,
        "+ exact twin, causal": lambda o: EXACT_ON_DEVICE & set(o.failed),
        "host mode: layer": lambda o: {"repeat", "links", "weights", "replay"} & set(o.failed),
        "host mode: layer and op": lambda o: o.op_right,
        "SRDD statistics alone": lambda o: o.srdd == o.case.layer,
    }
    rows = []
    for name, test in tests.items():
        by_kind = Counter(o.case.kind for o in live if test(o))
        all_kinds = Counter(o.case.kind for o in live)
        rows.append({"test": name, "located": sum(by_kind.values()), "of": len(live),
                     **{k: f"{by_kind[k]}/{n}" for k, n in sorted(all_kinds.items())}})  # fmt: skip
    return rows


def problems(outcomes: list[Outcome], healthy: list[dict[str, object]], dtype: str) -> list[str]:
    """What must not happen."""
    found = [f"healthy {r['dtype']} {r['attention']}: {r['flags']} flags" for r in healthy if r["flags"]]
    for o in outcomes:
        if not is_live(o, dtype):
            continue
        if not o.op_right and dtype in ("float32", "bfloat16"):
            found.append(
                f"host mode missed {o.case.plan if o.case.kind in MAGNITUDES else o.case} (named {o.op}, failed {o.failed})"
            )
        seen = EXACT_ON_DEVICE & set(o.failed)
        lucky = 0 < o.lanes <= 2 and o.case.sparsity == SPARSITIES[1]
        if not seen and not lucky and not o.case.is_symmetric(dtype):
            found.append(
                f"device mode missed {o.case.plan if o.case.kind in MAGNITUDES else o.case}, which is not in the symmetric set"
            )
    return found


def torch_dtype(name: str) -> torch.dtype:
    """A dtype by name; `tf32` is float32 with TF32 products allowed."""
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    found: torch.dtype = getattr(torch, name.replace("tf32", "float32"))
    return found


CLASS_OF = {
    "dead_zone": ("dead_zone",), "saturation": ("saturation",), "noise": ("noise",), "spike": ("spike", "noise"),
    "bias": ("bias",), "non_determinism": ("noise", "spike"), "gain": ("gain",), "truncation": ("truncation",),
    "stuck_bit": ("stuck_bit",), "weight": ("weight",), "eps": ("gain", "wrong_values"), "fast_silu": ("wrong_values",),
}  # fmt: skip


@dataclass
class Part:
    """The outcomes of one process for one dtype."""

    dtype: str
    outcomes: list[Outcome]
    whole: dict[str, int]
    wholes: int

    @classmethod
    def read(cls, path: str) -> Part:
        data = json.loads(Path(path).read_text())
        outcomes = [Outcome(**{**o, "case": Case(**o["case"])}) for o in data["outcomes"]]
        return cls(data["dtype"], outcomes, data["whole"], data["wholes"])


def run_part(dtype: str, options: argparse.Namespace, console: Console) -> Part:
    """Plant the faults of this process, and put some of them through the whole model."""
    bench = Bench(torch_dtype(dtype), options.device, options.attention, TOKENS)
    cases = grid(options.seeds, len(bench.trace.calls))
    order = random.Random(7)
    if options.sample:
        cases = order.sample(cases, min(options.sample, len(cases)))
    at, shards = map(int, options.shard.split("/"))
    cases = sorted(cases[at::shards], key=lambda c: c.layer)
    outcomes = [bench.run(c) for c in track(cases, f"faults {dtype}", console=console, transient=True)]
    live = [o for o in outcomes if is_live(o, dtype)]
    some = order.sample(live, min(options.whole, len(live)))
    whole: Counter[str] = Counter()
    for o in track(some, f"whole model {dtype}", console=console, transient=True):
        whole.update({k: int(v) for k, v in bench.baselines(o.case).items()})
    return Part(dtype, outcomes, dict(whole), len(some))


def merged(parts: list[Part], dtype: str) -> Part:
    """Several processes as one."""
    own = [p for p in parts if p.dtype == dtype]
    whole: Counter[str] = Counter()
    for part in own:
        whole.update(part.whole)
    return Part(dtype, [o for p in own for o in p.outcomes], dict(whole), sum(p.wholes for p in own))


def summary(part: Part) -> dict[str, object]:
    """The numbers of one dtype."""
    live = [o for o in part.outcomes if is_live(o, part.dtype)]
    missed = sum(p.startswith("device") for p in problems(part.outcomes, [], part.dtype))
    return {
        "faults": len(part.outcomes),
        "inert": sum(o.inert for o in part.outcomes),
        "below the accuracy of a kernel": sum(not o.inert and not is_live(o, part.dtype) for o in part.outcomes),
        "table": table(part.outcomes, part.dtype),
        "whole model": {k: f"{v}/{part.wholes}" for k, v in part.whole.items()},
        "device misses outside of the symmetric set": missed,
        "class right": f"{sum(o.fault_class in CLASS_OF.get(o.case.kind, ()) for o in live)}/{len(live)}",
        "lanes right": f"{sum(o.lanes_right for o in live)}/{len(live)}",
    }


def options_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=0, help="this many faults per dtype, seeded, instead of the grid")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--prompts", type=int, default=20, help="healthy prompts")
    parser.add_argument("--threads", default="1,2", help="of the healthy runs, on a CPU")
    parser.add_argument("--whole", type=int, default=60, help="faults that also go through the whole model")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th fault, from the i-th on; for several processes")
    parser.add_argument("--merge", nargs="*", default=[], help="parts of shards to put into one table")
    parser.add_argument("--healthy-from", nargs="*", default=[], help="results whose healthy runs go into the table")
    parser.add_argument("--out", default="", help="write the result to this file (.json; a .md goes beside it)")
    return parser.parse_args()


def main() -> int:
    """Run, or merge what was run."""
    options = options_of()
    console = Console(highlight=False, width=200)
    torch.set_num_threads(1)
    dtypes = options.dtypes.split(",")
    parts = [Part.read(path) for path in options.merge]
    for dtype in () if parts else dtypes:
        parts.append(run_part(dtype, options, console))
        if options.out:
            Path(options.out).with_suffix(f".{dtype}.part.json").write_text(json.dumps(asdict(parts[-1])))
    parts = [merged(parts, dtype) for dtype in dtypes]
    healthy = [row for path in options.healthy_from for row in json.loads(Path(path).read_text())["healthy"]]
    costs = [row for path in options.healthy_from for row in json.loads(Path(path).read_text())["costs"]]
    if options.prompts:
        healthy += healthy_runs(dtypes, options.device, options.prompts, options.threads, console)
        costs += measured_costs(dtypes, options.device, 3 if not options.sample else 1, console)
    bad = problems([], healthy, "")
    for part in parts:
        bad += [f"{part.dtype}: {p}" for p in problems(part.outcomes, [], part.dtype)]
        through = part.whole.get("locate on the whole model, host", 0)
        if through != part.wholes:
            bad.append(f"{part.dtype}: locate on the whole model found {through} of {part.wholes}")
    name = torch.cuda.get_device_name() if options.device == "cuda" and torch.cuda.is_available() else options.device
    result: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name, "tokens": TOKENS, "attention": options.attention, "sample": options.sample,
        **{part.dtype: summary(part) for part in parts}, "healthy": healthy, "costs": costs, "problems": bad,
    }  # fmt: skip
    text = markdown(result, dtypes)
    console.print(text, markup=False)
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
        Path(options.out).with_suffix(".md").write_text(text)
    return 1 if bad else 0


def markdown(result: dict[str, object], dtypes: list[str]) -> str:
    """The result as a page."""
    lines = [f"# Who finds a planted fault: SmolLM2-135M, {result['device']}, {result['tokens']} tokens", ""]
    lines += [
        f"{result['date']}, torch {result['torch']}, {result['attention']} attention. `benchmarks/locate.py` makes this file.",
        "",
    ]
    for dtype in dtypes:
        summary: dict = result[dtype]  # type: ignore[assignment,type-arg]
        lines += [
            f"## {dtype}",
            "",
            f"{summary['faults']} faults planted. Not scored: {summary['inert']} that changed nothing, and",
            f"{summary['below the accuracy of a kernel']} (another eps) that changed less than a norm's kernel can resolve.",
            "",
        ]
        head = list(summary["table"][0])
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(str(row.get(h, "")) for h in head) + " |" for row in summary["table"]]
        lines += ["", "Through the whole model: " + ", ".join(f"{k} {v}" for k, v in summary["whole model"].items()) + "."]
        lines += [f"Device mode misses outside of the symmetric set: {summary['device misses outside of the symmetric set']}. "
                  f"Class right: {summary['class right']}. Lanes right: {summary['lanes right']}.", ""]  # fmt: skip
    healthy: list = result["healthy"]  # type: ignore[assignment,type-arg]
    if healthy:
        head = list(healthy[0])
        lines += ["## Healthy", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(str(row[h]) for h in head) + " |" for row in healthy]
    costs: list = result["costs"]  # type: ignore[assignment,type-arg]
    if costs:
        head = list(dict.fromkeys(key for row in costs for key in row))
        lines += ["", "## Cost, in plain forwards", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(str(row.get(h, "")) for h in head) + " |" for row in costs]
    problems_found: list = result["problems"]  # type: ignore[assignment,type-arg]
    lines += ["", f"Problems: {len(problems_found)}", *(f"- {p}" for p in problems_found)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
