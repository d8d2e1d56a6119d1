"""What the stages come to: LEGAL, DEFECT or INCONCLUSIVE, in one sentence, with what was not looked at. Imports no torch."""

from __future__ import annotations

from typing import Any

SCHEMA = 2
EXIT = {"LEGAL": 0, "DEFECT": 1, "INCONCLUSIVE": 4}
REPRODUCES = 0.5
"""Of the gap, token by token: what the recorded differences must give back before a gap above the floor is called legal."""
NEVER = (
    "an error smaller than the rounding interval of its operator",
    "an error that needs other tokens, lengths or batches than these to show",
)
NEAR, TENTH = 3.0, 0.1
"""Times what an engine differs from itself by, or a tenth of rounding: how far returned numbers may be from its logits."""
LEFT = 3.0
"""Times what rounding makes: what may be left when all operators' differences were put into the trainer."""
LEADS = 0.95
"""Of the draws over tokens: how often the family with the largest share must have it before it is called the first to fix."""
FIX = {
    "lm_head": "compute lm_head in float32 on both sides",
    "attention": "use the same attention kernel, or accumulate it in float32, on both sides",
    "log_softmax": "sum the exponentials of the log-softmax in float64, or in blocks, on both sides",
    "residual": "keep the residual stream in float32",
}


def conclude(facts: dict[str, Any]) -> dict[str, Any]:
    """Verdict, stage, sentence, exit code, the next command, and what was not looked at."""
    not_looked_at = [*facts["unchecked"], *facts["not_looked_at"], *_unseen(facts), *NEVER]
    broken = _defect(facts)
    if broken is not None:
        stage, what = broken
        verdict, sentence = "DEFECT", f"DEFECT: {what}. {_gap(facts)}"
    elif (doubt := _doubt(facts)) is not None:
        stage, what = doubt
        verdict, sentence = "INCONCLUSIVE", f"INCONCLUSIVE: {what}. {_gap(facts)}{_best(facts)}"
    else:
        verdict, stage = "LEGAL", "shares" if not _at_floor(facts) else "gap"
        more = "" if facts["shares"] is None or not facts["shares"]["families"] else f" {causes(facts['shares'])}"
        sentence = f"LEGAL: rounding only; {_looked(facts)}. {_gap(facts)}{more}"
    return {
        "verdict": verdict,
        "stage": stage,
        "sentence": sentence,
        "at_floor": _at_floor(facts),
        "exit_code": EXIT[verdict],
        "next": _next(facts) if verdict == "INCONCLUSIVE" else None,
        "not_looked_at": not_looked_at,
    }


def _at_floor(facts: dict[str, Any]) -> bool:
    """Whether rounding explains the gap, token by token."""
    return bool(facts["gap"]["judged"]["explained"])


def _gap(facts: dict[str, Any]) -> str:
    gap = facts["gap"]
    times = gap["judged"]["mean_ratio"]
    where = f"{times:.2g} times what rounding in {facts['rounding']['dtype']} makes ({facts['rounding']['mean_abs']:.2g})"
    return f"The gap (mean |Δ log p| {gap['mean_abs']:.2g}, k3 {gap['k3']:.2g}) is {where}."


def _best(facts: dict[str, Any]) -> str:
    best = facts["semantics"]["best"]
    if best is None or best["gain"][0] <= 0:
        return ""
    return f" The hypothesis that fits best: {best['says']}, which leaves {best['mean_abs']:.2g}."


def _defect(facts: dict[str, Any]) -> tuple[str, str] | None:
    """The first link that is broken, with the most exact name that it has."""
    meant, returned = facts["semantics"]["named"], facts["returned"]
    link_holds = returned is not None and returned["explained"]
    if meant is not None and not link_holds:
        left = "to rounding" if meant["at_floor"] else f"to {meant['mean_abs']:.2g}"
        return "semantics", f"the sides mean different probabilities: {meant['says']}, which brings the gap down {left}"
    if (weights := facts["weights"]) is not None and weights["differing"]:
        return "weights", _weights(weights["differing"])
    if (operators := facts["operators"]) is not None:
        if operators["layers_absent"]:
            return "operators", f"the engine's {operators['layers_absent'][0]} is missing: none of its operators ran"
        if operators["wrong"]:
            return "operators", _operator(operators["wrong"])
    for row in facts["routing"] or ():
        if row["experts"][0] != row["experts"][1]:
            trainer, engine = row["experts"]
            return (
                "routing",
                f"the engine sends each token to {engine} experts in layer {row['layer']}, the trainer to {trainer}",
            )
    if wrong := [r for r in facts["floor"]["rows"] if r["wrong"]]:
        first = next((r for r in wrong if r["side"] == "engine"), wrong[0])
        return "floor", first["wrong"]
    if returned is not None and not returned["explained"]:
        return "returned", _not_its_own(returned)
    return None


def _not_its_own(returned: dict[str, Any]) -> str:
    example = returned["example"]
    own = "none" if example["own"] is None else f"{example['own']:.4g}"
    at = f"token {example['position']} of rollout {example['rollout']} came back as {example['returned']:.4g}, its own is {own}"
    return f"the engine's returned log-probabilities are not those of its own logits: {returned['says']}; {at}"


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


def _doubt(facts: dict[str, Any]) -> tuple[str, str] | None:
    """The first link that could not be checked, or that was and does not close."""
    if facts["died"] is not None:
        return "gap", f"the engine died ({facts['died']}); the stages before are told"
    if facts["unchecked"]:
        more = f", and {len(facts['unchecked']) - 1} more" if len(facts["unchecked"]) > 1 else ""
        return "gap", f"not every link could be checked: {facts['unchecked'][0]}{more}"
    weights, operators, shares = facts["weights"], facts["operators"], facts["shares"]
    own = max([r["mean_abs"] for r in facts["floor"]["rows"] if r["side"] == "engine"], default=0.0)
    if facts["returned"]["mean_abs"] > NEAR * max(own, TENTH * facts["rounding"]["mean_abs"]):
        far = f"{facts['returned']['mean_abs']:.2g} in the mean, and from each other by {own:.2g}"
        return "returned", f"the returned log-probabilities differ from the engine's own by {far}"
    for name in ("weights", "operators"):
        if facts[name] is None:
            return name, f"{name} were not looked at"
    for count, what in ((weights["not_told"], "did not tell"), (weights["unknown"], "has, and the trainer has not")):
        if count:
            return "weights", f"there are {len(count)} parameters that the engine {what}, such as {count[0]}"
    if operators["absent"]:
        return "operators", f"the engine did not tell {len(operators['absent'])} operators, such as {operators['absent'][0]}"
    if (best := facts["semantics"]["best"]) is not None and best["wins"]:
        return "semantics", f"no link is broken, but the gap is smaller if {best['says']}"
    if facts["gap"]["judged"]["biased"]:
        return "gap", f"no link is broken, but {facts['gap']['judged']['says'] or 'the gap has a sign'}"
    if _at_floor(facts):
        return None
    if shares is None:
        return "shares", "the gap is more than rounding, and the operators' differences were not put into the trainer"
    explained = shares["reproduced"]["explained"] if shares["reproduced"] else 0.0
    if explained < REPRODUCES and not shares["closure"]["explained"]:
        given = f"their differences give back {max(explained, 0):.0%} of the gap"
        return "operators", f"no operator is outside of its rounding interval, but {given}"
    if not shares["closure"]["explained"] and shares["closure"]["mean_ratio"] > LEFT:
        return "shares", f"the operators' differences leave more than rounding: {shares['closure']['says']}"
    if shares["rest"] is not None and not shares["rest"]["alike"]:
        return (
            "operators",
            "rollouts whose operators were not recorded have a larger gap than those which were; raise --recorded",
        )
    return None


def _next(facts: dict[str, Any]) -> str:
    """The command that would settle an inconclusive verdict."""
    start = f"shaketable mismatch --trainer {facts['trainer']['model']}"
    if facts["engine"] is None:
        return f"{start} --tokens FILE --engine vllm   (or --engine hf: the engine that wrote the file)"
    if facts["died"] is not None:
        return f"{start} …   (again, with fewer or shorter rollouts: -n 4 --max-new-tokens 64)"
    if any("captured" in line for line in facts["unchecked"]):
        return f"{start} … --engine-args '{{\"enforce_eager\": true}}'"
    if (best := facts["semantics"]["best"]) is not None and best["wins"]:
        return f"{start} …   (again, with the sampling declared as the best hypothesis says: {best['name']})"
    if facts["operators"] is not None and facts["operators"]["rollouts"] < facts["gap"]["rollouts"]:
        return f"{start} … --recorded {facts['gap']['rollouts']}"
    return f"shaketable locate {facts['trainer']['model']}   (judges operators of any model), and compare more rollouts: -n 64"


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
    """What the stages did not look at."""
    found = list(facts["floor"]["not_told"])
    if facts["died"] is not None:
        missing = [stage for stage in ("weights", "operators", "shares") if facts[stage] is None]
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
