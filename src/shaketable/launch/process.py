"""A plan made active in a whole process whose code never heard of us.

Models are found when they are first called: a global module hook attaches the plan to every outermost module it
meets, once. Operators are met in all threads and also outside of modules. The ledger goes to a file of this process
(`ledger_file.py`).
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from shaketable.faults.rng import mix64
from shaketable.inject.attach import Attached
from shaketable.inject.injection import Injection
from shaketable.inject.modules import Hook, ModuleTaps, change_input
from shaketable.inject.passes import Calls, Entry, Frame
from shaketable.launch import process_identity
from shaketable.launch.inert_notices import Notices
from shaketable.launch.ledger_file import LedgerFile
from shaketable.plan import Plan
from shaketable.sites.phases import current_phase

PLAN, SEED, LEDGER = "SHAKETABLE_PLAN", "SHAKETABLE_SEED", "SHAKETABLE_LEDGER"
_LOOSE = -1
"""The owner of operators outside of all modules."""


class Seen(Hook):
    """Marks a module that has been met; a copy of the module is not marked. Dynamo can read it."""


class ByTask(Calls):
    """The frames of a process that does one task after another: each task counts its passes and its models from zero."""

    def __init__(self, injection: Injection, step: int = 0) -> None:
        super().__init__(injection, step)
        self.task = 0
        self.models = 0
        """Models met in this task."""

    def follow(self) -> None:
        """Notice that another task has begun. Threads of a task do not know it, and belong to the one that was noticed last."""
        if threading.current_thread() is not threading.main_thread():
            return
        task = process_identity.current_task()
        if task != self.task:
            self.task, self.models = task, 0
            self.set_step(self.step)

    def new_key(self, who: int, phase: str) -> int:
        self.follow()
        moment = super().new_key(who, phase)
        return mix64(moment ^ self.task) if self.task else moment


class ProcessInjection(Injection):
    """An injection on every model of the process."""

    calls: ByTask
    has_group_of_parent = False
    """Whether the process group that this process seems to be in is that of the process it is a fork of."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, allow_inert=True)
        self.calls = ByTask(self)
        self.seen: WeakSet[nn.Module] = WeakSet()
        self.roots: WeakSet[nn.Module] = WeakSet()
        self.attaching = threading.RLock()
        self.names: list[str] = []
        self.late: set[str] = set()
        self.unmatched: list[str] = []
        self.unmatched_models: set[tuple[str, str]] = set()
        """Classes of models with parameters in which nothing matched, and the phase of their first call."""
        self.notices: Notices | None = None
        self.aside = 0
        """Above 0 while an engine runs its own models, which have an injection of their own."""
        self.meet = torch.compiler.disable(self._meet)
        """A model that is first called inside a compiled function: the graph is left to meet it."""
        self._loose = Entry(0, nn.Identity(), None, _LOOSE)
        self.operators.loose = self._loose
        self.operators.make(_LOOSE, "", range(0))

    @property
    def is_training(self) -> bool:
        return any(m.training for m in self.roots) or not len(self.roots)

    def rank_now(self) -> int:
        is_joined = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if is_joined else process_identity.rank_of_launcher()
        return rank if is_joined and not self.has_group_of_parent else process_identity.child_rank(rank)

    def operator_frame(self) -> Frame | None:
        return None if self.aside or not self.enabled else self.calls.top() or self._loose_frame()

    @contextmanager
    def standing_aside(self) -> Iterator[None]:
        """Leave alone what happens inside: an engine's own loop, outside of all modules too."""
        self.aside += 1
        try:
            yield
        finally:
            self.aside -= 1

    def leave_alone(self, model: nn.Module) -> None:
        """A model that another injection acts on."""
        self.seen.update(model.modules())
        for module in model.modules():
            module.__dict__["_shaketable_seen"] = Seen()

    def _loose_frame(self) -> Frame:
        current = self.begin_pass(self._loose, current_phase(training=torch.is_grad_enabled()))
        return Frame(self._loose, current, None, None, recomputing=False)

    def on_call(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Global forward pre-hook: attach the plan to a model that is called for the first time."""
        if isinstance(getattr(module, "_shaketable_seen", None), Seen):
            return None
        if torch.compiler.is_compiling():
            self.meet(module)
            return None
        return self._catch_up(module, args, self._meet(module))

    def _meet(self, module: nn.Module) -> list[Callable[..., Any]]:
        """Attach the plan to a new model; returns the hooks that came too late for the call it is in."""
        with self.attaching:
            if module in self.seen:
                return []
            if self._was_added(module):
                self.late.add(f"a {type(module).__name__} came into a model after its first call and is not shaken")
                return []
            before = len(module._forward_pre_hooks)
            self._attach_root(module)
            return list(module._forward_pre_hooks.values())[before:]

    def _was_added(self, module: nn.Module) -> bool:
        """Whether the module was put into a model that had been attached before: an adapter, added later."""
        frame = self.calls.stack[0] if self.calls.stack else None
        return frame is not None and any(module is m for m in frame.entry.module.modules())

    def _attach_root(self, root: nn.Module) -> None:
        self.calls.follow()
        attached = None
        if any(root.children()) or any(p is not None for p in root._parameters.values()):
            attached = Attached(self, root, len(self.names), skip=self.seen, lenient=True, number=self.calls.models)
            self.unmatched.extend(attached.unmatched)
            self._note(root, attached)
        if attached is not None and self._acts_on(attached):
            self.names.append(type(root).__name__)
            self.calls.models += 1
            self.roots.add(root)
            attached.hook()
            root.__dict__["_shaketable_attached"] = attached
        self.leave_alone(root)

    def _acts_on(self, attached: Attached) -> bool:
        return bool(attached.points or attached.weights or self.has_operators)

    def _note(self, root: nn.Module, attached: Attached) -> None:
        """A model is called for the first time: which clauses match in it, and which do not."""
        lost = unmatched_clauses(self.plan, attached.unmatched)
        self.inert_check.matched[attached.owner] = set(range(len(self.plan.clauses))) - lost.keys()
        if next(root.parameters(), None) is None or any(module in self.seen for module in root.modules()):
            return
        if not self._acts_on(attached):
            self.unmatched_models.add((type(root).__name__, current_phase(root.training)))
        if self.notices is not None:
            self.notices.on_model(root, lost)
            self.notices.on_hidden(root, attached.hidden)

    def _catch_up(self, module: nn.Module, args: tuple[Any, ...], hooks: list[Callable[..., Any]]) -> Any:
        """Run the hooks that came too late for the call they were added in."""
        has_tensor = change_input(args, {}, lambda x: x)[2]
        for hook in hooks:
            if not has_tensor and isinstance(hook, ModuleTaps):
                continue
            result = hook(module, args, {})
            args = args if result is None else result[0]
        return args or None


def unmatched_clauses(plan: Plan, errors: list[str]) -> dict[int, str]:
    """The clauses that matched nothing in a model, and why; an error begins with the site that it is about."""
    sites = ((i, f"{clause.site.text()}: ") for i, clause in enumerate(plan.clauses))
    return {i: e.removeprefix(site) for i, site in sites for e in errors if e.startswith(site)}


def active() -> LedgerFile | None:
    """The ledger of this process, when a plan is active in all of it."""
    return _active


_active: LedgerFile | None = None


def activate() -> None:
    """Make the plan of the environment active in this process. Does nothing the second time."""
    global _active
    if _active is not None:
        return
    injection = ProcessInjection(Plan.parse(os.environ[PLAN], seed=int(os.environ.get(SEED, "0"))))
    injection.enable()
    _in_every_thread(injection)
    register_module_forward_pre_hook(injection.on_call)
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
    _active = LedgerFile(injection, Path(os.environ[LEDGER]))
    injection.notices = Notices(injection, _active.folder)
    atexit.register(_active.flush)
    process_identity.before_an_answer = _active.catch_up
    os.register_at_fork(before=process_identity.count_fork, after_in_child=_active.after_fork)
    _flush_before_exit(_active)
    _note_rank_before_leaving(_active)
    _write_before_answers()


def _flush_before_exit(file: LedgerFile) -> None:
    """Children of multiprocessing, and others in a hurry, leave by `os._exit` and run nothing of atexit."""
    leave = os._exit

    def flush_and_leave(status: int) -> NoReturn:
        try:
            file.flush()
        except BaseException:  # who asks to leave must leave: a forked child would run on in the code of its parent
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
    """What a child of multiprocessing sends is pickled by one class; a pool ends children by a signal, too late to write."""
    begin = ForkingPickler.__init__

    def write_and_begin(self: ForkingPickler, *args: Any) -> None:
        if multiprocessing.parent_process() is not None:
            process_identity.before_an_answer()
        begin(self, *args)

    ForkingPickler.__init__ = write_and_begin  # type: ignore[method-assign]


def _in_every_thread(injection: ProcessInjection) -> None:
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
