"""What the rungs come to: LEGAL, DEFECT or INCONCLUSIVE, in one sentence, with what was not looked at. Imports no torch."""

from __future__ import annotations

from typing import Any

SCHEMA = 1
EXIT = {"LEGAL": 0, "DEFECT": 1, "INCONCLUSIVE": 4}
REPRODUCES = 0.5
"""Of the gap, token by token: what the recorded differences must give back before a gap above the floor is called legal."""
NEVER = (
    "an error smaller than the rounding interval of its operator",
    "an error that needs other tokens, lengths or batches than these to show",
)
LEADS = 0.95
"""Of the draws over tokens: how often the family with the largest share must have it before it is called the first to fix."""
FIX = {
    "lm_head": "compute lm_head in float32 on both sides",
    "attention": "use the same attention kernel, or accumulate it in float32, on both sides",
    "log_softmax": "sum the exponentials of the log-softmax in float64, or in blocks, on both sides",
    "residual": "keep the residual stream in float32",
}


def conclude(facts: dict[str, Any]) -> dict[str, Any]:
    """Verdict, rung, sentence, exit code and what was not looked at."""
    named = _defect(facts)
    not_looked_at = [*facts["not_looked_at"], *_unseen(facts), *NEVER]
    at_floor = _is_at_floor(facts)
    if named is not None:
        rung, what = named
        verdict, sentence = "DEFECT", f"DEFECT: {what}. {_gap(facts, at_floor)}"
    else:
        verdict, rung, sentence = _no_defect(facts, at_floor)
    return {
        "verdict": verdict,
        "rung": rung,
        "sentence": sentence,
        "at_floor": at_floor,
        "exit_code": EXIT[verdict],
        "not_looked_at": not_looked_at,
    }


def _is_at_floor(facts: dict[str, Any]) -> bool:
    from shaketable.mismatch.floor import is_at

    return is_at(facts["gap"]["mean_abs"], facts["floor"])


def _gap(facts: dict[str, Any], at_floor: bool) -> str:
    gap, floor = facts["gap"], facts["floor"]
    where = "at the floor" if at_floor else "above the floor"
    size = f"mean |Δ log p| {gap['mean_abs']:.2g}, k3 {gap['k3']:.2g}"
    return f"The gap ({size}) is {where} ({floor['mean_abs']:.2g}: {floor['largest']})."


def _defect(facts: dict[str, Any]) -> tuple[str, str] | None:
    if (meant := facts["semantics"]["named"]) is not None:
        left = "to the floor" if meant["at_floor"] else f"to {meant['mean_abs']:.2g}"
        return "semantics", f"the sides mean different probabilities: {meant['says']}, which brings the gap down {left}"
    weights = facts["weights"]
    if weights is not None and weights["differing"]:
        return "weights", _weights(weights["differing"])
    operators = facts["operators"]
    if operators is not None and operators["wrong"]:
        return "operators", _operator(operators["wrong"])
    return None


def _weights(differing: list[dict[str, Any]]) -> str:
    first = differing[0]
    kinds = sorted({d["kind"] for d in differing})
    more = f"; {len(differing)} parameters differ in all ({', '.join(kinds)})" if len(differing) > 1 else ""
    return f"the engine's {first['name']} {first['says']}{more}"


def _operator(wrong: list[dict[str, Any]]) -> str:
    first = wrong[0]
    lanes = f", {len(first['lanes'])} of {first['lanes_of']} lanes" if first["lanes"] else ""
    others = len({w["name"] for w in wrong}) - 1
    more = f"; {others} more operators are wrong" if others else ""
    what = f"{first['text']}, looks like {first['class']}{lanes}{more}"
    return f"the engine's {first['name']} ({first['kind']}, {first['phase']}) is wrong: {what}"


def _no_defect(facts: dict[str, Any], at_floor: bool) -> tuple[str, str, str]:
    gap = _gap(facts, at_floor)
    if facts["died"] is not None:
        return (
            "INCONCLUSIVE",
            "gap",
            f"INCONCLUSIVE: the engine died ({facts['died']}); what was found until then is told. {gap}",
        )
    if facts["weights"] is None or facts["operators"] is None:
        if at_floor:
            return "LEGAL", "floor", f"LEGAL: each side differs from itself as much as from the other. {gap}"
        missing = facts["not_looked_at"][0]
        return "INCONCLUSIVE", "gap", f"INCONCLUSIVE: no hypothesis explains the gap, and not looked at were {missing}. {gap}"
    looked = _looked(facts)
    if at_floor:
        return "LEGAL", "floor", f"LEGAL: rounding only; {looked}. {gap}"
    shares = facts["shares"]
    explained = None if shares is None or shares["reproduced"] is None else shares["reproduced"]["explained"]
    if explained is not None and explained >= REPRODUCES:
        return "LEGAL", "shares", f"LEGAL: rounding only; {looked}. {gap} {causes(shares)}"
    given = "were not measured" if explained is None else f"give back {max(explained, 0):.0%} of the gap"
    why = f"no operator is outside of its rounding interval, but their differences {given}"
    return "INCONCLUSIVE", "operators", f"INCONCLUSIVE: {why}. {gap}"


def _looked(facts: dict[str, Any]) -> str:
    weights, operators = facts["weights"], facts["operators"]
    cast = f", cast to {weights['engine_dtype']}" if weights["cast"] else ""
    count = sum(k["operators"] for k in operators["kinds"].values())
    return f"{weights['compared']} parameters are equal{cast}, {count} operators are inside of their rounding intervals"


def causes(shares: dict[str, Any]) -> str:
    """Shares with their intervals, and what to do first, where these tokens can tell."""
    parts = ", ".join(f"{r['family']} {r['share']:.0%} ({r['low']:.0%} to {r['high']:.0%})" for r in shares["families"][:3])
    first = shares["families"][0]
    name = first["family"]
    if first["leads"] < LEADS:
        why = f"{name} has most in {first['leads']:.0%} of draws over {shares['tokens']} tokens"
        return f"Of the KL: {parts}. What to fix first cannot be told: {why}; compare more rollouts."
    return f"Of the KL: {parts}. First fix: {FIX.get(name, f'compute {name} in the same dtype and order on both sides')}."


def _unseen(facts: dict[str, Any]) -> list[str]:
    """What the rungs that were climbed did not look at."""
    found = [f"engine, {line}" for line in facts["floor"]["not_told"]]
    if facts["died"] is not None:
        missing = [rung for rung in ("weights", "operators", "shares") if facts[rung] is None]
        found.append(f"{', '.join(missing)}: the engine died")
    weights, operators = facts["weights"], facts["operators"]
    if weights is not None and weights["not_told"]:
        found.append(f"{len(weights['not_told'])} parameters that the engine did not tell, such as {weights['not_told'][0]}")
    if operators is not None:
        rest = facts["gap"]["rollouts"] - operators["rollouts"]
        if rest:
            found.append(f"operators on {rest} of {facts['gap']['rollouts']} rollouts")
    if facts["semantics"]["tokens"] < facts["gap"]["tokens"]:
        found.append(f"semantics on {facts['gap']['tokens'] - facts['semantics']['tokens']} of {facts['gap']['tokens']} tokens")
    return found
