"""A plan and AQN in a Hugging Face Trainer, and so in all of TRL's: `callbacks=[ShaketableCallback(plan=…, ledger=…)]`.

The plan acts inside of `training_step`, where GRPO also samples, and nowhere else: optimizer, checkpoints and other callbacks
see a clean model. A clause without a phase acts in rollouts and training; an evaluation is clean, also when it samples, unless
a clause names `phase=eval`. Reference models are never touched.

No callback fires when an evaluation begins, none between generation and loss, and none when a trainer raises. So while a
training runs, two methods of that one trainer are wrapped; the trainer is found on the stack.

Step and rank key the noise, so a resumed training gets the noise of an uninterrupted one, and adds to the ledger that its
checkpoint had. A rank that injected nothing stops all of them with the same error, after the first step if that is known by
then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn
from transformers import Trainer, TrainerCallback

from shaketable.aqn.attach import AttachedAQN
from shaketable.aqn.spec import AQN
from shaketable.errors import InertError, ShaketableError
from shaketable.inject.injection import Injection, inject, this_rank
from shaketable.integrations.common.wrapping import wrap_once
from shaketable.integrations.hf.mismatch import MismatchCheck
from shaketable.integrations.hf.vllm_sampler import Colocated, prepare_colocated, sampler_of
from shaketable.integrations.names import check_object
from shaketable.ledger.ledger import Ledger
from shaketable.plan import Plan
from shaketable.records.record import put_in_place
from shaketable.sites.phases import phase

IN_CHECKPOINT = "shaketable_ledger.json"
ACCEPT = " (allow_inert=True accepts this)"


class ShaketableCallback(TrainerCallback):  # type: ignore[misc]
    """Puts a plan, AQN, or both on the model that a trainer trains, for as long as it trains.

    Args:
        plan: A line of the plan language, a YAML file, or a `Plan`.
        aqn: A line such as `global_decay:0.05-0.0005,stages=10`, a YAML file, or an `AQN`.
        seed: Keys all noise; overrides the plan's and AQN's own.
        ledger: A file for the merged ledger, kept up to date; one of a training that has finished is not overwritten.
        allow_inert: Accept a training in which nothing was injected.
        mismatch_every: Steps between two measurements of how far sampler and trainer are apart; alone, without plan and AQN,
            which would be measured too.
        mismatch_stop: Raise when a measurement finds that the sampler has other weights than the trainer.
    """

    def __init__(
        self,
        plan: str | Path | Plan | None = None,
        aqn: str | Path | AQN | None = None,
        *,
        seed: int | None = None,
        ledger: str | Path | None = None,
        allow_inert: bool = False,
        mismatch_every: int | None = None,
        mismatch_stop: bool = False,
    ) -> None:
        injects, measures = plan is not None or aqn is not None, mismatch_every is not None
        if injects is measures or (measures and ledger is not None) or (mismatch_stop and not measures):
            raise ShaketableError("ShaketableCallback needs plan=, aqn= or both, or mismatch_every= alone, with mismatch_stop=")
        if mismatch_every is not None and mismatch_every < 1:
            raise ShaketableError(f"mismatch_every is a number of steps, 1 or above, not {mismatch_every}")
        self.mismatch_every, self.mismatch_stop = mismatch_every, mismatch_stop
        self.mismatch: MismatchCheck | None = None
        """The measurements of this training, or of the last one."""
        self.plan = None if plan is None else while_training(Plan.load(plan, seed=seed))
        self.aqn = None if aqn is None else AQN.load(aqn)
        if self.aqn is not None and seed is not None:
            self.aqn = replace(self.aqn, seed=seed)
        prepare_colocated(self.plan)
        self.file = None if ledger is None else LedgerFile(Path(ledger), self.aqn)
        self.allow_inert = allow_inert
        self.injection: Injection | None = None
        """The plan of this training, or of the last one."""
        self.noise: AttachedAQN | None = None
        """The AQN of this training, or of the last one; None when vLLM samples."""
        self.sampler: Colocated | None = None
        """The vLLM of this process, when it samples."""
        self.merged: Ledger | None = None
        """The ledger of all ranks, when training has ended."""
        self._unwrap: list[Callable[[], None]] = []
        """Give the trainer its own methods back; empty when none is training."""
        self._call: FrameType | None = None
        """The call of `train` that this belongs to."""
        self._logged = (0, 0)
        self._is_compiled = False
        self._is_checked = False
        """Whether the first step is over."""

    # ---- the trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Attach to the model that is trained, for all of its steps."""
        self.close()
        if self.file is not None:
            self.file.begin(_checkpoint(args, state) if state.global_step else None)
        trainer, call = running_trainer()
        check_object("transformers trainer", trainer)
        self._attach(trainer, state)
        self._call = call
        self._unwrap = [
            wrap_once(trainer, "training_step", self._training_step),
            wrap_once(trainer, "evaluation_loop", self._evaluation_loop),
        ]
        callbacks = trainer.callback_handler.callbacks  # those that report a log come first and would miss what is added later
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))
        if self.mismatch_every is not None:
            self.mismatch = MismatchCheck(trainer, self.mismatch_every, self.mismatch_stop)
            self._unwrap.append(self.mismatch.undo)

    def _attach(self, trainer: Any, state: Any) -> None:
        """Match everything before anything is hooked: what does not fit raises, and leaves no trace."""
        self.injection = self.noise = self.sampler = self.merged = None
        self._logged, self._is_checked = (0, 0), False
        model, total, step = trainer.model, state.max_steps, state.global_step
        self._is_compiled = bool(trainer.args.torch_compile)
        if self.plan is not None:
            self.injection = inject(model, self.plan, step=step, allow_inert=True)
        self.sampler = sampler_of(trainer, self.plan, self.aqn, total, step)
        prepare_colocated(None)
        if self.aqn is not None and self.sampler is None:
            self.noise = self.aqn.attach(model, total, step=step, allow_inert=self.allow_inert, plan=self.injection)
        for injection in self._injections():
            injection.skip_pass = reference_test(model)
        self._enable(*self._injections())
        self._disable()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The noise of this step."""
        if not self._unwrap:
            raise ShaketableError(
                f"{type(self).__name__} was added after training began; give it to the trainer before train()"
            )
        if self.injection is not None:
            self.injection.step = state.global_step
        if self.noise is not None:
            self.noise.step = state.global_step
        if self.sampler is not None:
            self.sampler.set_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """After the first step: raises when a rank injected nothing, as far as that is known."""
        if not self._unwrap or self._is_checked:
            return
        self._is_checked = True
        lines: list[str] = []
        if self.injection is not None:
            lines += self.injection.inert_check.inert(trained=True, ledger=self.ledger).values()
        if self.noise is not None:
            lines += self.noise.inert(trained=True)
        found = [line + ACCEPT for line in lines if not self.allow_inert]
        if errors := _by_rank(gather_object([found])):
            self.close()
            raise InertError(f"{errors} (after the first step)")

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Write the ledger so far into the checkpoint, for a training that is resumed from there."""
        if self.file is not None and self._unwrap:
            self.file.write(self.ledger, _checkpoint(args, state))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        """Log what was injected since the last line, beside the losses."""
        if logs is not None and "loss" in logs and self._unwrap:
            found = self._metrics()
            for place in (logs, state.log_history[-1]):
                place.update(found)
            self._logged = self.ledger.forward, self.ledger.backward
            if self.file is not None and PartialState().num_processes == 1:  # several ranks do not all log
                self.file.write(self.ledger)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Take the noise off; merge, print and write the ledger; raises when a rank injected nothing."""
        if self.mismatch_every is not None:
            self.close()
            return
        ledger = self.ledger
        complaints = [] if self.allow_inert else self._complaints()
        self.close()
        if self.file is not None:
            self.merged = self.file.write(ledger, finished=True)
        else:
            self.merged = Ledger.merge([Ledger.from_dict(row) for row in gather_object([ledger.to_dict()])])
        if this_rank() == 0:
            print(self.merged)
        if errors := _by_rank(gather_object([complaints])):
            raise InertError(errors)

    # ---- on and off

    def _training_step(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_over():
            return train(*args, **kwargs)
        with self._guarded():
            self._enable(*self._injections())
            loss = train(*args, **kwargs)
            self._disable()
        return loss

    def _evaluation_loop(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_over():
            return evaluate(*args, **kwargs)
        with self._guarded(), phase("eval"):
            if self.sampler is not None:
                self.sampler.set_phase("eval")
            if self.injection is not None and any("eval" in c.site.phase for c in self.injection.plan.clauses):
                self._enable(self.injection)
            output = evaluate(*args, **kwargs)
            self._disable()
            if self.sampler is not None:
                self.sampler.set_phase("rollout")
        return output

    def _is_over(self) -> bool:
        """Whether our training has ended, perhaps by an error between its steps: then end too."""
        if any(frame is self._call for frame in _frames()):
            return False
        self.close()
        return True

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """An exception in the trainer's method leaves a clean model, and is raised even where a dead vLLM cannot be cleaned."""
        try:
            yield
        except BaseException as error:
            try:
                self.close()
            finally:
                raise error

    def _enable(self, *injections: Injection) -> None:
        """The operator mode is left to the calls of the model, unless it is compiled: dynamo must see the mode before them."""
        for injection in injections:
            injection.enable()
            if not self._is_compiled:
                injection.drop_mode()

    def _disable(self) -> None:
        for injection in self._injections():
            injection.disable()
            injection.drop_mode()

    def _injections(self) -> list[Injection]:
        noise = None if self.noise is None else self.noise.injection
        return [found for found in (self.injection, noise) if found is not None]

    def close(self) -> None:
        """Take everything off the model and the trainer. What was counted stays."""
        for unwrap in self._unwrap:
            unwrap()
        self._unwrap, self._call = [], None
        for part in (self.injection, self.noise):
            if part is not None:
                part.close(check=False)
        if self.sampler is not None:
            self.sampler.close()

    # ---- what happened

    @property
    def ledger(self) -> Ledger:
        """The ledger of this rank: the clauses of the plan, then those that AQN is made of."""
        parts = [part.ledger for part in (self.injection, self.noise) if part is not None]
        parts += [] if self.sampler is None else self.sampler.ledgers()
        return together(parts) if parts else Ledger("", 0, [])

    def _metrics(self) -> dict[str, float]:
        """σ, fires since the last line, and the largest error measured at a clause of the plan (of AQN, without one)."""
        if self.mismatch is not None:
            return self.mismatch.logged()
        ledger, found = self.ledger, {}
        acting = self.noise or self.sampler
        if self.aqn is not None and acting is not None:
            found["shaketable/sigma"] = acting.sigma
        found["shaketable/forward"] = float(ledger.forward - self._logged[0])
        found["shaketable/backward"] = float(ledger.backward - self._logged[1])
        asked = ledger.sites if self.plan is None else ledger.sites[: len(self.plan.clauses)]
        errors = [error for site in asked if (error := site.measured().error) is not None]
        return found | ({"shaketable/measured_error": max(errors)} if errors else {})

    def _complaints(self) -> list[str]:
        """One line for each thing that did nothing on this rank; of AQN's, what its own check says."""
        if self.noise is None:
            return [line + ACCEPT for line in self.ledger.inert()]
        lines = [] if self.injection is None else [line + ACCEPT for line in self.injection.ledger.inert()]
        try:
            self.noise.close()
        except InertError as error:
            lines.append(str(error))
        return lines


class LedgerFile:
    """The merged ledger of all ranks on disk. A training that was killed has left its own, which a resumed one goes on with."""

    def __init__(self, path: Path, aqn: AQN | None) -> None:
        self.path = path
        self.aqn = None if aqn is None else aqn.text()
        self.earlier: list[Ledger] = []
        """The ledger up to the checkpoint that this training was resumed from."""

    def begin(self, checkpoint: Path | None) -> None:
        """Refuse the file of another training; take over what a checkpoint had."""
        if self.path.exists() and not (checkpoint is not None and _is_unfinished(self.path)):
            raise ShaketableError(f"{self.path} is there already; nothing is overwritten, name another file")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ShaketableError(f"cannot write {self.path}: {error.strerror}") from None
        self.earlier = []
        if checkpoint is not None and checkpoint.exists():
            self.earlier = [Ledger.from_dict(json.loads(checkpoint.read_text(encoding="utf-8")))]

    def write(self, own: Ledger, *copies: Path, finished: bool = False) -> Ledger:
        """Merge the ledgers of all ranks, which come by here in the same order, and write them."""
        ranks = gather_object([own.to_dict()])
        merged = Ledger.merge([*self.earlier, *(Ledger.from_dict(rank) for rank in ranks)])
        workers = [{"rank": i, "forward": r["forward"], "backward": r["backward"]} for i, r in enumerate(ranks)]
        body = merged.to_dict() | {"aqn": self.aqn, "workers": workers, "finished": finished}
        for file in (self.path, *copies):
            if this_rank() == 0 and file.parent.is_dir():
                put_in_place(file, json.dumps(body, indent=2) + "\n")
        return merged


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}", IN_CHECKPOINT)


def _is_unfinished(file: Path) -> bool:
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("finished") is False
    except (OSError, ValueError, AttributeError):
        return False


def while_training(plan: Plan) -> Plan:
    """The plan with `phase=rollout+train` in the clauses that name no phase: an evaluation has to be asked for."""
    clauses = []
    for clause in plan.clauses:
        site = clause.site if clause.site.phase else clause.site.model_copy(update={"phase": ("rollout", "train")})
        clauses.append(clause.model_copy(update={"site": site}))
    return plan.model_copy(update={"clauses": tuple(clauses)})


def together(ledgers: list[Ledger]) -> Ledger:
    """One ledger of several: what a clause did here and in the sampler is added, other clauses follow one another."""
    first = Ledger.from_dict(ledgers[0].to_dict())
    for other in (Ledger.from_dict(ledger.to_dict()) for ledger in ledgers[1:]):
        mine = {(site.site, site.fault): site for site in first.sites}
        for site in other.sites:
            if (known := mine.get((site.site, site.fault))) is not None:
                known.add(site)
            else:
                first.sites.append(site)
        first.plan = first.plan if other.plan == first.plan else f"{first.plan};{other.plan}"
    return first


def _by_rank(complaints: list[list[str]]) -> str:
    """One line about all ranks; nothing when none complains."""
    if all(lines == complaints[0] for lines in complaints):
        return "; ".join(complaints[0])
    return "; ".join(f"rank {rank}: {line}" for rank, lines in enumerate(complaints) for line in lines)


# ---- what a trainer does not tell its callbacks


def running_trainer() -> tuple[Any, FrameType]:
    """The trainer that is calling a callback now, and its `train`: the outermost call that is its own."""
    trainer, call = None, None
    for frame in _frames():
        found = frame.f_locals.get("self")
        if trainer is None and isinstance(found, Trainer):
            trainer = found
        if trainer is not None and found is trainer:
            call = frame
    if call is None:
        raise ShaketableError("the callback was not called by a transformers Trainer; use st.inject and AQN.attach elsewhere")
    return trainer, call


def _frames() -> Iterator[FrameType]:
    """The calls that are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def reference_test(model: nn.Module) -> Callable[[], bool] | None:
    """Tells passes of the reference from those of the policy where PEFT makes them one module; None without adapters.

    The reference is the model with its adapters off, or with a frozen copy of them on (`ref`, in TRL): with other ones, in
    any case, than those that were on when training began.
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    layers = () if tuners is None else (m for m in model.modules() if isinstance(m, tuners.BaseTunerLayer))
    layer: Any = next(iter(layers), None)
    if layer is None:
        return None
    trained = list(layer.active_adapters)
    return lambda: bool(layer.disable_adapters) or layer.active_adapters != trained
