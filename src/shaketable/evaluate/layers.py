"""Decoder layer by decoder layer: activations and gradients under a fault, and a model that skips some of its layers.

`mechanism` reads (prompt, completion) pairs with teacher forcing, forward and backward, clean or under a plan, over every token
that is not padding. Gradients come from `torch.autograd.grad`, which leaves every `.grad` alone.

A skipped layer hands on its input: of h + f(h) the h is left. It stays in the list, so that all others keep their numbers and
a plan means the same layers; faults of layers that are not run are dropped (`without`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.capture.recorder import watched
from shaketable.errors import InertError, ModelError, NoMatchError, ShaketableError
from shaketable.evaluate.reading import Pair, pair_logits
from shaketable.evaluate.score import Evaluation, Evaluator, in_phases
from shaketable.faults.noise import wide
from shaketable.faults.sums import with_float64
from shaketable.inject import Ledger, inject
from shaketable.inject.attach import forget_compiled
from shaketable.ledger.ledger import Measured
from shaketable.plan import Plan
from shaketable.sites.match import targets
from shaketable.sites.phases import phase
from shaketable.sites.structure import Anatomy, find_layers

PAIRS = 32
"""Answers that `readings` reads: enough for stable means, little beside the scores themselves."""


@dataclass(frozen=True)
class LayerReading:
    """One decoder layer. Its output is a residual stream: the sum fills up what a dead zone takes out of a product inside."""

    layer: int
    rms: float
    """Of the output as the next layer sees it; of all values, so that one that is not finite shows."""
    kurtosis: float
    """m4 / m2² − 3 of the finite values of that output."""
    zeros: float
    """Share of that output which is exactly 0."""
    survival: float
    """Of the values not 0 when the layer had computed them, the share that is not 0 when the next layer reads them."""
    survival_inside: float | None
    """The same over all that the plan hit going forward in this layer, from the ledger; None without a fire."""
    grad_norm: float | None
    """L2 norm of the mean loss's gradient by the layer's trained parameters; None if none is."""


@dataclass(frozen=True)
class Mechanism:
    loss: float
    """Mean cross entropy of a completion's token, in nats."""
    tokens: int
    """Tokens of the completions."""
    layers: list[LayerReading]
    """In order; empty for a model without decoder layers."""
    ledger: dict[str, Any] | None
    """The proof that the plan acted; None without a plan."""


def mechanism(model: Any, sequences: Sequence[Pair], plan: Plan | None, *, pad: int) -> Mechanism:
    """Read (prompt, completion) pairs of tokens in one batch, forward and backward, with a model in eval mode.

    Raises:
        InertError: A clause of the plan never fired or changed nothing.
    """
    pairs = sorted(sequences, key=lambda pair: -len(pair[0]) - len(pair[1]))
    sizes = torch.tensor([[len(prompt) + len(completion)] for prompt, completion in pairs])
    real = torch.arange(int(sizes.max())) < sizes  # rows are padded on the right
    layers, _ = find_layers(model)
    computed: dict[str, Tensor] = {}
    seen: dict[str, dict[str, float]] = {}

    def note(name: str, x: Tensor, y: Tensor) -> None:
        computed[name] = y.detach()[real.to(y.device)]

    def compare(name: str, x: Tensor, y: Tensor) -> None:
        seen[name] = _activations(computed.pop(name), y.detach()[real.to(y.device)])

    trained = [p for p in model.parameters() if p.requires_grad]
    faults = nullcontext() if plan is None else inject(model, in_phases(plan, ()))
    with (
        phase("eval"),
        torch.enable_grad(),
        _outputs(layers, note),  # before the plan's own hooks: hooks run in the order they were set
        faults as ledger,
        _outputs(layers, compare),
    ):
        logits, wanted = pair_logits(model, pairs, pad)
        loss = torch.nn.functional.cross_entropy(wide(logits), wanted)
        found = torch.autograd.grad(loss, trained, allow_unused=True) if trained else ()
    gradients = dict(zip(trained, found, strict=True))
    if lacking := next((i for i in range(len(layers)) if str(i) not in seen), None) is not None:
        raise ModelError(f"decoder layer {lacking} was not called in a forward")
    readings = [
        LayerReading(
            layer=i,
            survival_inside=None if ledger is None else _survival_inside(i, ledger),
            grad_norm=_norm(layer.parameters(), gradients),
            **seen[str(i)],
        )
        for i, layer in enumerate(layers)
    ]
    return Mechanism(loss.item(), len(wanted), readings, None if ledger is None else ledger.to_dict())


@contextmanager
def _outputs(layers: list[nn.Module], look: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Look at what layers return. Compiled graphs do not see hooks come and go."""
    try:
        with watched({str(i): layer for i, layer in enumerate(layers)}, look):
            forget_compiled()
            yield
    finally:
        forget_compiled()


def _activations(computed: Tensor, faulty: Tensor) -> dict[str, float]:
    """What is read of a layer's output, as it was computed and as the next layer sees it."""
    computed, y = with_float64(computed), with_float64(faulty).double()
    alive, still = computed.ne(0), y.ne(0)
    finite = y[y.isfinite()]
    differ = len(finite) > 0 and bool(finite.min() < finite.max())
    away = finite - finite.mean()
    return {
        "rms": float(y.square().mean().sqrt()),
        "kurtosis": float(away.pow(4).mean() / away.square().mean() ** 2 - 3) if differ else math.nan,
        "zeros": float((~still).double().mean()),
        "survival": float((alive & still).sum() / alive.sum()) if alive.any() else math.nan,
    }


def _norm(parameters: Iterable[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor | None]) -> float | None:
    """L2 norm of the gradients of these parameters, squares summed in float64; None when none of them is trained."""
    trained = [p for p in parameters if p.requires_grad]
    known = [with_float64(g).double() for p in trained if (g := gradients[p]) is not None]
    return math.sqrt(math.fsum(float(g.square().sum()) for g in known)) if trained else None


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
    found, was_training = [], evaluator.model.training
    evaluator.model.eval()
    for evaluation in done:
        plan = evaluation.condition.plan
        try:
            read = asdict(mechanism(evaluator.model, pairs, plan, pad=evaluator.decoder.pad))
        except InertError as error:  # a rare fault that hit in the scores, which prove it, and not in these few answers
            read = {"loss": None, "layers": [], "note": str(error)}
        found.append({"condition": evaluation.condition.name, **read})
    evaluator.model.train(was_training)
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
        layers[i].forward = partial(_hand_on, len(returned[i]) if isinstance(returned[i], tuple) else None)


def _hand_on(size: int | None, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of the forward of a layer that returned a tuple of this size, or a tensor."""
    return hidden_states if size is None else (hidden_states, *[None] * (size - 1))


def without(plan: Plan, skipped: Collection[int], model: nn.Module) -> Plan | None:
    """A plan without the clauses that hit skipped layers alone; None when none is left."""
    anatomy, kept = Anatomy.of(model), []
    for clause in plan.clauses:
        if clause.site.level == "op":
            hit: set[int | None] = {None} if clause.site.layers is None else set(clause.site.layers)
        else:
            hit = {target.part.layer for target in targets(clause, anatomy)}
        if clause.site.level == "layer" and 0 < len(hit & set(skipped)) < len(hit):
            raise ShaketableError(f"{clause.text()} names skipped layers and others: write a clause for the others")
        if not hit <= set(skipped):
            kept.append(clause)
    return plan.model_copy(update={"clauses": tuple(kept)}) if kept else None
