"""The sweep: models × magnitudes × noise seeds on one sample of problems, every run on disk before the next begins.

    for each model: load once → clean → every magnitude × seed → one `point` event each

A point event is a whole run with its answers and its ledger; it is written in one piece, so a kill loses at most the run that
was under way. What a resumed sweep must not decide anew is in the record: the configuration, the batch size of each model
(noise is keyed by the call, so another batch size draws other noise), the clean answers, and hashes of the weights and
problems, which refuse a model or a file that has changed in the meantime. So a resumed sweep ends in the same numbers.

Numbers for people are made from the record alone, by `sweep_results.results`.

Rejected: running all models at once (memory), and skipping a point whose plan did nothing. Such a plan is an error, and no
point is written for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shaketable.errors import InertError, ModelError, ShaketableError
from shaketable.evaluate.sweep.config import Setting, SweepConfig
from shaketable.evaluate.sweep.solve import Solving
from shaketable.evaluate.sweep.text_loss import TextReading
from shaketable.evaluate.tasks import Problem, Task, load_task, sample
from shaketable.evaluate.tasks.task import digest
from shaketable.evaluate.tasks.text import TextTask
from shaketable.fsdp_checkpoint import sharded_folder
from shaketable.inject import inject
from shaketable.models import load_model, load_skeleton
from shaketable.records.record import RunRecord
from shaketable.records.weight_hash import weights_hash

if TYPE_CHECKING:
    from shaketable.evaluate.sweep.vllm import VllmSolving

    Subject = Solving | TextReading | VllmSolving

Load = Callable[[str], tuple[Any, Any]]
"""A model and its tokenizer, by name."""
Tell = Callable[[int, int, str], None]
"""Called with problems done, problems in all, and what is running."""
DEFAULT_N = 200


def default_n(task: Task) -> int:
    """How many problems when nobody says: 200, or all texts of a text task."""
    return len(task.texts()) if isinstance(task, TextTask) else DEFAULT_N


def draw(task: Task, n: int, seed: int) -> list[Problem]:
    """The problems of a sweep: a sample of the test side, or of the texts."""
    if not isinstance(task, TextTask):
        return sample(task, "test", n, seed)
    texts = task.texts()
    if not 2 <= n <= len(texts):
        raise ShaketableError(f"cannot draw {n} texts: there are {len(texts)}, and an interval needs two at least")
    chosen = random.Random(f"{task.name}/test/{seed}").sample(range(len(texts)), n)
    return [Problem(f"text {i + 1}", texts[i], "") for i in chosen]


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
        for plan in plans[:1]:
            inject(skeleton, plan).close(check=False)


class Sweep:
    """One sweep and its record. `run()` does what the record does not have yet."""

    def __init__(self, config: SweepConfig, record: RunRecord, load: Load | None = None, tell: Tell | None = None) -> None:
        """Args:
        config: What to do.
        record: New, or that of the sweep that goes on.
        load: Loads a model; `load_model` on the device and in the dtype of the configuration by default.
        tell: Told of the progress.
        """
        self.config, self.record = config, record
        self.load, self.tell = load or self._load, tell or (lambda done, total, text: None)
        self.task = load_task(config.task)
        self.problems = draw(self.task, config.n, config.seed)
        self.settings = config.settings()
        self.done = {(e["model"], e["magnitude"], e["seed"]) for e in record.events("point")}
        self._same_problems()

    def run(self) -> None:
        """Measure every point that is not recorded yet."""
        for name in self.config.models:
            left = [s for s in self.settings if (name, s.magnitude, s.seed) not in self.done]
            if left:
                self._measure(name, left)
        if not self.record.events("finished"):
            self.record.append("finished")

    def _measure(self, name: str, left: list[Setting]) -> None:
        self._told(0, f"loading {name}")
        subject = self._in_vllm(name) if self.config.engine == "vllm" else self._subject(name, *self.load(name))
        if left[0].plan is not None:
            subject.remember(self._recorded("point", model=name, magnitude=0.0))
        for setting in left:
            text = f"{name} {setting.name}"
            facts = self._point(name, setting, subject, lambda done, _, text=text: self._told(done, text))
            self.record.append("point", model=name, magnitude=setting.magnitude, seed=setting.seed, **facts)
            self.done.add((name, setting.magnitude, setting.seed))

    def _point(self, name: str, setting: Setting, subject: Subject, progress: Any) -> dict[str, Any]:
        try:
            return subject.measure(setting, progress)
        except InertError as error:
            why = str(error).removesuffix(" (allow_inert=True accepts this)")
            raise InertError(f"{name} at {setting.name}: {why}; no point is written, earlier ones are kept") from None
        except torch.OutOfMemoryError as error:
            hint = f"a batch of {subject.batch_size} does not fit; begin anew with a smaller --batch-size"
            raise ShaketableError(f"{name} at {setting.name}: {hint}") from error

    def _subject(self, name: str, model: Any, tokenizer: Any) -> Solving | TextReading:
        """The model at its problems, in batches of the recorded size when there is one."""
        known = self._recorded("model", model=name)
        kind = TextReading if isinstance(self.task, TextTask) else Solving
        size = known["batch_size"] if known else self.config.batch_size
        subject: Solving | TextReading = kind(model, tokenizer, self.task, self.problems, size)
        weight, digest = next(model.parameters()), weights_hash(model)
        if not known:
            facts = {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
            place = {"dtype": str(weight.dtype).removeprefix("torch."), "device": str(weight.device)}
            self.record.append("model", model=name, **facts, **place, weights=digest, batch_size=subject.batch_size)
        elif known["weights"] != digest:
            raise ShaketableError(f"the weights of {name} are not those that this sweep began with; begin anew")
        return subject

    def _in_vllm(self, name: str) -> VllmSolving:
        """The model at its problems inside of vLLM."""
        from shaketable.evaluate.sweep.vllm import VllmSolving

        known = self._recorded("model", model=name)
        size = known["batch_size"] if known else self.config.batch_size
        subject = VllmSolving(name, self.task, self.problems, self.config, size)
        facts = subject.facts()
        if not known:
            self.record.append("model", model=name, **facts)
        elif known["weights"] != facts["weights"]:
            raise ShaketableError(f"the weights of {name} are not those that this sweep began with; begin anew")
        return subject

    def _same_problems(self) -> None:
        known, content = self._recorded("sample"), digest(self.problems)
        if not known:
            self.record.append("sample", task=self.task.describe(), n=len(self.problems), sha256=content)
        elif known["sha256"] != content:
            raise ShaketableError(f"the problems of {self.config.task} are not those that this sweep began with; begin anew")

    def _recorded(self, kind: str, **facts: Any) -> dict[str, Any]:
        """The first event that says this; empty when there is none."""
        events = self.record.events(kind)
        return next((e for e in events if all(e[key] == value for key, value in facts.items())), {})

    def _told(self, done: int, text: str) -> None:
        n = len(self.problems)
        self.tell(n * len(self.done) + done, n * len(self.settings) * len(self.config.models), text)

    def _load(self, name: str) -> tuple[Any, Any]:
        dtype = None if self.config.dtype is None else getattr(torch, self.config.dtype)
        return load_model(name, device=self.config.device, dtype=dtype)
