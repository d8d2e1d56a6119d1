"""Stage 4: whether both sides mean the same probability; each other meaning is computed from the trainer's logits.

A log-probability can be of the model's own logits or of what the sampler made of them; of the next token; of a prompt with or
without its first token. Each such hypothesis is judged token by token: its loss is log(1 + z²), with z the difference over the
scale of rounding of that token, so that a few impossible tokens do not decide.

It **wins** when it leaves at most LEAVES of the mean difference, and the lower end of a bootstrap of the paired improvement is
above zero; or when nothing in it was fitted and it leaves only rounding of a gap that is more. It is **named** when it leaves
only rounding, or a small part of the gap. The simplest comes first; a later one must be better for certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shaketable.mismatch.engine import Rollout, Sampling
from shaketable.mismatch.gap import DRAWS, FEWEST, blocks, differences, resample
from shaketable.mismatch.logprobs import expected, prefixes, processed
from shaketable.mismatch.results import LARGEST, HypothesisFit, Semantics
from shaketable.mismatch.rounding import FEW, SMALLEST, judge
from shaketable.mismatch.trainer import Trainer

TOKENS = 512
LEAVES = 0.6
"""Of the mean difference: what a hypothesis that wins may leave."""
EXPLAINS = 0.2
"""A hypothesis that leaves this share of the gap is named, whatever rounding is."""
CERTAIN = 0.995
"""One-sided, for an improvement."""
ENOUGH, FITTED = 8, 32
"""Tokens below which a hypothesis, and one with a fitted value, proves nothing."""
IMPOSSIBLE = 10.0
"""Nats: by how much a token counts as off to which a hypothesis gives no probability."""
TEMPERATURES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.7)
FINER = (0.03, 0.01, 0.003, 0.001)
VALUES: dict[str, tuple[float, ...]] = {
    "": (0.0,),
    "top_p": tuple(round(0.3 + 0.01 * i, 2) for i in range(70)),
    "top_k": (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40, 50, 64, 100, 200),
}
"""By kind of truncation, the values that are tried with each temperature."""
COLUMNS = 4096
"""Likeliest tokens that hold a nucleus of 0.99, nearly always."""
PROBED = 32
"""Tokens on which another prompt must fit better before all rollouts are read with it."""
CUTS = tuple(2**n for n in range(2, 16))
SHIFTS = {1: "next token", -1: "previous token", 2: "token after the next", -2: "token before the previous"}
STEPS = ("temperature", "top_p", "top_k", "repetition_penalty", "logit_bias")
RAW = Sampling(1)
Differences = list[np.ndarray]


@dataclass(frozen=True)
class Hypothesis:
    """Another meaning of the returned numbers."""

    name: str
    says: str
    """What is then true of the engine, for the verdict."""
    differences: Callable[[], Differences]
    """Engine minus trainer, of every token; NaN where it says nothing of a token, empty where it does not apply."""
    is_fitted: bool = False
    """Whether a value in it was chosen to fit; such a hypothesis needs more tokens than the few that it can be fitted to."""


NOTHING = Hypothesis("", "", list)


def try_hypotheses(
    trainer: Trainer,
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    scale: Sequence[np.ndarray],
    logits: Sequence[Tensor],
    edges: Sequence[Sequence[bool]],
    *,
    like: float = 0.0,
    of_engine: bool = False,
) -> Semantics:
    """The best hypothesis, the one that is named, and all that were tried.

    Args:
        trainer: Its model and tokenizer say which other prompts and defaults there may be.
        rollouts: With the returned numbers.
        sampling: As it was declared.
        scale: Of rounding, for each token.
        logits: The trainer's, or the engine's own, for the examined rollouts.
        edges: Tokens at the edge of a nucleus, of which a few may be outside: they speak for no hypothesis.
        like: Of the declared temperature: another that is so near is that of weights that were rounded.
        of_engine: Whether the logits are the engine's own; other prompts are then not tried.
    """
    some = examined(rollouts)
    case = _Case(trainer, some, list(logits), sampling, list(scale[: len(some)]), edges, like)
    base = case.against(sampling)
    before = found if np.isfinite(found := _mean_abs(base)) else IMPOSSIBLE
    base_loss, declared_fits = case.loss(base), _is_rounding(base, case.scale)
    rows: list[HypothesisFit] = []
    best: HypothesisFit | None = None
    best_loss: Differences = []
    for hypothesis in case.hypotheses(with_prompts=not of_engine):
        name, says, d = hypothesis.name, hypothesis.says, hypothesis.differences()
        if not d or all(np.isnan(x).all() for x in d):
            continue
        if not np.isfinite(left := _mean_abs(d)):
            rows.append(HypothesisFit(name, says, None))
            continue
        loss = case.loss(d)
        low, high = gain(base_loss, loss)
        at_floor = _is_rounding(d, case.scale)
        settles = at_floor and not declared_fits and not hypothesis.is_fitted
        enough = before > SMALLEST and sum(len(x) for x in d) >= (FITTED if hypothesis.is_fitted else ENOUGH)
        wins = bool((low > 0 or settles) and left <= LEAVES * before and enough)
        rows.append(
            HypothesisFit(name, says, left, (low, high), wins, at_floor, wins and (at_floor or left <= EXPLAINS * before))
        )
        if high > 0 and (best is None or gain(best_loss, loss)[0] > 0 or (wins and not best.wins)):
            best, best_loss = rows[-1], loss
    return Semantics(before, sum(len(r.completion) for r in some), best, rows)


def examined(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The first rollouts, up to `TOKENS` tokens."""
    ends = np.cumsum([len(r.completion) for r in rollouts])
    return list(rollouts[: max(1, int((ends <= TOKENS).sum()))])


def keep_examined(logits: Iterable[Tensor], rollouts: Sequence[Rollout], kept: list[Tensor]) -> Iterator[Tensor]:
    """The logits, of which those of the examined rollouts are kept."""
    count = len(examined(rollouts))
    for i, x in enumerate(logits):
        kept += [x] if i < count else []
        yield x


def gain(before: Differences, after: Differences) -> tuple[float, float]:
    """Interval of the mean improvement of a loss, by a bootstrap over rollouts, or over tokens where there are few."""
    parts = blocks([b - a for b, a in zip(before, after, strict=True)])
    means = resample(parts, np.array([[p.sum()] for p in parts]), DRAWS)
    low, high = np.quantile(means[:, 0], (1 - CERTAIN, CERTAIN))
    return float(low), float(high)


def _is_rounding(d: Differences, scale: Sequence[np.ndarray]) -> bool:
    """Whether rounding explains all but a few tokens, which a hypothesis may call impossible."""
    kept = [(x[np.isfinite(x)], s[np.isfinite(x)]) for x, s in zip(d, scale, strict=True)]
    if not any(len(x) for x, _ in kept):
        return False
    found = judge([x for x, _ in kept], [s for _, s in kept])
    return found.explained and sum(int(np.isinf(x).sum()) for x in d) <= max(1, FEW * found.tokens)


def _mean_abs(d: Differences) -> float:
    flat = np.concatenate(d)
    flat = flat[np.isfinite(flat)]
    return float(np.abs(flat).mean()) if len(flat) else float("inf")


def _loss(d: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """log(1 + z²), z in units of rounding; a token that a hypothesis says nothing of counts as two."""
    off = np.where(np.isfinite(d), np.abs(d), np.where(np.isnan(d), 2 * scale, IMPOSSIBLE))
    found: np.ndarray = np.log1p((off / scale) ** 2)
    return found


@dataclass
class _Case:
    """The rollouts of this stage with their logits, and the hypotheses about them."""

    trainer: Trainer
    rollouts: list[Rollout]
    logits: list[Tensor]
    sampling: Sampling
    scale: Differences
    edges: Sequence[Sequence[bool]]
    like: float

    def __post_init__(self) -> None:
        self.engine = [np.asarray(r.logprobs) for r in self.rollouts]
        self.weight = [np.ones(len(x)) for x in self.scale]
        some = self.edges[: len(self.scale)]
        if 0 < sum(map(sum, some)) <= max(1, FEW * sum(len(x) for x in self.scale)):
            self.weight = [1.0 - np.asarray(edge, float) for edge in some]
        self.found: dict[str, Differences] = {}

    def loss(self, d: Differences) -> Differences:
        return [w * _loss(x, s) for x, s, w in zip(d, self.scale, self.weight, strict=False)]

    def against(self, sampling: Sampling) -> Differences:
        """The engine's numbers minus the trainer's in the terms of a sampling."""
        terms = "raw" if sampling.logprobs_mode == "raw" else repr(sampling)
        if terms not in self.found:
            own = [expected(x, r, sampling) for r, x in zip(self.rollouts, self.logits, strict=True)]
            self.found[terms] = differences(self.engine, own)
        return self.found[terms]

    def hypotheses(self, with_prompts: bool) -> Iterator[Hypothesis]:
        """The simplest first."""
        yield from self._processing()
        yield from self._misplaced()
        if with_prompts:
            for name, says, prompts in _prompts(self.trainer.tokenizer, [r.prompt for r in self.rollouts]):
                yield Hypothesis(name, says, lambda prompts=prompts: self._reread(prompts))  # type: ignore[misc]
        yield from self._fitted()

    def _sampled(self, name: str, says: str, sampling: Sampling, is_fitted: bool = False) -> Hypothesis:
        sampling = replace(sampling, logprobs_mode="processed")
        return Hypothesis(name, says, lambda: self.against(sampling), is_fitted)

    def _processing(self) -> Iterator[Hypothesis]:
        """Raw, processed, or processed but for one step."""
        s, neutral = self.sampling, _neutral(self.sampling)
        on = {step.replace("_", " "): step for step in STEPS if getattr(s, step) != getattr(neutral, step)}
        raw = "the engine returns raw log-probabilities, of the model's own logits"
        yield Hypothesis("raw log-probabilities", raw, lambda: self.against(RAW))
        steps = ", ".join(on) or "no step"
        yield self._sampled("processed log-probabilities", f"the engine returns processed log-probabilities ({steps})", s)
        for name, step in on.items():
            says = f"the engine's log-probabilities are processed, but without {name}"
            yield self._sampled(f"{name} not applied", says, replace(s, **{step: getattr(neutral, step)}))

    def _misplaced(self) -> Iterator[Hypothesis]:
        """Another base, log-probabilities at the wrong token or rollout, and tokens that one side does not count."""
        d = self.against(self.sampling)
        trainer = [e - x for e, x in zip(self.engine, d, strict=True)]
        for base, word in ((2, "two"), (10, "ten")):
            says = f"the engine's logarithms are to the base of {word}"
            natural = differences([e * np.log(base) for e in self.engine], trainer)
            yield Hypothesis(f"to the base of {word}", says, lambda natural=natural: natural)  # type: ignore[misc]
        for shift, what in SHIFTS.items():
            if all(len(x) > 2 * abs(shift) for x in d):
                says = f"the log-probability at each token is that of the {what}"
                yield Hypothesis(f"of the {what}", says, lambda shift=shift: self._shifted(shift, trainer))  # type: ignore[misc]
        if len(self.rollouts) > 1:
            says = "the log-probabilities are those of another rollout"
            yield Hypothesis("of another rollout", says, lambda: self._exchanged(trainer))
        stops = [int(r.finish == "stop") for r in self.rollouts]
        if any(stops):
            says = "the stop token is counted on one side only: all other tokens agree"
            yield Hypothesis("stop token not counted", says, lambda: _apart(d, self.scale, stops))
        for cut in CUTS:
            beyond = [max(0, len(r.tokens) - cut) for r in self.rollouts]
            if any(beyond) and any(len(r.prompt) < cut for r in self.rollouts):
                says = f"sequences are cut at {cut} tokens on one side"
                yield Hypothesis(f"cut at {cut} tokens", says, lambda n=beyond: _apart(d, self.scale, n))  # type: ignore[misc]

    def _shifted(self, shift: int, trainer: Differences) -> Differences:
        found = differences(self.engine, trainer)
        for moved, engine, own in zip(found, self.engine, trainer, strict=True):
            n = abs(shift)
            if shift > 0:
                moved[:-n] = engine[:-n] - own[n:]
            else:
                moved[n:] = engine[n:] - own[:-n]
        return found

    def _exchanged(self, trainer: Differences) -> Differences:
        """Every rollout with the numbers of the one that fits best, where that is another."""
        found, moved = differences(self.engine, trainer), 0
        for i, own in enumerate(trainer):
            fits = [(float(np.abs(e[: len(own)] - own[: len(e)]).mean()), j) for j, e in enumerate(self.engine)]
            best = min(fits)[1]
            n, moved = min(len(own), len(self.engine[best])), moved + (best != i)
            found[i][:n] = self.engine[best][:n] - own[:n]
        return found if moved else []

    def _reread(self, prompts: list[list[int]]) -> Differences:
        """With other prompts; of a few rollouts first, and impossible where these fit no better."""
        some = [replace(r, prompt=p) for r, p in zip(self.rollouts, prompts, strict=True)]
        count = int((np.cumsum([len(r.completion) for r in some]) < PROBED).sum()) + 1
        losses = [np.concatenate(self.loss(d[:count])).sum() for d in (self._read(some[:count]), self.against(self.sampling))]
        if count < len(some) and losses[0] >= losses[1]:
            return [np.full(len(r.completion), np.inf) for r in some]
        return self._read(some)

    def _read(self, some: list[Rollout]) -> Differences:
        own = [expected(x, r, self.sampling) for r, x in zip(some, self.trainer.logits(some), strict=True)]
        return differences(self.engine[: len(some)], own)

    def _fitted(self) -> Iterator[Hypothesis]:
        """The checkpoint's own defaults; then temperature with top-p or top-k, and a repetition penalty, fitted."""
        own = _defaults(self.trainer.model, self.sampling)
        if own is not None:
            yield self._sampled("the checkpoint's generation defaults", f"the checkpoint's defaults are used: {own}", own)
        still = replace(self.sampling, temperature=1.0, top_p=1.0, top_k=0)  # the declared bias and penalty stay
        fit = _Grid(self, still)
        for fits_temperature, kind in ((True, ""), (False, "top_p"), (True, "top_p"), (False, "top_k"), (True, "top_k")):
            yield fit.best(fits_temperature, kind)
        yield self._penalty(replace(still, temperature=self.sampling.temperature or 1.0, logprobs_mode="processed"))

    def _penalty(self, still: Sampling) -> Hypothesis:
        from scipy.optimize import minimize_scalar

        def left(penalty: float) -> float:
            return float(np.concatenate(self.loss(self.against(replace(still, repetition_penalty=float(penalty))))).mean())

        found = minimize_scalar(left, bounds=(1.0, 2.0), method="bounded", options={"xatol": 2e-3, "maxiter": 12}).x
        says = f"the engine applies a repetition penalty of {found:.3g}"
        return self._sampled(f"repetition penalty {found:.3g}", says, replace(still, repetition_penalty=float(found)), True)


@dataclass(frozen=True)
class _Ranked:
    """The logits of one rollout's tokens in the order of their size, less the largest of each row."""

    logits: Tensor
    own: Tensor
    rank: Tensor
    """Tokens that are likelier than the own one."""


class _Grid:
    """The difference of every token at each temperature and truncation; a temperature is computed once for all truncations."""

    def __init__(self, case: _Case, still: Sampling) -> None:
        self.case, self.still = case, still
        self.rows: list[_Ranked] = []
        for x, r in zip(case.logits, case.rollouts, strict=True):
            z = processed(x.double(), still, prefixes(r))
            z = z - z.amax(-1, keepdim=True)
            own = z.gather(1, torch.tensor(r.completion).unsqueeze(1))
            self.rows.append(_Ranked(z.float().sort(-1, descending=True).values, own, (z > own).sum(-1, keepdim=True)))
        self.engine, self.scale, self.weight = (np.concatenate(x) for x in (case.engine, case.scale, case.weight))
        self.found: dict[float, dict[str, np.ndarray]] = {}

    def best(self, fits_temperature: bool, kind: str) -> Hypothesis:
        """The best pair of values, over a coarse grid, then finer around the best temperature."""
        declared = self.case.sampling.temperature or 1.0
        tried = set(TEMPERATURES) if fits_temperature else {1.0, declared}
        (t, second), ends = self._least(tried, kind)
        for width in FINER if fits_temperature else ():
            tried |= {float(t * np.exp(width * i)) for i in range(-3, 4)}
            (t, second), ends = self._least(tried, kind)
        stated = 1.0 if self.case.sampling.logprobs_mode == "raw" else declared
        if fits_temperature and abs(t / stated - 1) <= self.case.like:
            fits_temperature = False
            (t, second), ends = self._least({stated}, kind)
        names, words = [], []
        if fits_temperature or t != 1.0:
            names.append(f"temperature {t:.3g}")
            words.append(f"divided by {t:.3g}" + (f" ({ends[0][0]:.3g} to {ends[0][1]:.3g})" if fits_temperature else ""))
        if not words and not kind:
            return NOTHING
        if kind:
            names.append(f"{kind}={second:g}")
            words.append(f"renormalised over {kind}={second:g} ({ends[1][0]:g} to {ends[1][1]:g})")
        d = self._at(t)[kind][VALUES[kind].index(second)]
        if kind and np.allclose(d, self._at(t)[""][0], atol=SMALLEST):  # it cuts nothing off
            return NOTHING
        apart = np.split(d, np.cumsum([len(x) for x in self.case.engine])[:-1])
        says = f"the engine's logits are {' and '.join(words)}"
        return Hypothesis(", ".join(names), says, lambda: apart, is_fitted=True)

    def _least(self, temperatures: set[float], kind: str) -> tuple[tuple[float, float], list[tuple[float, float]]]:
        """The pair with the least loss, and 95 % of each value by a bootstrap over rollouts (tokens where there are few)."""
        ordered = sorted(temperatures)
        pairs = [(t, float(second)) for t in ordered for second in VALUES[kind]]
        losses = self.weight * np.concatenate([_loss(self._at(t)[kind], self.scale) for t in ordered])
        lengths = [len(x) for x in self.case.engine]
        block = np.repeat(np.arange(len(lengths)), lengths) if len(lengths) >= FEWEST else np.arange(sum(lengths))
        sums = np.stack([np.bincount(block, row) for row in losses])
        weights = np.random.default_rng(0).multinomial(sums.shape[1], np.full(sums.shape[1], 1 / sums.shape[1]), 200)
        drawn = np.array([pairs[i] for i in (sums @ weights.T).argmin(0)])
        low, high = np.quantile(drawn, (0.025, 0.975), axis=0).tolist()
        return pairs[int(losses.mean(1).argmin())], list(zip(low, high, strict=True))

    def _at(self, t: float) -> dict[str, np.ndarray]:
        """By kind, the differences (values, tokens) at a temperature; logits are in the order of their size."""
        if t not in self.found:
            parts: dict[str, list[Tensor]] = {kind: [] for kind in VALUES}
            for row in self.rows:
                own, rank = row.own / t, row.rank
                odds = (row.logits / t).exp_()
                total, mass = odds.sum(-1, keepdim=True, dtype=torch.float64), odds[:, :COLUMNS].double().cumsum(-1)
                if bool((mass[:, -1:] < VALUES["top_p"][-1] * total).any()):
                    mass = odds.double().cumsum(-1)
                top = mass.shape[1] - 1
                nuclei = torch.tensor([VALUES["top_p"]], dtype=mass.dtype) * total
                lasts = {
                    "top_p": torch.searchsorted(mass, nuclei).clamp_max(top),
                    "top_k": torch.tensor([[min(int(k) - 1, top) for k in VALUES["top_k"]]]).repeat(len(own), 1),
                }
                parts[""].append((own - total.log()).T)
                for kind, last in lasts.items():
                    parts[kind].append(torch.where(rank <= last, own - mass.gather(1, last).log(), -torch.inf).T)
            self.found[t] = {k: self.engine - torch.cat(made, 1).numpy() for k, made in parts.items()}
        return self.found[t]


def _apart(d: Differences, scale: Differences, last: list[int]) -> Differences:
    """No claim about so many tokens at the end of each rollout, if each is off by more than rounding and any other token."""
    ends = [np.abs(x[len(x) - min(n, len(x)) :]) for x, n in zip(d, last, strict=True)]
    rest = [x[: len(x) - len(end)] for x, end in zip(d, ends, strict=True)]
    ratios = [end / s[len(s) - len(end) :] for end, s in zip(ends, scale, strict=True) if len(end)]
    least = min((float(end.min()) for end in ends if len(end)), default=0.0)
    most = max((float(np.abs(x).max()) for x in rest if len(x)), default=np.inf)
    if not ratios or least <= most or min(float(r.min()) for r in ratios) < LARGEST:
        return []
    return [np.concatenate([x, np.full(len(end), np.nan)]) for x, end in zip(rest, ends, strict=True)]


def _neutral(sampling: Sampling) -> Sampling:
    return Sampling(sampling.max_new_tokens, seed=sampling.seed, stop=sampling.stop)


def _defaults(model: Any, sampling: Sampling) -> Sampling | None:
    """The sampling of generation_config.json, which engines take over where nothing else is asked for."""
    config = getattr(model, "generation_config", None)
    found = {name: value for name in STEPS[:4] if (value := getattr(config, name, None)) is not None}
    changed = replace(_neutral(sampling), **found)
    return None if changed == _neutral(sampling) else changed


def _prompts(tokenizer: Any, prompts: list[list[int]]) -> Iterator[tuple[str, str, list[list[int]]]]:
    """Other prompts than the trainer reads: another first token, the end of the chat template, or only the last tokens."""

    def ends(prompt: list[int]) -> bool:
        return len(prompt) > len(suffix) and prompt[-len(suffix) :] == suffix

    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and any(p[0] == bos and len(p) > 1 for p in prompts):
        cut = [p[1:] if p[0] == bos and len(p) > 1 else p for p in prompts]
        yield "no BOS", "the engine reads prompts without the BOS token", cut
    if bos is not None:
        yield "one BOS more", "the engine reads prompts with one BOS token more", [[bos, *p] for p in prompts]
    suffix = _generation_prompt(tokenizer)
    if suffix and any(ends(p) for p in prompts):
        cut = [p[: -len(suffix)] if ends(p) else p for p in prompts]
        yield "no generation prompt", "the engine reads prompts without the template's generation prompt", cut
    elif suffix:
        yield "a generation prompt", "the engine adds the template's generation prompt", [[*p, *suffix] for p in prompts]
    for k in CUTS:
        if k < max(len(p) for p in prompts):
            yield f"the last {k} tokens", f"the engine reads the last {k} tokens of a prompt only", [p[-k:] for p in prompts]


def _generation_prompt(tokenizer: Any) -> list[int]:
    """The tokens that a chat template puts after the last message; empty without a template."""
    if tokenizer is None or tokenizer.chat_template is None:
        return []
    message = [{"role": "user", "content": "a"}]
    texts = [tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=asked) for asked in (False, True)]
    found: list[int] = tokenizer(texts[1].removeprefix(texts[0]), add_special_tokens=False)["input_ids"]
    return found if texts[1].startswith(texts[0]) and texts[1] != texts[0] else []
