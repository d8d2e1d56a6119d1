"""A plan in a whole process whose code knows nothing of it.

One `Injection` acts on every model of the process: a global module hook attaches the plan to each outermost module when it is
first called. Operators are covered in all threads and also outside of modules. The ledger goes to a file of this process
(`ledger_file.py`), and a clause that does nothing is reported on stderr while the program runs.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import multiprocessing
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shaketable.faults.rng import mix64
from shaketable.inject.attach import Attached
from shaketable.inject.injection import Injection, rank_of_launcher
from shaketable.inject.modules import Hook, ModuleTaps, change_input
from shaketable.inject.passes import Calls, Entry
from shaketable.launch import process_identity
from shaketable.launch.ledger_file import LedgerFile
from shaketable.plan import Plan
from shaketable.sites.phases import current_phase

if TYPE_CHECKING:
    from shaketable.ledger.ledger import Ledger

PLAN, SEED, LEDGER = "SHAKETABLE_PLAN", "SHAKETABLE_SEED", "SHAKETABLE_LEDGER"
PASSES = 2
"""Passes in which a clause was on before it is reported that it never fired."""
_LOOSE = -1
"""The owner of operators outside of all modules."""


class Seen(Hook):
    """Marks a module that has been met; a copy of the module is not marked. Dynamo can read it."""


class CallsByTask(Calls):
    """The calls of a process that does one task after another: each task counts its passes and its models from zero."""

    task = 0
    models = 0
    """Models met in this task."""

    def follow(self) -> None:
        """Notice that another task has begun. Other threads do not know their task, and belong to the one noticed last."""
        if threading.current_thread() is not threading.main_thread():
            return
        task = process_identity.current_task()
        if task != self.task:
            self.task, self.models = task, 0
            self.set_step(self.step)

    def new_key(self, who: int, phase: str) -> int:
        self.follow()
        key = super().new_key(who, phase)
        return mix64(key ^ self.task) if self.task else key


class ProcessInjection:
    """The injection of a process, and the models that it has met."""

    def __init__(self, plan: Plan) -> None:
        self._inherits_group = False
        """Whether the process group is that of the parent, of which this process is a fork."""
        self.injection = Injection(plan, rank=self._rank_now, allow_inert=True)
        self.injection.how_to_end = "run the program without --plan"
        self.injection.calls = self.calls = CallsByTask(self.injection)
        self.seen: WeakSet[nn.Module] = WeakSet()
        self.attaching = threading.RLock()
        self.names: list[str] = []
        """Classes of the models that a clause matched."""
        self.late: set[str] = set()
        self.unmatched: list[str] = []
        self.unmatched_models: set[tuple[str, str]] = set()
        """Classes of models with parameters in which nothing matched, and the phase of their first call."""
        self.reports: Reports | None = None
        self.meet = torch.compiler.disable(self._meet)
        """A model that is first called inside a compiled function: the graph is left to meet it."""
        self._loose = Entry(0, nn.Identity(), None, _LOOSE)
        self._aside = 0
        self._is_aside = False
        """Whether models that are called belong to an engine: the graphs that it has made of its model too."""
        self.injection.operators.loose = self._loose
        self.injection.operators.make(_LOOSE, "", range(0))

    def group(self) -> tuple[int, int] | None:
        """Rank and number of ranks of the process group that this process has joined itself."""
        is_joined = dist.is_available() and dist.is_initialized() and not self._inherits_group
        return (dist.get_rank(), dist.get_world_size()) if is_joined else None

    def _rank_now(self) -> int:
        group = self.group()
        return process_identity.child_rank(rank_of_launcher()) if group is None else group[0]

    @contextmanager
    def standing_aside(self) -> Iterator[None]:
        """Leave all modules and operators alone: an engine runs models with an injection of their own."""

        def change(more: int) -> None:
            with self.attaching:
                self._aside += more
                self._is_aside = self._aside > 0
                self.injection.operators.loose = None if self._aside else self._loose

        change(1)
        try:
            yield
        finally:
            change(-1)

    def leave_alone(self, model: nn.Module) -> None:
        """A model that has been met, or that another injection acts on."""
        self.seen.update(model.modules())
        for module in model.modules():
            module.__dict__["_shaketable_seen"] = Seen()

    def after_fork(self) -> None:
        """A forked child has done nothing yet, and is in no process group of its own."""
        self.injection.ledger.clear()
        self.injection.inert_check.clear()
        self.unmatched_models.clear()
        if self.reports is not None:
            self.reports.trained = False
        self._inherits_group = self._inherits_group or self.group() is not None
        self.calls.lock = threading.Lock()  # another thread of the parent may have held these
        self.attaching = threading.RLock()

    # ---- meeting models

    def on_call(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Global forward pre-hook: attach the plan to a model that is called for the first time."""
        if self._is_aside or isinstance(getattr(module, "_shaketable_seen", None), Seen):
            return None
        if torch.compiler.is_compiling():
            self.meet(module)
            return None
        has_tensor = change_input(args, {}, lambda x: x)[2]
        for hook in self._meet(module):
            if has_tensor or not isinstance(hook, ModuleTaps):
                result = hook(module, args, {})
                args = args if result is None else result[0]
        return args or None

    def _meet(self, module: nn.Module) -> list[Callable[..., Any]]:
        """Attach the plan to a new model; returns the hooks that came too late for the call it is in."""
        with self.attaching:
            if module in self.seen:
                return []
            outermost = self.calls.stack[0] if self.calls.stack else None
            if outermost is not None and any(module is m for m in outermost.entry.module.modules()):
                self.late.add(f"a {type(module).__name__} was added to a model after its first call and has no faults")
                return []
            before = len(module._forward_pre_hooks)
            self._attach_root(module)
            return list(module._forward_pre_hooks.values())[before:]

    def _attach_root(self, root: nn.Module) -> None:
        self.calls.follow()
        attached = None
        if any(root.children()) or any(p is not None for p in root._parameters.values()):
            attached = Attached(self.injection, root, len(self.names), skip=self.seen, lenient=True, number=self.calls.models)
            self.unmatched.extend(attached.unmatched)
            self._note(root, attached)
        if attached is not None and self._acts_on(attached):
            self.names.append(type(root).__name__)
            self.calls.models += 1
            root.__dict__["_shaketable_attached"] = attached
            self.injection.add(attached, weakly=True)
            attached.hook()
        self.leave_alone(root)

    def _acts_on(self, attached: Attached) -> bool:
        return bool(attached.points or attached.weights or self.injection.has_operators)

    def _note(self, root: nn.Module, attached: Attached) -> None:
        """A model is called for the first time: which clauses match in it, and which do not."""
        lost = unmatched_clauses(self.injection.plan, attached.unmatched)
        self.injection.inert_check.matched[attached.owner] = set(range(len(self.injection.plan.clauses))) - lost.keys()
        if next(root.parameters(), None) is None or any(module in self.seen for module in root.modules()):
            return
        if not self._acts_on(attached):
            self.unmatched_models.add((type(root).__name__, current_phase(root.training)))
        if self.reports is not None:
            self.reports.on_model(root, lost, attached.hidden)


def unmatched_clauses(plan: Plan, errors: list[str]) -> dict[int, str]:
    """The clauses that matched nothing in a model, and why; an error begins with the site that it is about."""
    sites = ((i, f"{clause.site.text()}: ") for i, clause in enumerate(plan.clauses))
    return {i: e.removeprefix(site) for i, site in sites for e in errors if e.startswith(site)}


# ---- reports while the program runs


class Reports:
    """One line on stderr, while a program runs, about a clause of its plan that does nothing. The program continues.

    Each line is written once for all processes of the program, by the first to leave a mark in the folder of ledgers. A clause
    that matches nothing is reported when the model is called for the first time. The others are judged whenever the ledger of
    the process is written: compiled models and replayed graphs run no Python when a pass ends. A clause that acts backward
    only is judged after the first step of an optimizer, when the models have gradients.
    """

    def __init__(self, injection: Injection, folder: Path) -> None:
        self.injection = injection
        self.folder = folder
        self.trained = False
        """Whether a model has been trained; known only where a clause needs it."""
        self._done: set[object] = set()
        self._matched: set[int] = set()
        if any(clause.site.directions == ("backward",) for clause in injection.plan.clauses):
            self._hook = register_optimizer_step_pre_hook(self._on_optimizer)

    def on_model(self, model: nn.Module, lost: dict[int, str], hidden: Sequence[Sequence[str]]) -> None:
        """A model is called for the first time. A clause that has matched elsewhere, or a model of one layer, is not reported.

        Args:
            model: The model.
            lost: The clauses that match nothing in it, and why.
            hidden: Per clause, the operators that the model computes where they cannot be hit.
        """
        clauses, name = self.injection.plan.clauses, type(model).__name__
        self._matched |= set(range(len(clauses))) - lost.keys()
        for i, why in lost.items():
            if i not in self._matched and any(model.children()):
                self._report((i, name), f"{clauses[i].text()} does nothing in {name}: {why}")
        for clause, lines in zip(clauses, hidden, strict=True):
            for line in lines:
                self._report((clause.text(), line), f"{clause.text()} in {name}: {line}")

    def judge(self, ledger: Ledger) -> None:
        """The ledger of the process is about to be written: see what each clause has done so far."""
        for i, line in self.injection.inert_check.inert(trained=self.trained, passes=PASSES, ledger=ledger).items():
            self._report(i, line)

    def _on_optimizer(self, *_: Any) -> None:
        """An optimizer is about to step."""
        if any(p.grad is not None for attached in self.injection.models for p in attached.model.parameters()):
            self.trained = True
            self._hook.remove()

    def _report(self, key: object, line: str) -> None:
        if key not in self._done:
            self._done.add(key)
            mark = self.folder / f"told-{hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()}.mark"
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:  # another process of this program has reported it
                return
            except OSError:
                pass
            sys.stderr.write(f"shaketable: {line} (process {os.getpid()}; the program continues)\n")
            sys.stderr.flush()


# ---- the plan of this process


_active: LedgerFile | None = None


def active() -> LedgerFile | None:
    """The ledger of this process, when a plan is active in all of it."""
    return _active


def activate() -> None:
    """Make the plan of the environment active in this process. Does nothing the second time."""
    global _active
    if _active is not None:
        return
    process = ProcessInjection(Plan.parse(os.environ[PLAN], seed=int(os.environ.get(SEED, "0"))))
    process.injection.enable()
    _in_every_thread(process.injection)
    register_module_forward_pre_hook(process.on_call)
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
    _active = LedgerFile(process, Path(os.environ[LEDGER]))
    process.reports = Reports(process.injection, _active.folder)
    atexit.register(_active.flush)
    process_identity.before_an_answer = _active.catch_up
    os.register_at_fork(after_in_child=_active.after_fork)
    _flush_before_exit(_active)
    _note_rank_before_leaving(_active)
    _write_before_answers()


def _flush_before_exit(file: LedgerFile) -> None:
    """Children of multiprocessing leave by `os._exit`, which does not run atexit."""
    leave = os._exit

    def flush_and_leave(status: int) -> NoReturn:
        try:
            file.flush()
        except BaseException:  # the process must end all the same: a forked child would run on in the code of its parent
            traceback.print_exc()
        finally:
            leave(status)

    os._exit = flush_and_leave


def _note_rank_before_leaving(file: LedgerFile) -> None:
    """A rank that has left its process group is still a rank in the ledger."""
    if not dist.is_available():
        return
    leave = dist.destroy_process_group

    @functools.wraps(leave)
    def note_and_leave(*args: Any, **kwargs: Any) -> None:
        file.note_rank()
        leave(*args, **kwargs)

    dist.destroy_process_group = note_and_leave


def _write_before_answers() -> None:
    """A child of multiprocessing sends what one class pickles; a pool ends children by a signal, too late to write."""
    begin = ForkingPickler.__init__

    def write_and_begin(self: ForkingPickler, *args: Any) -> None:
        if multiprocessing.parent_process() is not None:
            process_identity.before_an_answer()
        begin(self, *args)

    ForkingPickler.__init__ = write_and_begin  # type: ignore[method-assign]


def _in_every_thread(injection: Injection) -> None:
    """Operator modes belong to a thread: put ours on in each that starts from now on."""
    if not injection.has_operators:
        return
    start: Callable[[threading.Thread], None] = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def run_inner(self: threading.Thread) -> None:
        injection.push_mode()
        try:
            start(self)
        finally:
            injection.drop_mode()

    threading.Thread._bootstrap_inner = run_inner  # type: ignore[attr-defined]
