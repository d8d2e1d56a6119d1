"""Stage 8: how much of the divergence each family of operators causes.

For every recorded call the trainer computes the same operator on the engine's inputs; the difference is the operator's own. The
differences of one family are added to the trainer's own results in a forward over the same tokens, and KL(with‖without) is
measured over the whole vocabulary at every token of the completions. All families together must give back the engine's
log-probabilities: how far they do is `explained`.

log_softmax makes the number that is returned and nothing that a forward could read: its difference d is added to the
log-probability itself. It shifts all tokens of a row, which then do not sum to one: Σ p·log(p/q) − p + q = exp(d) − 1 − d.

A share is the KL of a family alone over the sum of that over all families. Independent errors add up to it; where they cancel
or amplify each other, `together` is the ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shaketable.capture.decoder import observed
from shaketable.errors import UnavailableError
from shaketable.mismatch.engine import Rollout, Sampling
from shaketable.mismatch.gap import differences, k3_of, mean_interval
from shaketable.mismatch.logprobs import expected
from shaketable.mismatch.operators import Recompute
from shaketable.mismatch.results import FamilyShare, Shares
from shaketable.numerics.decoder_operators import OperatorCall

RAW = Sampling(1)
Records = dict[str, list[OperatorCall]]
"""Calls by phase; `prompt` has those of reading the prompt before decoding."""


class _Differences:
    """The differences between an engine's operators and the trainer's, for one rollout."""

    def __init__(self, recompute: Recompute, rollout: Rollout, records: Records) -> None:
        self.rollout, self.decoder = rollout, recompute.decoder
        self.by_name: dict[str, Tensor] = {}
        self.kinds: dict[str, str] = {}
        self.last = np.zeros(len(rollout.completion))
        """The difference of log_softmax for each token of the completion."""
        calls = whole_sequence(records)
        length = max(len(call.output) for call in calls)
        for call in calls:
            own, got = recompute.result(call).double(), call.output.double().reshape(call.output.shape[0], -1)
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

        def visit(call: OperatorCall, row: int = 0) -> Tensor | None:
            names = [call.name]
            if call.name.endswith(".self_attn.o_proj"):  # a sum between modules is changed by what is added to it
                names.append(call.name.replace(".self_attn.o_proj", ".attention_residual"))
            found = [self.by_name[n] for n in names if self.kinds.get(n) in families]
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
        self.alone: list[dict[str, np.ndarray]] = []
        """By rollout and family, the KL of each token."""
        self.together: list[np.ndarray] = []
        self.gap: list[np.ndarray] = []
        self.made: list[np.ndarray] = []
        """What all differences together make of the gap."""

    def add(self, rollout: Rollout, records: Records, engine: Sequence[float], sampling: Sampling = RAW) -> list[float]:
        """Measure one rollout, from the engine's calls and the log-probabilities that it returned.

        Returns:
            The log-probabilities that the trainer gives with all of the engine's differences put into it.
        """
        found = _Differences(self.recompute, rollout, records)
        clean, all_in, last = found.logits(set()), found.logits(found.families), k3_of(found.last)
        self.together.append(_kl(all_in, clean) + last)
        self.alone.append({f: last if f == "log_softmax" else _kl(found.logits({f}), clean) for f in found.families})
        own = expected(clean, rollout, sampling)
        put_in = np.asarray(expected(all_in, rollout, sampling)) + found.last
        self.gap += differences([engine], [own])
        self.made += differences([put_in.tolist()], [own])
        return [float(x) for x in put_in]

    def result(self) -> Shares:
        """All rollouts together."""
        nothing = [np.zeros_like(kl) for kl in self.together]
        kl = {
            family: [one.get(family, zeros) for one, zeros in zip(self.alone, nothing, strict=True)]
            for family in sorted(set().union(*self.alone))
        }
        total = [np.sum(parts, axis=0) for parts in zip(*kl.values(), strict=True)]
        families = sorted((_share(family, parts, total) for family, parts in kl.items()), key=lambda row: -row.kl)
        alone = sum(row.kl for row in families)
        whole = np.concatenate(self.together) if self.together else np.zeros(0)
        mean = float(whole.mean()) if len(whole) else 0.0
        return Shares(families, mean, len(whole), mean / alone if alone else None, self._explained())

    def _explained(self) -> float:
        if not self.gap:
            return 0.0
        d, e = np.concatenate(self.gap), np.concatenate(self.made)
        kept = np.isfinite(d) & np.isfinite(e)
        return 1 - float(np.abs(d - e)[kept].sum() / max(float(np.abs(d[kept]).sum()), 1e-300))


def _share(family: str, kl: list[np.ndarray], total: list[np.ndarray]) -> FamilyShare:
    """Its interval is that of the mean of kl − share · total, over the mean of the total."""
    own, whole = float(np.concatenate(kl).mean()), max(float(np.concatenate(total).mean()), 1e-300)
    share = own / whole
    low, high = mean_interval([k - share * t for k, t in zip(kl, total, strict=True)])
    return FamilyShare(family, own, share, max(share + low / whole, 0.0), min(share + high / whole, 1.0))


def _kl(a: Tensor, b: Tensor) -> np.ndarray:
    """KL(a‖b) of each token, over the whole vocabulary, in float64."""
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    terms = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q))  # a token that neither side allows
    found: np.ndarray = terms.sum(-1).clamp_min(0).numpy()
    return found
