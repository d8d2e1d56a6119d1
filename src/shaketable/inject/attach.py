"""The plan on one model: what it matches there, and every hook that is set and taken off again.

torch.compile bakes hooks into graphs and does not look again, so setting and removing hooks drops what has been compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shaketable.errors import NoMatchError, PlanError
from shaketable.inject import operators, passes, weights
from shaketable.inject.modules import Hook, begin_plan, end_plan, hooks_for
from shaketable.inject.op import Tap
from shaketable.inject.operators import families, hidden_by_attention
from shaketable.inject.passes import Entry
from shaketable.inject.weights_in_place import Written
from shaketable.sites.engine_modules import shard_of
from shaketable.sites.match import Target, check_layers, targets
from shaketable.sites.phases import mark_generate, unmark_generate
from shaketable.sites.structure import Anatomy, Part, class_name, is_rotary

if TYPE_CHECKING:
    from shaketable.inject.injection import Injection


class Attached(Hook):
    """The plan on one model: what it matches, and its hooks."""

    def __init__(
        self,
        injection: Injection,
        model: nn.Module,
        owner: int,
        skip: Container[nn.Module] = (),
        lenient: bool = False,
        number: int | None = None,
    ) -> None:
        """Args:
        skip: Modules that another model of this injection has hooked already.
        lenient: Leave out clauses that match nothing here.
        number: Which model it is to those who name its spots and key its noise; `owner` by default.
        """
        refuse(model)
        self.injection = injection
        self.model = model
        self.owner = owner
        self.skip = skip
        self.lenient = lenient
        self.unmatched: list[str] = []
        self.number = owner if number is None else number
        self.prefix = f"model{self.number}." if self.number else ""
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            raise PlanError("DeepSpeed ZeRO-3 keeps parts of weights and has a product of its own; use ZeRO-1 or 2, or FSDP2")
        self.anatomy = Anatomy.of(model)
        reasons = {p.name: "rotary" if is_rotary(p.module) else self.anatomy.excluded(p) for p in self.anatomy.parts if p.name}
        self.left_out = {name: why for name, why in reasons.items() if why not in (None, "embedding")}
        self.entries: dict[int, Entry] = {}
        self.points: dict[tuple[int, str], tuple[nn.Module, list[Tap]]] = {}
        self.weights: list[tuple[nn.Module, weights.WeightTap]] = []
        self.heads: list[Tap] = []
        """The taps on inputs and outputs of heads."""
        self.written: Written | None = None
        """Where the faults of weights are written into them."""
        self.hooks: list[RemovableHandle] = []
        self.generators: list[type] = []
        matched = [self._match(i) for i in range(len(injection.plan.clauses))]
        for i, found in enumerate(matched):
            for target in found:
                self._place(i, target)
        injection.operators.make(owner, self.prefix, range(len(self.anatomy.layers)))
        self.hidden = [hidden_by_attention(model, clause.site) for clause in injection.plan.clauses]
        """Per clause, what of it the attention of this model hides."""
        for site, lines in zip(injection.sites, self.hidden, strict=True):
            site.notes += [line for line in lines if line not in site.notes]

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
        shard = shard_of(part.module, target.point)
        if target.point != "weight":
            label = name if target.point == "output" else f"{name}:{target.point}"
            tap = self.injection.make_tap(clause, f"{name}{shard}", target.point, part.layer, label)
            self.points.setdefault((id(part.module), target.point), (part.module, []))[1].append(tap)
            if part.role == "lm_head":
                self.heads.append(tap)
            self._entry(part)
            return
        for own in part.weights:
            shown = f"{name}:weight" if own == "weight" else f"{name}.{own}:weight"
            tap = self.injection.make_tap(clause, f"{name}{shard}.{own}", "weight", part.layer, shown)
            tap.transposed = class_name(part.module) == "Conv1D"
            self.weights.append((part.holder, weights.WeightTap(own, tap, self._entry(part))))

    def _entry(self, part: Part) -> Entry:
        known = self.entries.get(id(part.module))
        if known is None:
            index = len(self.entries) + (self.number << 16) + 1
            known = Entry(index, part.module, part.layer, self.owner, self._excluded(part))
            self.entries[id(part.module)] = known
        return known

    def _excluded(self, part: Part) -> str | None:
        """The reason why operators of this part, or of one above it, are left out by default; embeddings hold none."""
        words = part.name.split(".")
        paths = (".".join(words[: i + 1]) for i in range(len(words)))
        return next((self.left_out[path] for path in paths if path in self.left_out), None)

    def _framed(self) -> Iterator[tuple[Part, str | None]]:
        """Modules that open a frame, with the operator they are as a whole: the root, containers, and exceptions.

        Operators are hit only where a frame is open, and any container may be recomputed by itself, so under their plans each
        opens one. Elsewhere the layers do. Noise that is held for a rollout does not depend on recomputation: the root will do.
        """
        sites = [c.site for c in self.injection.plan.clauses]
        operator_sites = [site for site in sites if site.level == "op"]
        met = {family for site in operator_sites for family in families(site.names)}
        layers = set(self.anatomy.layers)
        is_held = self.injection.hold and not self.points and not operator_sites
        is_held = is_held and all(site.phase == ("rollout",) and site.directions == ("forward",) for site in sites)
        for part in self.anatomy.parts:
            family = operators.atomic_family(part) if met else None
            atomic = family if family in met else None
            special = met and (atomic or self.anatomy.excluded(part) or is_rotary(part.module))
            inside = any(part.module.children()) if met or not self.anatomy.layers else part.module in layers
            wanted = part.module is self.model or special or (inside and not is_held)
            if wanted and part.module not in self.skip:
                yield part, atomic

    def note_heads(self, passes: Mapping[str, int]) -> None:
        """Name heads that were not called in so many passes of the whole model: TRL multiplies by their weight itself."""
        for tap in self.heads:
            note = f"{tap.spot.name} was never called: its product, if there was one, is not covered"
            notes = self.injection.sites[tap.clause].notes
            if sum(n for phase, n in passes.items() if not tap.site.phase or phase in tap.site.phase) and not tap.spot.counts:
                if note not in notes:
                    notes.append(note)
            elif note in notes:
                notes.remove(note)

    # ---- hooks

    def hook(self) -> None:
        """Set every hook; does nothing when they are set.

        A sampling engine whose weights alone are faulty is not hooked: what it has compiled or captured stays valid.
        """
        if self.hooks or self.written is not None:
            return
        if self.injection.sampler:
            self.written = Written(self.weights)
            if not self.points and not self.injection.has_operators:
                return
        operators.cover_transformers()
        begin_plan()
        framed = list(self._framed())
        wrapped = [] if any(p.module is self.model for p, _ in framed) else [(Part(self.model, "", None, None), None)]
        entries = []
        for part, atomic in [*wrapped, *framed]:
            entry = self._entry(part)
            entry.atomic = atomic
            entry.is_root = part.module is self.model
            entries.append(entry)
            self.hooks.append(part.module.register_forward_pre_hook(_FrameHook(self.injection, entry), with_kwargs=True))
        if self.injection.has_operators:
            for part, _ in framed:
                if (reason := self._excluded(part)) is not None:
                    self.injection.operators.weights.add(part.module, reason, self.owner)
            for part in self.anatomy.heads_without_a_module():
                self.injection.operators.weights.add(part.module, "lm_head", self.owner)
        for (_, point), (module, taps) in self.points.items():
            self.hooks.extend(hooks_for(module)(point, taps, self.entries[id(module)]).install(module))
        for entry in entries:
            if entry.atomic:
                self._hook_operator(entry)
        if self.written is None:
            for module, tap in self.weights:
                weights.add_tap(module, tap)
        for entry in entries:
            leave = _FrameHook(self.injection, entry)
            self.hooks.append(entry.module.register_forward_hook(leave, with_kwargs=True, always_call=True))
        for part in self.anatomy.parts:  # `generate` of this model is a rollout by itself
            if part.module not in self.skip and (home := mark_generate(type(part.module))) is not None:
                self.generators.append(home)
        passes.watch(self.injection)
        forget_compiled()

    def _hook_operator(self, entry: Entry) -> None:
        """Taps of a module that is one operator as a whole."""
        assert entry.atomic
        taps = self.injection.operators.tapped(entry.atomic, entry.owner, entry.layer, entry.excluded)
        if not taps:
            return
        hook = operators.OperatorModule(self.injection, taps)
        self.hooks.append(entry.module.register_forward_pre_hook(hook, with_kwargs=True))
        self.hooks.append(entry.module.register_forward_hook(hook, with_kwargs=True))
        if entry.module._parameters.get("weight") is not None:
            for tap in hook.backward:
                own = weights.WeightTap("weight", tap, entry, gradient_only=True)
                self.weights.append((entry.module, own))

    def unhook(self) -> None:
        self.written = None
        if not self.hooks:
            return
        for module, tap in self.weights:
            weights.remove_taps(module, {tap.tap})
        for hook in self.hooks:
            hook.remove()
        for home in self.generators:
            unmark_generate(home)
        end_plan()
        self.hooks, self.generators = [], []
        forget_compiled()


class _FrameHook(Hook):
    """Forward pre-hook of a module that opens a frame, and its forward hook, which runs also when the module raises."""

    def __init__(self, injection: Injection, entry: Entry) -> None:
        self.injection = injection
        self.entry = entry

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        if output:
            self.injection.leave(self.entry)
        else:
            self.injection.enter(self.entry, args, kwargs)


def refuse(model: nn.Module) -> None:
    """Raise for what is no model."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"inject needs a torch.nn.Module, not {type(model).__name__}")


def put_behind(later: Attached, earlier: Attached) -> None:
    """Have one plan act after another on the outputs of both, by moving its hooks to the end. Both must be hooked."""
    for place, (module, _) in later.points.items():
        if place in earlier.points and place[1] == "output":
            hooks = module._forward_hooks
            for handle in later.hooks:
                if handle.id in hooks:
                    hooks[handle.id] = hooks.pop(handle.id)
    forget_compiled()


def forget_compiled() -> None:
    """Drop compiled graphs: those from before do not have our hooks, those from now on must not keep them."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and frames.output_codes.seen:
        torch._dynamo.reset()
