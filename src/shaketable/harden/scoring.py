"""The scores of a run: clean and under every plan, by problem, with KL and agreement beside the clean model, and their proof.

With a task a problem is right or wrong. With prompts its score is the share of positions at which the most
likely token is the clean model's own: 1 for the clean model by definition. Everything after (comparisons, shares that came
back) is the same for both.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from shaketable.errors import PlanError, ShaketableError
from shaketable.evaluate.decoding import Decoder, decode_all, probe_batch_size
from shaketable.evaluate.layers import readings
from shaketable.evaluate.reading import Pair, Reading
from shaketable.evaluate.score import Answer, Condition, Evaluation, Evaluator, in_phases, injected
from shaketable.evaluate.statistics import Recovered, paired, paired_interval, share_recovered
from shaketable.harden.config import HardenConfig
from shaketable.harden.students import SequenceSource, Students
from shaketable.inject import Injection, Ledger
from shaketable.models import ADAPTER, load_skeleton
from shaketable.plan import Plan
from shaketable.train.plans import condition_seed

PAIRS = 128
"""Answers of the clean model that KL and agreement are read on, beside accuracy."""
CLEAN = "clean"


def forward_part(text: str, seed: int) -> Plan:
    """The part of a plan that acts at inference: the forward pass, in every phase."""
    plan = in_phases(Plan.parse(text, seed=seed), ())
    clauses = tuple(
        c.model_copy(update={"site": c.site.model_copy(update={"direction": "forward"})})
        for c in plan.clauses
        if "forward" in c.site.directions
    )
    if not clauses:
        raise PlanError(f"{text} acts backward only, and using a model has no backward pass")
    return plan.model_copy(update={"clauses": clauses})


def conditions_of(config: HardenConfig) -> list[Condition]:
    """Clean, and every plan that is scored under."""
    if config.conditions is not None:
        seed = condition_seed(config)
        return [Condition(CLEAN), *(Condition(n, forward_part(p, seed)) for n, p in config.conditions.items())]
    texts = list(dict.fromkeys((*config.plans, *config.eval_plans)))
    names = ["plan", *texts[1:]] if len(config.plans) == 1 else texts
    return [Condition(CLEAN), *(Condition(n, forward_part(p, config.eval_seed)) for n, p in zip(names, texts, strict=True))]


class Scoring:
    """Scores one student on fixed problems."""

    def __init__(
        self, config: HardenConfig, source: SequenceSource, students: Students, tokenizer: Any, batch_size: int = 0
    ) -> None:
        self.config, self.source, self.students = config, source, students
        self.by_task = source.task is not None
        self.conditions = conditions_of(config)
        own = {forward_part(text, 0).text() for text in config.plans}
        self.against = [c.name for c in self.conditions if c.plan is not None and c.plan.text() in own]
        """The conditions whose plan the model is hardened against, by name."""
        self.prompts = [source.tokens(tokenizer, p) for p in source.tests]
        self.decoder = Decoder.of(students.model, tokenizer, source.limit)
        self.tokenizer = tokenizer
        self.batch_size = batch_size or config.eval_batch or probe_batch_size(self.decoder, students.model, self.prompts)
        self.pairs = self._answers_of_the_clean_model()

    def _answers_of_the_clean_model(self) -> list[Pair]:
        prompts = self.prompts[:PAIRS] if self.by_task else self.prompts
        with self.students.teacher() as clean:
            done = decode_all(self.decoder, clean, prompts, batch_size=self.batch_size)
        pairs = [(prompt, completion.tokens) for prompt, completion in zip(prompts, done, strict=True)]
        if not self.by_task and not all(c for _, c in pairs):
            raise ShaketableError("the clean model writes nothing to one of the prompts: there is nothing to compare")
        return [pair for pair in pairs if pair[1]]

    def evaluate(self, tell: Any) -> list[dict[str, Any]]:
        """Every condition, clean first, as the record keeps it."""
        found = []
        for condition in self.conditions:
            tell("stage", {"text": f"scoring: {condition.name}"})
            start = time.perf_counter()
            # on a few answers a rare fault may not hit; where these are all there is, the ledger is checked
            with injected(self.students.model, condition.plan, on=False, allow_inert=self.by_task) as injection:
                near = self.students.beside_clean(self.pairs, injection, self.batch_size)
            if self.by_task:
                with self.students.arithmetic():
                    facts = {"measure": "accuracy", **self._evaluator().score(condition).to_dict()}
            else:
                ledger = None if injection is None else injection.ledger
                facts = self._agreement(condition, near, ledger, time.perf_counter() - start)
            kl, agreement = sum(r.kl / r.tokens for r in near), sum(r.agree / r.tokens for r in near)
            found.append({**facts, "kl": kl / len(near), "agreement": agreement / len(near)})
        return found

    def _agreement(self, condition: Condition, near: list[Reading], ledger: Ledger | None, seconds: float) -> dict[str, Any]:
        """The share of tokens on which the model agrees with the clean one, as the score of each prompt."""
        answers = [Answer(p.id, "", r.agree / r.tokens, True) for p, r in zip(self.source.tests, near, strict=True)]
        facts = Evaluation(condition, answers, [], ledger, seconds, self.batch_size).to_dict()
        low, high = 1.0, 1.0
        if condition.plan is not None:
            ends = paired_interval([a.correct for a in answers])
            low, high = max(0.0, ends.low), min(1.0, ends.high)
        return {"measure": "agreement", **facts, "ci_low": low, "ci_high": high}

    def mechanism(self) -> list[dict[str, Any]]:
        """Gradient norms and activations per layer, under every condition."""
        evaluator = self._evaluator()
        with self.students.arithmetic():
            return readings(evaluator, [evaluator.score(c) for c in self.conditions])

    def _evaluator(self) -> Evaluator:
        assert self.source.task is not None
        model, task, tests = self.students.model, self.source.task, self.source.tests
        return Evaluator(model, self.tokenizer, task, tests, self.batch_size, loss=self.config.eval_loss)


def scores(conditions: list[dict[str, Any]], name: str) -> list[float]:
    """By problem, under a condition."""
    found = next(c for c in conditions if c["name"] == name)
    return [float(a["correct"]) for a in found["answers"]]


def shares(before: list[dict[str, Any]], after: list[dict[str, Any]], names: list[str]) -> dict[str, Recovered]:
    """The recovered share under each of these conditions; those under which nothing was lost are left out."""
    clean, found = scores(before, CLEAN), {}
    for name in names:
        was = scores(before, name)
        if sum(clean) != sum(was):
            found[name] = share_recovered(was, scores(after, name), clean)
    return found


def check_worth(before: list[dict[str, Any]], names: list[str]) -> None:
    """Refuse a model that has nothing to lose, and a plan that takes nothing measurable."""
    clean = before[0]
    if clean["ci_low"] < 0.5 / clean["n"]:
        solved = f"the clean model solves {clean['accuracy']:.1%} of {clean['n']} problems"
        raise ShaketableError(f"{solved}: there is nothing that a fault could take; --prompts compares tokens instead")
    for name in names:
        lost = paired(scores(before, name), scores(before, CLEAN))
        if not lost.distinguishable or lost.difference <= 0:
            half = 100 * (lost.interval.high - lost.interval.low) / 2
            takes = f"{name}: the fault costs {100 * lost.difference:.1f} ± {half:.1f} points"
            raise ShaketableError(f"{takes}: there is nothing to harden against; a larger --limit would see smaller losses")


def rehearse(config: HardenConfig) -> None:
    """Read the task, match every plan on the model's skeleton; raises whatever would stop the run later."""
    config.check_stages()
    SequenceSource.of(config)
    if (Path(config.model).expanduser() / ADAPTER).is_file():
        raise ShaketableError(f"{config.model} is a LoRA adapter, which is not hardened; merge it into its base first")
    skeleton = load_skeleton(config.model)
    for plan in [forward_part(text, 0) for text in config.plans] + [c.plan for c in conditions_of(config) if c.plan]:
        Injection(plan).attach(skeleton)
