"""GRPO under faults, from a configuration to a run record.

    weights --rollout phase: plan, AQN--> samples --rewards--> loss --train phase: plan--> weights
       |
       +--eval phase: clean, and the plan as a condition of its own--> scores, answers, ledgers

The plan is one injection on the model for the whole run, switched off while an evaluation runs; each evaluation makes its own
injection, with its own ledger. AQN is a second injection. Both are keyed by the step, and the data, the sampling and TRL's
shuffling are too, so that a killed run resumes from its last whole checkpoint to the same weights, bit for bit.

A plan, or AQN, that did nothing in the first step ends the run there, not after a night.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig

from shaketable.aqn.attach import AttachedAQN
from shaketable.aqn.schedules import Constant
from shaketable.errors import InertError, ShaketableError
from shaketable.evaluate.decoding import Decoder, chat_tokens
from shaketable.evaluate.layers import readings
from shaketable.evaluate.score import Condition, Evaluation, Evaluator, arithmetic
from shaketable.evaluate.tasks import Problem, Task, digest, examples, load_task, reward_of, sample
from shaketable.evaluate.tasks.task import train_problems
from shaketable.faults.rng import key_of
from shaketable.inject import Injection, Ledger, inject
from shaketable.models import load_model
from shaketable.records.record import RunRecord
from shaketable.records.weight_hash import weights_hash
from shaketable.train import checkpoints
from shaketable.train.config import TrainConfig
from shaketable.train.plans import aqn_of, conditions_of, train_plan
from shaketable.train.trainer import FaultyGRPO, grpo_config
from shaketable.train.warm_start import Tell, warm_start

SMALL = 10_000_000
COLLAPSE = 0.5
"""A first score under noise below this share of the clean one is a collapse."""


class Training:
    """One run. `run()` does it."""

    def __init__(self, config: TrainConfig, record: RunRecord, tell: Tell | None = None, *, loaded: Any = None) -> None:
        """`loaded` is the model, in float32, and its tokenizer, when they are there already."""
        self.record, self.tell = record, tell or (lambda kind, facts: None)
        self.task: Task = load_task(config.task)
        plan, aqn = train_plan(config), aqn_of(config)
        self.conditions = conditions_of(config)
        self.tell("stage", {"text": f"loading {config.model}"})
        self.model, self.tokenizer = loaded or load_model(config.model, device=config.device, dtype=torch.float32)
        self.config = _resolved(config, self.model)
        record.append("resolved", config=self.config.model_dump(mode="json"))
        total = self.config.steps * self.config.prompts
        self.problems = train_problems(self.task, total, lambda i: key_of(config.seed, "data", i))
        self.tests = sample(self.task, "test", self.config.eval_n, self.config.eval_seed)
        warmed: dict[str, Any] = {}
        if self.config.warm_start:
            warmed = {"warm_start": warm_start(self.config, self.task, self.model, self.tokenizer, self.tell)}
        problems, weights = digest([*self.problems, *self.tests]), weights_hash(self.model)
        made_of = {"problems": problems, "tests": digest(self.tests), "weights": weights}
        known = checkpoints.made_of(record, made_of)
        self.trainer = self._make_trainer()
        self.policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        self.policy.eval()
        size = known["batch_size"] if known else self.config.eval_batch
        self.evaluator = Evaluator(self.policy, self.tokenizer, self.task, self.tests, size, loss=self.config.eval_loss)
        self.injection: Injection | None = None if plan is None else inject(self.policy, plan, allow_inert=True)
        self.noise: AttachedAQN | None = (
            None if aqn is None else aqn.attach(self.policy, self.config.steps, plan=self.injection)
        )
        self.before: dict[str, Any] = {}
        self.trainer.add_callback(Steps(self))
        if not known:
            record.append("made_of", **made_of, batch_size=self.evaluator.batch_size, **warmed)
        if not record.events("examples"):
            record.append("examples", problems=examples(self.tests))

    # ---- making

    def _make_trainer(self) -> FaultyGRPO:
        config, out = self.config, self.record.folder
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(out / "tensorboard")
        lora = LoraConfig(r=config.lora, lora_alpha=2 * config.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        rows = [
            {"prompt": _prompt(self.tokenizer, self.task, problem), "problem": i} for i, problem in enumerate(self.problems)
        ]
        decoder = Decoder.of(self.model, self.tokenizer, self.task.max_new_tokens, config.temperature)
        trainer = FaultyGRPO(
            decoder=decoder,
            key=key_of(config.seed, "train"),
            cap=config.tis,
            dtype=config.dtype,
            model=self.model,
            processing_class=self.tokenizer,
            reward_funcs=self._reward,
            args=grpo_config(config, out, self.task.max_new_tokens),
            train_dataset=Dataset.from_list(rows),
            peft_config=lora if config.lora else None,
        )
        for callback in (transformers.PrinterCallback, transformers.ProgressCallback):
            trainer.remove_callback(callback)
        return trainer

    def _reward(self, prompts: Any, completions: list[Any], problem: list[int], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [reward_of(self.task, self.problems[i], text) for i, text in zip(problem, texts, strict=True)]

    # ---- running

    def run(self, *, resume: bool = False) -> None:
        """Train to the last step, evaluate it, save the clean weights; everything is in the record."""
        checkpoint = self._last_checkpoint() if resume else None
        if checkpoint is None:
            self._first_look()
        self._switch_on()
        if self.noise is not None:
            self.noise.enable()
        for name, injection in self._injections().items() if checkpoint is not None else ():
            injection.go_on(self.before["counted"][name])
        try:
            self.trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except BaseException:
            self._close(check=False)
            raise
        self._close(check=True)
        self._finish()

    def _last_checkpoint(self) -> Path | None:
        folder = checkpoints.newest(self.record)
        if folder is not None:
            self.before = checkpoints.content(folder)
        self.record.resumed(-1 if folder is None else checkpoints.step_of(folder))
        return folder

    def _first_look(self) -> None:
        """Scores before the first step; warns when noise has already taken the model down."""
        clean, *faulty = self.evaluate(0)
        for found in faulty:
            self._warn_of_collapse(f"under {found.condition.name}", clean, found)
        if self.noise is not None:
            top = max(self.noise.aqn.schedule.sigma(s, self.config.steps) for s in range(self.config.steps))
            loudest = replace(self.noise.aqn, schedule=Constant(top), order="after")
            with loudest.attach(self.policy, 1), arithmetic(self.config.device, self.config.dtype):
                found = self.evaluator.score(Condition("aqn"), during="rollout")
            self.record.append("aqn_check", step=0, sigma=top, **found.summary())
            self._warn_of_collapse(f"with AQN at its largest σ = {top:g}", clean, found)

    def _warn_of_collapse(self, what: str, clean: Evaluation, noisy: Evaluation) -> None:
        if noisy.accuracy < COLLAPSE * clean.accuracy and noisy.interval.high < clean.interval.low:
            text = f"{what} accuracy falls from {clean.accuracy:.1%} to {noisy.accuracy:.1%} before the first step"
            self.record.append("warning", step=0, text=text)
            self.tell("warning", {"text": text})

    def evaluate(self, step: int) -> list[Evaluation]:
        """Scores under every condition; training noise is off, and the record has every answer."""
        was_on = self.injection is not None and self.injection.enabled
        if self.injection is not None:
            self.injection.disable()
        done = []
        for condition in self.conditions:
            self.tell("stage", {"text": f"evaluating: {condition.name}"})
            with arithmetic(self.config.device, self.config.dtype):
                done.append(self.evaluator.score(condition))
        self.record.append("evaluation", step=step, conditions=[e.to_dict() for e in done])
        self.tell("evaluation", {"step": step, "conditions": [e.summary() for e in done]})
        if self.config.mechanism and step in (0, self.config.steps):
            self.tell("stage", {"text": "reading the mechanism"})
            with arithmetic(self.config.device, self.config.dtype):
                self.record.append("mechanism", step=step, conditions=readings(self.evaluator, done))
        if was_on:
            self._switch_on()
        return done

    def _switch_on(self) -> None:
        """The plan, on; its operator mode is left to the model's own calls, and TRL's tensor work does not pass through it."""
        if self.injection is not None:
            self.injection.enable().drop_mode()

    def seconds(self) -> tuple[float, float]:
        """Time spent in the plan's faults and in AQN's so far, in this process."""
        injection = self.injection.ledger.sites if self.injection is not None else []
        noise = self.noise.injection.ledger.sites if self.noise is not None else []
        both = [sum(spot.seconds for site in sites for spot in site.spots.values()) for sites in (injection, noise)]
        return both[0], both[1]

    def check_weights(self, step: int) -> None:
        """Weights that are not numbers end the run: they would be saved as clean ones, and scored."""
        trained = [p.detach() for p in self.policy.parameters() if p.requires_grad]
        if not bool(torch.nn.utils.get_total_norm(trained).isfinite()):
            raise ShaketableError(
                f"step {step}: the weights are no longer finite, the noise or the learning rate was too much; "
                f"nothing of this step is saved, earlier checkpoints are in {self.record.folder}"
            )

    def check_first_step(self) -> None:
        """A clause that did nothing in the first step, in which everything happens, will do nothing in the others."""
        lines: list[str] = []
        if self.injection is not None:
            lines += self.injection.inert_check.inert(trained=True).values()
            lines += [f"{s.fault}@{s.site} never fired" for s in self.injection.ledger.sites if not s.forward + s.backward]
        if self.noise is not None:
            lines += self.noise.inert(trained=True)
        if lines:
            raise InertError(f"{lines[0]} in the first step; the run ends here")

    def _injections(self) -> dict[str, Injection]:
        noise = None if self.noise is None else self.noise.injection
        return {name: found for name, found in {"plan": self.injection, "aqn": noise}.items() if found is not None}

    def counted(self) -> dict[str, Any]:
        """Counters of plan and AQN, for the process that resumes from a checkpoint."""
        return {name: injection.counted() for name, injection in self._injections().items()}

    def ledgers(self) -> dict[str, Any]:
        """What plan and AQN did in the whole run, before a resume too."""
        now = {"plan": self.injection.ledger if self.injection else None, "aqn": self.noise.ledger if self.noise else None}
        found = {}
        for name, ledger in now.items():
            if ledger is not None:
                earlier = [Ledger.from_dict(self.before[name])] if name in self.before else []
                found[name] = Ledger.merge([*earlier, ledger]).to_dict()
        return found

    def _close(self, *, check: bool) -> None:
        self.whole = self.ledgers()
        if self.noise is not None:
            self.noise.close(check=False)
        if self.injection is not None:
            self.injection.close(check=False)
        if check:
            for ledger in self.whole.values():
                Ledger.from_dict(ledger).check()

    def _finish(self) -> None:
        folder = self.record.folder / "model"
        with checkpoints.writing("the weights", self.record.folder):
            self.policy.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        self.record.append("finished", step=self.config.steps, ledgers=self.whole)


def _resolved(config: TrainConfig, model: Any) -> TrainConfig:
    """The configuration with what depends on the model filled in."""
    size = sum(p.numel() for p in model.parameters())
    lr = config.lr or (1e-4 if size < SMALL else 2e-4 if config.lora else 2e-5)
    return config.model_copy(update={"lr": lr})


def _prompt(tokenizer: Any, task: Task, problem: Problem) -> Any:
    if tokenizer.chat_template is None:
        return task.prompt(problem, chat=False)
    text = task.prompt(problem, chat=True)
    chat_tokens(tokenizer, text)  # the trainer renders it again, and would wait for a template that does not end
    return [{"role": "user", "content": text}]


class Steps(transformers.TrainerCallback):  # type: ignore[misc]
    """What happens around each step: randomness is set, meters are read, scores taken, checkpoints sealed."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.started = 0.0
        self.facts: dict[str, float] = {}
        self.is_checked = False
        """Whether the first step of this process is over and has proven that the plan acts."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Everything random follows the step."""
        run = self.training
        run.trainer.begin_step()
        if run.injection is not None:
            run.injection.step = state.global_step
        if run.noise is not None:
            run.noise.step = state.global_step
        self.spent = run.seconds()
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Read the meters, then evaluate if it is time."""
        run, trainer = self.training, self.training.trainer
        seconds, spent = time.perf_counter() - self.started, run.seconds()
        run.check_weights(state.global_step)
        if not self.is_checked:
            self.is_checked = True
            run.check_first_step()
        self.facts = {
            "sigma": run.noise.sigma if run.noise is not None else 0.0,
            "seconds": seconds,
            "sampling_seconds": trainer.sampling_seconds,
            "tokens_per_second": trainer.sampled_tokens / max(trainer.sampling_seconds, 1e-9),
            "injection_seconds": spent[0] - self.spent[0],
            "aqn_seconds": spent[1] - self.spent[1],
            **trainer.mismatch.summary(),
        }
        metrics = trainer._metrics["train"]
        for name, value in self.facts.items():
            metrics[f"shaketable/{name}"].append(value)
        if run.config.evaluates_at(state.global_step):
            for found in run.evaluate(state.global_step):
                metrics[f"shaketable/accuracy/{found.condition.name}"].append(found.accuracy)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """One line of the record per step."""
        if not logs or "reward" not in logs:
            return
        shown = {"loss": "loss", "reward": "reward", "entropy": "entropy", "zero_variance": "frac_reward_zero_std"}
        facts = {name: logs[key] for name, key in (shown | {"grad_norm": "grad_norm"}).items() if key in logs}
        event = {"step": state.global_step, **facts, **self.facts}
        self.training.record.append("step", **event)
        self.training.tell("step", event)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The checkpoint is written: declare it whole, and let older ones go."""
        out, name = self.training.record.folder, f"checkpoint-{state.global_step}"
        with checkpoints.writing(name, out):
            checkpoints.seal(out / name, {**self.training.ledgers(), "counted": self.training.counted()})
            self.training.record.append("checkpoint", step=state.global_step, files=checkpoints.hashes(out / name))
            checkpoints.drop_old(out)
