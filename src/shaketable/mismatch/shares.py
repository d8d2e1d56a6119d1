"""Stage 8: how much of the divergence each family of operators causes.

For every recorded call the trainer computes the same operator on the engine's inputs; the difference is the operator's own. The
differences of one family are added to the trainer's own results in a forward over the same tokens, and KL(with‖without) is
measured over the whole vocabulary at every token of the completions. All families together must give back the engine's
log-probabilities: how far they do is `explained`.

log_softmax makes the number that is returned and nothing that a forward could read: its difference d is added to the
log-probability itself. It shifts all tokens of a row, which then do not sum to one: Σ p·log(p/q) − p + q = exp(d) − 1 − d.

A share is the KL of a family alone over the sum of that over all families. Independent errors add up to it; where they cancel
or amplify each other, `together` is the ratio. Intervals are of a bootstrap over tokens, and so is `leads`, the share of draws
in which no other family has more.

The plan that is fitted has one clause for each family: Gaussian noise of the measured size, relative to each value or to the
rms, whichever is more likely. A plan has no rotation as a site, so that its noise goes onto q and k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from shaketable.capture.decoder import observed
from shaketable.errors import UnavailableError
from shaketable.mismatch.engine import Rollout, Sampling
from shaketable.mismatch.gap import DRAWS, differences, k3_of
from shaketable.mismatch.logprobs import expected
from shaketable.mismatch.operators import Recompute
from shaketable.mismatch.results import FamilyShare, Mismatch, Shares
from shaketable.numerics.decoder_operators import OperatorCall, scale_of
from shaketable.numerics.fit import NOISE, fit_all
from shaketable.plan import Plan

SITES = {  # log_softmax has none: nothing in a model reads what it makes
    "embedding": "module.embedding,include=embedding",
    "rms_norm": "module.rmsnorm",
    "linear": "module.linear",
    "rotary": "module.*.q_proj+*.k_proj",
    "attention": "module.*.o_proj,point=input",
    "activation": "module.*.down_proj,point=input",
    "residual": "layer.all",
    "router": "module.router,include=router",
    "experts": "module.mlp",
    "lm_head": "module.lm_head,include=lm_head",
}
RAW = Sampling(1)
VALUES, FITTED = 2**12, 2**14
"""Values of each call that are kept, and of each family that a plan is fitted to: its magnitudes are right to a hundredth."""
SMALLEST = 2.0**-22
"""Noise below this is not written into a plan: float32 does not hold it."""
Records = dict[str, list[OperatorCall]]
"""Calls by phase; `prompt` has those of reading the prompt before decoding."""


class _Differences:
    """The differences between an engine's operators and the trainer's, for one rollout."""

    def __init__(self, recompute: Recompute, rollout: Rollout, records: Records) -> None:
        self.rollout, self.decoder = rollout, recompute.decoder
        self.by_name: dict[str, Tensor] = {}
        self.kinds: dict[str, str] = {}
        self.pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """By kind: some of the trainer's and of the engine's results, over the rms of each call."""
        self.last = np.zeros(len(rollout.completion))
        """The difference of log_softmax for each token of the completion."""
        calls = whole_sequence(records)
        length = max(len(call.output) for call in calls)
        for call in calls:
            own, got = recompute.result(call).double(), call.output.double().reshape(call.output.shape[0], -1)
            size, step = own.square().mean().sqrt().clamp_min(1e-300), max(1, own.numel() // VALUES)
            self.pairs.setdefault(call.kind, []).append((own.flatten()[::step] / size, got.flatten()[::step] / size))
            if call.kind == "log_softmax":
                self.last = (got - own).squeeze(1).numpy()
                continue
            d = torch.zeros(len(rollout.tokens), got.shape[-1])
            d[length - len(got) : length] = (got - own).float()  # a head that was asked for the last rows only
            self.by_name[call.name], self.kinds[call.name] = d, call.kind

    @property
    def families(self) -> set[str]:
        """Those with a difference."""
        found = {self.kinds[name] for name, d in self.by_name.items() if bool((d != 0).any())}
        return found | ({"log_softmax"} if self.last.any() else set())

    def add(self, families: set[str]) -> Callable[[OperatorCall, int], Tensor | None]:
        """For `observed`: an operator's result with the difference where its family is among them."""
        scale = scale_of(self.decoder.model, "residual_scale")

        def visit(call: OperatorCall, row: int = 0) -> Tensor | None:
            names = [call.name]
            if call.name.endswith(".self_attn.o_proj"):  # a sum between modules is changed by what is added to it
                names.append(call.name.replace(".self_attn.o_proj", ".attention_residual"))
            found = [self.by_name[n] / (1 if n == call.name else scale) for n in names if self.kinds.get(n) in families]
            if not found or call.name.endswith(".attention_residual"):
                return None
            total = sum(found[1:], found[0]).double()
            return call.output.double().reshape(total.shape) + total.to(call.output.device)

        return visit

    @torch.no_grad()
    def logits(self, families: set[str]) -> Tensor:
        """The trainer's logits of the completion's tokens, with the differences of some families added."""
        model = self.decoder.model
        ids = torch.tensor([self.rollout.tokens], device=model.get_input_embeddings().weight.device)
        with observed(self.decoder, self.add(families)) if families else nullcontext():
            logits = model(input_ids=ids, use_cache=False).logits
        return logits[0, len(self.rollout.prompt) - 1 : -1].cpu()  # type: ignore[no-any-return]


def whole_sequence(records: Records) -> list[OperatorCall]:
    """Calls over the whole sequence, as the trainer makes them: the prompt as it was read, the rest as it was decoded.

    Without a record of decoding, the sequence as it was read at once.
    """
    if not records.get("decode"):
        if not records.get("prefill"):
            raise UnavailableError("the engine did not record how it reads a prompt")
        return records["prefill"]
    joined, read = [], {call.name: call for call in records["prompt"]}
    for later in records["decode"]:
        if later.kind == "log_softmax":  # of the whole completion already
            joined.append(later)
            continue
        first = read[later.name]
        inputs = {k: t if k in ("k", "v") else torch.cat([first.inputs[k], t]) for k, t in later.inputs.items()}
        output = torch.cat([first.output, later.output])
        joined.append(OperatorCall(later.name, later.kind, later.layer, inputs, output))
    return joined


class ShareMeter:
    """Measures shares one rollout after another: records are large, and only their numbers are kept."""

    def __init__(self, model: Any) -> None:
        self.recompute = Recompute(model)
        self.alone: dict[str, list[np.ndarray]] = {}
        self.together: list[np.ndarray] = []
        self.gap: list[np.ndarray] = []
        self.made: list[np.ndarray] = []
        """What all differences together make of the gap."""
        self.pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(self, rollout: Rollout, records: Records, engine: Sequence[float], sampling: Sampling = RAW) -> list[float]:
        """Measure one rollout.

        Args:
            rollout: One whose operators were recorded.
            records: The engine's calls.
            engine: The log-probabilities that it returned for the completion.
            sampling: In whose terms they are.

        Returns:
            The log-probabilities that the trainer gives with all of the engine's differences put into it.
        """
        found = _Differences(self.recompute, rollout, records)
        clean, all_in = found.logits(set()), found.logits(found.families)
        before = sum(len(kl) for kl in self.together)
        last = k3_of(found.last)
        self.together.append(_kl(all_in, clean) + last)
        for family in found.families | set(self.alone):
            parts = self.alone.setdefault(family, [np.zeros(before)] if before else [])
            if family == "log_softmax":
                parts.append(last)
            else:
                parts.append(_kl(found.logits({family}) if family in found.families else clean, clean))
        for kind, pairs in found.pairs.items():
            self.pairs.setdefault(kind, []).extend(pairs)
        own = expected(clean, rollout, sampling)
        put_in = np.asarray(expected(all_in, rollout, sampling)) + found.last
        self.gap += differences([engine], [own])
        self.made += differences([put_in.tolist()], [own])
        return [float(x) for x in put_in]

    def result(self) -> Shares:
        """All rollouts together."""
        if not self.alone:
            return Shares([], 0.0, 0, None, 0.0, [])
        names = sorted(self.alone)
        kl, whole = np.stack([np.concatenate(self.alone[name]) for name in names]), np.concatenate(self.together)
        drawn = np.random.default_rng(0).integers(0, kl.shape[1], (DRAWS, kl.shape[1]))
        means = kl[:, drawn].mean(2)
        ratios = means / np.maximum(means.sum(0), 1e-300)
        low, high = np.quantile(ratios, (0.025, 0.975), axis=1)
        own, leads = kl.mean(1), np.bincount(ratios.argmax(0), minlength=len(names)) / DRAWS
        share = own / max(float(own.sum()), 1e-300)
        rows = [
            FamilyShare(f, *(float(x[i]) for x in (own, share, low, high, leads)), _relative(self.pairs[f]))  # type: ignore[call-arg]
            for i, f in enumerate(names)
        ]
        plan = [clause for f in names if f in SITES and (clause := _clause(f, self.pairs[f])) is not None]
        total = float(own.sum())
        together = float(whole.mean()) / total if total else None
        families = sorted(rows, key=lambda r: -r.kl)
        return Shares(families, float(whole.mean()), len(whole), together, self._explained(), plan)

    def _explained(self) -> float:
        d, e = np.concatenate(self.gap), np.concatenate(self.made)
        kept = np.isfinite(d) & np.isfinite(e)
        d, e = d[kept], e[kept]
        return 1 - float(np.abs(d - e).sum() / max(float(np.abs(d).sum()), 1e-300)) if len(d) else 0.0


def _kl(a: Tensor, b: Tensor) -> np.ndarray:
    """KL(a‖b) of each token, over the whole vocabulary, in float64."""
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    terms = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q))  # a token that neither side allows
    found: np.ndarray = terms.sum(-1).clamp_min(0).numpy()
    return found


def _relative(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The size of differences over that of results."""
    below = sum(float(a.square().sum()) for a, _ in pairs)
    return float(np.sqrt(sum(float((b - a).square().sum()) for a, b in pairs) / max(below, 1e-300)))


def _clause(family: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> str | None:
    """Noise of the size and law of a family's differences; None when there is too little of it."""
    clean, faulty = (torch.cat([p[i] for p in pairs]).unsqueeze(1) for i in (0, 1))
    clean, faulty = (x[:: max(1, len(x) // FITTED)] for x in (clean, faulty))
    fits = [f for f in fit_all(clean, faulty, 2.0**-40) if f.kind in NOISE]
    if not fits or fits[0].magnitude < SMALLEST:
        return None
    kind = "rms_gaussian" if fits[0].kind == "absolute_gaussian" else fits[0].kind
    return f"{kind}:{fits[0].magnitude:.4g}@{SITES[family]}"


def plan_text(found: Mismatch) -> str | None:
    """The measured differences as a plan file for `harden`, `sweep` and `train`; None when there is nothing to inject."""
    if found.shares is None or not found.shares.plan or found.engine is None:
        return None
    trainer, engine = found.trainer, found.engine
    lines = [
        "# Differences measured by shaketable mismatch, one clause for each family of operators.",
        f"# trainer: {trainer.model}, {trainer.dtype}; engine: {engine.engine} {engine.version}, {engine.dtype}",
        *(f"# {r.family}: {r.share:.0%} of the KL, relative error {r.relative_error:.2e}" for r in found.shares.families),
        "seed: 0",
        "plan:",
        *(f'  - "{clause}"' for clause in found.shares.plan),
    ]
    text = "\n".join(lines) + "\n"
    Plan.from_data(yaml.safe_load(text), name="the measured plan")
    return text
