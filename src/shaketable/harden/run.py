"""One hardening run: scores, training under the fault, scores again; everything in the record.

Refused when the fault costs nothing that the first scores can show.

Everything follows from the seed and the step, and the state between steps is in checkpoints: a killed run resumes to the same
weights, bit for bit. Checkpoints hold safetensors and are never unpickled.
"""

from __future__ import annotations

import shutil
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
from shaketable.harden.config import STAGE, HardenConfig
from shaketable.harden.distil import TrainingSteps
from shaketable.harden.results import write_card
from shaketable.harden.scoring import Scoring, check_worth, forward_part, shares
from shaketable.harden.students import OwnCompletions, SequenceSource, Students
from shaketable.inject import Injection, Ledger, inject
from shaketable.models import load_model
from shaketable.records.record import RunRecord
from shaketable.records.weight_hash import weights_hash
from shaketable.train import checkpoints
from shaketable.train.summary import short
from shaketable.train.warm_start import Tell, warm_start

WEIGHTS = "model.safetensors"
RATES = ((300_000_000, 3e-4), (1_000_000_000, 1e-4))
"""Learning rates by size; 1e-5 above the last."""


class Hardening:
    """One run. `run()` does it."""

    def __init__(self, config: HardenConfig, record: RunRecord, tell: Tell | None = None, *, loaded: Any = None) -> None:
        """`loaded` is the model, in float32, and its tokenizer, when they are there already."""
        self.record, self.tell = record, tell or (lambda kind, facts: None)
        config.check_stages()
        self.source = SequenceSource.of(config)
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
        self.injections: list[Injection] = []
        """One for each plan, while the model is trained."""
        self.earlier: dict[str, Any] = {}
        """Ledgers of the plans in training before the last resume, and all of it once the training is over."""
        if not known:
            record.append("made_of", **made_of, batch_size=self.scoring.batch_size, **warmed)
            record.append("examples", problems=examples(self.source.tests))

    def run(self, *, resume: bool = False) -> None:
        """Repair, score, save; everything is in the record."""
        checkpoint = self._last_checkpoint() if resume else None
        if checkpoint is None:
            self._first_look()
        if self.config.rungs and not self.record.events("rung"):
            try:
                self._repair(checkpoint)
            except torch.OutOfMemoryError as error:
                smaller = max(1, (self.config.micro_batch or self.config.batch) // 4)
                hint = f"--micro-batch {smaller}, --checkpointing or --lora 16"
                raise ShaketableError(f"not enough memory to {STAGE}: start again with {hint}") from error
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

    def _repair(self, checkpoint: Path | None) -> None:
        """Train, score, and write both down."""
        seconds, step = self._train(checkpoint), self.config.steps
        before, now = self.record.events("evaluation")[0]["conditions"], self.scoring.evaluate(self.tell)
        found = {name: s.to_dict() for name, s in shares(before, now, self.scoring.against).items()}
        said = {"rung": STAGE, "shares": found, "cost": {"seconds": seconds, "sequences": step * self.config.batch}}
        self.record.append("evaluation", step=step, rung=STAGE, conditions=now)
        self.record.append("rung", step=step, **said)
        self.tell("evaluation", {**said, "conditions": [short(c) for c in now]})
        self._save(step)

    def _train(self, checkpoint: Path | None) -> float:
        """Steps of gradient descent under the plans, with checkpoints; the seconds they took."""
        config = self.config
        if config.lora:
            self._adapt()
        if config.checkpointing:
            self.students.model.gradient_checkpointing_enable()
        completions = OwnCompletions(config, self.source, self.tokenizer, self.students, self.decoder)
        self.injections = [inject(self.students.model, plan, allow_inert=True) for plan in self.plans]
        steps = TrainingSteps(config, self.students, self.injections, completions, self._tell_step)
        first = 0
        if checkpoint is not None:
            first, before = checkpoints.step_of(checkpoint), checkpoints.content(checkpoint)
            steps.load(checkpoint)
            steps.seconds = before["seconds"]
            for injection, counted in zip(self.injections, before["counted"], strict=True):
                injection.enable().go_on(counted)
                injection.disable()
        self.students.model.train()
        try:
            for step in range(first, config.steps):
                steps.do(step)
                if (step + 1) % config.save_steps == 0 and step + 1 < config.steps:
                    self._save(step + 1, steps)
        finally:
            self.students.model.eval()
            self._close()
            if config.checkpointing:
                self.students.model.gradient_checkpointing_disable()
        return steps.seconds

    def _tell_step(self, facts: dict[str, Any]) -> None:
        self.record.append("step", rung=STAGE, **facts)
        self.tell("step", facts)

    def _adapt(self) -> None:
        """Give the student its adapters, once; the teacher is the same model with them off."""
        if not isinstance(self.students.model, PeftModel):
            torch.manual_seed(key_of(self.config.seed, "lora") >> 1)
            lora = LoraConfig(
                r=self.config.lora, lora_alpha=2 * self.config.lora, target_modules="all-linear", task_type="CAUSAL_LM"
            )
            self.students.model = get_peft_model(self.students.model, lora)

    def _close(self) -> None:
        self.earlier = self._ledgers()
        for injection in self.injections:
            injection.close(check=False)
        self.injections = []

    def _ledgers(self) -> dict[str, Any]:
        """What the plans did so far, in this process and before."""
        found = dict(self.earlier)
        for text, injection in zip(self.config.plans, self.injections, strict=False):
            known = [Ledger.from_dict(self.earlier[text])] if text in self.earlier else []
            found[text] = Ledger.merge([*known, injection.ledger]).to_dict()
        return found

    # ---- going on after a kill, and ending

    def _save(self, step: int, steps: TrainingSteps | None = None) -> None:
        """The state to resume from, bound to the record; without `steps` when the training is over."""
        facts: dict[str, Any] = {"ledgers": self._ledgers()}
        if steps is not None:
            facts |= {"seconds": steps.seconds, "counted": [injection.counted() for injection in self.injections]}
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
        self.earlier = checkpoints.content(folder)["ledgers"]
        if self.config.lora:
            self._adapt()
        load_into(self.students.model, folder / WEIGHTS, device=str(self.students.model.device))
        self.record.resumed(checkpoints.step_of(folder))
        return folder

    def _finish(self) -> None:
        model = self.students.model
        step = self.config.steps if self.config.rungs else 0
        if self.config.mechanism and step:
            self.record.append("mechanism", step=step, conditions=self.scoring.mechanism())
        merged: dict[str, Any] = {}
        if isinstance(model, PeftModel):
            model, merged = self._merged(model)
        folder = self.record.folder / "model"
        with checkpoints.writing("the weights", self.record.folder):
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            write_card(folder, self.record, self.config)
        self.record.append("finished", step=step, ledgers=self.earlier, weights=weights_hash(model), **merged)

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
