"""Whether both sides speak of the same probability: each way in which they may not, computed anew from the trainer's logits.

A log-probability can be of the model's own logits or of what the sampler made of them; with another temperature; renormalised
over a nucleus; of the next token; of a prompt with or without its first token. None of that is rounding. Every hypothesis is
computed, and judged by how much better it fits, token by token: its loss is log(1 + z²), with z the difference over what
rounding makes of that token, so that a few impossible tokens do not decide. A hypothesis **wins** when it leaves at most LEAVES
of the mean difference, and the lower end of a bootstrap over rollouts of the paired improvement is above zero; or when nothing
in it was fitted and it leaves only rounding of a gap that is more. It is **named** when it leaves only rounding, or a
small part of the gap. The simplest hypothesis comes first; a later one must be better for certain. Fitted values (temperature
with top-p or top-k, a repetition penalty) come with a range.

Logits are looked at for the first rollouts only, as many as `TOKENS` tokens: a hypothesis is about all tokens or none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shaketable.mismatch.engines.engine import Rollout, Sampling
from shaketable.mismatch.gap import DRAWS, FEWEST
from shaketable.mismatch.processing import expected, in_terms_of, processed
from shaketable.mismatch.rounding import LARGEST, MEAN, Rounding, judge
from shaketable.mismatch.teacher_forcing import chosen
from shaketable.mismatch.trainer import Trainer

TOKENS = 512
LEAVES = 0.6
"""Of the mean difference: what a hypothesis that wins may leave."""
EXPLAINS = 0.2
"""A hypothesis that leaves this share of the gap is named, whatever rounding is."""
CERTAIN = 0.995
"""One-sided, for an improvement."""
IMPOSSIBLE = 10.0
"""Nats: by how much a token counts as off to which a hypothesis gives no probability."""
FEW = 0.02
"""Share of tokens at the edge of a nucleus that rounding may put on its other side."""
TEMPERATURES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.7)
NUCLEI = tuple(round(0.3 + 0.01 * i, 2) for i in range(70))
TOPS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40, 50, 64, 100, 200)
FINER = (0.03, 0.01, 0.003, 0.001)
SECONDS: dict[str, tuple[float, ...]] = {"": (0.0,), "top_p": NUCLEI, "top_k": TOPS}
CUTS = tuple(2**n for n in range(2, 16))


@dataclass(frozen=True)
class Hypothesis:
    """One way of meaning something else."""

    name: str
    says: str
    """What is then true of the engine, for the verdict."""
    differences: Callable[[], list[np.ndarray]]
    """Engine minus trainer, of every token; NaN where it says nothing of a token, empty where it says nothing at all."""
    is_fitted: bool = False
    """Whether a value in it was chosen to fit; such a hypothesis needs more tokens than the few that it can be fitted to."""


def semantics(
    trainer: Trainer,
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    rounding: Rounding,
    engine_logits: Sequence[Tensor] | None = None,
) -> dict[str, Any]:
    """The best hypothesis, the one that is named, and all that were tried.

    Args:
        trainer: Whose logits the hypotheses are about.
        rollouts: With the returned numbers.
        sampling: As it was declared.
        rounding: What moves each token without a cause.
        engine_logits: The engine's own, to ask about those instead; other prompts are then not tried.
    """
    some = looked_at(rollouts)
    logits = list(trainer.logits(some)) if engine_logits is None else list(engine_logits[: len(some)])
    case = _Case(trainer, some, logits, sampling, rounding.scale[: len(some)], engine_logits is None)
    base = case.against(sampling if sampling.logprobs_mode == "processed" else None)
    before = _finite(base) if np.isfinite(_finite(base)) else IMPOSSIBLE
    facts: dict[str, Any] = {"mean_abs": before, "tokens": sum(len(r.completion) for r in some), "named": None, "best": None}
    facts |= {"rows": [], "judged": _judged(base, case.scale)}
    base_loss = case.loss(base)
    best: tuple[dict[str, Any], list[np.ndarray]] | None = None
    for hypothesis in case.hypotheses():
        d = hypothesis.differences()
        if not d or all(np.isnan(x).all() for x in d):
            continue
        if not np.isfinite(_finite(d)):
            facts["rows"].append({"name": hypothesis.name, "mean_abs": None, "gain": None})
            continue
        loss = case.loss(d)
        low, high = gain(base_loss, loss)
        row: dict[str, Any] = {"name": hypothesis.name, "says": hypothesis.says, "mean_abs": _finite(d), "gain": [low, high]}
        row |= _judged(d, case.scale)
        settles = row["explained"] and not facts["judged"]["explained"] and not hypothesis.is_fitted
        leaves_little = row["mean_abs"] <= LEAVES * before and (
            engine_logits is not None or _is_no_rounding(hypothesis.name, rounding)
        )
        row["wins"] = bool((low > 0 or settles) and leaves_little)
        facts["rows"].append({key: row[key] for key in ("name", "mean_abs", "gain")})
        is_better = best is None or gain(best[1], loss)[0] > 0 or (row["wins"] and not best[0]["wins"])
        if high > 0 and is_better:
            best = (row, loss)
    if best is None:
        return facts
    facts["best"] = best[0]
    rounds = best[0]["mean_ratio"] <= MEAN and best[0]["explained"]
    near = best[0]["mean_abs"] <= EXPLAINS * before
    if best[0]["wins"] and (rounds or near):
        facts["named"] = best[0] | {"at_floor": rounds}
    return facts


def _judged(d: Sequence[np.ndarray], scale: Sequence[np.ndarray]) -> dict[str, Any]:
    """Whether rounding explains what is left, but for a few tokens that fell off the edge of a nucleus."""
    kept = [(x[np.isfinite(x)], s[np.isfinite(x)]) for x, s in zip(d, scale, strict=True)]
    lost = sum(int((~np.isfinite(x) & ~np.isnan(x)).sum()) for x in d)
    if not any(len(x) for x, _ in kept):
        return {"mean_ratio": 0.0, "explained": False, "impossible": lost}
    found = judge([x for x, _ in kept], [s for _, s in kept])
    few = lost <= max(1, FEW * found.tokens)
    return {"mean_ratio": found.mean_ratio, "explained": found.explained and few, "impossible": lost}


def _is_no_rounding(name: str, rounding: Rounding) -> bool:
    """Weights that were rounded act like another temperature, which differs from one by a few units of the dtype."""
    found = re.fullmatch(r"temperature ([0-9.]+)", name)
    return found is None or abs(float(found[1]) - 1) > 4 * torch.finfo(getattr(torch, rounding.dtype)).eps


def gain(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> tuple[float, float]:
    """Interval of the mean improvement of a loss, by a bootstrap over rollouts, or over tokens where there are few."""
    d = [b - a for b, a in zip(before, after, strict=True)]
    parts = d if len(d) >= FEWEST else [np.array([x]) for x in np.concatenate(d)]
    sums = np.array([[p.sum(), len(p)] for p in parts])
    drawn = sums[np.random.default_rng(0).integers(0, len(sums), (DRAWS, len(sums)))].sum(1)
    means = drawn[:, 0] / drawn[:, 1]
    low, high = np.quantile(means, (1 - CERTAIN, CERTAIN))
    return float(low), float(high)


def _finite(d: Sequence[np.ndarray]) -> float:
    flat = np.concatenate(list(d))
    flat = flat[np.isfinite(flat)]
    return float(np.abs(flat).mean()) if len(flat) else float("inf")


def looked_at(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The first rollouts, as many as `TOKENS` tokens."""
    kept: list[Rollout] = []
    tokens = 0
    for rollout in rollouts:
        if kept and tokens + len(rollout.completion) > TOKENS:
            break
        kept.append(rollout)
        tokens += len(rollout.completion)
    return kept


class _Case:
    """The rollouts of this stage, with the trainer's logits."""

    def __init__(
        self,
        trainer: Trainer,
        rollouts: list[Rollout],
        logits: list[Tensor],
        sampling: Sampling,
        scale: list[np.ndarray],
        tries_prompts: bool = True,
    ) -> None:
        self.tries_prompts = tries_prompts
        self.trainer, self.rollouts, self.logits, self.sampling, self.scale = trainer, rollouts, logits, sampling, scale

    def loss(self, d: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Of each token; one that a hypothesis says nothing of counts as two times what rounding makes."""
        return [_loss(np.where(np.isnan(x), 2 * size, x), size) for x, size in zip(d, self.scale, strict=True)]

    def hypotheses(self) -> Iterator[Hypothesis]:
        """The simplest first."""
        yield from self._returned()
        yield from self._placed()
        if self.tries_prompts:
            yield from self._prompted()
        yield from self._tuned()

    def against(self, sampling: Sampling | None) -> list[np.ndarray]:
        """The engine's minus the trainer's, processed or raw."""
        pairs = zip(self.rollouts, self.logits, strict=True)
        return [self._minus(r, chosen(x, r.completion) if sampling is None else in_terms_of(x, r, sampling)) for r, x in pairs]

    def _minus(self, rollout: Rollout, trainer: list[float]) -> np.ndarray:
        found: np.ndarray = np.asarray(rollout.logprobs) - np.asarray(trainer)
        return found

    def _processing(self, name: str, says: str, sampling: Sampling | None, is_fitted: bool = False) -> Hypothesis:
        return Hypothesis(name, says, lambda: self.against(sampling), is_fitted)

    def _returned(self) -> Iterator[Hypothesis]:
        """Raw, processed, or processed but for one step."""
        s = self.sampling
        yield self._processing(
            "raw log-probabilities", "the engine returns raw log-probabilities, of the model's own logits", None
        )
        yield self._processing("processed log-probabilities", _steps(s), s)
        for name, change in _stepsin_terms_of(s).items():
            without = replace(s, **change)
            yield self._processing(
                f"{name} not applied", f"the engine's log-probabilities are processed, but without {name}", without
            )
        for name, change in _stepsin_terms_of(s).items():
            only = replace(_neutral(s), **{key: getattr(s, key) for key in change})
            yield self._processing(
                f"{name} alone", f"the engine's log-probabilities have {name} in them, and nothing else", only
            )

    def _placed(self) -> Iterator[Hypothesis]:
        """Tokens that are counted or not, and log-probabilities that stand at the wrong token."""
        mode = None if self.sampling.logprobs_mode == "raw" else self.sampling
        yield Hypothesis("in another base", "the engine's logarithms are to the base of two", lambda: self._base_two(mode))
        for shift, what in (
            (1, "next token"),
            (-1, "previous token"),
            (2, "token after the next"),
            (-2, "token before the previous"),
        ):
            says = f"the log-probability at each token is that of the {what}"
            if all(len(r.completion) > 2 * abs(shift) for r in self.rollouts):
                yield Hypothesis(f"of the {what}", says, lambda shift=shift: self._shifted(shift, mode))  # type: ignore[misc]
        if len(self.rollouts) > 1:
            yield Hypothesis(
                "of another rollout", "the log-probabilities are those of another rollout", lambda: self._rows(mode)
            )
        stops = [int(r.finish == "stop") for r in self.rollouts]
        if any(stops):
            says = "the stop token is counted on one side only: all other tokens agree"
            yield Hypothesis("stop token not counted", says, lambda: _apart(self.against(mode), self.scale, stops))
        for cut in CUTS:
            yield from self._cut(cut, mode)

    def _shifted(self, shift: int, mode: Sampling | None) -> list[np.ndarray]:
        found = []
        for r, d in zip(self.rollouts, self.against(mode), strict=True):
            engine, moved = np.asarray(r.logprobs), d.copy()
            trainer = engine - d
            if shift > 0:
                moved[:-shift] = engine[:-shift] - trainer[shift:]
            else:
                moved[-shift:] = engine[-shift:] - trainer[:shift]
            found.append(moved)
        return found

    def _base_two(self, mode: Sampling | None) -> list[np.ndarray]:
        pairs = zip(self.rollouts, self.against(mode), strict=True)
        return [np.asarray(r.logprobs) * np.log(2) - (np.asarray(r.logprobs) - d) for r, d in pairs]

    def _rows(self, mode: Sampling | None) -> list[np.ndarray]:
        """Every rollout with the numbers of the one that fits best among those of its length, where that is another."""
        d = self.against(mode)
        engine = [np.asarray(r.logprobs) for r in self.rollouts]
        trainer = [e - x for e, x in zip(engine, d, strict=True)]
        found, moved = [], 0
        for i, own in enumerate(trainer):
            fits = [(float(np.abs(e[: len(own)] - own[: len(e)]).mean()), j) for j, e in enumerate(engine)]
            best = min(fits)[1]
            moved += best != i
            full = d[i].copy()
            n = min(len(own), len(engine[best]))
            full[:n] = engine[best][:n] - own[:n]
            found.append(full)
        return found if moved else []

    def _cut(self, cut: int, mode: Sampling | None) -> Iterator[Hypothesis]:
        """Everything up to a length agrees, and nothing beyond it: one side cuts sequences there."""
        beyond = [max(0, len(r.tokens) - cut) for r in self.rollouts]
        if not any(beyond) or all(len(r.tokens) - len(r.completion) >= cut for r in self.rollouts):
            return
        says = f"sequences are cut at {cut} tokens on one side"
        yield Hypothesis(f"cut at {cut} tokens", says, lambda: _apart(self.against(mode), self.scale, beyond))

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
        yield from self._fitted()

    def _fitted(self) -> Iterator[Hypothesis]:
        """Temperature with top-p or top-k, and a repetition penalty, fitted together; the declared bias and penalty stay."""
        still = replace(self.sampling, temperature=1.0, top_p=1.0, top_k=0)
        free = [processed(x.double(), still, self._before(r)) for x, r in zip(self.logits, self.rollouts, strict=True)]
        grid = _Grid([_ranked(x, r.completion) for x, r in zip(free, self.rollouts, strict=True)], self.rollouts, self.scale)
        for fits_temperature, kind in ((True, ""), (False, "top_p"), (True, "top_p"), (False, "top_k"), (True, "top_k")):
            yield self._fit(grid, fits_temperature, kind, still)
        yield self._penalty(still)

    def _before(self, r: Rollout) -> list[list[int]]:
        return [[*r.prompt, *r.completion[:i]] for i in range(len(r.completion))]

    def _fit(self, grid: _Grid, fits_temperature: bool, kind: str, still: Sampling) -> Hypothesis:
        """The best pair of values, over a coarse grid, then finer around the best temperature."""
        tried = set(TEMPERATURES) if fits_temperature else {1.0, self.sampling.temperature or 1.0}
        t, second = grid.best(tried, kind)
        for width in FINER if fits_temperature else ():
            tried |= {float(t * np.exp(width * i)) for i in range(-3, 4)}
            t, second = grid.best(tried, kind)
        ends = self._range(*grid.losses(tried, kind))
        words, name, changed = [], [], {"temperature": t}
        if fits_temperature or t != 1.0:
            low, high = ends[0]
            name.append(f"temperature {t:.3g}")
            words.append(f"divided by {t:.3g}" + (f" ({low:.3g} to {high:.3g})" if fits_temperature else ""))
        if kind:
            changed[kind] = second
            name.append(f"{kind}={second:g}")
            words.append(f"renormalised over {kind}={second:g} ({ends[1][0]:g} to {ends[1][1]:g})")
        says = f"the engine's logits are {' and '.join(words)}"
        return self._processing(", ".join(name), says, replace(still, **changed), True)  # type: ignore[arg-type]

    def _range(self, values: list[tuple[float, float]], losses: np.ndarray) -> list[tuple[float, float]]:
        """95 % of the best values, by a bootstrap over rollouts (tokens where there are few)."""
        lengths = [len(r.completion) for r in self.rollouts]
        blocks = np.repeat(np.arange(len(lengths)), lengths) if len(lengths) >= FEWEST else np.arange(sum(lengths))
        sums = np.stack([np.bincount(blocks, row) for row in losses])
        weights = np.random.default_rng(0).multinomial(sums.shape[1], np.full(sums.shape[1], 1 / sums.shape[1]), 200)
        best = [values[i] for i in (sums @ weights.T).argmin(0)]
        ends = []
        for part in (0, 1):
            low, high = np.quantile([pair[part] for pair in best], (0.025, 0.975))
            ends.append((float(low), float(high)))
        return ends

    def _penalty(self, still: Sampling) -> Hypothesis:
        from scipy.optimize import minimize_scalar

        def at(penalty: float) -> Sampling:
            return replace(still, temperature=self.sampling.temperature or 1.0, repetition_penalty=float(penalty))

        def left(penalty: float) -> float:
            d = self.against(at(penalty))
            return float(np.concatenate(self.loss(d)).mean())

        found = minimize_scalar(left, bounds=(1.0, 2.0), method="bounded", options={"xatol": 2e-3, "maxiter": 12})
        says = f"the engine applies a repetition penalty of {found.x:.3g}"
        return self._processing(f"repetition penalty {found.x:.3g}", says, at(found.x), True)


def _ranked(x: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits in falling order, and the rank of each row's token."""
    ordered, places = x.sort(-1, descending=True)
    rank = (places == torch.tensor(list(tokens)).unsqueeze(1)).int().argmax(1)
    return ordered, rank


class _Grid:
    """The loss of every token at a temperature, over every nucleus and every top-k; each temperature is computed once."""

    def __init__(self, ranked: list[tuple[Tensor, Tensor]], rollouts: list[Rollout], scale: list[np.ndarray]) -> None:
        self.ranked, self.scale = ranked, np.concatenate(scale)
        self.told = np.concatenate([np.asarray(r.logprobs) for r in rollouts])
        self.known: dict[float, dict[str, np.ndarray]] = {}

    def losses(self, temperatures: set[float], kind: str) -> tuple[list[tuple[float, float]], np.ndarray]:
        """All pairs of a temperature and a value of a kind (top_p, top_k, or none), and the losses under each."""
        ordered = sorted(temperatures)
        values = [(t, float(second)) for t in ordered for second in SECONDS[kind]]
        return values, np.concatenate([self._at(t)[kind] for t in ordered])

    def best(self, temperatures: set[float], kind: str) -> tuple[float, Any]:
        """The pair with the least loss."""
        values, losses = self.losses(temperatures, kind)
        t, second = values[int(losses.mean(1).argmin())]
        return t, int(second) if kind == "top_k" else second

    def _at(self, t: float) -> dict[str, np.ndarray]:
        if t not in self.known:
            parts: dict[str, list[np.ndarray]] = {kind: [] for kind in SECONDS}
            for x, rank in self.ranked:
                for kind, made in _renormalised(x, rank, t).items():
                    parts[kind].append(made)
            joined = {kind: np.concatenate(made, 1) for kind, made in parts.items()}
            self.known[t] = {kind: _loss(self.told - lp, self.scale) for kind, lp in joined.items()}
        return self.known[t]


def _loss(d: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """log(1 + z²), z in units of rounding."""
    off = np.where(np.isfinite(d), np.abs(d), IMPOSSIBLE)
    found: np.ndarray = np.log1p((off / scale) ** 2)
    return found


def _renormalised(x: Tensor, rank: Tensor, t: float) -> dict[str, np.ndarray]:
    """Log-probabilities of tokens (values of a kind, tokens) at a temperature, by kind."""
    logp = (x / t).log_softmax(-1)
    own = logp.gather(1, rank.unsqueeze(1))
    mass = logp.exp().cumsum(-1)
    nuclei = torch.tensor([NUCLEI], dtype=mass.dtype).repeat(len(x), 1)
    lasts = {
        "top_p": torch.searchsorted(mass, nuclei).clamp_max(x.shape[1] - 1),
        "top_k": torch.tensor([[min(k, x.shape[1]) - 1 for k in TOPS]]).repeat(len(x), 1),
    }
    found: dict[str, np.ndarray] = {"": own.T.numpy()}
    for kind, last in lasts.items():
        lp = own - mass.gather(1, last).log()
        found[kind] = torch.where(rank.unsqueeze(1) <= last, lp, -torch.inf).T.numpy()
    return found


def _apart(d: list[np.ndarray], scale: list[np.ndarray], last: list[int]) -> list[np.ndarray]:
    """Nothing said of so many tokens at the end of each rollout, if each is off by more than rounding and any other token."""
    pairs = [(x[: max(0, len(x) - n)], x[max(0, len(x) - n) :]) for x, n in zip(d, last, strict=True)]
    ends = [np.abs(x[-n:] / s[-n:]) for x, s, n in zip(d, scale, last, strict=True) if n]
    least = min((float(np.abs(end).min()) for _, end in pairs if len(end)), default=0.0)
    most = max((float(np.abs(rest).max()) for rest, _ in pairs if len(rest)), default=np.inf)
    if not ends or least <= most or min(float(e.min()) for e in ends if len(e)) < LARGEST:
        return []
    return [np.concatenate([rest, np.full(len(end), np.nan)]) for rest, end in pairs]


def _neutral(sampling: Sampling) -> Sampling:
    return Sampling(sampling.max_new_tokens, seed=sampling.seed, stop=sampling.stop)


def _stepsin_terms_of(s: Sampling) -> dict[str, dict[str, Any]]:
    """The steps that are on, and what switches each of them off."""
    neutral = _neutral(s)
    fields = ("temperature", "top_p", "top_k", "repetition_penalty", "logit_bias")
    return {f.replace("_", " "): {f: getattr(neutral, f)} for f in fields if getattr(s, f) != getattr(neutral, f)}


def _steps(s: Sampling) -> str:
    on = ", ".join(_stepsin_terms_of(s)) or "no step"
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
