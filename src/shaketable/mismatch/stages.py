"""The stages of a mismatch: from the numbers that an engine returned to the trainer's own, link by link.

    returned numbers ← the engine's logits ← its operators ← its weights ← the trainer

Every stage runs, whatever the one before has found: stale weights under a small gap are stale weights. LEGAL is a claim about
every link; a link that breaks is a DEFECT, and one that could not be checked makes the verdict INCONCLUSIVE and is named.

    gap         how far the returned numbers are from the trainer's
    returned    whether the engine's own logits give the numbers that it returned
    floor       each side against itself, within rounding
    semantics   what the numbers may mean instead
    weights     bit for bit
    routing     which experts tokens go to, with which weights
    operators   each within its rounding interval
    shares      the operators' differences, put into the trainer, give back the returned numbers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shaketable.errors import ShaketableError
from shaketable.mismatch import routing as routes
from shaketable.mismatch import weights as parameters
from shaketable.mismatch.engines.engine import (
    PHASES,
    EngineError,
    NotToldError,
    Phase,
    Rollout,
    RolloutEngine,
    Sampling,
)
from shaketable.mismatch.floor import floor
from shaketable.mismatch.gap import describe
from shaketable.mismatch.operators.judge import Judge
from shaketable.mismatch.operators.observe import record_batch
from shaketable.mismatch.processing import at_the_edge, expected
from shaketable.mismatch.returned import against_itself, held, returned, rounded_to
from shaketable.mismatch.rounding import Rounding, measure
from shaketable.mismatch.semantics import semantics
from shaketable.mismatch.shares import Records, Shares
from shaketable.mismatch.trainer import Trainer
from shaketable.mismatch.verdict import SCHEMA, conclude

Tell = Callable[..., None]
"""Told what is being done and, now and then, the share of the work that is behind."""
RECORDED = 8
"""Rollouts whose operators are recorded."""
STAGES = ("gap", "returned", "floor", "semantics", "weights", "routing", "operators", "shares")


@dataclass(frozen=True)
class Question:
    """Two sides and what they are held against each other on."""

    trainer: Trainer
    engine: RolloutEngine | None
    """None when only the engine's log-probabilities are known."""
    rollouts: list[Rollout]
    sampling: Sampling
    earlier: dict[str, dict[str, Any]]
    """Parameters of earlier checkpoints, by name."""
    recorded: int = RECORDED


def run_stages(question: Question, tell: Tell = lambda text, done=None: None) -> dict[str, Any]:
    """Run every stage; the result is what `--json` writes."""
    given = check(question.rollouts, question.trainer)
    question = replace(question, rollouts=given)
    trainer, engine, rollouts, sampling = question.trainer, question.engine, question.rollouts, question.sampling
    tell("trainer reads the rollouts", 0.0)
    raw, meant, edges = [], [], []
    for rollout, logits in zip(rollouts, trainer.logits(rollouts), strict=True):
        raw.append(expected(logits, rollout, Sampling(1)))
        meant.append(expected(logits, rollout, sampling))
        edges.append(at_the_edge(logits, rollout, sampling, meant[-1]))
    facts: dict[str, Any] = {"schema": SCHEMA, "kind": "mismatch", "trainer": trainer.describe()}
    facts["engine"] = None if engine is None else engine.describe()
    facts["sampling"] = {k: v for k, v in vars(sampling).items() if k != "stop"}
    words = None if trainer.tokenizer is None else lambda token: str(trainer.tokenizer.decode([token]))
    facts["gap"] = describe(rollouts, meant, words)
    tell("rounding", 0.05)
    dtype = torch.bfloat16 if engine is None else engine.dtype  # a file does not say; most engines compute in it
    rounding = measure(trainer, rollouts, sampling, dtype, raw, meant)
    facts["rounding"] = rounding.to_dict()
    facts["gap"]["judged"] = held(rollouts, meant, rounding.scale, edges)
    facts |= {"died": None, "not_looked_at": [], "unchecked": []}
    facts |= dict.fromkeys(("returned", "weights", "routing", "operators", "shares"))
    try:
        if engine is not None:
            tell("engine is shown what it returned", 0.15)
            facts["returned"] = _told(facts, "returned", lambda: returned(engine, rollouts, sampling, rounding))
        facts["floor"] = floor(trainer, engine, rollouts, raw, rounding, tell)
    except EngineError as error:
        facts["died"], facts["floor"] = str(error), floor(trainer, None, rollouts, raw, rounding, tell)
    ways = facts["floor"].pop("ways")
    tell("semantics", 0.4)
    facts["semantics"] = semantics(trainer, rollouts, sampling, rounding)
    if (grid := rounded_to(rollouts)) is not None:
        facts["unchecked"].append(f"returned: the log-probabilities were rounded to {grid}; return them in float32")
    if engine is None:
        facts["unchecked"].insert(
            0, "the engine's logits, weights, routing and operators: there are only its log-probabilities"
        )
    elif facts["died"] is None:
        try:
            if facts["returned"] is not None and facts["returned"]["explained"]:
                doubt = _told(facts, "returned", lambda: against_itself(trainer, engine, rollouts, sampling, rounding, ways))
                facts["unchecked"] += [f"returned: {doubt}"] if doubt else []
            _inside(question, engine, rounding, facts, tell)
        except EngineError as error:
            facts["died"] = str(error)
    return facts | conclude(facts)


def _inside(question: Question, engine: RolloutEngine, rounding: Rounding, facts: dict[str, Any], tell: Tell) -> None:
    """The stages that look into the engine."""
    trainer = question.trainer
    tell("weights", 0.55)
    own = dict(trainer.model.named_parameters(remove_duplicate=False))
    other_source: dict[str, Any] = {}
    facts["weights"] = _told(
        facts,
        "weights",
        lambda: parameters.compare(own, engine.parameters(), engine.dtype, question.earlier, other_source),
    )
    tell("routing", 0.6)
    facts["routing"] = _told(facts, "routing", lambda: _routing(question, engine))
    facts["operators"] = _told(facts, "operators", lambda: _operators(question, engine, rounding, facts, other_source, tell))


def _told(facts: dict[str, Any], stage: str, ask: Callable[[], Any]) -> Any:
    """The result of a stage, or None and a line on why it could not be checked."""
    try:
        return ask()
    except NotToldError as error:
        facts["unchecked"].append(f"{stage}: {error}")
        return None


def _some(rollouts: Sequence[Rollout], worst: int, count: int) -> list[int]:
    """Rollouts at equal distances in the order of their lengths, and the worst one of all in place of the shortest."""
    ordered = sorted(range(len(rollouts)), key=lambda i: len(rollouts[i].tokens))
    count = min(count, len(ordered))
    found = [ordered[round(i * (len(ordered) - 1) / max(count - 1, 1))] for i in range(count)]
    return sorted(found if worst in found or count == 1 else [worst, *found[1:]])


def _routing(question: Question, engine: RolloutEngine) -> list[dict[str, Any]] | None:
    tokens = max(question.rollouts, key=lambda r: len(r.tokens)).tokens
    own, other = routes.routing(question.trainer.model, tokens), engine.routing(tokens)
    if own is None:
        return None
    if other is None:
        raise NotToldError("the trainer has experts, and the engine tells of none")
    return routes.compare(own, other)


def _operators(
    question: Question,
    engine: RolloutEngine,
    rounding: Rounding,
    facts: dict[str, Any],
    held_weights: dict[str, Any],
    tell: Tell,
) -> dict[str, Any]:
    """Operators, and shares on the way, since records are too large to be kept."""
    trainer = question.trainer
    fewest = 1 if engine.together == 1 else 2  # a fault of later rows shows in no batch of one
    chosen = _some(question.rollouts, facts["gap"]["judged"]["worst"][0], max(question.recorded, fewest))
    if engine.together == 1:
        facts["not_looked_at"].append("operators in batches: they were recorded one rollout at a time")
    some = [question.rollouts[i] for i in chosen]
    own, judged = Judge(trainer.model, trainer.dtype), Judge(trainer.model, engine.dtype, held_weights)
    names: set[str] = set()
    for rollout in some:
        (read,) = record_batch(trainer.model, [rollout], "prefill")
        names |= {call.name for call in read.calls}
        own.leave_out(read.calls)
    changes = not torch.equal(read.logits, read.head)
    judged.unjudged = dict(own.unjudged)
    phases, meter = list(PHASES), Shares(trainer.model)
    made: list[list[float]] = []
    seen: dict[str, set[str]] = {}
    for start in range(0, len(question.rollouts), engine.together):
        batch = question.rollouts[start : start + engine.together]
        rows = [i - start for i in chosen if start <= i < start + len(batch)]
        if not rows:
            continue
        tell(f"operators of {len(rows)} rollouts", 0.6 + 0.4 * len(made) / len(chosen))
        told = {
            phase: found
            for phase in tuple(phases)
            if (found := _recorded(engine, batch, rows, phase, phases, facts)) is not None
        }
        if not phases:
            raise NotToldError("no phase was recorded")
        if any(record.changed_behind_head != changes for found in told.values() for record in found):
            who = "the trainer changes logits behind its head, and the engine does not"
            raise NotToldError(who if changes else "the engine changes logits behind its head, and the trainer does not")
        for i, row in enumerate(rows):
            tell(f"shares of rollout {start + row + 1}", 0.6 + 0.4 * len(made) / len(chosen))
            records: Records = {phase: told[phase][i].calls for phase in phases}
            if "decode" in records:
                records["prompt"] = told["decode"][i].prompt or []
            for name, calls in records.items():
                judged.judge(calls, "decode" if name == "decode" else "prefill")
                seen.setdefault(name, names.copy()).intersection_update(call.name for call in calls)
            if all(found == names for found in seen.values()):
                made.append(meter.add(batch[row], records, batch[row].logprobs, question.sampling))
    facts["shares"] = meter.result() if len(made) == len(some) else None
    if len(made) == len(some):
        facts["shares"]["closure"] = held(some, made, [rounding.scale[i] for i in chosen])
        facts["shares"]["rest"] = _rest(question, rounding, chosen, meter)
    facts["unchecked"] += _unjudged(judged.unjudged)
    if "log_softmax" not in judged.summary():
        facts["unchecked"].append(
            "log_softmax, from logits to the log-probability that is returned: the engine does not tell it"
        )
    wrong = [row.to_dict() for row in judged.found()]
    tokens = sum(len(r.tokens) for r in some)
    absent = sorted({name for found in seen.values() for name in names - found})
    return {
        "phases": phases,
        "rollouts": len(some),
        "tokens": tokens,
        "kinds": judged.summary(),
        "wrong": wrong,
        "absent": absent,
        "layers_absent": _layers(absent, names),
    }


def _rest(question: Question, rounding: Rounding, chosen: Sequence[int], meter: Shares) -> dict[str, Any] | None:
    """The rollouts whose operators were not recorded: whether their gap is like that of those which were."""
    rest = [i for i in range(len(question.rollouts)) if i not in chosen]
    if not rest:
        return None
    trainer, sampling = question.trainer, question.sampling
    some = [question.rollouts[i] for i in rest]
    own = [expected(x, r, sampling) for x, r in zip(trainer.logits(some), some, strict=True)]
    found = held(some, own, [rounding.scale[i] for i in rest])
    recorded = np.concatenate(meter.real)
    usual = float(np.abs(recorded[np.isfinite(recorded)]).mean())
    return found | {"alike": bool(found["explained"] or found["mean_abs"] <= 2 * usual)}


def _layers(absent: Sequence[str], names: set[str]) -> list[str]:
    """Layers of which the engine ran no operator."""
    found = []
    for name in absent:
        words = name.split(".")
        at = next((i for i, word in enumerate(words) if word.isdigit()), None)
        layer = None if at is None else ".".join(words[: at + 1])
        if layer and layer not in found and all(n in absent for n in names if n.startswith(f"{layer}.")):
            found.append(layer)
    return found


def _recorded(
    engine: RolloutEngine,
    batch: Sequence[Rollout],
    rows: Sequence[int],
    phase: Phase,
    phases: list[Phase],
    facts: dict[str, Any],
) -> Any:
    """What the engine tells of some rollouts of a batch; None for a phase that it cannot tell."""
    try:
        return engine.record(batch, phase, rows)
    except NotToldError as error:
        phases.remove(phase)
        facts["unchecked"].append(f"operators in {phase}: {error}")
        return None


def _unjudged(reasons: dict[str, str]) -> list[str]:
    """Operators that nobody can judge, by reason."""
    lines = []
    for why in dict.fromkeys(reasons.values()):
        names = [name for name, reason in reasons.items() if reason == why]
        lines.append(f"{names[0]}{f' and {len(names) - 1} more operators' if len(names) > 1 else ''}: {why}")
    return lines


def check(rollouts: Sequence[Rollout], trainer: Trainer) -> list[Rollout]:
    """The rollouts with something to compare.

    Raises:
        ShaketableError: One line on a rollout that this trainer cannot read, or on none with a token.
    """
    if not rollouts or not any(r.completion for r in rollouts):
        raise ShaketableError("there is no token to compare: every completion is empty")
    for i, rollout in enumerate(rollouts):
        _check_one(i, rollout, trainer)
    return [r for r in rollouts if r.completion]


def _check_one(i: int, rollout: Rollout, trainer: Trainer) -> None:
    if len(rollout.logprobs) != len(rollout.completion):
        what = f"{len(rollout.logprobs)} log-probabilities for {len(rollout.completion)} tokens"
        raise ShaketableError(f"rollout {i} has {what}; there must be one for each token of the completion")
    if not rollout.prompt:
        raise ShaketableError(f"rollout {i} has an empty prompt")
    if bad := next((t for t in rollout.tokens if not 0 <= t < trainer.vocabulary), None):
        what = f"token {bad}, and {trainer.name} knows 0 to {trainer.vocabulary - 1}"
        raise ShaketableError(f"rollout {i} has {what}; are the rollouts of another tokenizer?")
    if trainer.context is not None and len(rollout.tokens) > trainer.context:
        what = f"{len(rollout.tokens)} tokens, and the context of {trainer.name} is {trainer.context}"
        raise ShaketableError(f"rollout {i} has {what}")
    place = next((t for t, x in enumerate(rollout.logprobs) if not -math.inf < x <= 1e-6), None)
    if place is not None:
        what = f"the log-probability {rollout.logprobs[place]} at token {place}"
        raise ShaketableError(f"rollout {i} has {what}; they are finite, and zero or below")
