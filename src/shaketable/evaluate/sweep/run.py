"""The sweep: models × magnitudes × noise seeds on one sample of problems, every run on disk before the next begins.

    for each model: load once → clean → every magnitude × seed → one `point` event each

A point event is a whole run with its answers and its ledger, so a kill loses at most the run that was under way. A resumed
sweep decides nothing again: the record has the batch size of each model (noise is keyed by the call), and hashes of weights and
problems, which refuse a model or a file that has changed.

KL(clean‖faulty) and top-1 agreement are read on the clean answers to the first 64 problems, under the first seed; of texts, on
all of them. A plan that did nothing is an error, and no point is written for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shaketable.errors import InertError, ModelError, ShaketableError
from shaketable.evaluate.score import LONGEST_TEXT, Condition, Evaluation, Evaluator, proof_of
from shaketable.evaluate.sweep.config import Setting, SweepConfig
from shaketable.evaluate.tasks import digest, draw, load_task
from shaketable.fsdp_checkpoint import sharded_folder
from shaketable.inject import inject
from shaketable.models import load_model, load_skeleton
from shaketable.records.record import RunRecord
from shaketable.records.weight_hash import weights_hash

if TYPE_CHECKING:
    from shaketable.evaluate.vllm import VllmEvaluator

Load = Callable[[str], tuple[Any, Any]]
"""A model and its tokenizer, by name."""
Tell = Callable[[int, int, str], None]
"""Called with problems done, problems in all, and what is running."""
READ = 64
"""Answers that KL and agreement are read on."""


def check(config: SweepConfig) -> None:
    """Whatever can be known before the first forward: the problems, every model's shape and weights, the plan on each."""
    draw(load_task(config.task), config.n, config.seed)
    plans = [s.plan for s in config.settings() if s.plan is not None]
    for name in config.models:
        skeleton = load_skeleton(name)
        path = Path(name).expanduser()
        has_weights = path.is_dir() and (any(path.glob("*.safetensors")) or sharded_folder(path) is not None)
        if path.exists() and not has_weights:
            raise ModelError(f"model {name!r} holds no weights: there are no safetensors in it")
        for plan in {plan.text(): plan for plan in plans}.values():
            inject(skeleton, plan).close(check=False)


class Sweep:
    """One sweep and its record. `run()` does what the record does not have yet."""

    def __init__(self, config: SweepConfig, record: RunRecord, load: Load | None = None, tell: Tell | None = None) -> None:
        """Args:
        config: What to do.
        record: New, or that of the sweep to resume.
        load: Loads a model; `load_model` on the device and in the dtype of the configuration by default.
        tell: Called with progress.
        """
        self.config, self.record = config, record
        self.load, self.tell = load or self._load, tell or (lambda done, total, text: None)
        self.task = load_task(config.task)
        self.problems = draw(self.task, config.n, config.seed)
        self.settings = config.settings()
        self.done = {(e["model"], e.get("plan_index", 0), e["magnitude"], e["seed"]) for e in record.events("point")}
        known, content = self._recorded("sample"), digest(self.problems)
        if not known:
            record.append("sample", task=self.task.describe(), n=len(self.problems), sha256=content)
        elif known["sha256"] != content:
            raise ShaketableError(f"the problems of {config.task} have changed since this sweep began; start a new one")

    def run(self) -> None:
        """Measure every point that is not recorded yet."""
        for name in self.config.models:
            left = [s for s in self.settings if (name, s.plan_index, s.magnitude, s.seed) not in self.done]
            if not left:
                continue
            self._progress(0, f"loading {name}")
            evaluator = self._evaluator(name)
            for setting in left:
                facts = self._point(name, setting, evaluator)
                which = {"plan_index": setting.plan_index, "magnitude": setting.magnitude, "seed": setting.seed}
                self.record.append("point", model=name, **which, **facts)
                self.done.add((name, setting.plan_index, setting.magnitude, setting.seed))
        if not self.record.events("finished"):
            self.record.append("finished")

    def _evaluator(self, name: str) -> Evaluator | VllmEvaluator:
        """The model on its problems, in batches of the recorded size when there is one."""
        known, config = self._recorded("model", model=name), self.config
        size = known.get("batch_size") or config.batch_size or 0
        evaluator: Evaluator | VllmEvaluator
        if config.engine == "vllm":
            from shaketable.evaluate.vllm import VllmEvaluator

            plan = next(s.plan for s in self.settings if s.plan is not None)
            more: dict[str, Any] = {"batch_size": size, "dtype": config.dtype, "engine_args": config.engine_args}
            evaluator = VllmEvaluator(name, self.task, self.problems, plan, **more)
            facts = evaluator.facts()
        else:
            model, tokenizer = self.load(name)
            evaluator = Evaluator(model, tokenizer, self.task, self.problems, size)
            weight = next(model.parameters())
            facts = {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
            facts |= {"dtype": str(weight.dtype).removeprefix("torch."), "device": str(weight.device)}
            facts["weights"] = weights_hash(model)
        if not known:
            self.record.append("model", model=name, **facts, batch_size=evaluator.batch_size)
        elif known["weights"] != facts["weights"]:
            raise ShaketableError(f"the weights of {name} have changed since this sweep began; start a new one")
        return evaluator

    def _point(self, name: str, setting: Setting, evaluator: Evaluator | VllmEvaluator) -> dict[str, Any]:
        condition, text = Condition.of(setting.name, setting.plan), f"{name} {setting.name}"

        def tell(done: int, _: int) -> None:
            self._progress(done, text)

        try:
            if self.task.kind == "text":
                assert isinstance(evaluator, Evaluator)
                return _of_texts(evaluator, evaluator.score(condition, tell, beside=True))
            found = evaluator.score(condition, tell)
            facts = {**found.to_dict(), "tokens": found.tokens}
            if setting.plan is None:
                return {**facts, "completions": [c.tokens for c in found.completions[:READ]]}
            return {**facts, "drift": self._drift(name, setting, evaluator) if setting.is_first else None}
        except InertError as error:
            why = str(error).removesuffix(" (allow_inert=True accepts this)")
            raise InertError(f"{name} at {setting.name}: {why}; no point is written, earlier ones are kept") from None
        except torch.OutOfMemoryError as error:
            hint = f"a batch of {evaluator.batch_size} does not fit; start a new sweep with a smaller --batch-size"
            raise ShaketableError(f"{name} at {setting.name}: {hint}") from error

    def _drift(self, name: str, setting: Setting, evaluator: Evaluator | VllmEvaluator) -> dict[str, Any]:
        """The answers' ledger is the proof; on these few tokens a rare fault may do nothing, and that is KL 0."""
        clean = self._recorded("point", model=name, magnitude=0.0)["completions"]
        if not isinstance(evaluator, Evaluator):
            agreement, tokens = evaluator.agreement(clean)
            return {"kl": None, "agreement": agreement, "tokens": tokens}
        assert setting.plan is not None
        return evaluator.drift(clean, setting.plan)

    def _recorded(self, kind: str, **facts: Any) -> dict[str, Any]:
        """The first event that says this; empty when there is none."""
        events = self.record.events(kind)
        return next((e for e in events if all(e[key] == value for key, value in facts.items())), {})

    def _progress(self, done: int, text: str) -> None:
        n = len(self.problems)
        self.tell(n * len(self.done) + done, n * len(self.settings) * len(self.config.models), text)

    def _load(self, name: str) -> tuple[Any, Any]:
        dtype = None if self.config.dtype is None else getattr(torch, self.config.dtype)
        return load_model(name, device=self.config.device, dtype=dtype)


def _of_texts(evaluator: Evaluator, found: Evaluation) -> dict[str, Any]:
    """A run over texts, as sums per text: perplexity is exp(total loss / total tokens)."""
    rows = [
        {"id": a.id, "tokens": r.tokens, "correct": r.foreseen, "agree": r.agree, "loss": r.loss, "kl": r.kl}
        for a, r in zip(found.answers, found.readings, strict=True)
    ]
    sizes = {"n": found.n, "tokens": found.tokens, "cut": evaluator.cut, "limit": evaluator.context or LONGEST_TEXT}
    proof = {**proof_of(found.ledger), "ledger": found.ledger and found.ledger.to_dict()}
    spent = {"seconds": found.seconds, "batch_size": found.batch_size}
    return {**found.condition.to_dict(), **sizes, **proof, **spent, "texts": rows}
