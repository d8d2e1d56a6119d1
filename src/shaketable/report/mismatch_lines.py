"""One line for each stage of a mismatch, as the terminal and the page show it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from shaketable.mismatch.results import Mismatch


class StageLine(NamedTuple):
    """A stage, how it ended, and its numbers."""

    stage: str
    state: Literal["pass", "fail", "shown", "absent"]
    """`shown` has numbers without a judgement."""
    text: str


def stage_lines(found: Mismatch) -> list[StageLine]:
    """All stages; the one that the verdict names has failed."""
    broken = found.stage if found.verdict == "DEFECT" else None
    return [line._replace(state="fail") if line.stage == broken else line for line in _lines(found)]


def _lines(found: Mismatch) -> Iterator[StageLine]:
    gap, rounding, floor = found.gap, found.rounding, found.floor
    low, high = gap.k3_interval
    kl = f"KL k1 {gap.k1:.3g}, k3 {gap.k3:.3g} ({low:.2g} to {high:.2g} over {gap.interval_over})"
    size = f"mean |Δ log p| {gap.mean_abs:.3g}, largest {gap.largest:.3g}"
    many = f"{gap.tokens:,} tokens of {gap.rollouts} rollouts"
    yield StageLine("gap", "shown", f"{kl}; {size}; {gap.outside:.1%} of ratios outside [0.9, 1.1]; {many}")

    if (returned := found.returned) is None:
        yield StageLine("returned", "absent", "not looked at")
    elif returned.explained:
        same = f"mean |Δ log p| {returned.mean_abs:.3g}, {returned.tokens:,} tokens"
        yield StageLine("returned", "pass", f"the engine's own logits give the returned numbers: {same}")
    else:
        where = f" (token {returned.worst[1]} of rollout {returned.worst[0]})" if returned.worst_pair is not None else ""
        yield StageLine("returned", "fail", f"not those of the engine's own logits: {returned.says}{where}")

    row, wrong = floor.largest, sum(bool(r.wrong) for r in floor.rows)
    within = f"{wrong} ways of computing differ by more than rounding" if wrong else "every way of computing is within rounding"
    times = f"rounding in {rounding.dtype} makes {rounding.mean_abs:.3g}, and the gap is {gap.judged.mean_ratio:.3g} times that"
    moved = f"mean |Δ log p| {row.mean_abs:.3g} ({row.side}, {row.variant})"
    yield StageLine("floor", "fail" if wrong else "pass", f"{moved}: {within}; {times}")

    semantics = found.semantics
    tried = f"{len(semantics.rows)} tried on {semantics.tokens} tokens"
    if (named := semantics.named) is not None:
        left = f"leaves {named.mean_abs:.2e} of {semantics.mean_abs:.2e}"
        yield StageLine("semantics", "fail", f"{named.says} ({left}); {tried}")
    elif (best := semantics.best) is not None:
        left = f"leaves {best.mean_abs:.2e} of {semantics.mean_abs:.2e}; gain {best.gain[0]:.2g} to {best.gain[1]:.2g} a token"
        yield StageLine("semantics", "pass", f"none explains the gap; best: {best.says} ({left}); {tried}")
    else:
        yield StageLine("semantics", "pass", f"no hypothesis is better than what was declared; {tried}")

    if (weights := found.weights) is None:
        yield StageLine("weights", "absent", "not looked at")
    elif weights.differing:
        yield StageLine("weights", "fail", f"{len(weights.differing)} of {weights.compared} parameters differ")
    else:
        cast = f", all cast to {weights.engine_dtype}" if weights.cast else ""
        yield StageLine("weights", "pass", f"{weights.compared} parameters, bit for bit the trainer's{cast}")

    if not found.routing:
        none = "not looked at" if found.engine is None else "no experts, or the engine does not report them"
        yield StageLine("routing", "absent", none)
    else:
        apart = [r.weights for r in found.routing if r.weights is not None]
        mixed = f"; weights of the same experts differ by up to {max(apart):.2g}" if apart else ""
        layers = ", ".join(f"layer {r.layer} {r.differs:.2%}" for r in found.routing)
        yield StageLine("routing", "shown", f"tokens whose experts differ: {layers}{mixed}")

    if (operators := found.operators) is None:
        yield StageLine("operators", "absent", "not looked at")
    else:
        judged = f"{len(operators.wrong)} are wrong" if operators.wrong else "all inside of their rounding intervals"
        text = f"{operators.count} in prefill and decode on {operators.tokens} tokens: {judged}"
        yield StageLine("operators", "fail" if operators.wrong else "pass", text)

    if (shares := found.shares) is None:
        yield StageLine("shares", "absent", "not measured")
    elif not shares.families:
        yield StageLine("shares", "shown", "no operator differs")
    else:
        adding_up = f"{shares.together:.2f} times the sum of the families' own" if shares.together else "nothing"
        given = f"they explain {shares.explained:.0%} of the gap, token by token"
        yield StageLine("shares", "shown", f"KL {shares.kl:.3g} of all differences together, {adding_up}; {given}")
