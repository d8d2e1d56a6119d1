"""Stage 4: whether both sides mean the same probability; each other meaning is computed from the trainer's logits.

A log-probability can be of the model's own logits or of what the sampler made of them; of the next token; of a prompt with or
without its first token. Each such hypothesis is judged token by token: its loss is log(1 + z²), with z the difference over the
scale of rounding of that token, so that a few impossible tokens do not decide.

It **wins** when it leaves at most LEAVES of the mean difference, and the lower end of the interval of the paired improvement is
above zero; or when nothing in it was fitted and it leaves only rounding of a gap that is more. It is **named** when it leaves
only rounding, or a small part of the gap. The simplest comes first; a later one must be better for certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shaketable.mismatch.engine import Rollout, Sampling
from shaketable.mismatch.gap import FEWEST, differences, mean_interval
from shaketable.mismatch.logprobs import expected, prefixes, processed
from shaketable.mismatch.results import HypothesisFit, Semantics
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
TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.7, 2.0)
"""Where the best temperature is looked for first."""
TRUNCATIONS: dict[str, tuple[float, ...]] = {
    "": (0.0,),
    "top_p": tuple(round(0.3 + 0.01 * i, 2) for i in range(70)),
    "top_k": (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40, 50, 64, 100, 200),
}
"""By kind of truncation, the values that are tried with each temperature."""
COLUMNS = 4096
"""Tokens of the largest nucleus that is tried."""
SHIFTS = {"next": (slice(None, -1), slice(1, None)), "previous": (slice(1, None), slice(None, -1))}
"""By the token whose number is returned: places in the returned numbers, and in the trainer's own."""
STEPS = ("temperature", "top_p", "top_k", "repetition_penalty")
RAW = Sampling(1)
Differences = list[np.ndarray]


@dataclass(frozen=True)
class Hypothesis:
    """Another meaning of the returned numbers."""

    name: str
    says: str
    """What is then true of the engine, for the verdict."""
    differences: Callable[[], Differences]
    """Engine minus trainer, of every token."""
    is_fitted: bool = False
    """Whether a value in it was chosen to fit; such a hypothesis needs more tokens than the few that it can be fitted to."""


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

    `logits` are the trainer's for the examined rollouts, or the engine's own, and then other prompts are not tried. Tokens at
    the edge of a nucleus, of which a few may be outside, speak for no hypothesis. A temperature as near to the declared one as
    `like` is that of weights that were rounded.
    """
    some = examined(rollouts)
    case = _Case(trainer, some, list(logits), sampling, list(scale[: len(some)]), edges)
    base = case.against(sampling)
    before = found if np.isfinite(found := _mean_abs(base)) else IMPOSSIBLE
    base_loss, declared_fits = case.loss(base), _is_rounding(base, case.scale)
    tokens = sum(len(x) for x in base)
    rows: list[HypothesisFit] = []
    best: HypothesisFit | None = None
    best_loss: Differences = []
    for hypothesis in _hypotheses(case, like, with_prompts=not of_engine):
        d = hypothesis.differences()
        if not np.isfinite(left := _mean_abs(d)):
            rows.append(HypothesisFit(hypothesis.name, hypothesis.says, None))
            continue
        loss = case.loss(d)
        low, high = _gain(base_loss, loss)
        at_floor = _is_rounding(d, case.scale)
        settles = at_floor and not declared_fits and not hypothesis.is_fitted
        enough = before > SMALLEST and tokens >= (FITTED if hypothesis.is_fitted else ENOUGH)
        wins = bool((low > 0 or settles) and left <= LEAVES * before and enough)
        is_named = wins and (at_floor or left <= EXPLAINS * before)
        rows.append(HypothesisFit(hypothesis.name, hypothesis.says, left, (low, high), wins, at_floor, is_named))
        if high > 0 and (best is None or _gain(best_loss, loss)[0] > 0 or (wins and not best.wins)):
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


def _gain(before: Differences, after: Differences) -> tuple[float, float]:
    """Interval of the mean improvement of a loss."""
    return mean_interval([b - a for b, a in zip(before, after, strict=True)], CERTAIN)


def _is_rounding(d: Differences, scale: Sequence[np.ndarray]) -> bool:
    """Whether rounding explains all but a few tokens, which a hypothesis may call impossible."""
    kept = [(x[np.isfinite(x)], s[np.isfinite(x)]) for x, s in zip(d, scale, strict=True)]
    if not any(len(x) for x, _ in kept):
        return False
    found = judge([x for x, _ in kept], [s for _, s in kept])
    return found.explained and sum(len(x) for x in d) - found.tokens <= max(1, FEW * found.tokens)


def _mean_abs(d: Differences) -> float:
    flat = np.concatenate(d)
    flat = flat[np.isfinite(flat)]
    return float(np.abs(flat).mean()) if len(flat) else float("inf")


def _loss(d: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """log(1 + z²), z in units of rounding."""
    found: np.ndarray = np.log1p((np.where(np.isfinite(d), np.abs(d), IMPOSSIBLE) / scale) ** 2)
    return found


@dataclass
class _Case:
    """The rollouts of this stage with their logits."""

    trainer: Trainer
    rollouts: list[Rollout]
    logits: list[Tensor]
    sampling: Sampling
    scale: Differences
    edges: Sequence[Sequence[bool]]

    def __post_init__(self) -> None:
        self.engine = [np.asarray(r.logprobs) for r in self.rollouts]
        self.weight = [np.ones(len(x)) for x in self.scale]
        some = self.edges[: len(self.scale)]
        if 0 < sum(map(sum, some)) <= max(1, FEW * sum(len(x) for x in self.scale)):
            self.weight = [1.0 - np.asarray(edge, float) for edge in some]
        self.found: dict[str, Differences] = {}

    def loss(self, d: Differences) -> Differences:
        """Of every token."""
        return [w * _loss(x, s) for x, s, w in zip(d, self.scale, self.weight, strict=True)]

    def against(self, sampling: Sampling) -> Differences:
        """The engine's numbers minus the trainer's in the terms of a sampling."""
        terms = "raw" if sampling.logprobs_mode == "raw" else repr(sampling)
        if terms not in self.found:
            own = [expected(x, r, sampling) for r, x in zip(self.rollouts, self.logits, strict=True)]
            self.found[terms] = differences(self.engine, own)
        return self.found[terms]

    def reread(self, prompts: list[list[int]]) -> Differences:
        """With other prompts."""
        some = [replace(r, prompt=p) for r, p in zip(self.rollouts, prompts, strict=True)]
        own = [expected(x, r, self.sampling) for r, x in zip(some, self.trainer.logits(some), strict=True)]
        return differences(self.engine, own)


# ---- the hypotheses, the simplest first


def _hypotheses(case: _Case, like: float, with_prompts: bool) -> Iterator[Hypothesis]:
    yield from _processing(case)
    yield from _misplaced(case)
    if with_prompts:
        yield from _prompts(case)
    yield from _fitted(case, like)


def _sampled(case: _Case, name: str, says: str, sampling: Sampling, is_fitted: bool = False) -> Hypothesis:
    """Processed log-probabilities under another sampling."""
    sampling = replace(sampling, logprobs_mode="processed")
    return Hypothesis(name, says, lambda: case.against(sampling), is_fitted)


def _processing(case: _Case) -> Iterator[Hypothesis]:
    """Raw, processed, processed but for one step, or by the checkpoint's own defaults, which engines may take over."""
    declared = case.sampling
    neutral = Sampling(declared.max_new_tokens, seed=declared.seed, stop=declared.stop)
    steps = [step for step in STEPS if getattr(declared, step) != getattr(neutral, step)]
    raw = "the engine returns raw log-probabilities, of the model's own logits"
    yield Hypothesis("raw log-probabilities", raw, lambda: case.against(RAW))
    words = ", ".join(steps).replace("_", " ") or "no step"
    says = f"the engine returns processed log-probabilities ({words})"
    yield _sampled(case, "processed log-probabilities", says, declared)
    for step in steps:
        name = step.replace("_", " ")
        says = f"the engine's log-probabilities are processed, but without {name}"
        yield _sampled(case, f"{name} not applied", says, replace(declared, **{step: getattr(neutral, step)}))
    config = getattr(case.trainer.model, "generation_config", None)
    defaults = {step: value for step in STEPS if (value := getattr(config, step, None)) is not None}
    if (own := replace(neutral, **defaults)) != neutral:
        says = ", ".join(f"{step} {getattr(own, step):g}" for step in STEPS if getattr(own, step) != getattr(neutral, step))
        yield _sampled(case, "the checkpoint's generation defaults", f"the checkpoint's defaults are used: {says}", own)


def _misplaced(case: _Case) -> Iterator[Hypothesis]:
    """Log-probabilities at the wrong token."""
    engine = case.engine
    trainer = [e - x for e, x in zip(engine, case.against(case.sampling), strict=True)]

    def shifted(here: slice, there: slice) -> Differences:
        found = differences(engine, trainer)
        for moved, e, own in zip(found, engine, trainer, strict=True):
            moved[here] = e[here] - own[there]
        return found

    for what, places in SHIFTS.items() if all(len(x) > 2 for x in engine) else ():
        says = f"the log-probability at each token is that of the {what} token"
        yield Hypothesis(f"of the {what} token", says, partial(shifted, *places))


def _prompts(case: _Case) -> Iterator[Hypothesis]:
    """Prompts with another beginning than the trainer reads: without the BOS token, or with one more."""
    bos = getattr(case.trainer.tokenizer, "bos_token_id", None)
    prompts = [r.prompt for r in case.rollouts]
    if bos is None:
        return
    if any(p[0] == bos and len(p) > 1 for p in prompts):
        cut = [p[1:] if p[0] == bos and len(p) > 1 else p for p in prompts]
        yield Hypothesis("no BOS", "the engine reads prompts without the BOS token", lambda: case.reread(cut))
    more = [[bos, *p] for p in prompts]
    yield Hypothesis("one BOS more", "the engine reads prompts with one BOS token more", lambda: case.reread(more))


def _fitted(case: _Case, like: float) -> Iterator[Hypothesis]:
    """Temperature alone, with top-p and with top-k; then a repetition penalty."""
    still = replace(case.sampling, temperature=1.0, top_p=1.0, top_k=0)  # the declared penalty stays
    grid = _Grid(case, still)
    for fits_temperature, kind in ((True, ""), (False, "top_p"), (True, "top_p"), (False, "top_k"), (True, "top_k")):
        yield from grid.best(fits_temperature, kind, like)
    still = replace(still, temperature=case.sampling.temperature or 1.0, logprobs_mode="processed")

    def loss(penalty: float) -> float:
        return float(np.concatenate(case.loss(case.against(replace(still, repetition_penalty=float(penalty))))).mean())

    penalty = _least(loss, 1.0, 2.0, 2e-3)
    says = f"the engine applies a repetition penalty of {penalty:.3g}"
    yield _sampled(case, f"repetition penalty {penalty:.3g}", says, replace(still, repetition_penalty=penalty), is_fitted=True)


def _least(loss: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    from scipy.optimize import minimize_scalar

    options = {"xatol": tolerance, "maxiter": 24}
    return float(minimize_scalar(loss, bounds=(low, high), method="bounded", options=options).x)


class _Grid:
    """The difference of every token at each temperature, with every truncation at once."""

    def __init__(self, case: _Case, still: Sampling) -> None:
        self.case = case
        self.rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        """By rollout: logits, less the largest; the greatest in order; the own token's; and how many are likelier."""
        for x, r in zip(case.logits, case.rollouts, strict=True):
            z = processed(x.double(), still, prefixes(r))
            z = z - z.amax(-1, keepdim=True)
            own = z.gather(1, torch.tensor(r.completion).unsqueeze(1))
            greatest = z.topk(min(COLUMNS, z.shape[-1])).values
            self.rows.append((z.float(), greatest, own, (z > own).sum(-1, keepdim=True)))
        self.engine, self.scale, self.weight = (np.concatenate(x) for x in (case.engine, case.scale, case.weight))
        self.lengths = [len(x) for x in case.engine]
        self.found: dict[float, dict[str, np.ndarray]] = {}

    def best(self, fits_temperature: bool, kind: str, like: float) -> Iterator[Hypothesis]:
        """The temperature and the truncation of a kind with the least loss; nothing where that is what was declared.

        The declared temperature stays unless one is fitted, and where the best one is as near to it as `like`.
        """
        sampling, values = self.case.sampling, TRUNCATIONS[kind]
        t = declared = 1.0 if sampling.logprobs_mode == "raw" else sampling.temperature or 1.0
        tried = {declared}
        if fits_temperature:
            first = min(range(len(TEMPERATURES)), key=lambda i: self._loss(TEMPERATURES[i], kind))
            ends = TEMPERATURES[max(first - 1, 0)], TEMPERATURES[min(first + 1, len(TEMPERATURES) - 1)]
            t = _least(lambda t: self._loss(t, kind), *ends, 1e-5)
            tried = set(self.found)
            if abs(t / declared - 1) <= like:
                t, fits_temperature, tried = declared, False, {declared}
        at = int(self._losses(t, kind).mean(1).argmin())
        d = self._at(t)[kind][at]
        if kind and np.allclose(d, self._at(t)[""][0], atol=SMALLEST):  # it cuts nothing off
            return
        low, high = self._range(sorted(tried), kind)
        names, words = [], []
        if t != 1.0:
            names.append(f"temperature {t:.3g}")
            words.append(f"divided by {t:.3g}" + (f" ({low[0]:.3g} to {high[0]:.3g})" if fits_temperature else ""))
        if kind:
            names.append(f"{kind}={values[at]:g}")
            words.append(f"renormalised over {kind}={values[at]:g} ({low[1]:g} to {high[1]:g})")
        if words:
            apart = np.split(d, np.cumsum(self.lengths)[:-1])
            yield Hypothesis(", ".join(names), f"the engine's logits are {' and '.join(words)}", lambda: apart, is_fitted=True)

    def _losses(self, t: float, kind: str) -> np.ndarray:
        """By truncation and token."""
        found: np.ndarray = self.weight * _loss(self._at(t)[kind], self.scale)
        return found

    def _loss(self, t: float, kind: str) -> float:
        return float(self._losses(t, kind).mean(1).min())

    def _range(self, temperatures: list[float], kind: str) -> tuple[list[float], list[float]]:
        """95 % of temperature and truncation, by a bootstrap over rollouts, or over tokens where there are few."""
        pairs = np.array([(t, value) for t in temperatures for value in TRUNCATIONS[kind]])
        losses = np.concatenate([self._losses(t, kind) for t in temperatures])
        if len(self.lengths) >= FEWEST:
            losses = np.add.reduceat(losses, np.cumsum([0, *self.lengths[:-1]]), axis=1)
        count = losses.shape[1]
        drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), 200)
        low, high = np.quantile(pairs[(losses @ drawn.T).argmin(0)], (0.025, 0.975), axis=0).tolist()
        return low, high

    def _at(self, t: float) -> dict[str, np.ndarray]:
        """By kind, the differences (values, tokens) at a temperature."""
        if t not in self.found:
            parts: dict[str, list[Tensor]] = {kind: [] for kind in TRUNCATIONS}
            for logits, greatest, own, rank in self.rows:
                total = (logits / t).exp_().sum(-1, keepdim=True, dtype=torch.float64)
                mass, last = (greatest / t).exp_().cumsum(-1), greatest.shape[1] - 1
                nuclei = torch.tensor([TRUNCATIONS["top_p"]], dtype=mass.dtype) * total
                counts = torch.tensor([[min(int(k) - 1, last) for k in TRUNCATIONS["top_k"]]]).repeat(len(own), 1)
                parts[""].append((own / t - total.log()).T)
                for kind, ends in (("top_p", torch.searchsorted(mass, nuclei).clamp_max(last)), ("top_k", counts)):
                    parts[kind].append(torch.where(rank <= ends, own / t - mass.gather(1, ends).log(), -torch.inf).T)
            self.found[t] = {kind: self.engine - torch.cat(made, 1).numpy() for kind, made in parts.items()}
        return self.found[t]
