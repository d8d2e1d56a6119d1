"""A plan and AQN inside of a vLLM worker.

The plan is attached right after the model was loaded: vLLM compiles at the first forward, and what is compiled carries the
taps. It stays quiet while vLLM profiles and warms up, and is switched on at the first real request. Two things are checked,
and each ends the engine with an error: the instructions match something in this model, and each clause fires in the first
forward in which it acts (`_prove`). What could never act is refused before (`refusals.py`).

What is compiled has numbers of taps in it, so vLLM is told to keep none of it on disk, where an engine without them would find
it.

On a CPU vLLM packs the weights of linears away. When a plan is about them, packing is left out, and the product is torch's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shaketable.aqn.attach import AttachedAQN
from shaketable.aqn.spec import AQN
from shaketable.errors import InertError, PlanError, ShaketableError, nearest
from shaketable.inject.injection import Injection
from shaketable.integrations.common.instructions import Instructions
from shaketable.integrations.common.worker_report import WorkerReport
from shaketable.integrations.common.wrapping import wrap_once
from shaketable.integrations.names import check_object
from shaketable.integrations.vllm.refusals import (
    is_written,
    read_instructions,
    refuse_idle,
    refuse_standstill,
    refuse_unhooked,
    refusing,
    tell,
)
from shaketable.launch import process_identity
from shaketable.launch.process import active
from shaketable.plan import PHASES, Plan

LOOP = ("load_model", "determine_available_memory", "compile_or_warm_up_model", "execute_model", "sample_tokens")
"""Methods that run the model; a plan on the whole process does nothing inside of them."""
_prepared: Instructions | None = None


def prepare(instructions: Instructions | None) -> None:
    """Have the taps of a plan compiled into every vLLM that is made in this process from now on; they do nothing until
    `set_plan` asks for that plan. For trainers that make their vLLM before they can say what it is for."""
    global _prepared
    _prepared = instructions


class Shaker:
    """The plan and the AQN of one worker."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.config = worker.vllm_config
        self.instructions = read_instructions(self.config)
        self.plan: Injection | None = None
        self.compiled: Injection | None = None
        """The plan whose taps are in the compiled model, also while another one is on."""
        self.aqn: AttachedAQN | None = None
        self.step = 0
        self.is_stepped = False
        """Whether the schedule is advanced."""
        self.phase = "rollout"
        self.is_live = False
        """Whether vLLM has warmed up and serves."""
        self.unproven: set[int] = set()
        """The clauses of the plan that have not been seen to act yet; those on weights alone need no forward to act."""
        self.newest: dict[str, Injection | AttachedAQN | None] = {"plan": None, "aqn": None}
        """The newest injections; their ledgers stay when they have been cleared."""
        self.is_stale = False
        """Whether new weights have come since faults were last written into them."""
        self.file: WorkerReport | None = None
        if (instructions := self.instructions or _prepared) is not None:
            check_object("vllm worker", worker)
            follow_instructions(self, instructions)

    @property
    def model(self) -> nn.Module:
        """The model of this worker."""
        runner = self.worker.model_runner
        if runner is None:
            raise ShaketableError("the model has not been loaded yet")
        found: nn.Module = runner.get_model()
        return found

    @property
    def injections(self) -> list[Injection]:
        """The injections of plan and AQN."""
        return [*([self.plan] if self.plan is not None else []), *([self.aqn.injection] if self.aqn is not None else [])]

    @property
    def rank(self) -> int:
        """Which copy of the model this is: tensor-parallel workers are one copy, and share it."""
        if given := os.environ.get("SHAKETABLE_RANK"):
            return int(given)
        parallel, place = self.config.parallel_config, process_identity.rank_here()
        copy = int(parallel.data_parallel_index or 0)
        return process_identity.number(f"{place}/{copy}") if place else copy

    @property
    def is_compiled(self) -> bool:
        """Whether vLLM compiles the model."""
        return int(self.config.compilation_config.mode or 0) > 0

    # ---- attaching

    def on_loaded(self, instructions: Instructions) -> None:
        """Attach to the loaded model. Instructions that were only prepared are compiled in and stay off; those that do not fit
        may be meant for another model, and `set_plan` refuses them."""
        if self.instructions is not None:
            self.attach(instructions)
            self._announce()
            return
        with suppress(PlanError):
            self.attach(instructions)
        self.clear()

    def attach(self, instructions: Instructions) -> None:
        """Put the instructions on the model that has just been loaded; what is on is hooked now and quiet until `go_live`."""
        if instructions.plan is not None:
            if not os.environ.get("SHAKETABLE_PLAN"):
                refuse_idle(Plan.parse(instructions.plan))
            self._attach_plan(Plan.parse(instructions.plan, seed=instructions.seed))
        if instructions.aqn is not None:
            self._attach_aqn(AQN.load(instructions.aqn), instructions.total_steps, self.step)
        self._keep_ledger(instructions)

    def _announce(self) -> None:
        """Print what will act, and what cannot: nobody can ask a server."""
        name = type(self.model).__name__
        self._say([f"{injection.plan.text()} will act on {name}" for injection in self.injections])
        self._say([f"{site.site}: {note}" for injection in self.injections for site in injection.sites for note in site.notes])

    def _say(self, lines: list[str]) -> None:
        where = f" (process {os.getpid()}{'' if self.file is None else f', ledger {self.file.path}'})"
        sys.stderr.writelines(f"shaketable: {line}{where}\n" for line in lines)
        sys.stderr.flush()

    def _keep_ledger(self, instructions: Instructions) -> None:
        """Write what is done here to the folder of ledgers; under `shaketable run`, to the ledger of the process."""
        file = active()
        if file is not None:
            file.process.leave_alone(self.model)
            if self.plan is not None:
                file.engines.append((type(self.model).__name__, self.plan, self.plan.ledger))
        if instructions.ledger is not None:
            self.file = WorkerReport(Path(instructions.ledger), "sampler", self.ledger)

    def _attach_plan(self, plan: Plan) -> None:
        """Put a plan in place of the one there is, which stays when this one does not fit."""
        refuse_unhooked(plan, self.config)
        injection = Injection(plan, step=self.step, rank=self.rank, allow_inert=True, sampler=True)
        injection.attach(self.model)
        injection.phase = self.phase
        if self.aqn is not None:
            self.aqn.stand_beside(injection)
        if self.plan is not None:
            self._retire(self.plan)
        self.plan = self.newest["plan"] = injection
        self._begin_proof(injection)
        self._hook(injection)
        if self.is_compiled and injection.models[0].hooks:
            self.compiled = injection

    def _attach_aqn(self, aqn: AQN, total_steps: int, step: int) -> None:
        attached = aqn.attach(
            self.model, total_steps, step=step, rank=self.rank, allow_inert=True, sampler=True, plan=self.plan
        )
        refuse_unhooked(attached.injection.plan, self.config)
        attached.injection.phase = self.phase
        if self.aqn is not None:
            self._retire(self.aqn.injection)
        self.aqn = self.newest["aqn"] = attached
        self._hook(attached.injection)

    def _hook(self, injection: Injection) -> None:
        """Hook the model, so that what is compiled has the taps; before the first request they do nothing."""
        wrap_once(self.worker, "execute_model", self._execute_model)
        for owner, name in ((self.worker, "reload_weights"), (self.model, "load_weights")):  # whoever sends new ones
            if hasattr(owner, name):
                wrap_once(owner, name, self._replace_weights)
        for attached in injection.models:
            attached.hook()
        injection.push_mode()
        if self.is_live:
            injection.enable()

    def _retire(self, injection: Injection) -> None:
        """Take an injection off the model. What is compiled keeps its taps, which do nothing."""
        injection.disable()
        if not (self.is_compiled and injection.models[0].hooks):
            injection.close(check=False)

    def go_live(self) -> None:
        """vLLM serves its first request: switch on."""
        if not self.is_live:
            self.is_live = True
            for injection in self.injections:
                injection.enable()

    def _execute_model(self, execute: Callable[..., Any], scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if not scheduled.total_num_scheduled_tokens:
            return execute(scheduled, *args, **kwargs)
        self.go_live()
        self._refuse_standstill()
        self._write_anew()
        plan, acts = self.plan, self._acting()
        output = execute(scheduled, *args, **kwargs)
        if plan is not None and any(acts):
            self._prove(plan, acts)
            self.flush()
            if self.file is not None:
                self._say([plan.ledger.sites[i].summary() for i, acted in enumerate(acts) if acted])
        return output

    def _refuse_standstill(self) -> None:
        """A schedule that nothing advances stays at its first σ, which may be 0."""
        if self.aqn is None or self.is_stepped or not self._samples_noisily(self.aqn):
            return
        try:
            refuse_standstill(self.aqn.aqn)
        except PlanError as error:
            tell(error)
            raise

    def _begin_proof(self, injection: Injection) -> None:
        self.unproven = {i for i, clause in enumerate(injection.plan.clauses) if not is_written(clause)}

    def _acting(self) -> tuple[bool, ...]:
        """Per clause, whether it acts forward in the request that begins and has not been seen to act before."""
        if self.plan is None or not self.plan.enabled:
            return ()
        forward = ("forward" in clause.site.directions for clause in self.plan.plan.clauses)
        acting = zip(self.plan.acting(self.phase), forward, strict=True)
        return tuple(i in self.unproven and all(both) for i, both in enumerate(acting))

    def _prove(self, plan: Injection, acts: tuple[bool, ...]) -> None:
        """Every clause must act in the first forward in which it is on: a hook that is never called leaves no trace."""
        plan.inert_check.saw_pass(acts)
        lines = [line for i, line in plan.inert_check.inert().items() if acts[i]]
        if lines:
            error = InertError(f"{'; '.join(lines)} in the first forward of this vLLM worker")
            tell(error)
            raise error
        self.unproven -= {i for i, acted in enumerate(acts) if acted}

    def flush(self) -> None:
        """Write the ledgers to disk now: an engine that is told to stop may be killed before their next write."""
        for file in (self.file, active()):
            if file is not None:
                file.flush()

    # ---- what can be asked for

    def set_plan(self, plan: str, seed: int = 0) -> None:
        """Put a plan in place of the one there is; a compiled model takes its own."""
        new = Plan.load(plan, seed=seed)
        refuse_idle(new)
        if self.instructions is not None and active() is not None:
            raise PlanError(
                "`shaketable run` has given this vLLM its plan, and its ledger is of one plan; use options(plan=…) instead"
            )
        if self.is_compiled and not all(is_written(clause) for clause in new.clauses):
            self._put_into_graph(new)
        else:
            self.go_live()
            self._attach_plan(new)

    def _put_into_graph(self, plan: Plan) -> None:
        """Switch the plan on that the model was compiled with, at the magnitudes it asks for."""
        compiled = self.compiled
        if compiled is None or (compiled.plan, compiled.rank) != (plan, self.rank):
            has = "without taps" if compiled is None else f"with {compiled.plan.text()}, of which only magnitudes can change"
            raise PlanError(
                f"{plan.text()}: this vLLM model was compiled {has}; "
                "start vLLM with the plan (shaketable.integrations.vllm.options), or with enforce_eager=True"
            )
        self.go_live()
        if self.plan is not None and self.plan is not compiled:
            self._retire(self.plan)
        self.plan = self.newest["plan"] = compiled
        for i, clause in enumerate(plan.clauses):
            if (asked := clause.fault.asked()) is not None:
                compiled.set_magnitude(asked, i)
        compiled.enable()

    def set_magnitude(self, magnitude: float, clause: int | None = None) -> None:
        """Change the magnitude of one clause, or of all."""
        self._planned().set_magnitude(magnitude, clause)

    def set_aqn(self, aqn: str, total_steps: int, step: int = 0) -> None:
        """Put AQN on the model; `set_step` moves along its schedule."""
        new = AQN.load(aqn)
        if self.is_compiled and new.form == "output":
            raise PlanError("this vLLM model is compiled: AQN on outputs must be given when vLLM starts, or use form=weight")
        self.go_live()
        self._attach_aqn(new, total_steps, step)
        self.set_step(step)

    def set_sigma(self, sigma: float | None) -> None:
        """Put a σ in place of the schedule's (0 is off), also without AQN; None gives the schedule back."""
        if self.aqn is None and sigma is not None:
            self.set_aqn(f"constant:{sigma!r}", 1, self.step)
        if self.aqn is None:
            raise ShaketableError("no AQN on this worker whose schedule could be given back")
        self.go_live()
        self.is_stepped = True
        self.aqn.force_sigma(sigma)
        self.aqn.enable()

    def set_step(self, step: int) -> None:
        """Begin a training step: it keys the noise, and σ follows."""
        self.step, self.is_stepped = step, True
        if self.plan is not None:
            self.plan.step = step
        if self.aqn is not None:
            self.aqn.step = step

    def set_phase(self, phase: str) -> None:
        """rollout, or eval for a validation: AQN is off in it, and of the plan what does not name it."""
        if phase not in PHASES:
            raise PlanError(f"unknown phase {phase!r}; {nearest(phase, PHASES)}")
        for injection in self.injections:
            injection.phase = phase
        self.phase = phase

    def _replace_weights(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Perhaps only some weights come, or parts of one: let all of them be clean when it begins."""
        for injection in self.injections:
            if (written := injection.models[0].written) is not None:
                written.put_back()
                self.is_stale = True
        return load(*args, **kwargs)

    def _write_anew(self) -> None:
        """Write the faults of weights into new weights, once for all that have come: a trainer may send them one by one."""
        if self.is_stale:
            self.is_stale = False
            for injection in self.injections:
                injection.rewrite()

    def clear(self) -> None:
        """Take plan and AQN off; the weights are the clean ones, bit for bit. Compiled taps stay, and do nothing."""
        self.is_live = True
        for injection in self.injections:
            self._retire(injection)
        self.set_phase("rollout")
        self.plan = None if self.plan is None or self.plan.closed else self.plan
        self.aqn = None if self.aqn is None or self.aqn.injection.closed else self.aqn

    def _planned(self) -> Injection:
        if self.plan is None or (self.is_live and not self.plan.enabled):
            raise ShaketableError("this vLLM worker has no plan; start it with one, or call set_plan")
        return self.plan

    def _samples_noisily(self, aqn: AttachedAQN) -> bool:
        return aqn.enabled and self.phase in aqn.injection.plan.clauses[0].site.phase

    def _sigmas(self) -> dict[str, float]:
        """σ of each layer as it is now; empty where AQN is off."""
        if self.aqn is None or not self._samples_noisily(self.aqn):
            return {}
        return {str(layer): sigma for layer, sigma in self.aqn.sigmas.items()}

    def ledger(self) -> dict[str, Any]:
        """The report of this worker: the ledgers of plan and AQN, its instructions' digest, σ per layer, step and phase."""
        return {
            "pid": os.getpid(),
            "rank": self.rank,
            "instructions": self.instructions.digest() if self.instructions is not None else None,
            "config": self.instructions.model_dump() if self.instructions is not None else None,
            "step": self.step,
            "phase": self.phase,
            "written": len({id(w) for i in self.injections for m in i.models if m.written for w in m.written.faulty()}),
            **{what: found.ledger.to_dict() if found is not None else None for what, found in self.newest.items()},
            "sigma": self.aqn.sigma if self.aqn is not None and self._samples_noisily(self.aqn) else 0.0,
            "sigmas": self._sigmas(),
        }


# ---- methods of the worker that are ours while it lives


def follow_instructions(shaker: Shaker, instructions: Instructions) -> None:
    """Attach when the model has been loaded, and switch on at the first request."""
    worker = shaker.worker
    os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
    for name in LOOP:
        wrap_once(worker, name, _standing_aside)

    def load_and_attach(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _unpacked() if shaker.instructions and _is_about_linear_weights(instructions) else nullcontext():
            result = load(*args, **kwargs)
        with refusing():
            shaker.on_loaded(instructions)
        return result

    def flush_and_stop(stop: Callable[[], None]) -> None:
        shaker.flush()
        stop()

    wrap_once(worker, "load_model", load_and_attach)
    wrap_once(worker, "shutdown", flush_and_stop)


def _standing_aside(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A method of the worker, during which a plan on the whole process does nothing: the worker has its own."""
    file = active()
    with file.process.standing_aside() if file is not None else nullcontext():
        return call(*args, **kwargs)


def _is_about_linear_weights(instructions: Instructions) -> bool:
    """Whether linears must keep their weights: the plan, or AQN, is about them."""
    plan = Plan.parse(instructions.plan, seed=instructions.seed) if instructions.plan is not None else None
    of_plan = plan is not None and any("weight" in clause.points for clause in plan.clauses)
    return of_plan or (instructions.aqn is not None and "linear" in AQN.load(instructions.aqn).roles)


@contextmanager
def _unpacked() -> Iterator[None]:
    """While a model is loaded: linears keep their weights, and multiply as torch does."""
    import vllm.model_executor.layers.utils as layers

    def keep(_: Callable[..., None], layer: nn.Module, remove_weight: bool) -> None:
        layer.__dict__["cpu_linear"] = torch.nn.functional.linear

    undo = wrap_once(layers, "dispatch_cpu_unquantized_gemm", keep)
    try:
        yield
    finally:
        undo()
