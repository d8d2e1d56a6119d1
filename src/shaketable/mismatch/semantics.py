"""Whether both sides speak of the same probability: each way in which they may not, computed anew from the trainer's logits.

A log-probability can be of the model's own logits or of what the sampler made of them; with another temperature; renormalised
over a nucleus; of the next token; of a prompt with or without its first token. None of that is rounding, and each leaves a
gap that is far above the floor and disappears when the trainer computes what the engine meant. So every hypothesis is
computed, and one is named when the gap that it leaves is at the floor and half of the gap as it was, or a tenth of it
whatever the floor is. The simplest comes first; a later one must be better by a fifth, and one that reached the floor stays.

Logits are looked at for the first rollouts only, as many as `TOKENS` tokens: a hypothesis is about all tokens or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from shaketable.mismatch.engines.engine import Rollout, Sampling
from shaketable.mismatch.floor import is_at
from shaketable.mismatch.gap import distance
from shaketable.mismatch.processing import processed
from shaketable.mismatch.teacher_forcing import chosen
from shaketable.mismatch.trainer import Trainer

TOKENS = 768
EXPLAINS = 0.2
"""A hypothesis that leaves this share of the gap explains it, whatever the floor is."""
HALF = 0.5
"""What it may leave at most, when that is at the floor: a gap just above the floor needs no explanation."""
BETTER = 0.8
NUCLEI = (0.8, 0.9, 0.95, 0.99)
TOPS = (10, 20, 50)
CUTS = tuple(2**n for n in range(2, 16))


@dataclass(frozen=True)
class Hypothesis:
    """One way of meaning something else."""

    name: str
    says: str
    """What is then true of the engine, for the verdict."""
    differences: Callable[[], list[np.ndarray]]
    """Engine minus trainer, of the tokens that it speaks of; empty where it speaks of none."""


def expected(logits: Tensor, rollout: Rollout, sampling: Sampling) -> list[float]:
    """The log-probabilities that the engine should have returned, by the trainer's logits and the way it was asked."""
    if sampling.logprobs_mode == "raw":
        return chosen(logits, rollout.completion)
    return _of(logits, rollout, sampling)


def _of(logits: Tensor, rollout: Rollout, sampling: Sampling) -> list[float]:
    before = [[*rollout.prompt, *rollout.completion[:i]] for i in range(len(rollout.completion))]
    return chosen(processed(logits.double(), sampling, before), rollout.completion)


def semantics(trainer: Trainer, rollouts: Sequence[Rollout], sampling: Sampling, floor: dict[str, Any]) -> dict[str, Any]:
    """The third rung."""
    some = _first(rollouts)
    case = _Case(trainer, some, list(trainer.logits(some)), sampling)
    base = distance(case.against(sampling if sampling.logprobs_mode == "processed" else None)).mean_abs
    facts: dict[str, Any] = {"mean_abs": base, "tokens": sum(len(r.completion) for r in some), "named": None, "rows": []}
    best: tuple[float, Hypothesis] | None = None
    for hypothesis in case.hypotheses():
        d = [x for x in hypothesis.differences() if len(x)]
        if not d:
            continue
        left = distance(d).mean_abs if all(np.isfinite(x).all() for x in d) else np.inf
        facts["rows"].append({"name": hypothesis.name, "mean_abs": left if np.isfinite(left) else None})
        is_better = best is None or (left < BETTER * best[0] and not is_at(best[0], floor))
        if np.isfinite(left) and left < base * (1 - 1e-9) and is_better:
            best = (left, hypothesis)
    if is_at(base, floor) or best is None:
        return facts
    left, hypothesis = best
    if left <= EXPLAINS * base or (is_at(left, floor) and left <= HALF * base):
        facts["named"] = {"name": hypothesis.name, "says": hypothesis.says, "mean_abs": left, "at_floor": is_at(left, floor)}
    return facts


def _first(rollouts: Sequence[Rollout]) -> list[Rollout]:
    kept: list[Rollout] = []
    tokens = 0
    for rollout in rollouts:
        if kept and tokens + len(rollout.completion) > TOKENS:
            break
        kept.append(rollout)
        tokens += len(rollout.completion)
    return kept


class _Case:
    """The rollouts of this rung, with the trainer's logits."""

    def __init__(self, trainer: Trainer, rollouts: list[Rollout], logits: list[Tensor], sampling: Sampling) -> None:
        self.trainer, self.rollouts, self.logits, self.sampling = trainer, rollouts, logits, sampling

    def hypotheses(self) -> Iterator[Hypothesis]:
        """The simplest first."""
        yield from self._returned()
        yield from self._placed()
        yield from self._prompted()
        yield from self._tuned()

    def against(self, sampling: Sampling | None) -> list[np.ndarray]:
        """The engine's minus the trainer's, processed or raw."""
        pairs = zip(self.rollouts, self.logits, strict=True)
        return [self._minus(r, chosen(x, r.completion) if sampling is None else _of(x, r, sampling)) for r, x in pairs]

    def _minus(self, rollout: Rollout, trainer: list[float]) -> np.ndarray:
        found: np.ndarray = np.asarray(rollout.logprobs) - np.asarray(trainer)
        return found

    def _processing(self, name: str, says: str, sampling: Sampling | None) -> Hypothesis:
        return Hypothesis(name, says, lambda: self.against(sampling))

    def _returned(self) -> Iterator[Hypothesis]:
        """Raw, processed, or processed but for one step."""
        s = self.sampling
        yield self._processing(
            "raw log-probabilities", "the engine returns raw log-probabilities, of the model's own logits", None
        )
        yield self._processing("processed log-probabilities", _steps(s), s)
        for name, change in _steps_of(s).items():
            without = replace(s, **change)
            yield self._processing(
                f"{name} not applied", f"the engine's log-probabilities are processed, but without {name}", without
            )
        for name, change in _steps_of(s).items():
            only = replace(_neutral(s), **{key: getattr(s, key) for key in change})
            yield self._processing(
                f"{name} alone", f"the engine's log-probabilities have {name} in them, and nothing else", only
            )

    def _placed(self) -> Iterator[Hypothesis]:
        """Tokens that are counted or not, and log-probabilities that stand at the wrong token."""
        mode = None if self.sampling.logprobs_mode == "raw" else self.sampling
        for shift, what in ((1, "next"), (-1, "previous")):
            says = f"the log-probability at each token is that of the {what} one"
            yield Hypothesis(f"of the {what} token", says, lambda shift=shift: self._shifted(shift, mode))  # type: ignore[misc]
        stops = [int(r.finish == "stop") for r in self.rollouts]
        if any(stops):
            says = "the stop token is counted on one side only: all other tokens agree"
            yield Hypothesis("stop token not counted", says, lambda: _apart(self.against(mode), stops))
        for cut in CUTS:
            yield from self._cut(cut, mode)

    def _shifted(self, shift: int, mode: Sampling | None) -> list[np.ndarray]:
        found = []
        for r, d in zip(self.rollouts, self.against(mode), strict=True):
            engine = np.asarray(r.logprobs)
            trainer = engine - d
            n = len(engine) - 1
            found.append(engine[:n] - trainer[1:] if shift == 1 else engine[1:] - trainer[:n])
        return found

    def _cut(self, cut: int, mode: Sampling | None) -> Iterator[Hypothesis]:
        """Everything up to a length agrees, and nothing beyond it: one side cuts sequences there."""
        beyond = [max(0, len(r.tokens) - cut) for r in self.rollouts]
        if not any(beyond) or all(len(r.tokens) - len(r.completion) >= cut for r in self.rollouts):
            return
        says = f"sequences are cut at {cut} tokens on one side"
        yield Hypothesis(f"cut at {cut} tokens", says, lambda: _apart(self.against(mode), beyond))

    def _prompted(self) -> Iterator[Hypothesis]:
        """Another prompt than the trainer reads: its first token, the end of the chat template, or only its last tokens."""
        for name, says, prompts in _prompts(self.trainer.tokenizer, [r.prompt for r in self.rollouts]):
            yield Hypothesis(name, says, lambda prompts=prompts: self._read_anew(prompts))  # type: ignore[misc]

    def _read_anew(self, prompts: list[list[int]]) -> list[np.ndarray]:
        some = [replace(r, prompt=p) for r, p in zip(self.rollouts, prompts, strict=True)]
        pairs = zip(some, self.trainer.logits(some), strict=True)
        return [self._minus(r, expected(x, r, self.sampling)) for r, x in pairs]

    def _tuned(self) -> Iterator[Hypothesis]:
        """Values that nobody declared: the checkpoint's own defaults, the usual ones, and the temperature that fits best."""
        own = _defaults(self.trainer.model, self.sampling)
        if own is not None:
            yield self._processing("the checkpoint's generation defaults", f"the checkpoint's defaults are used: {own}", own)
        for p in NUCLEI:
            for base in (self.sampling, _neutral(self.sampling)):
                says = f"the engine's log-probabilities are renormalised over top_p={p}"
                yield self._processing(f"top_p={p}, temperature {base.temperature:g}", says, replace(base, top_p=p))
        for k in TOPS:
            says = f"the engine's log-probabilities are renormalised over top_k={k}"
            yield self._processing(f"top_k={k}", says, replace(self.sampling, top_k=k))
        t = self._best_temperature()
        yield self._processing(
            f"temperature {t:.3g}",
            f"the engine's logits are divided by {t:.3g}",
            replace(_neutral(self.sampling), temperature=t),
        )

    def _best_temperature(self) -> float:
        """By golden-section search over log T: mean |d| has one valley along it, up to noise that is far below what matters."""
        from scipy.optimize import minimize_scalar

        def left(log_t: float) -> float:
            return distance(self.against(replace(_neutral(self.sampling), temperature=float(np.exp(log_t))))).mean_abs

        return float(np.exp(minimize_scalar(left, bounds=(-2.0, 2.0), method="bounded", options={"xatol": 1e-3}).x))


def _apart(d: list[np.ndarray], last: list[int]) -> list[np.ndarray]:
    """Differences without so many tokens at the end of each rollout, if each of those is off by more than any other token."""
    pairs = [(x[: max(0, len(x) - n)], x[max(0, len(x) - n) :]) for x, n in zip(d, last, strict=True)]
    least = min((float(np.abs(end).min()) for _, end in pairs if len(end)), default=0.0)
    most = max((float(np.abs(rest).max()) for rest, _ in pairs if len(rest)), default=np.inf)
    return [rest for rest, _ in pairs] if least > most else []


def _neutral(sampling: Sampling) -> Sampling:
    return Sampling(sampling.max_new_tokens, seed=sampling.seed, stop=sampling.stop)


def _steps_of(s: Sampling) -> dict[str, dict[str, Any]]:
    """The steps that are on, and what switches each of them off."""
    neutral = _neutral(s)
    fields = ("temperature", "top_p", "top_k", "repetition_penalty", "logit_bias")
    return {f.replace("_", " "): {f: getattr(neutral, f)} for f in fields if getattr(s, f) != getattr(neutral, f)}


def _steps(s: Sampling) -> str:
    on = ", ".join(_steps_of(s)) or "no step"
    return f"the engine returns processed log-probabilities ({on})"


def _defaults(model: Any, sampling: Sampling) -> Sampling | None:
    """What generation_config.json says, which engines take over where nobody says otherwise."""
    config = getattr(model, "generation_config", None)
    found = {name: getattr(config, name, None) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
    given = {name: value for name, value in found.items() if value is not None}
    changed = replace(_neutral(sampling), **given)
    return None if changed == _neutral(sampling) else changed


def _prompts(tokenizer: Any, prompts: list[list[int]]) -> Iterator[tuple[str, str, list[list[int]]]]:
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and any(p[0] == bos and len(p) > 1 for p in prompts):
        cut = [p[1:] if p[0] == bos and len(p) > 1 else p for p in prompts]
        yield "no BOS", "the engine reads prompts without the BOS token", cut
    if bos is not None:
        yield "one BOS more", "the engine reads prompts with one BOS token more", [[bos, *p] for p in prompts]
    suffix = _generation_prompt(tokenizer)
    if suffix and any(_ends(p, suffix) for p in prompts):
        cut = [p[: -len(suffix)] if _ends(p, suffix) else p for p in prompts]
        yield "no generation prompt", "the engine reads prompts without the template's generation prompt", cut
    elif suffix:
        yield "a generation prompt", "the engine adds the template's generation prompt", [[*p, *suffix] for p in prompts]
    for k in CUTS:
        if k < max(len(p) for p in prompts):
            yield f"the last {k} tokens", f"the engine reads the last {k} tokens of a prompt only", [p[-k:] for p in prompts]


def _ends(prompt: list[int], suffix: list[int]) -> bool:
    return len(prompt) > len(suffix) and prompt[-len(suffix) :] == suffix


def _generation_prompt(tokenizer: Any) -> list[int]:
    """What a chat template puts behind the last message; empty without a template."""
    if tokenizer is None or tokenizer.chat_template is None:
        return []
    message = [{"role": "user", "content": "a"}]
    texts = [tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=asked) for asked in (False, True)]
    found: list[int] = tokenizer(texts[1].removeprefix(texts[0]), add_special_tokens=False)["input_ids"]
    return found if texts[1].startswith(texts[0]) and texts[1] != texts[0] else []
