"""One line for each stage of a mismatch, as the terminal and the page show it."""

from __future__ import annotations

from shaketable.mismatch.results import Deviation, Floor, Gap, Mismatch, OperatorResults, Semantics, Shares, Weights

STAGES = ("gap", "returned", "floor", "semantics", "weights", "routing", "operators", "shares")


def lines(found: Mismatch) -> dict[str, str]:
    """The line of every stage by its name."""
    return {
        "gap": _gap(found.gap),
        "returned": _returned(found.returned),
        "floor": _floor(found.floor, found),
        "semantics": _semantics(found.semantics),
        "weights": _weights(found.weights),
        "routing": _routing(found),
        "operators": _operators(found.operators),
        "shares": _shares(found.shares),
    }


def adding_up(shares: Shares) -> str:
    """How far the shares add up."""
    together = shares.together
    if together is None:
        return "no difference moves a probability"
    if 0.8 <= together <= 1.25:
        return f"the families add up: all together make {together:.2f} times the sum of their KL"
    how = "cancel" if together < 1 else "amplify each other"
    return f"the families do not add up: all together make {together:.2f} times the sum of their KL, their errors {how}"


def _gap(gap: Gap) -> str:
    low, high = gap.interval.k3
    kl = f"KL k1 {gap.k1:.3g}, k3 {gap.k3:.3g} ({low:.2g} to {high:.2g} over {gap.interval.over})"
    size = f"mean |Δ log p| {gap.mean_abs:.3g}, largest {gap.largest:.3g}"
    many = f"{gap.tokens:,} tokens of {gap.rollouts} rollouts"
    return f"{kl}; {size}; {gap.outside:.1%} of ratios outside [0.9, 1.1]; {many}"


def _returned(found: Deviation | None) -> str:
    if found is None:
        return "not looked at"
    if found.explained:
        return (
            f"the engine's own logits give the returned numbers: mean |Δ log p| {found.mean_abs:.3g}, {found.tokens:,} tokens"
        )
    where = "" if found.worst_pair is None else f" (token {found.worst[1]} of rollout {found.worst[0]})"
    return f"not those of the engine's own logits: {found.says}{where}"


def _floor(floor: Floor, found: Mismatch) -> str:
    wrong = sum(bool(r.wrong) for r in floor.rows)
    within = f"{wrong} ways of computing differ by more than rounding" if wrong else "every way of computing is within rounding"
    rounding = f"rounding in {found.rounding.dtype} makes {found.rounding.mean_abs:.3g}"
    times = f"the gap is {found.gap.judged.mean_ratio:.3g} times that"
    row = floor.largest
    return f"mean |Δ log p| {row.mean_abs:.3g} ({row.side}, {row.variant}): {within}; {rounding}, and {times}"


def _semantics(found: Semantics) -> str:
    tried = f"{len(found.rows)} tried on {found.tokens} tokens"
    if (named := found.named) is not None:
        return f"{named.says} (leaves {named.mean_abs:.2e} of {found.mean_abs:.2e}); {tried}"
    if (best := found.best) is None:
        return f"no hypothesis is better than what was declared; {tried}"
    low, high = best.gain
    how = f"leaves {best.mean_abs:.2e} of {found.mean_abs:.2e}; gain {low:.2g} to {high:.2g} a token"
    return f"none explains the gap; best: {best.says} ({how}); {tried}"


def _weights(found: Weights | None) -> str:
    if found is None:
        return "not looked at"
    if found.differing:
        return f"{len(found.differing)} of {found.compared} parameters differ"
    cast = f", all cast to {found.engine_dtype}" if found.cast else ""
    return f"{found.compared} parameters, bit for bit the trainer's{cast}"


def _routing(found: Mismatch) -> str:
    if not found.routing:
        return "not looked at" if found.engine is None else "no experts, or the engine does not report them"
    weights = [r.weights for r in found.routing if r.weights is not None]
    apart = f"; weights of the same experts differ by up to {max(weights):.2g}" if weights else ""
    rows = ", ".join(f"layer {r.layer} {r.differs:.2%}" for r in found.routing)
    return f"tokens whose experts differ: {rows}{apart}"


def _operators(found: OperatorResults | None) -> str:
    if found is None:
        return "not looked at"
    wrong = f"{len(found.wrong)} are wrong" if found.wrong else "all inside of their rounding intervals"
    return f"{found.count} in {' and '.join(found.phases)} on {found.tokens} tokens: {wrong}"


def _shares(found: Shares | None) -> str:
    if found is None:
        return "not measured"
    if not found.families:
        return "no operator differs"
    given = f"they explain {found.explained:.0%} of the gap, token by token"
    return f"KL {found.kl:.3g} of all differences together; {given}"
