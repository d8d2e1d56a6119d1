"""The ladder: gap, floor, semantics, weights, routing, operators, shares; then a verdict.

Every rung is climbed, whatever the one before has found: stale weights under a gap at the floor are stale weights. The first
rung that names a defect is the verdict. Legal is said only when weights and operators were looked at and nothing was wrong,
and the gap is at the floor or the operators' legal differences give it back; otherwise the verdict is inconclusive. Each
verdict lists what was not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.mismatch import routing as routes
from shaketable.mismatch import weights as parameters
from shaketable.mismatch.engines.engine import PHASES, EngineError, NotToldError, Phase, Rollout, RolloutEngine, Sampling
from shaketable.mismatch.floor import floor
from shaketable.mismatch.gap import describe
from shaketable.mismatch.operators.judge import Judge
from shaketable.mismatch.operators.observe import record
from shaketable.mismatch.semantics import expected, semantics
from shaketable.mismatch.shares import Records, Shares
from shaketable.mismatch.trainer import Trainer
from shaketable.mismatch.verdict import SCHEMA, conclude

Tell = Callable[[str], None]
RECORDED = 8
"""Rollouts whose operators are recorded."""


@dataclass(frozen=True)
class Question:
    """Two sides and what they are held against each other on."""

    trainer: Trainer
    engine: RolloutEngine | None
    rollouts: list[Rollout]
    sampling: Sampling
    earlier: dict[str, dict[str, Any]]
    """Parameters of earlier checkpoints, by name."""
    recorded: int = RECORDED


def climb(question: Question, tell: Tell = lambda text: None) -> dict[str, Any]:
    """Climb all rungs; the result is what `--json` writes."""
    trainer, engine, rollouts = question.trainer, question.engine, question.rollouts
    check(rollouts, trainer)
    tell("trainer reads the rollouts")
    raw, meant = [], []
    for rollout, logits in zip(rollouts, trainer.logits(rollouts), strict=True):
        raw.append(expected(logits, rollout, Sampling(1)))
        meant.append(expected(logits, rollout, question.sampling))
    facts: dict[str, Any] = {"schema": SCHEMA, "kind": "mismatch", "trainer": trainer.describe()}
    facts["engine"] = None if engine is None else engine.describe()
    facts["sampling"] = {k: v for k, v in vars(question.sampling).items() if k != "stop"}
    words = None if trainer.tokenizer is None else lambda token: str(trainer.tokenizer.decode([token]))
    facts["gap"] = describe(rollouts, meant, words)
    facts["died"] = None
    try:
        facts["floor"] = floor(trainer, engine, rollouts, raw, tell)
    except EngineError as error:
        facts["died"], facts["floor"] = str(error), floor(trainer, None, rollouts, raw, tell)
    tell("semantics")
    facts["semantics"] = semantics(trainer, rollouts, question.sampling, facts["floor"])
    facts["not_looked_at"] = []
    facts |= dict.fromkeys(("weights", "routing", "operators", "shares"))
    if engine is None:
        what = "the engine's weights, routing and operators: there are only its log-probabilities"
        facts["not_looked_at"] = [what]
    elif facts["died"] is None:
        try:
            _inside(question, engine, facts, tell)
        except EngineError as error:
            facts["died"] = str(error)
    return facts | conclude(facts)


def _inside(question: Question, engine: RolloutEngine, facts: dict[str, Any], tell: Tell) -> None:
    """The rungs that look into the engine."""
    trainer, missing = question.trainer, facts["not_looked_at"]
    tell("weights")
    own = dict(trainer.model.named_parameters(remove_duplicate=False))
    facts["weights"] = _told(
        missing, "weights", lambda: parameters.compare(own, engine.parameters(), engine.dtype, question.earlier)
    )
    tell("routing")
    facts["routing"] = _told(missing, "routing", lambda: _routing(question, engine))
    some = _some(question.rollouts, question.recorded)
    facts["operators"] = _told(missing, "operators", lambda: _operators(trainer, engine, some, facts, tell))


def _told(missing: list[str], rung: str, ask: Callable[[], Any]) -> Any:
    """A rung, or None and a line on why it could not be looked at."""
    try:
        return ask()
    except NotToldError as error:
        missing.append(f"{rung}: {error}")
        return None


def _some(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """Rollouts at equal distances in the order of their lengths: short and long ones."""
    ordered = sorted(rollouts, key=lambda r: len(r.tokens))
    count = min(count, len(ordered))
    return [ordered[round(i * (len(ordered) - 1) / max(count - 1, 1))] for i in range(count)]


def _routing(question: Question, engine: RolloutEngine) -> list[dict[str, Any]] | None:
    tokens = max(question.rollouts, key=lambda r: len(r.tokens)).tokens
    own, other = routes.routing(question.trainer.model, tokens), engine.routing(tokens)
    return None if own is None or other is None else routes.compare(own, other)


def _operators(
    trainer: Trainer, engine: RolloutEngine, some: list[Rollout], facts: dict[str, Any], tell: Tell
) -> dict[str, Any]:
    """The sixth rung; the seventh is measured on the way, since records are too large to be kept."""
    own, judge = Judge(trainer.model, trainer.dtype), Judge(trainer.model, engine.dtype)
    for rollout in some:
        own.leave_out(record(trainer.model, rollout.tokens, len(rollout.prompt), "prefill"))
    judge.unjudged = dict(own.unjudged)
    phases, missing, meter = list(PHASES), facts["not_looked_at"], Shares(trainer.model)
    told = engine.logprobs(some, "decode" if "decode" in engine.variants() else None)
    for i, (rollout, logprobs) in enumerate(zip(some, told, strict=True)):
        tell(f"operators of rollout {i + 1} of {len(some)}")
        records = _recorded(engine, rollout, phases, missing)
        for phase in phases:
            judge.judge(records[phase], phase)
        tell(f"shares of rollout {i + 1} of {len(some)}")
        meter.add(rollout, records, logprobs)
    facts["shares"] = meter.result()
    missing += _unjudged(judge.unjudged)
    if "log_softmax" not in judge.summary():
        missing.append("log_softmax, from logits to the log-probability that is returned: the engine does not tell it")
    wrong = [row.to_dict() for row in judge.found()]
    tokens = sum(len(r.tokens) for r in some)
    return {"phases": phases, "rollouts": len(some), "tokens": tokens, "kinds": judge.summary(), "wrong": wrong}


def _recorded(engine: RolloutEngine, rollout: Rollout, phases: list[Phase], missing: list[str]) -> Records:
    """What the engine tells of one rollout; a phase that it cannot tell is not asked for again."""
    records: Records = {}
    for phase in list(phases):
        try:
            records[phase] = engine.record(rollout.tokens, len(rollout.prompt), phase)
        except NotToldError as error:
            phases.remove(phase)
            missing.append(f"operators in {phase}: {error}")
    if not phases:
        raise NotToldError("no phase was recorded")
    if "decode" in records:
        records["prompt"] = engine.record(rollout.prompt, len(rollout.prompt), "prefill")
    return records


def _unjudged(reasons: dict[str, str]) -> list[str]:
    """Operators that nobody can judge, by reason."""
    lines = []
    for why in dict.fromkeys(reasons.values()):
        names = [name for name, reason in reasons.items() if reason == why]
        lines.append(f"{names[0]}{f' and {len(names) - 1} more operators' if len(names) > 1 else ''}: {why}")
    return lines


def check(rollouts: Sequence[Rollout], trainer: Trainer) -> None:
    """Refuse in one line rollouts that this trainer cannot read."""
    if not rollouts or not any(r.completion for r in rollouts):
        raise ShaketableError("there is no token to compare: every completion is empty")
    for i, rollout in enumerate(rollouts):
        if len(rollout.logprobs) != len(rollout.completion):
            what = f"{len(rollout.logprobs)} log-probabilities for {len(rollout.completion)} tokens"
            raise ShaketableError(f"rollout {i} has {what}; there must be one for each token of the completion")
        if not rollout.prompt or not rollout.completion:
            raise ShaketableError(f"rollout {i} has an empty {'completion' if rollout.prompt else 'prompt'}")
        if bad := next((t for t in rollout.tokens if not 0 <= t < trainer.vocabulary), None):
            what = f"token {bad}, and {trainer.name} knows 0 to {trainer.vocabulary - 1}"
            raise ShaketableError(f"rollout {i} has {what}; are the rollouts of another tokenizer?")
        if trainer.context is not None and len(rollout.tokens) > trainer.context:
            what = f"{len(rollout.tokens)} tokens, and the context of {trainer.name} is {trainer.context}"
            raise ShaketableError(f"rollout {i} has {what}")
        if bad_lp := next((x for x in rollout.logprobs if not x <= 1e-6), None):
            raise ShaketableError(f"rollout {i} has the log-probability {bad_lp}; they are zero or below")
