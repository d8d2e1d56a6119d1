"""The conclusion of all stages: LEGAL, DEFECT or INCONCLUSIVE, in one sentence, with what was not looked at."""

from __future__ import annotations

from typing import Literal

from shaketable.mismatch.results import Mismatch, Shares, Verdict

EXIT = {"LEGAL": 0, "DEFECT": 1, "INCONCLUSIVE": 4}
REPRODUCES = 0.5
"""Of the gap, token by token: what the recorded differences must explain before a gap above the floor is called legal."""
NEVER = (
    "an error smaller than the rounding interval of its operator",
    "an error that needs other tokens, lengths or batches than these to show",
)
LEFT = 3.0
"""Times what rounding makes: what may be left when all operators' differences were put into the trainer."""
FIX = {
    "lm_head": "compute lm_head in float32 on both sides",
    "attention": "use the same attention kernel, or accumulate it in float32, on both sides",
    "log_softmax": "sum the exponentials of the log-softmax in float64, or in blocks, on both sides",
    "residual": "keep the residual stream in float32",
}


def conclude(found: Mismatch) -> Verdict:
    """The verdict on what the stages found."""
    verdict: Literal["LEGAL", "DEFECT", "INCONCLUSIVE"]
    after, advice = "", None
    if (broken := _defect(found)) is not None:
        verdict, (stage, what) = "DEFECT", broken
    elif (doubt := _doubt(found)) is not None:
        verdict, (stage, what) = "INCONCLUSIVE", doubt
        after, advice = _best(found), _next(found)
    else:
        verdict, stage, what = "LEGAL", "gap" if found.at_floor else "shares", f"rounding only; {_checked(found)}"
        if found.shares is not None and found.shares.families:
            after = f" {causes(found.shares)}"
    return Verdict(
        verdict=verdict,
        stage=stage,
        sentence=f"{verdict}: {what}. {_gap(found)}{after}",
        exit_code=EXIT[verdict],
        next=advice,
        not_looked_at=[*found.unchecked, *found.caveats, *_unseen(found), *NEVER],
    )


def _gap(found: Mismatch) -> str:
    gap, rounding = found.gap, found.rounding
    where = f"{gap.judged.mean_ratio:.2g} times what rounding in {rounding.dtype} makes ({rounding.mean_abs:.2g})"
    lost = f" {gap.impossible} of {gap.tokens} tokens are impossible under the declared sampling." if gap.impossible else ""
    if gap.impossible == gap.tokens:
        return lost.strip()
    return f"The gap (mean |Δ log p| {gap.mean_abs:.2g}, k3 {gap.k3:.2g}) is {where}.{lost}"


def _best(found: Mismatch) -> str:
    best = found.semantics.best
    if best is None:
        return " No other meaning of the numbers fits better than the declared one."
    low, high = best.gain
    doubt = "" if low > 0 else f", though not for certain (gain {low:.2g} to {high:.2g} a token)"
    return f" The hypothesis that fits best: {best.says}, which leaves {best.mean_abs:.2g}{doubt}."


def _defect(found: Mismatch) -> tuple[str, str] | None:
    """The first link that is broken, with the most exact name that it has."""
    returned = found.returned
    if returned is None or not returned.explained:
        for semantics, what in ((found.semantics, "the gap"), (found.own_semantics, "the difference from the engine's own")):
            if semantics is not None and (named := semantics.named) is not None:
                left = "to rounding" if named.at_floor else f"to {named.mean_abs:.2g}"
                return "semantics", f"the sides mean different probabilities: {named.says}, which brings {what} down {left}"
    if found.weights is not None and (differing := found.weights.differing):
        kinds = sorted({d.kind for d in differing})
        more = f"; {len(differing)} parameters differ in all ({', '.join(kinds)})" if len(differing) > 1 else ""
        return "weights", f"the engine's {differing[0].name} {differing[0].says}{more}"
    if (operators := found.operators) is not None:
        if operators.layers_absent:
            return "operators", f"the engine's layer {operators.layers_absent[0]} is missing: none of its operators ran"
        if operators.wrong:
            first, others = operators.wrong[0], len({w.name for w in operators.wrong}) - 1
            lanes = f", {len(first.lanes)} of {first.lanes_of} lanes" if first.lanes else ""
            more = f"; {others} more operators are wrong" if others else ""
            what = f"{first.text}, looks like {first.looks_like}{lanes}{more}"
            return "operators", f"the engine's {first.name} ({first.kind}, {first.phase}) is wrong: {what}"
    for row in found.routing or ():
        trainer, engine = row.experts
        if trainer != engine:
            where = f"to {engine} experts in layer {row.layer}, the trainer to {trainer}"
            return "routing", f"the engine sends each token {where}"
    if wrong := [r for r in found.floor.rows if r.wrong]:
        return "floor", next((r for r in wrong if r.side == "engine"), wrong[0]).wrong
    if returned is not None and not returned.explained:
        says = f"the engine's returned log-probabilities are not those of its own logits: {returned.says}"
        if returned.worst_pair is not None:
            (rollout, position), (got, own) = returned.worst, returned.worst_pair
            expected = "none" if own is None else f"{own:.4g}"
            says += f"; token {position} of rollout {rollout} was returned as {got:.4g}, its own is {expected}"
        return "returned", says
    return None


def _doubt(found: Mismatch) -> tuple[str, str] | None:
    """The first link that could not be checked, or that was and does not close."""
    if found.died is not None:
        return "gap", f"the engine died ({found.died}); the stages before it ran"
    if found.unchecked:
        more = f", and {len(found.unchecked) - 1} more" if len(found.unchecked) > 1 else ""
        return "gap", f"not every link could be checked: {found.unchecked[0]}{more}"
    weights, operators, returned, judged = found.weights, found.operators, found.returned, found.gap.judged
    if returned is None:
        return "returned", "the returned log-probabilities were not looked at"
    if weights is None:
        return "weights", "weights were not looked at"
    if operators is None:
        return "operators", "operators were not looked at"
    for names, what in ((weights.missing, "does not give"), (weights.unknown, "has, and the trainer has not")):
        if names:
            return "weights", f"there are {len(names)} parameters that the engine {what}, such as {names[0]}"
    if operators.absent:
        return "operators", f"the engine did not record {len(operators.absent)} operators, such as {operators.absent[0]}"
    if (best := found.semantics.best) is not None and best.wins:
        return "semantics", f"no link is broken, but the gap is smaller if {best.says}"
    if judged.biased:
        return "gap", f"no link is broken, but {judged.says or 'the gap has a sign'}"
    return None if found.at_floor else _unclosed(found.shares)


def _unclosed(shares: Shares | None) -> tuple[str, str] | None:
    """Why the operators' differences do not explain a gap above rounding."""
    if shares is None or shares.closure is None:
        return "shares", "the gap is more than rounding, and the operators' differences were not put into the trainer"
    if shares.explained < REPRODUCES and not shares.closure.explained:
        given = f"their differences explain {max(shares.explained, 0):.0%} of the gap"
        return "operators", f"no operator is outside of its rounding interval, but {given}"
    if not shares.closure.explained and shares.closure.mean_ratio > LEFT:
        return "shares", f"the operators' differences leave more than rounding: {shares.closure.says}"
    if not shares.rest_alike:
        larger = "rollouts whose operators were not recorded have a larger gap than those which were; raise --recorded"
        return "operators", larger
    return None


def _next(found: Mismatch) -> str:
    """The command that would settle an inconclusive verdict."""
    start = f"shaketable mismatch {found.trainer.model}"
    if found.engine is None:
        return f"{start} … --engine vllm   (or --engine hf: the engine that wrote the file)"
    if found.died is not None:
        return f"{start} … -n 4   (again, with fewer or shorter rollouts)"
    if any("captured" in line for line in found.unchecked):
        return f"{start} … --engine-args '{{\"enforce_eager\": true}}'"
    if any(line.startswith("returned:") for line in found.unchecked):
        return f"{start} … --task arithmetic -n 16   (without --rollouts: does the engine repeat it on rollouts of its own?)"
    if (best := found.semantics.best) is not None and best.wins:
        return f"{start} …   (again, with the sampling declared as the best hypothesis says: {best.name})"
    if found.operators is not None and found.operators.rollouts < found.gap.rollouts:
        return f"{start} … --recorded {found.gap.rollouts}"
    return f"shaketable locate {found.trainer.model}   (judges operators of any model), and compare more rollouts: -n 64"


def _checked(found: Mismatch) -> str:
    weights, operators = found.weights, found.operators
    assert weights is not None
    assert operators is not None
    cast = f", cast to {weights.engine_dtype}" if weights.cast else ""
    inside = f"{operators.count} operators are inside of their rounding intervals"
    return f"{weights.compared} parameters are equal{cast}, {inside}"


def causes(shares: Shares) -> str:
    """Shares with their intervals, and what to do first, where these tokens can tell."""
    parts = ", ".join(f"{r.family} {r.share:.0%} ({r.low:.0%} to {r.high:.0%})" for r in shares.families[:3])
    first, *others = shares.leaders
    if others:
        why = f"the interval of {first} overlaps that of {', '.join(others)}"
        return f"Of the KL: {parts}. Which to fix first is not certain: {why}; compare more rollouts."
    advice = FIX.get(first, f"compute {first} in the same dtype and order on both sides")
    return f"Of the KL: {parts}. First fix: {advice}."


def _unseen(found: Mismatch) -> list[str]:
    """The parts of the input that the stages did not look at."""
    lines = list(found.floor.unavailable)
    gap, weights, operators = found.gap, found.weights, found.operators
    if found.died is not None:
        stages = {"weights": weights, "operators": operators, "shares": found.shares}
        lines.append(f"{', '.join(name for name, one in stages.items() if one is None)}: the engine died")
    if weights is not None and weights.missing:
        lines.append(f"{len(weights.missing)} parameters that the engine does not give, such as {weights.missing[0]}")
    if operators is not None and operators.rollouts < gap.rollouts:
        lines.append(f"operators on {gap.rollouts - operators.rollouts} of {gap.rollouts} rollouts")
    if found.semantics.tokens < gap.tokens:
        lines.append(f"semantics on {gap.tokens - found.semantics.tokens} of {gap.tokens} tokens")
    return lines
