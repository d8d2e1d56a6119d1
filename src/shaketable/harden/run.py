"""One hardening run: stages that train the model under the fault, each scored before the next; everything in the record.

    clean scores, scores under the plan --refused when nothing was lost-->
       distil → scores → supervise → scores        until the target share of the loss is back

Everything follows from the seed and the step, and the state between steps is in checkpoints: a killed run resumes to the same
weights, bit for bit. Checkpoints hold safetensors and are never unpickled.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_model as load_into
from safetensors.torch import save_model

from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding import Decoder
from shaketable.evaluate.tasks import digest, examples
from shaketable.faults.rng import key_of
from shaketable.harden.config import HardenConfig
from shaketable.harden.distil import TrainingSteps
from shaketable.harden.results import write_card
from shaketable.harden.scoring import Scoring, check_worth, forward_part, shares
from shaketable.harden.students import Answers, OwnCompletions, SequenceSource, Students
from shaketable.inject import Injection, Ledger, inject
from shaketable.models import load_model
from shaketable.records.record import RunRecord
from shaketable.records.weight_hash import weights_hash
from shaketable.train import checkpoints
from shaketable.train.summary import short
from shaketable.train.warm_start import Tell, check_answers, warm_start

WEIGHTS = "model.safetensors"
RATES = ((300_000_000, 3e-4), (1_000_000_000, 1e-4))
"""Learning rates by size; 1e-5 above the last."""


class Hardening:
    """One run. `run()` does it."""

    def __init__(self, config: HardenConfig, record: RunRecord, tell: Tell | None = None, *, loaded: Any = None) -> None:
        """`loaded` is the model, in float32, and its tokenizer, when they are there already."""
        self.record, self.tell = record, tell or (lambda kind, facts: None)
        self.source = SequenceSource.of(config)
        if "supervise" in config.stages and self.source.task is not None:
            check_answers(self.source.task)
        self.tell("stage", {"text": f"loading {config.model}"})
        model, self.tokenizer = loaded or load_model(config.model, device=config.device, dtype=torch.float32)
        self.config = _resolved(config, model)
        record.append("resolved", config=self.config.model_dump(mode="json"))
        warmed: dict[str, Any] = {}
        if config.warm_start and self.source.task is not None:
            warmed = {"warm_start": warm_start(self.config, self.source.task, model, self.tokenizer, self.tell)}
        made_of = {"tests": digest(self.source.tests), "weights": weights_hash(model)}
        known = checkpoints.made_of(record, made_of)
        self.decoder = Decoder.of(model, self.tokenizer, self.source.limit, self.config.temperature)
        self.students = Students(model, self.decoder.pad, self.config.device, self.config.dtype, lora=bool(self.config.lora))
        self.scoring = Scoring(self.config, self.source, self.students, self.tokenizer, known["batch_size"] if known else 0)
        self.plans = [forward_part(text, self.config.seed) for text in self.config.plans]
        self.earlier: dict[str, Any] = {}
        """Ledgers of the plans in training, as far as their injections are closed."""
        self.step = 0
        if not known:
            record.append("made_of", **made_of, batch_size=self.scoring.batch_size, **warmed)
            record.append("examples", problems=examples(self.source.tests))

    # ---- stages

    def run(self, *, resume: bool = False) -> None:
        """Repair, score, save; everything is in the record."""
        saved = self._last_checkpoint() if resume else None
        inside = None if saved is None else checkpoints.content(saved)["inside"]
        if saved is None:
            self._first_look()
        self.before = self.record.events("evaluation")[0]["conditions"]
        self.now = self.record.events("evaluation")[-1]["conditions"]
        done = [e["rung"] for e in self.record.events("rung") if e["step"] <= self.step]
        for stage in self.config.stages:
            if stage in done:
                continue
            if self._is_reached():
                break
            try:
                self._do(stage, saved if stage == inside else None)
            except torch.OutOfMemoryError as error:
                smaller = max(1, (self.config.micro_batch or self.config.batch) // 4)
                hint = f"--micro-batch {smaller}, --checkpointing or --lora 16"
                raise ShaketableError(f"not enough memory for {stage}: start again with {hint}") from error
        self._finish()

    def _first_look(self) -> None:
        """Scores before anything is done; refuses what cannot be hardened."""
        conditions = self.scoring.evaluate(self.tell)
        self.record.append("evaluation", step=0, rung=None, conditions=conditions)
        self.tell("evaluation", {"conditions": [short(c) for c in conditions]})
        if self.config.conditions is None:
            check_worth(conditions, self.scoring.against)
        if self.config.mechanism:
            self.record.append("mechanism", step=0, conditions=self.scoring.mechanism())

    def _is_reached(self) -> bool:
        found = shares(self.before, self.now, self.scoring.against)
        target = self.config.target
        return target is not None and bool(found) and min(s.share for s in found.values()) >= target

    def _do(self, stage: str, saved: Path | None) -> None:
        """Train, score, and write both down."""
        seconds = self._train(stage, saved)
        self.now, self.step = self.scoring.evaluate(self.tell), self.step + self.config.steps
        found = {name: s.to_dict() for name, s in shares(self.before, self.now, self.scoring.against).items()}
        cost = {"seconds": seconds, "sequences": self.config.steps * self.config.batch}
        said = {"rung": stage, "shares": found, "cost": cost}
        self.record.append("evaluation", step=self.step, rung=stage, conditions=self.now)
        self.record.append("rung", step=self.step, **said)
        self.tell("evaluation", {**said, "conditions": [short(c) for c in self.now]})
        self._save()

    def _train(self, stage: str, saved: Path | None) -> float:
        """Steps of gradient descent under the plans, with checkpoints; the seconds they took."""
        config = self.config
        if config.lora:
            self._adapt()
        if config.checkpointing:
            self.students.model.gradient_checkpointing_enable()
        supervised = stage == "supervise"
        batches = (
            Answers(config, self.source, self.tokenizer)
            if supervised
            else OwnCompletions(config, self.source, self.tokenizer, self.students, self.decoder)
        )
        injections = [inject(self.students.model, plan, allow_inert=True) for plan in self.plans]
        tell = self._tell_step(stage)
        steps = TrainingSteps(config, self.students, injections, batches, supervised, self.step, tell)
        if saved is not None:
            before = checkpoints.content(saved)
            steps.load(saved, before["done"])
            steps.seconds = before["seconds"]
            for injection, counted in zip(injections, before["counted"], strict=True):
                injection.enable().go_on(counted)
                injection.disable()
        try:
            while steps.done < config.steps:
                steps.until(min(config.steps, (steps.done // config.save_steps + 1) * config.save_steps))
                if steps.done < config.steps:
                    self._save(steps, stage)
        finally:
            self._close(injections)
            if config.checkpointing:
                self.students.model.gradient_checkpointing_disable()
        return steps.seconds

    def _tell_step(self, stage: str) -> Callable[[dict[str, Any]], None]:
        def tell(facts: dict[str, Any]) -> None:
            self.record.append("step", rung=stage, **facts)
            self.tell("step", {"rung": stage, "done": facts["step"] - self.step, "total": self.config.steps, **facts})

        return tell

    def _adapt(self) -> None:
        """Give the student its adapters, once; the teacher is the same model with them off."""
        if not isinstance(self.students.model, PeftModel):
            torch.manual_seed(key_of(self.config.seed, "lora") >> 1)
            lora = LoraConfig(
                r=self.config.lora, lora_alpha=2 * self.config.lora, target_modules="all-linear", task_type="CAUSAL_LM"
            )
            self.students.model = get_peft_model(self.students.model, lora)

    def _close(self, injections: list[Injection]) -> None:
        self.earlier = self._ledgers(injections)
        for injection in injections:
            injection.close(check=False)

    def _ledgers(self, injections: list[Injection]) -> dict[str, Any]:
        """What the plans did so far, in this process and before."""
        found = dict(self.earlier)
        for text, injection in zip(self.config.plans, injections, strict=True):
            known = [Ledger.from_dict(self.earlier[text])] if text in self.earlier else []
            found[text] = Ledger.merge([*known, injection.ledger]).to_dict()
        return found

    # ---- going on after a kill, and ending

    def _save(self, steps: TrainingSteps | None = None, stage: str | None = None) -> None:
        """The state to resume from, within a stage or between two, bound to the record."""
        injections = [] if steps is None else list(steps.injections)
        done = 0 if steps is None else steps.done
        facts = {
            "inside": stage,
            "base": self.step,
            "done": done,
            "seconds": 0.0 if steps is None else steps.seconds,
            "counted": [injection.counted() for injection in injections],
            "ledgers": self._ledgers(injections) if injections else self.earlier,
        }
        step = self.step + done
        folder = self.record.folder / f"checkpoint-{step}"
        with checkpoints.writing(folder.name, self.record.folder):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
            save_model(self.students.model, str(folder / WEIGHTS))
            if steps is not None:
                steps.save(folder)
            checkpoints.seal(folder, facts)
            self.record.append("checkpoint", step=step, files=checkpoints.hashes(folder))
            checkpoints.drop_old(self.record.folder)

    def _last_checkpoint(self) -> Path | None:
        """The newest whole state; the model is put into it."""
        folder = checkpoints.newest(self.record)
        if folder is None:
            self.record.resumed(-1)
            return None
        facts = checkpoints.content(folder)
        self.step = facts["base"]
        self.earlier = facts["ledgers"]
        if self.config.lora:
            self._adapt()
        load_into(self.students.model, folder / WEIGHTS, device=str(self.students.model.device))
        self.record.resumed(checkpoints.step_of(folder))
        return folder

    def _finish(self) -> None:
        model = self.students.model
        if self.config.mechanism and self.step:
            self.record.append("mechanism", step=self.step, conditions=self.scoring.mechanism())
        merged: dict[str, Any] = {}
        if isinstance(model, PeftModel):
            model, merged = self._merged(model)
        folder = self.record.folder / "model"
        with checkpoints.writing("the weights", self.record.folder):
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            write_card(folder, self.record, self.config)
        facts = {"reached": self._is_reached(), "ledgers": self.earlier, "weights": weights_hash(model), **merged}
        self.record.append("finished", step=self.step, **facts)

    def _merged(self, model: Any) -> tuple[Any, dict[str, Any]]:
        """The weights with the adapters in them, and how much that changed what the model says."""
        pairs = self.scoring.pairs[:8]
        with torch.no_grad(), self.students.arithmetic():
            apart, _ = self.students.logits(model, pairs)
            whole = model.merge_and_unload()
            together, _ = self.students.logits(whole, pairs)
        return whole, {"merging_changed_logits_by": float((apart.float() - together.float()).abs().max())}


def _resolved(config: HardenConfig, model: Any) -> HardenConfig:
    """The configuration with what depends on the model filled in."""
    size = sum(p.numel() for p in model.parameters())
    lr = config.lr or next((rate for limit, rate in RATES if size < limit), 1e-5) * (10 if config.lora else 1)
    return config.model_copy(update={"lr": lr})
