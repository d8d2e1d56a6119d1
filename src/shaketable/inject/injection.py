"""A plan made active on a model: matching, hooks, the switch, and bit-clean removal.

`inject` matches at once (a plan that hits nothing raises before anything is hooked), hooks when it is enabled, and
checks its ledger when it is closed: a clause that never fired or changed nothing raises.

torch.compile bakes hooks into graphs and does not look again. So activating and closing an injection drops what has been
compiled so far; what is compiled while it is active carries the taps, and from then on the switch, the magnitude and
the phase change nothing in the graph.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shaketable.errors import NoMatchError, PlanError
from shaketable.faults import FaultBase, MagnitudeFault, native
from shaketable.inject import compiled, operators, recompute, weights
from shaketable.inject.calls import Calls, Entry, Frame
from shaketable.inject.hooks import Hook
from shaketable.inject.ledger import Ledger, Spot
from shaketable.inject.modules import ModuleTaps
from shaketable.inject.taps import Tap
from shaketable.plan import Plan
from shaketable.sites.anatomy import Anatomy, Part
from shaketable.sites.match import Target, check_layers, targets
from shaketable.sites.phases import mark_generate, unmark_generate


def inject(
    model: nn.Module,
    plan: str | Path | Plan,
    *,
    seed: int | None = None,
    step: int = 0,
    rank: int | None = None,
    allow_inert: bool = False,
) -> Injection:
    """Make a plan active on a model.

        with st.inject(model, "relative_gaussian:0.05@op.matmul", seed=0) as ledger:
            model(**batch).loss.backward()
        print(ledger)

    Without `with`, use `enable()`, `disable()` and, at the end, `close()`.

    Args:
        model: Any PyTorch module.
        plan: A line of the plan language, a YAML file, or a `Plan`.
        seed: Keys all noise; overrides the plan's own.
        step: Where a resumed run goes on; see `Injection.step`.
        rank: Keys the noise of this process; the distributed rank by default.
        allow_inert: Accept a plan that never fires or changes nothing.

    Raises:
        PlanError: The plan cannot be read, or does not fit this model (`NoMatchError`).
    """
    injection = Injection(Plan.load(plan, seed=seed), step=step, rank=rank, allow_inert=allow_inert)
    injection.attach(model)
    return injection


def this_rank() -> int:
    """The distributed rank of this process, 0 when it has none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return int(os.environ.get("RANK", "0") or 0)


class Injection:
    """A plan on one or several models. Make it with `inject`."""

    def __init__(self, plan: Plan, *, step: int = 0, rank: int | None = None, allow_inert: bool = False) -> None:
        self.plan = plan
        self.rank = this_rank() if rank is None else rank
        self.allow_inert = allow_inert
        self.faults: list[FaultBase] = [c.fault for c in plan.clauses]
        self.ledger = Ledger.for_plan(plan, native.name())
        self.calls = Calls(step)
        self.enabled = False
        self.closed = False
        self.fires = 0
        """Grows with every fire; tells whoever keeps a copy of the ledger that it is out of date."""
        self.models: list[Attached] = []
        self.tracing: list[Entry] = []
        """The frames of the graph that is being compiled."""
        self.has_operators = any(c.site.level == "op" for c in plan.clauses)
        self._operator_taps: dict[tuple[int, int | None, str, str | None], list[Tap]] = {}
        self._mode = operators.Operators(self) if self.has_operators else None
        self._depth = 0

    # ---- the switch

    def attach(self, model: nn.Module) -> None:
        """Match the plan on a model, and hook it if the injection is enabled."""
        attached = Attached(self, model, len(self.models))
        self.models.append(attached)
        if self.enabled:
            attached.hook()

    def enable(self) -> Self:
        """Switch on. Hooks are set the first time and stay until `close`."""
        if self.closed:
            raise PlanError("this injection is closed; make a new one with inject()")
        for model in self.models:
            model.hook()
        if not self.enabled:
            self.calls.stack.clear()
        self.enabled = True
        self.push_mode()
        return self

    def disable(self) -> Self:
        """Switch off, bit for bit. Hooks and mode stay, so that compiled graphs stay valid."""
        self.enabled = False
        return self

    def close(self, *, check: bool = True) -> None:
        """Take every hook off. Raises `InertError` when a clause did nothing, unless `allow_inert`."""
        if self.closed:
            return
        self.enabled = False
        self.closed = True
        self.drop_mode()
        for model in self.models:
            model.unhook()
        recompute.unwatch(self)
        if check and not self.allow_inert:
            self.ledger.check()

    def __enter__(self) -> Ledger:
        self._depth += 1
        self.enable()
        return self.ledger

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.close(check=kind is None)

    # ---- what can change while it is active

    @property
    def step(self) -> int:
        """The training step that keys the noise. Setting it makes a resumed run draw what an uninterrupted one drew."""
        return self.calls.step

    @step.setter
    def step(self, step: int) -> None:
        self.calls.set_step(step)

    def set_magnitude(self, magnitude: float, clause: int | None = None) -> None:
        """Change the magnitude of one clause, or of all; takes effect at the next call, compiled or not."""
        for i, fault in enumerate(self.faults):
            if clause in (None, i) and isinstance(fault, MagnitudeFault):
                self.faults[i] = fault.with_magnitude(magnitude)
                self.ledger.sites[i].asked = self.faults[i].asked()

    @property
    def is_training(self) -> bool:
        """Whether any of the models is in training mode."""
        return any(m.model.training for m in self.models)

    # ---- what hooks and the operator mode ask for

    def make_tap(self, clause: int, name: str, point: str, layer: int | None, shown: str | None = None) -> Tap:
        """A tap with its place in the ledger."""
        spots = self.ledger.sites[clause].spots
        label = shown or (name if point == "output" else f"{name}:{point}")
        tap = Tap(self, clause, spots.setdefault(label, Spot(label, layer)), name, point)
        compiled.register(tap)
        return tap

    def make_operator_taps(self, owner: int, prefix: str, layers: range) -> None:
        """Taps for every operator family of every layer, and for operators outside of layers."""
        for i, clause in enumerate(self.plan.clauses):
            if clause.site.level != "op":
                continue
            for family in operators.families(clause.site.names):
                for layer in [None, *layers]:
                    if clause.site.layers is not None and layer not in clause.site.layers:
                        continue
                    name = f"{prefix}{family}" if layer is None else f"{prefix}layer.{layer}.{family}"
                    tap = self.make_tap(i, name, "output", layer)
                    for excluded in (None, *clause.site.include):
                        self._operator_taps.setdefault((owner, layer, family, excluded), []).append(tap)

    def operator_taps(self, family: str, frame: Frame) -> list[Tap]:
        """Taps for an operator called in `frame`."""
        return self._operator_taps.get((frame.entry.owner, frame.layer, family, frame.excluded), [])

    def traced_taps(self, family: str) -> list[Tap]:
        """Taps for an operator of the graph that is being compiled."""
        if not self.tracing:
            return []
        entry = self.tracing[-1]
        if entry.atomic == family:
            return []
        return self._operator_taps.get((entry.owner, entry.layer, family, entry.excluded), [])

    def operator_frame(self) -> Frame | None:
        """The frame an operator belongs to; None outside the models of this injection."""
        return self.calls.top()

    def reaches(self, family: str, frame: Frame) -> bool:
        """Whether an operator of this family would be struck here and now."""
        return any(t.is_active and t.acts_in(frame.phase) for t in self.operator_taps(family, frame))

    def note_fused(self, frame: Frame) -> None:
        """Count an attention call whose inner products cannot be reached."""
        for tap in self.operator_taps("matmul", frame):
            if tap.is_active and not frame.recomputing:
                self.ledger.sites[tap.clause].fused += 1

    # ---- the operator mode, per thread

    def push_mode(self) -> bool:
        """Put our mode on in this thread, unless it is on.

        The stack itself is asked: `loss.backward()` runs through our mode and so runs with it off, and a recomputed
        layer inside it must switch it on again.
        """
        if self._mode is None or self._mode in torch.overrides._get_current_function_mode_stack():
            return False
        self._mode.__enter__()
        return True

    def drop_mode(self) -> None:
        """Take our mode out of this thread's stack, wherever in it it is."""
        if self._mode is None or self._mode not in torch.overrides._get_current_function_mode_stack():
            return
        above = []
        while (top := torch.overrides._pop_mode()) is not self._mode:
            above.append(top)
        for mode in reversed(above):
            torch.overrides._push_mode(mode)

    def enter(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called."""
        if torch.compiler.is_compiling():
            if self.has_operators:
                self.tracing.append(entry)
            return
        if not self.enabled:
            return
        frame = self.calls.open(entry, args, kwargs)
        outermost = not self.calls.stack
        self.calls.push(frame)
        if outermost and self.push_mode():
            frame.counts["mode"] = 1

    def leave(self, entry: Entry) -> None:
        """A module returns, or raises. Its frame is open unless the injection was off when it was called."""
        if torch.compiler.is_compiling():
            if self.has_operators:
                self.tracing.pop()
            return
        frame = self.calls.top()
        if frame is None or frame.entry is not entry:
            return
        if "mode" in frame.counts:
            self.drop_mode()
        self.calls.pop()


class Attached(Hook):
    """The plan on one model: what it matches, and its hooks."""

    def __init__(
        self, injection: Injection, model: nn.Module, owner: int, skip: Container[nn.Module] = (), lenient: bool = False
    ) -> None:
        """Args:
        skip: Modules that another model of this injection has hooked already.
        lenient: Leave out clauses that match nothing here.
        """
        refuse(model)
        self.injection = injection
        self.model = model
        self.owner = owner
        self.skip = skip
        self.lenient = lenient
        self.unmatched: list[str] = []
        self.prefix = f"model{owner}." if owner else ""
        self.anatomy = Anatomy.of(model)
        reasons = {p.name: self.anatomy.excluded(p) for p in self.anatomy.parts if p.name}
        self.left_out = {name: r for name, r in reasons.items() if r in ("lm_head", "router", "lora")}
        self.entries: dict[int, Entry] = {}
        self.points: dict[tuple[int, str], tuple[nn.Module, list[Tap]]] = {}
        self.weights: list[tuple[nn.Module, weights.WeightTap]] = []
        self.hooks: list[RemovableHandle] = []
        self.generators: list[type] = []
        matched = [self._match(i) for i in range(len(injection.plan.clauses))]
        for i, found in enumerate(matched):
            for target in found:
                self._place(i, target)
        injection.make_operator_taps(owner, self.prefix, range(len(self.anatomy.layers)))

    def _match(self, index: int) -> list[Target]:
        clause = self.injection.plan.clauses[index]
        try:
            if clause.site.level == "op":
                check_layers(clause.site, self.anatomy)
                return []
            return [t for t in targets(clause, self.anatomy) if t.part.module not in self.skip]
        except NoMatchError as error:
            if not self.lenient:
                raise
            self.unmatched.append(str(error))
            return []

    def _place(self, clause: int, target: Target) -> None:
        part, name = target.part, f"{self.prefix}{target.part.name}"
        if target.point != "weight":
            tap = self.injection.make_tap(clause, name, target.point, part.layer)
            self.points.setdefault((id(part.module), target.point), (part.module, []))[1].append(tap)
            self._entry(part)
            return
        for own in part.weights:
            shown = f"{name}:weight" if own == "weight" else f"{name}.{own}:weight"
            tap = self.injection.make_tap(clause, f"{name}.{own}", "weight", part.layer, shown)
            tap.transposed = type(part.module).__name__ == "Conv1D"
            self.weights.append((part.module, weights.WeightTap(own, tap, self.injection.calls, self._entry(part))))

    def _entry(self, part: Part) -> Entry:
        known = self.entries.get(id(part.module))
        if known is None:
            index = len(self.entries) + (self.owner << 16) + 1
            known = Entry(index, part.module, part.layer, self.owner, self._excluded(part))
            self.entries[id(part.module)] = known
        return known

    def _excluded(self, part: Part) -> str | None:
        """The reason this part, or one above it, is left out by default; embeddings hold no covered operator."""
        words = part.name.split(".")
        paths = (".".join(words[: i + 1]) for i in range(len(words)))
        return next((self.left_out[path] for path in paths if path in self.left_out), None)

    def _framed(self) -> Iterator[tuple[Part, str | None]]:
        """Modules that open a frame, with the operator they are as a whole: the root, containers, and exceptions."""
        for part in self.anatomy.parts:
            atomic = operators.atomic_family(part) if self.injection.has_operators else None
            special = self.injection.has_operators and (atomic or self.anatomy.excluded(part))
            wanted = part.module is self.model or any(part.module.children()) or special
            if wanted and part.module not in self.skip:
                yield part, atomic

    # ---- hooks

    def hook(self) -> None:
        """Set every hook; does nothing when they are set."""
        if self.hooks:
            return
        operators.cover_transformers()
        framed = list(self._framed())
        wrapped = [] if any(p.module is self.model for p, _ in framed) else [(Part(self.model, "", None, None), None)]
        entries = []
        for part, atomic in [*wrapped, *framed]:
            entry = self._entry(part)
            entry.atomic = atomic
            entry.is_root = part.module is self.model
            entries.append(entry)
            self.hooks.append(part.module.register_forward_pre_hook(_Enter(self.injection, entry), with_kwargs=True))
        for (_, point), (module, taps) in self.points.items():
            hook = ModuleTaps(point, taps, self.injection.calls, self.entries[id(module)])
            self.hooks.append(hook.install(module))
        for entry in entries:
            if entry.atomic:
                self._hook_operator(entry)
        for module, tap in self.weights:
            weights.add_tap(module, tap)
        for entry in entries:
            leave = _Leave(self.injection, entry)
            self.hooks.append(entry.module.register_forward_hook(leave, with_kwargs=True, always_call=True))
        self._mark_generate()
        recompute.watch(self.injection)
        forget_compiled()

    def _hook_operator(self, entry: Entry) -> None:
        """Taps of a module that is one operator as a whole."""
        assert entry.atomic
        taps = self.injection._operator_taps.get((self.owner, entry.layer, entry.atomic, entry.excluded), [])
        if not taps:
            return
        hook = operators.OperatorModule(self.injection, taps)
        self.hooks.append(entry.module.register_forward_pre_hook(hook, with_kwargs=True))
        self.hooks.append(entry.module.register_forward_hook(hook, with_kwargs=True))
        if entry.module._parameters.get("weight") is not None:
            for tap in hook.echoes:
                own = weights.WeightTap("weight", tap, self.injection.calls, entry, echo_only=True)
                self.weights.append((entry.module, own))

    def _mark_generate(self) -> None:
        """`generate` of this model is a rollout by itself."""
        for part in self.anatomy.parts:
            module = part.module
            if module not in self.skip and (home := mark_generate(type(module))) is not None:
                self.generators.append(home)

    def unhook(self) -> None:
        """Take every hook off again."""
        if not self.hooks:
            return
        for hook in self.hooks:
            hook.remove()
        for module, tap in self.weights:
            weights.remove_taps(module, {tap.tap})
        for home in self.generators:
            unmark_generate(home)
        self.hooks, self.generators = [], []
        forget_compiled()


class _Enter(Hook):
    """Forward pre-hook of a module that opens a frame."""

    def __init__(self, injection: Injection, entry: Entry) -> None:
        self.injection = injection
        self.entry = entry

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.injection.enter(self.entry, args, kwargs)


class _Leave(Hook):
    """Forward hook of a module that opened a frame; runs also when the module raises."""

    def __init__(self, injection: Injection, entry: Entry) -> None:
        self.injection = injection
        self.entry = entry

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.injection.leave(self.entry)


def refuse(model: nn.Module) -> None:
    """Models in which a hook would never fire."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"inject needs a torch.nn.Module, not {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(
                f"{name or type(model).__name__} is TorchScript, in which hooks do not fire; inject before scripting"
            )


def forget_compiled() -> None:
    """Drop compiled graphs: those from before do not have our hooks, those from now on must not keep them."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and frames.output_codes.seen:
        torch._dynamo.reset()


__all__ = ["Attached", "Injection", "inject"]
