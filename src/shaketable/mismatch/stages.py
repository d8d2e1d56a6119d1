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

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from shaketable.capture.decoder import PHASES, Phase, record_batch
from shaketable.errors import ShaketableError, UnavailableError
from shaketable.mismatch.engine import DECODE, EngineError, OperatorRecord, Rollout, RolloutEngine, Sampling
from shaketable.mismatch.floor import measure_floor
from shaketable.mismatch.gap import measure_gap
from shaketable.mismatch.logprobs import read
from shaketable.mismatch.operators import Judge, layers_of
from shaketable.mismatch.results import LARGEST, MEAN, Deviation, Evidence, LayerRouting, Mismatch, Operators, Shares
from shaketable.mismatch.returned import check_returned, doubt_returned, rounded_to
from shaketable.mismatch.rounding import MORE_DRAWS, Rounding, judge_returned, measure_rounding
from shaketable.mismatch.routing import compare_routing, routing
from shaketable.mismatch.semantics import keep_examined, try_hypotheses
from shaketable.mismatch.shares import Records, ShareMeter
from shaketable.mismatch.trainer import Trainer
from shaketable.mismatch.verdict import conclude
from shaketable.mismatch.weights import compare

Progress = Callable[..., None]
"""Called with the current step and, now and then, the share of the work that is done."""
RECORDED = 8
"""Rollouts whose operators are recorded."""
ALIKE = 2.0
"""Times the gap of the recorded rollouts: how large that of the others may be."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Question:
    """Two sides and the rollouts on which they are compared."""

    trainer: Trainer
    engine: RolloutEngine | None
    """None when only the engine's log-probabilities are known."""
    rollouts: list[Rollout]
    sampling: Sampling
    earlier: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Parameters of earlier checkpoints, by name."""
    recorded: int = RECORDED


def run_stages(question: Question, progress: Progress = lambda text, done=None: None) -> Mismatch:
    """Run every stage and conclude."""
    trainer, engine, sampling = question.trainer, question.engine, question.sampling
    rollouts = check(question.rollouts, trainer)
    question = replace(question, rollouts=rollouts)
    progress("trainer reads the rollouts", 0.0)
    kept: list[torch.Tensor] = []
    reading = read(keep_examined(trainer.logits(rollouts), rollouts, kept), rollouts, sampling)
    progress("rounding", 0.05)
    dtype = torch.bfloat16 if engine is None else engine.dtype  # a file does not say; most engines compute in it
    rounding = measure_rounding(trainer, rollouts, sampling, dtype, reading)
    more = functools.cache(lambda: measure_rounding(trainer, rollouts, sampling, dtype, reading, MORE_DRAWS))
    judged = judge_returned(rollouts, reading.meant, rounding.scale, reading.edges)
    if judged.mean_ratio <= MEAN and judged.worst_ratio > LARGEST:
        rounding = more()
        judged = judge_returned(rollouts, reading.meant, rounding.scale, reading.edges)
    words = None if trainer.tokenizer is None else lambda token: str(trainer.tokenizer.decode([token]))
    unchecked: list[str] = []
    returned: Deviation | None = None
    decoded: list[list[float]] | None = None
    died: str | None = None
    try:
        if engine is not None:
            progress("engine decodes its own completions", 0.15)
            if DECODE in engine.variants():
                decoded = engine.logprobs(rollouts, DECODE)
            returned = _asked(unchecked, "returned", lambda: check_returned(engine, rollouts, sampling, rounding, decoded))
        floor, ways = measure_floor(trainer, engine, rollouts, reading.raw, rounding, decoded, progress, more)
    except EngineError as error:
        died = str(error)
        floor, ways = measure_floor(trainer, None, rollouts, reading.raw, rounding, progress=progress, more=more)
    progress("semantics", 0.4)
    found = Evidence(
        trainer=trainer.describe(),
        engine=None if engine is None else engine.describe(),
        sampling={k: v for k, v in vars(sampling).items() if k != "stop"},
        gap=measure_gap(rollouts, reading.meant, judged, words),
        rounding=rounding.size,
        returned=returned,
        floor=floor,
        semantics=try_hypotheses(trainer, rollouts, sampling, rounding, own_logits=kept),
        died=died,
        unchecked=unchecked,
    )
    if (grid := rounded_to(rollouts)) is not None:
        unchecked.append(f"returned: the log-probabilities were rounded to {grid}; return them in float32")
    if engine is None:
        unchecked.insert(0, "the engine's logits, weights, routing and operators: there are only its log-probabilities")
    elif died is None:
        try:
            if returned is not None and returned.explained:
                doubt = _asked(
                    unchecked, "returned", lambda: doubt_returned(trainer, engine, rollouts, sampling, rounding, ways)
                )
                unchecked += [f"returned: {doubt}"] if doubt else []
            _look_inside(question, engine, rounding, found, progress)
        except EngineError as error:
            found.died = str(error)
    return Mismatch(**vars(found), conclusion=conclude(found))


def _look_inside(question: Question, engine: RolloutEngine, rounding: Rounding, found: Evidence, progress: Progress) -> None:
    """Weights, routing, operators and shares."""
    trainer = question.trainer
    progress("weights", 0.55)
    own = dict(trainer.model.named_parameters(remove_duplicate=False))
    other_source: dict[str, Any] = {}
    found.weights = _asked(
        found.unchecked, "weights", lambda: compare(own, engine.parameters(), engine.dtype, question.earlier, other_source)
    )
    progress("routing", 0.6)
    found.routing = _asked(found.unchecked, "routing", lambda: _routing(question, engine))
    stage = _OperatorStage(question, engine, rounding, found, progress, other_source)
    found.operators = _asked(found.unchecked, "operators", stage.run)


def _asked(unchecked: list[str], stage: str, ask: Callable[[], Found]) -> Found | None:
    """The result of a stage, or None and a line on why it could not be checked."""
    try:
        return ask()
    except UnavailableError as error:
        unchecked.append(f"{stage}: {error}")
        return None


def _routing(question: Question, engine: RolloutEngine) -> list[LayerRouting] | None:
    tokens = max(question.rollouts, key=lambda r: len(r.tokens)).tokens
    own, other = routing(question.trainer.model, tokens), engine.routing(tokens)
    if own is None:
        return None
    if other is None:
        raise UnavailableError("the trainer has experts, and the engine reports none")
    return compare_routing(own, other)


def _chosen(rollouts: Sequence[Rollout], worst: int, count: int) -> list[int]:
    """Rollouts at equal distances in the order of their lengths, and the worst one of all in place of the shortest."""
    ordered = sorted(range(len(rollouts)), key=lambda i: len(rollouts[i].tokens))
    count = min(count, len(ordered))
    found = [ordered[round(i * (len(ordered) - 1) / max(count - 1, 1))] for i in range(count)]
    return sorted(found if worst in found or count == 1 else [worst, *found[1:]])


class _OperatorStage:
    """Operators of some rollouts, and shares on the way, since records are too large to be kept."""

    def __init__(
        self,
        question: Question,
        engine: RolloutEngine,
        rounding: Rounding,
        found: Evidence,
        progress: Progress,
        own_weights: dict[str, Any],
    ) -> None:
        self.question, self.engine, self.rounding, self.found, self.progress = question, engine, rounding, found, progress
        fewest = 1 if engine.together == 1 else 2  # a fault of later rows shows in no batch of one
        worst = found.gap.judged.worst[0]
        self.chosen = _chosen(question.rollouts, worst, max(question.recorded, fewest))
        self.model = question.trainer.model
        self.own_weights = own_weights
        self.phases: list[Phase] = list(PHASES)

    def run(self) -> Operators:
        question, engine, rollouts = self.question, self.engine, self.question.rollouts
        if engine.together == 1:
            self.found.caveats.append("operators in batches: they were recorded one rollout at a time")
        judge = Judge(self.model, engine.dtype, self.own_weights)
        names: set[str] = set()
        for i in self.chosen:
            (row,) = record_batch(self.model, [(rollouts[i].prompt, rollouts[i].completion)], "prefill")
            names |= {call.name for call in row.calls}
            judge.leave_out(row.calls)
        changes = not torch.equal(row.logits, row.head)
        meter = ShareMeter(self.model)
        made: list[list[float]] = []
        seen: dict[str, set[str]] = {}
        for start in range(0, len(rollouts), engine.together):
            batch = rollouts[start : start + engine.together]
            rows = [i - start for i in self.chosen if start <= i < start + len(batch)]
            if not rows:
                continue
            self.progress(f"operators of {len(rows)} rollouts", 0.6 + 0.4 * len(made) / len(self.chosen))
            records = {phase: one for phase in tuple(self.phases) if (one := self._recorded(batch, rows, phase)) is not None}
            if not self.phases:
                raise UnavailableError("no phase was recorded")
            if any(record.changed_behind_head != changes for found in records.values() for record in found):
                who = ("trainer", "engine") if changes else ("engine", "trainer")
                raise UnavailableError(f"the {who[0]} changes logits behind its head, and the {who[1]} does not")
            for i, row_of in enumerate(rows):
                self.progress(f"shares of rollout {start + row_of + 1}", 0.6 + 0.4 * len(made) / len(self.chosen))
                calls: Records = {phase: records[phase][i].calls for phase in self.phases}
                if "decode" in calls:
                    calls["prompt"] = records["decode"][i].prompt or []
                for name, some in calls.items():
                    judge.judge(some, "decode" if name == "decode" else "prefill")
                    seen.setdefault(name, names.copy()).intersection_update(call.name for call in some)
                if all(present == names for present in seen.values()):
                    made.append(meter.add(batch[row_of], calls, batch[row_of].logprobs, question.sampling))
        if len(made) == len(self.chosen):
            self.found.shares = self._shares(meter, made)
        self.found.unchecked += judge.reasons()
        kinds = judge.kinds()
        if "log_softmax" not in kinds:
            link = "log_softmax, from logits to the log-probability that is returned"
            self.found.unchecked.append(f"{link}: the engine does not record it")
        absent = sorted({name for present in seen.values() for name in names - present})
        tokens = sum(len(rollouts[i].tokens) for i in self.chosen)
        phases: list[str] = list(self.phases)
        return Operators(phases, len(self.chosen), tokens, kinds, judge.wrong(), absent, layers_of(absent, names))

    def _recorded(self, batch: Sequence[Rollout], rows: Sequence[int], phase: Phase) -> list[OperatorRecord] | None:
        """Records of some rollouts of a batch; None for a phase that the engine cannot record."""
        try:
            return self.engine.record(batch, phase, rows)
        except UnavailableError as error:
            self.phases.remove(phase)
            self.found.unchecked.append(f"operators in {phase}: {error}")
            return None

    def _shares(self, meter: ShareMeter, made: Sequence[Sequence[float]]) -> Shares:
        """Shares, whether they close the gap, and whether the rollouts that were not recorded have a gap like it."""
        rollouts, scale = self.question.rollouts, self.rounding.scale
        closure = judge_returned([rollouts[i] for i in self.chosen], made, [scale[i] for i in self.chosen])
        shares = replace(meter.result(), closure=closure)
        rest = [i for i in range(len(rollouts)) if i not in self.chosen]
        if not rest:
            return shares
        some = [rollouts[i] for i in rest]
        own = read(self.question.trainer.logits(some), some, self.question.sampling).meant
        found = judge_returned(some, own, [scale[i] for i in rest])
        recorded = np.concatenate(meter.gap)
        usual = float(np.abs(recorded[np.isfinite(recorded)]).mean())
        return replace(shares, rest=found, rest_alike=bool(found.explained or found.mean_abs <= ALIKE * usual))


def check(rollouts: Sequence[Rollout], trainer: Trainer) -> list[Rollout]:
    """The rollouts with something to compare.

    Raises:
        ShaketableError: One line on a rollout that this trainer cannot read, or on none with a token.
    """
    if not rollouts or not any(r.completion for r in rollouts):
        raise ShaketableError("there is no token to compare: every completion is empty")
    for i, rollout in enumerate(rollouts):
        if (problem := _problem(rollout, trainer)) is not None:
            raise ShaketableError(f"rollout {i} has {problem}")
    return [r for r in rollouts if r.completion]


def _problem(rollout: Rollout, trainer: Trainer) -> str | None:
    if len(rollout.logprobs) != len(rollout.completion):
        counts = f"{len(rollout.logprobs)} log-probabilities for {len(rollout.completion)} tokens"
        return f"{counts}; there must be one for each token of the completion"
    if not rollout.prompt:
        return "an empty prompt"
    if bad := next((t for t in rollout.tokens if not 0 <= t < trainer.vocabulary), None):
        known = f"{trainer.name} knows 0 to {trainer.vocabulary - 1}"
        return f"token {bad}, and {known}; are the rollouts of another tokenizer?"
    if trainer.context is not None and len(rollout.tokens) > trainer.context:
        return f"{len(rollout.tokens)} tokens, and the context of {trainer.name} is {trainer.context}"
    place = next((t for t, x in enumerate(rollout.logprobs) if not -math.inf < x <= 1e-6), None)
    if place is None:
        return None
    return f"the log-probability {rollout.logprobs[place]} at token {place}; they are finite, and zero or below"
