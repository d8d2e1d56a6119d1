"""Decoder layer by decoder layer: activations and gradients under a fault, and a model that skips some of its layers.

`mechanism` reads (prompt, completion) pairs with teacher forcing, forward and backward, clean or under a plan. Per layer,
over every token that is not padding:

    rms          of the layer's output as the next layer sees it. Of all values: one that is not finite shows.
    kurtosis     m4 / m2² − 3 of the finite values of that output.
    zeros        share of that output which is exactly 0.
    survival     of the values not 0 when the layer had computed them, the share that is not 0 when the next layer reads them.
    survival_inside   the same over all that the plan hit going forward in this layer, from the ledger; None without a fire.
    grad_norm    L2 norm of the mean loss's gradient by the layer's trained parameters; None if none is.

Two kinds of survival, because a layer returns a residual stream: the sum fills up what a dead zone takes out of a product
inside the layer, so `survival` is 1 unless the output itself is hit.

Every number is that of one large batch, however the pairs are batched: gradients are summed before their norm is taken, and
moments are moved to a common mean. Gradients come from `torch.autograd.grad`, which leaves every `.grad` alone.

A skipped layer hands on its input: of h + f(h) the h is left. It stays in the list, so that all others keep their numbers and
a plan means the same layers; faults of layers that are not run are dropped (`without`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shaketable.capture.recorder import watched
from shaketable.errors import InertError, ModelError, NoMatchError, ShaketableError
from shaketable.evaluate.decoding import batches
from shaketable.evaluate.reading import Pair, pair_logits
from shaketable.evaluate.score import Evaluation, Evaluator, in_phases
from shaketable.faults.noise import wide
from shaketable.faults.sums import with_float64
from shaketable.inject import Ledger, inject
from shaketable.inject.attach import forget_compiled
from shaketable.ledger.ledger import Measured
from shaketable.plan import Clause, Plan
from shaketable.sites.match import targets
from shaketable.sites.phases import phase
from shaketable.sites.structure import Anatomy, find_layers

PAIRS = 32
"""Answers that `readings` reads: enough for stable means, little beside the scores themselves."""


@dataclass(frozen=True)
class LayerReading:
    """One decoder layer; the module's docstring defines the numbers."""

    layer: int
    rms: float
    kurtosis: float
    zeros: float
    survival: float
    survival_inside: float | None
    grad_norm: float | None


@dataclass(frozen=True)
class Mechanism:
    """What was read, clean or under a plan."""

    loss: float
    """Mean cross entropy of a completion's token, in nats."""
    tokens: int
    """Tokens of the completions."""
    layers: list[LayerReading]
    """In order; empty for a model without decoder layers."""
    outside_grad_norm: float | None
    """Gradient norm of the trained parameters outside of the decoder layers; None if there are none."""
    ledger: dict[str, Any] | None
    """The proof that the plan acted; None without a plan."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a number that is not finite is None."""
        strict: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return strict


def mechanism(model: Any, sequences: Sequence[Pair], plan: Plan | None, *, batch_size: int, pad: int) -> Mechanism:
    """Read (prompt, completion) pairs of tokens, forward and backward, and leave the model as it was.

    Raises:
        InertError: A clause of the plan never fired or changed nothing.
    """
    tokens = _check(sequences)
    whole = [[*prompt, *completion] for prompt, completion in sequences]
    layers, _ = find_layers(model)
    watch, gradients, loss = _Outputs(layers), _Gradients(model), 0.0
    before, after = watch.hooked(faulty=False), watch.hooked(faulty=True)
    shaken = nullcontext() if plan is None else inject(model, in_phases(plan, ()))
    with _in_eval(model), phase("eval"), torch.enable_grad(), before, shaken as ledger, after:
        for indices in batches(whole, batch_size):
            chosen = [sequences[i] for i in indices]
            watch.mask = _real([whole[i] for i in indices])
            logits, wanted = pair_logits(model, chosen, pad)
            share = torch.nn.functional.cross_entropy(wide(logits), wanted, reduction="sum") / tokens
            gradients.add(share)
            loss += share.item()
    readings = [_reading(i, watch.rows[i], gradients.norm(layer.parameters()), ledger) for i, layer in enumerate(layers)]
    inside = {p for layer in layers for p in layer.parameters()}
    outside = gradients.norm(p for p in model.parameters() if p not in inside)
    return Mechanism(loss, tokens, readings, outside, None if ledger is None else ledger.to_dict())


def _check(sequences: Sequence[Pair]) -> int:
    """The number of tokens that are predicted."""
    if not all(len(prompt) for prompt, _ in sequences):
        raise ShaketableError("a prompt has no tokens: there is nothing to continue")
    tokens = sum(len(completion) for _, completion in sequences)
    if tokens == 0:
        raise ShaketableError("no completion has a token: there is no loss to read")
    return tokens


def _real(rows: Sequence[Sequence[int]]) -> Tensor:
    """Tokens that are no padding, of rows padded on the right."""
    return torch.arange(max(map(len, rows))) < torch.tensor([[len(row)] for row in rows])


@contextmanager
def _in_eval(model: nn.Module) -> Iterator[None]:
    """Eval mode; afterwards every module has its own flag again, for they need not agree."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


class _Gradients:
    """The gradient of the loss by everything that is trained, summed over batches."""

    def __init__(self, model: nn.Module) -> None:
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.sums: dict[Tensor, Tensor] = {}

    def add(self, loss: Tensor) -> None:
        """One batch's share of the loss. A parameter that the loss does not depend on has a gradient of zero."""
        if not self.trained:
            return
        found = torch.autograd.grad(loss, self.trained, allow_unused=True)
        for parameter, gradient in zip(self.trained, found, strict=True):
            if gradient is not None:
                self.sums[parameter] = wide(gradient) + self.sums.get(parameter, 0.0)

    def norm(self, parameters: Iterable[nn.Parameter]) -> float | None:
        """L2 norm over these parameters, squares summed in float64; None when none of them is trained."""
        trained = [p for p in parameters if p.requires_grad]
        squares = [float(with_float64(self.sums[p]).double().square().sum()) for p in trained if p in self.sums]
        return math.sqrt(math.fsum(squares)) if trained else None


class _Outputs:
    """Sees the output of every layer before and after the plan's own hooks do: hooks run in the order they were set.

    What activation checkpointing computes a second time is seen twice: twice the same sums, and no other ratio of them.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers
        self.rows: list[list[list[float]]] = [[] for _ in layers]
        self._computed: dict[int, Tensor] = {}
        self.mask = torch.ones(1, 1, dtype=torch.bool)
        """The tokens of the present batch that are no padding."""

    @contextmanager
    def hooked(self, *, faulty: bool) -> Iterator[None]:
        """Look at what layers return, as hit by the hooks set so far. Compiled graphs do not see hooks come and go."""

        def look(name: str, x: Tensor, y: Tensor) -> None:
            layer, values = int(name), y.detach()
            values = values[self.mask.to(values.device)]
            if faulty:
                self.rows[layer].append(_row(self._computed.pop(layer), values))
            else:
                self._computed[layer] = values

        try:
            with watched({str(i): layer for i, layer in enumerate(self.layers)}, look):
                forget_compiled()
                yield
        finally:
            forget_compiled()


def _row(computed: Tensor, faulty: Tensor) -> list[float]:
    """What is kept of one call: values, sum of squares, zeros, alive, survived; and of what is finite: how many, their
    mean, sums of their 2nd, 3rd and 4th powers about it, the least and the largest."""
    computed, faulty = with_float64(computed), with_float64(faulty)
    alive, still, y = computed.ne(0), faulty.ne(0), faulty.double()
    finite = y.isfinite()
    mean = y.where(finite, 0.0).sum() / finite.sum()
    away = (y - mean).where(finite, 0.0)
    counts = [still.numel() - still.sum(), alive.sum(), (alive & still).sum(), finite.sum()]
    ends = [y.where(finite, math.inf).min(), y.where(finite, -math.inf).max()]
    sums = [y.square().sum(), *counts, mean, *(away.pow(k).sum() for k in (2, 3, 4)), *ends]
    return [y.numel(), *torch.stack([x.to(y.device).double() for x in sums]).tolist()]


def _reading(layer: int, rows: list[list[float]], grad_norm: float | None, ledger: Ledger | None) -> LayerReading:
    if not rows:
        raise ModelError(f"decoder layer {layer} was not called in a forward")
    values, square, zeros, alive, survived = map(math.fsum, list(zip(*rows, strict=True))[:5])
    return LayerReading(
        layer=layer,
        rms=math.sqrt(square / values),
        kurtosis=_kurtosis(np.array([row[5:] for row in rows if row[5]])),
        zeros=zeros / values,
        survival=survived / alive if alive else math.nan,
        survival_inside=None if ledger is None else _survival_inside(layer, ledger),
        grad_norm=grad_norm,
    )


def _kurtosis(rows: npt.NDArray[np.float64]) -> float:
    """Of all values together: each row's sums of powers are moved from its own mean to the common one."""
    if not rows.size or rows[:, 5].min() == rows[:, 6].max():
        return math.nan
    n, mean, second, third, fourth = rows.T[:5]
    d = mean - np.average(mean, weights=n)
    m2, m4 = second + n * d**2, fourth + 4 * d * third + 6 * d**2 * second + n * d**4
    return float(n.sum() * m4.sum() / m2.sum() ** 2 - 3)


def _survival_inside(layer: int, ledger: Ledger) -> float | None:
    sums = Measured()
    for spot in (spot for site in ledger.sites for spot in site.spots.values() if spot.layer == layer):
        sums.add(spot.forward)
    return sums.survived / sums.alive if sums.alive else None


def readings(evaluator: Evaluator, done: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """One reading per condition, on the first answers that the clean model gave; the first of `done` is clean."""
    clean = done[0].completions
    pairs = [(p, c.tokens) for p, c in zip(evaluator.prompts, clean, strict=True) if c.tokens][:PAIRS]
    if not pairs:
        return []
    found = []
    for evaluation in done:
        plan = evaluation.condition.plan
        try:
            read = mechanism(evaluator.model, pairs, plan, batch_size=PAIRS, pad=evaluator.decoder.pad).to_dict()
        except InertError as error:  # a rare fault that hit in the scores, which prove it, and not in these few answers
            read = {"loss": None, "layers": [], "note": str(error)}
        found.append({"condition": evaluation.condition.name, **read})
    return found


# ---- skipped layers


def check_skipped(model: nn.Module, skipped: Collection[int]) -> list[nn.Module]:
    """The decoder layers of a model from which these may be skipped; raises when they may not."""
    layers, _ = find_layers(model)
    if not layers or max(skipped) >= len(layers):
        raise NoMatchError(f"cannot skip layer {max(skipped)}: this model has layers 0-{len(layers) - 1}")
    if 0 in skipped:
        raise ShaketableError("layer 0 cannot be skipped: the length of a cache is read from it")
    return layers


@torch.no_grad()
def skip_layers(model: Any, skipped: Sequence[int]) -> None:
    """Have these decoder layers hand on what they are given, for as long as the model lives."""
    layers, returned = check_skipped(model, skipped), dict[int, Any]()
    hooks = [layers[i].register_forward_hook(lambda m, a, y, i=i: returned.update({i: y})) for i in skipped]
    model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.get_input_embeddings().weight.device))
    for hook in hooks:
        hook.remove()
    for i in skipped:
        layers[i].forward = _HandOn(len(returned[i]) if isinstance(returned[i], tuple) else None)


class _HandOn:
    """In place of a layer's forward."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        """Of the tuple that the layer returned; None where it returned a tensor."""

    def __call__(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states if self.size is None else (hidden_states, *[None] * (self.size - 1))


def without(plan: Plan, skipped: Collection[int], model: nn.Module) -> Plan | None:
    """What is left of a plan on a model that does without some layers; None when nothing is."""
    anatomy = Anatomy.of(model)
    clauses = tuple(kept for clause in plan.clauses if (kept := _elsewhere(clause, skipped, anatomy)) is not None)
    return plan.model_copy(update={"clauses": clauses}) if clauses else None


def _elsewhere(clause: Clause, skipped: Collection[int], anatomy: Anatomy) -> Clause | None:
    if clause.site.level == "op":
        return None if clause.site.layers is not None and set(clause.site.layers.indices()) <= set(skipped) else clause
    hit = {target.part.layer for target in targets(clause, anatomy)}
    if hit <= set(skipped):
        return None
    if clause.site.level != "layer" or not hit & set(skipped):
        return clause
    names = tuple(str(layer) for layer in sorted(layer for layer in hit if layer is not None) if layer not in skipped)
    return clause.model_copy(update={"site": clause.site.model_copy(update={"names": names})})
