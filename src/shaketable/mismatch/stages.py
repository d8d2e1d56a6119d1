"""The stages of a mismatch: from the numbers that an engine returned to the trainer's own, link by link.

    returned numbers ← the engine's logits ← its operators ← its weights ← the trainer

Every stage runs, whatever the one before has found: stale weights under a small gap are stale weights. LEGAL is a claim about
every link; a link that breaks is a DEFECT, and one that could not be checked makes the verdict INCONCLUSIVE and is named.
docs/mismatch.md describes the eight stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from shaketable.capture.decoder import PHASES, Phase, record_batch
from shaketable.errors import ShaketableError, UnavailableError
from shaketable.mismatch.engine import DECODE, EngineError, Rollout, RolloutEngine, Sampling
from shaketable.mismatch.floor import measure_floor
from shaketable.mismatch.gap import measure_gap
from shaketable.mismatch.logprobs import read
from shaketable.mismatch.operators import Judge
from shaketable.mismatch.results import Floor, LayerRouting, Mismatch, OperatorResults
from shaketable.mismatch.returned import doubt, own_numbers, rounded_to
from shaketable.mismatch.rounding import Rounding, from_returned, judge
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
    return _Comparison(replace(question, rollouts=check(question.rollouts, question.trainer)), progress).run()


class _Comparison:
    """One run of the stages."""

    def __init__(self, question: Question, progress: Progress) -> None:
        self.trainer, self.engine, self.progress = question.trainer, question.engine, progress
        self.rollouts, self.sampling = question.rollouts, question.sampling
        self.question = question

    def run(self) -> Mismatch:
        """Every stage, as far as the engine lives."""
        trainer, engine, rollouts, sampling = self.trainer, self.engine, self.rollouts, self.sampling
        self.progress("trainer reads the rollouts", 0.0)
        kept: list[torch.Tensor] = []
        self.reading = read(keep_examined(trainer.logits(rollouts), rollouts, kept), rollouts, sampling)
        if np.isnan(np.concatenate(self.reading.raw)).any():
            raise ShaketableError(f"{trainer.name} gives log-probabilities that are not numbers (NaN): see `shaketable locate`")
        self.progress("rounding", 0.05)
        dtype = torch.bfloat16 if engine is None else engine.dtype  # a file does not say; most engines compute in it
        self.rounding = rounding = Rounding(trainer, rollouts, sampling, dtype, self.reading)
        judged = rounding.judge(from_returned(rollouts, self.reading.meant, self.reading.edges))
        floor, _ = measure_floor(trainer, rollouts, self.reading.raw, rounding, progress=self.progress)
        self.progress("semantics", 0.15)
        words = None if trainer.tokenizer is None else lambda token: str(trainer.tokenizer.decode([token]))
        like = 4 * torch.finfo(rounding.dtype).eps  # weights that were rounded have a temperature as near to the declared one
        self.found = found = Mismatch(
            trainer=trainer.describe(),
            engine=None if engine is None else engine.describe(),
            sampling={k: v for k, v in vars(sampling).items() if k != "stop"},
            gap=measure_gap(rollouts, self.reading.meant, judged, words),
            rounding=rounding.size,
            floor=floor,
            semantics=try_hypotheses(trainer, rollouts, sampling, rounding.scale, kept, self.reading.edges, like=like),
        )
        if engine is None:
            found.unchecked.append("the engine's logits, weights, routing and operators: there are only its log-probabilities")
        if (grid := rounded_to(rollouts)) is not None:
            found.unchecked.append(f"returned: the log-probabilities were rounded to {grid}; return them in float32")
        if engine is not None:
            try:
                self._returned(engine)
                self._look_inside(engine)
            except EngineError as error:
                found.died = str(error)
        found.rounding = rounding.size  # a stage may have measured it more often
        found.conclusion = conclude(found)
        return found

    def _asked(self, stage: str, ask: Callable[[], Found]) -> Found | None:
        """The result of a stage, or None and a line on why it could not be checked."""
        try:
            return ask()
        except UnavailableError as error:
            self.found.unchecked.append(f"{stage}: {error}")
            return None

    def _returned(self, engine: RolloutEngine) -> None:
        """The engine against itself, and the returned numbers against its logits: by rounding, then by its own spread."""
        found, rollouts, sampling = self.found, self.rollouts, self.sampling
        self.progress("engine decodes its own completions", 0.3)
        own = self._asked("returned", lambda: own_numbers(engine, rollouts, sampling))
        decoded_so = engine.together > 1 or sampling.logprobs_mode == "raw"
        known = {DECODE: own.reading.raw} if own is not None and decoded_so else None
        floor, ways = measure_floor(engine, rollouts, None, self.rounding, known, self.progress)
        found.floor = Floor(found.floor.rows + floor.rows, found.floor.unavailable + floor.unavailable)
        if own is None:
            return
        found.returned = own.judge(rollouts, self.rounding)
        narrow = self.rounding.among(ways)
        if own.logits:
            found.own_semantics = try_hypotheses(
                self.trainer, rollouts, sampling, narrow, own.logits, own.reading.edges, of_engine=True
            )
        if found.returned.explained and (why := doubt(own, rollouts, narrow, found.own_semantics)):
            found.unchecked.append(f"returned: {why}")

    def _look_inside(self, engine: RolloutEngine) -> None:
        """Weights, routing, operators and shares."""
        self.progress("weights", 0.55)
        own = dict(self.trainer.model.named_parameters(remove_duplicate=False))
        other_source: dict[str, Any] = {}
        earlier = self.question.earlier
        self.found.weights = self._asked(
            "weights", lambda: compare(own, engine.parameters(), engine.dtype, earlier, other_source)
        )
        self.progress("routing", 0.6)
        self.found.routing = self._asked("routing", lambda: self._routing(engine))
        self.found.operators = self._asked("operators", lambda: self._operators(engine, other_source))

    def _routing(self, engine: RolloutEngine) -> list[LayerRouting] | None:
        tokens = max(self.rollouts, key=lambda r: len(r.tokens)).tokens
        own, other = routing(self.trainer.model, tokens), engine.routing(tokens)
        if own is None:
            return None
        if other is None:
            raise UnavailableError("the trainer has experts, and the engine reports none")
        return compare_routing(own, other)

    def _operators(self, engine: RolloutEngine, other_source: dict[str, Any]) -> OperatorResults:
        """Operators of some rollouts, and their shares on the way, since records are too large to be kept."""
        model, rollouts, unchecked = self.trainer.model, self.rollouts, self.found.unchecked
        if engine.together == 1:
            self.found.caveats.append("operators in batches: they were recorded one rollout at a time")
        fewest = 1 if engine.together == 1 else 2  # a fault of later rows shows in no batch of one
        suspects = [self.found.gap.judged.worst[0], *(row.most for row in self.found.floor.rows if row.side == "engine")]
        chosen = _chosen(rollouts, suspects, max(self.question.recorded, fewest))
        by_interval, meter = Judge(model, engine.dtype, other_source), ShareMeter(model)
        layer_of: dict[str, int | None] = {}
        """By the name of every operator that the trainer has."""
        for i in chosen:
            (row,) = record_batch(model, [(rollouts[i].prompt, rollouts[i].completion)], "prefill")
            layer_of |= {call.name: call.layer for call in row.calls}
            by_interval.leave_out(row.calls)
        changes = not torch.equal(row.logits, row.head)
        made: list[list[float]] = []
        absent: set[str] = set()
        for start in range(0, len(rollouts), engine.together):
            batch = rollouts[start : start + engine.together]
            rows = [i - start for i in chosen if start <= i < start + len(batch)]
            if not rows:
                continue
            self.progress(f"operators of {len(rows)} rollouts", 0.6 + 0.4 * len(made) / len(chosen))
            read_at_once, decoded = (engine.record(batch, phase, rows) for phase in PHASES)
            if any(record.changed_behind_head != changes for record in (*read_at_once, *decoded)):
                who = ("trainer", "engine") if changes else ("engine", "trainer")
                raise UnavailableError(f"the {who[0]} changes logits behind its head, and the {who[1]} does not")
            for i, whole, later in zip(rows, read_at_once, decoded, strict=True):
                self.progress(f"shares of rollout {start + i + 1}", 0.6 + 0.4 * len(made) / len(chosen))
                calls: Records = {"prefill": whole.calls, "decode": later.calls, "prompt": later.prompt or []}
                for name, some in calls.items():
                    phase: Phase = "decode" if name == "decode" else "prefill"
                    by_interval.judge(some, phase)
                    absent |= layer_of.keys() - {call.name for call in some}
                    if not absent:
                        by_interval.chain(some, phase)
                if not absent:
                    made.append(meter.add(batch[i], calls, batch[i].logprobs, self.sampling))
        if len(made) == len(chosen):
            closure = judge(from_returned([rollouts[i] for i in chosen], made), [self.rounding.scale[i] for i in chosen])
            rest_alike = self._rest_alike(chosen, np.concatenate(meter.gap))
            self.found.shares = replace(meter.result(), closure=closure, rest_alike=rest_alike)
        unchecked += by_interval.reasons()
        kinds = by_interval.kinds()
        if "log_softmax" not in kinds:
            unchecked.append("log_softmax, from logits to the log-probability that is returned: the engine does not record it")
        tokens = sum(len(rollouts[i].tokens) for i in chosen)
        layers = {layer_of[name] for name in absent} - {layer for name, layer in layer_of.items() if name not in absent}
        gone = sorted(layer for layer in layers if layer is not None)
        return OperatorResults(len(chosen), tokens, kinds, by_interval.wrong(), sorted(absent), gone)

    def _rest_alike(self, chosen: Sequence[int], recorded: np.ndarray) -> bool:
        """Whether the other rollouts have a gap that rounding explains, or one like that of those that were recorded."""
        rest = [i for i in range(len(self.rollouts)) if i not in chosen]
        if not rest:
            return True
        d = from_returned([self.rollouts[i] for i in rest], [self.reading.meant[i] for i in rest])
        found = judge(d, [self.rounding.scale[i] for i in rest])
        return bool(found.explained or found.mean_abs <= ALIKE * float(np.abs(recorded[np.isfinite(recorded)]).mean()))


def _chosen(rollouts: Sequence[Rollout], first: Sequence[int], count: int) -> list[int]:
    """The first of these rollouts, then others at equal distances in the order of their lengths."""
    count = min(count, len(rollouts))
    ordered = sorted(range(len(rollouts)), key=lambda i: len(rollouts[i].tokens))
    spread = [ordered[round(i * (len(ordered) - 1) / max(count - 1, 1))] for i in range(count)]
    return sorted(list(dict.fromkeys([*first, *spread, *ordered]))[:count])


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
