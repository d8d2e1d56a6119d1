"""One hardening run: repairs, cheapest first, each scored before the next one is tried; everything in the record.

    clean scores, scores under the plan --refused when nothing was lost-->
       calibrate → scores → rescale → scores → distil → scores → …        until the target share of the loss is back

A repair without gradients that leaves the model no closer to the clean one, by KL under the plans, and no better by score, or
that costs more than `clean_loss` without the fault, is undone. Everything follows from the seed and the step, and the state
between steps is in checkpoints: a killed run resumes to the same weights, bit for bit. Checkpoints hold safetensors and are
never unpickled; the file names biases and adapters that the model was given.

`reinforce` is a short GRPO under the plan, with a KL that keeps the model near: a run of its own in a folder of its own.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_model as load_into
from safetensors.torch import save_model
from torch import nn

from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding import Decoder
from shaketable.evaluate.reading import Pair
from shaketable.evaluate.tasks import digest, examples
from shaketable.faults.rng import key_of
from shaketable.harden.calibrate import calibrate, flags, set_flags
from shaketable.harden.config import TRAINED, HardenConfig
from shaketable.harden.distil import TrainingSteps
from shaketable.harden.rescale import rescale
from shaketable.harden.results import write_card
from shaketable.harden.scoring import Scoring, check_worth, forward_part, shares
from shaketable.harden.students import Answers, OwnCompletions, Prompts, SequenceSource, Students
from shaketable.inject import Injection, Ledger, inject
from shaketable.models import load_model
from shaketable.records.environment import gather
from shaketable.records.record import FILE, RunRecord
from shaketable.records.weight_hash import weights_hash
from shaketable.train import checkpoints
from shaketable.train.config import TrainConfig
from shaketable.train.run import Training
from shaketable.train.summary import short
from shaketable.train.warm_start import Tell, check_answers, warm_start

WEIGHTS = "model.safetensors"
REINFORCED, START = "reinforce", "hardened"
RATES = ((300_000_000, 3e-4), (1_000_000_000, 1e-4))
"""Learning rates by size; 1e-5 above the last."""


class Hardening:
    """One run. `run()` does it."""

    def __init__(self, config: HardenConfig, record: RunRecord, tell: Tell | None = None, *, loaded: Any = None) -> None:
        """`loaded` is the model, in float32, and its tokenizer, when they are there already."""
        self.record, self.tell = record, tell or (lambda kind, facts: None)
        self.source = SequenceSource.of(config)
        if "supervise" in config.climbed and self.source.task is not None:
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
        self.prompts = Prompts(self.source, self.tokenizer, model)
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
        done = [e["rung"] for e in self.record.events("rung")]
        for rung in self.config.climbed:
            if rung in done:
                continue
            if self._is_reached():
                break
            try:
                self._do(rung, saved if rung == inside else None)
            except torch.OutOfMemoryError as error:
                hint = (
                    f"--micro-batch {max(1, (self.config.micro_batch or self.config.batch) // 4)}, --checkpointing or --lora 16"
                )
                raise ShaketableError(f"not enough memory for {rung}: start again with {hint}") from error
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

    def _do(self, rung: str, saved: Path | None) -> None:
        start, step = time.perf_counter(), self.step
        state = None if rung in TRAINED else {n: t.detach().cpu().clone() for n, t in self.students.model.state_dict().items()}
        before = flags(self.students.model)
        facts = self._train(rung, saved) if rung in TRAINED else self._fold(rung)
        seconds = time.perf_counter() - start
        changed = facts.get("layers") != 0
        conditions = self.scoring.evaluate(self.tell) if changed else self.now
        worse = None if rung in TRAINED or not changed else self._worse(conditions)
        kept = changed and worse is None
        if worse is not None and state is not None:
            self._undo(state, before)
            conditions, facts["undone"] = self.now, worse
        self.now, self.step = conditions, step + self._length(rung)
        found = {name: s.to_dict() for name, s in shares(self.before, conditions, self.scoring.against).items()}
        cost = {"seconds": facts.pop("rung_seconds", seconds), "sequences": facts.pop("sequences", 0)}
        cost["flops_added"] = facts.pop("flops_added", 0.0) if kept else 0.0
        said = {"rung": rung, "kept": kept, "shares": found, "cost": cost, "facts": facts}
        self.record.append("evaluation", step=self.step, rung=rung, conditions=conditions)
        self.record.append("rung", step=self.step, **said)
        self.tell("evaluation", {**said, "conditions": [short(c) for c in conditions]})
        self._save(None, rung=None)

    def _length(self, rung: str) -> int:
        return self.config.steps if rung in TRAINED else self.config.reinforce_steps if rung == "reinforce" else 1

    def _worse(self, conditions: list[dict[str, Any]]) -> str | None:
        """Why a stage is to be undone: no closer to the clean model and no better under the plans, or too costly without."""
        lost = self.before[0]["accuracy"] - conditions[0]["accuracy"]
        if lost > self.config.clean_loss:
            return f"it takes {100 * lost:.1f} points without the fault, more than the {100 * self.config.clean_loss:g} allowed"
        names = self.scoring.against or [c["name"] for c in conditions[1:]]

        def sums(found: list[dict[str, Any]]) -> tuple[float, float]:
            mine = [c for c in found if c["name"] in names]
            return sum(c["kl"] for c in mine), sum(c["accuracy"] for c in mine)

        (kl, score), (kl_before, score_before) = sums(conditions), sums(self.now)
        better = kl < kl_before or score > score_before
        return None if better else f"under the plan the model is no closer to the clean one: KL {kl_before:.3g} → {kl:.3g}"

    def _undo(self, state: dict[str, torch.Tensor], before: dict[str, Any]) -> None:
        model = self.students.model
        for name, _ in list(model.named_parameters()):
            if name not in state:
                model.get_submodule(name.rpartition(".")[0]).register_parameter("bias", None)
        set_flags(model, before)
        model.load_state_dict(state)

    # ---- one stage

    def _fold(self, rung: str) -> dict[str, Any]:
        """A stage without gradients, or the reinforcement, which is a run of its own."""
        if rung == "reinforce":
            return reinforce(self.config, self.students, self.tokenizer, self.record.folder, self.tell)
        injections = self._injections()
        done = {"calibrate": calibrate, "rescale": rescale}[rung]

        def tell(at: int, total: int) -> None:
            self.tell("stage", {"text": rung, "done": at, "total": total})

        try:
            facts = done(self.students, injections, self._calibration_pairs(), tell)
        finally:
            self._close(injections)
        return {"sequences": self.config.calibrate_n, **facts}

    def _calibration_pairs(self) -> list[Pair]:
        order = torch.Generator().manual_seed(key_of(self.config.seed, "calibration") >> 1)
        chosen = torch.randperm(len(self.prompts), generator=order)[: self.config.calibrate_n].tolist()
        prompts = [self.prompts[i] for i in chosen]
        done = self.students.complete(self.decoder, prompts, key_of(self.config.seed, "calibration completions") >> 1)
        return [(p, c.tokens) for p, c in zip(prompts, done, strict=True) if c.tokens]

    def _train(self, rung: str, saved: Path | None) -> dict[str, Any]:
        """Steps of gradient descent under the plans, with checkpoints."""
        config = self.config
        if config.lora:
            self._adapt()
        if config.checkpointing:
            self.students.model.gradient_checkpointing_enable()
        batches = (
            Answers(config, self.source, self.tokenizer)
            if rung == "supervise"
            else OwnCompletions(config, self.prompts, self.decoder, self.students.complete)
        )
        injections = self._injections()
        self._training = steps = TrainingSteps(
            config, self.students, injections, batches, rung == "supervise", self.step, self._tell_step(rung)
        )
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
                    self._save(steps, rung=rung)
        finally:
            self._close(injections)
            if config.checkpointing:
                self.students.model.gradient_checkpointing_disable()
        return {"sequences": config.steps * config.batch, "lr": config.lr, "rung_seconds": steps.seconds}

    def _tell_step(self, rung: str) -> Callable[[dict[str, Any]], None]:
        def tell(facts: dict[str, Any]) -> None:
            self.record.append("step", rung=rung, **facts)
            self.tell("step", {"rung": rung, "done": facts["step"] - self.step, "total": self.config.steps, **facts})

        return tell

    def _adapt(self) -> None:
        """Give the student its adapters, once; the teacher is the same model with them off."""
        if not isinstance(self.students.model, PeftModel):
            torch.manual_seed(key_of(self.config.seed, "lora") >> 1)
            lora = LoraConfig(
                r=self.config.lora, lora_alpha=2 * self.config.lora, target_modules="all-linear", task_type="CAUSAL_LM"
            )
            self.students.model = get_peft_model(self.students.model, lora)

    def _injections(self) -> list[Injection]:
        return [inject(self.students.model, plan, allow_inert=True) for plan in self.plans]

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

    def _save(self, training: TrainingSteps | None, rung: str | None) -> None:
        step = self.step if training is None else self.step + training.done
        injections = [] if training is None else list(training.injections)
        facts = {
            "inside": rung,
            "base": self.step,
            "done": 0 if training is None else training.done,
            "seconds": 0.0 if training is None else training.seconds,
            "counted": [injection.counted() for injection in injections],
            "ledgers": self._ledgers(injections) if injections else self.earlier,
            "flags": flags(self.students.model),
        }
        save_checkpoint(self.record, step, self.students.model, training, facts)

    def _last_checkpoint(self) -> Path | None:
        """The newest whole state; the model is put into it."""
        folder = checkpoints.newest(self.record)
        if folder is None:
            self.record.resumed(-1)
            return None
        facts = checkpoints.content(folder)
        self.step = facts["base"]
        self.earlier = facts["ledgers"]
        if self.config.lora and (facts["inside"] or any(e["rung"] in TRAINED for e in self.record.events("rung"))):
            self._adapt()
        set_flags(self.students.model, facts["flags"])
        load_weights(folder, self.students.model)
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


# ---- checkpoints


def save_checkpoint(
    record: RunRecord, step: int, model: nn.Module, training: TrainingSteps | None, facts: dict[str, Any]
) -> None:
    """Write the state to resume from after `step`, and bind it to the record."""
    folder = record.folder / f"checkpoint-{step}"
    with checkpoints.writing(folder.name, record.folder):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        save_model(model, str(folder / WEIGHTS))
        if training is not None:
            training.save(folder)
        checkpoints.seal(folder, facts)
        record.append("checkpoint", step=step, files=checkpoints.hashes(folder))
        checkpoints.drop_old(record.folder)


def load_weights(folder: Path, model: Any) -> None:
    """Put saved weights into a model; Linears that were given a bias meanwhile get one."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        given = {name: file.get_slice(name).get_shape() for name in file.keys() if name.endswith(".bias")}  # noqa: SIM118
    for name in given.keys() - {name for name, _ in model.named_parameters()}:
        module = model.get_submodule(name.rpartition(".")[0])
        module.register_parameter("bias", nn.Parameter(module.weight.new_zeros(given[name])))
    load_into(model, folder / WEIGHTS, device=str(model.device))


# ---- reinforcement


def reinforce(config: HardenConfig, students: Students, tokenizer: Any, out: Path, tell: Any) -> dict[str, Any]:
    """Train the student further; returns what it cost."""
    if len(config.plans) != 1:
        raise ShaketableError("reinforce takes one plan; harden against several without it")
    start, folder = out / START, out / REINFORCED
    begun = (folder / FILE).is_file()
    if not begun:
        students.model.save_pretrained(start)
        tokenizer.save_pretrained(start)
    asked = TrainConfig.checked(
        model=str(start),
        task=config.task,
        steps=config.reinforce_steps,
        seed=config.seed,
        plan=config.plans[0],
        beta=config.reinforce_beta,
        eval_n=min(config.eval_n, 64),
        device=config.device,
        dtype=config.dtype,
        report_to=(),
    )
    record = (
        RunRecord.open(folder, "train") if begun else RunRecord.create(folder, "train", asked.model_dump(mode="json"), gather())
    )
    if not record.events("finished"):
        Training(asked, record, tell).run(resume=begun)
    trained, _ = load_model(str(folder / "model"), device=config.device, dtype=torch.float32)
    students.model.load_state_dict(trained.state_dict())
    return {"sequences": asked.steps * asked.batch, "record": REINFORCED}
