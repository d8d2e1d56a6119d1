"""verl's actors in a comparison with samplers: their weights, and a whole model that reads rollouts.

FSDP2 keeps a part of every weight on each rank. All ranks put them together, one weight after another; rank 0 compares each
with the digests that samplers gave, and keeps it only where it differs, or where a whole model is asked for. Such a model is
made on rank 0 from the same class, the same config and the same values, in the dtype that FSDP2 computes in: the sharded one
calls the other ranks in every forward, and its layers cannot be called alone. It takes the memory of one more set of weights
for as long as a check lasts. Nothing is drawn at random for it: it is built without values and given those of the actor.

The gap is not its business: that is between the numbers which sampler and actors gave in training itself (`trainer.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_id
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine_workers import ActorRolloutRefWorker

from shaketable.integrations.common.mismatch import DigestComparison, floor_and_share
from shaketable.integrations.verl.mismatch.engine import VerlEngine
from shaketable.mismatch.engine import Rollout
from shaketable.mismatch.results import Weights
from shaketable.mismatch.trainer import Trainer

WRAPPER = "_checkpoint_wrapped_module."
"""In the names of modules that are recomputed in backward; samplers do not know it."""


class MeasuredWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker, which can be compared with samplers."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def compare_with_samplers(
        self, servers: Sequence[Any], folder: str, rollouts: Sequence[tuple[list[int], list[int]]]
    ) -> dict[str, Any] | None:
        """Compare the weights with those of all samplers and, where there are rollouts, measure floor and share with the first.

        Returns:
            On rank 0 what was found; every other rank helps to put weights together, and has nothing to say.
        """
        model, is_first = self.actor.engine.module, self.rank == 0
        engines = [VerlEngine(server, Path(folder)) for server in servers] if is_first else []
        compared = [DigestComparison(engine.digests(), engine.dtype) for engine in engines]
        whole: dict[str, Tensor] = {}
        for name, value in _whole_weights(model):
            if is_first and rollouts:
                whole[name] = value
            for one in compared:
                one.add(name, value)
        if not is_first:
            return None
        found: dict[str, Any] = {"weights": _together([c.result(e.parameters) for c, e in zip(compared, engines, strict=True)])}
        if rollouts:
            read = [Rollout(prompt, completion, []) for prompt, completion in rollouts]
            side = Trainer(whole_copy(model, whole, self._dtype()), None, "trainer")
            found |= {"numbers": floor_and_share(side, engines[0], read)}
        return found

    def _dtype(self) -> torch.dtype:
        """The dtype that FSDP2 casts weights to, by verl's own rule."""
        precision = self.actor.engine.engine_config.mixed_precision
        found: torch.dtype = PrecisionType.to_dtype("bf16" if precision is None else precision.get("param_dtype", "bf16"))
        return found


def _together(found: Sequence[Weights]) -> Weights:
    """The comparisons with all samplers as one."""
    differing = [replace(row, name=f"{row.name} (replica {i})") for i, one in enumerate(found) for row in one.differing]
    unknown = [name for one in found for name in one.unknown]
    compared, cast = sum(one.compared for one in found), sum(one.cast for one in found)
    return Weights(compared, cast, differing, found[0].engine_dtype if found else "", [], unknown)


def _whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its own name. All ranks must ask for all of them, in this order."""
    for name, value in model.named_parameters(remove_duplicate=False):
        here: Any = value.detach().to(get_device_id()) if isinstance(value, DTensor) else value.detach()
        yield name.replace(WRAPPER, ""), here.full_tensor() if isinstance(here, DTensor) else here


def whole_copy(model: nn.Module, values: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """The model that FSDP2 has sharded, with these weights, and whole."""
    kind: Any = next(found for found in type(model).__mro__ if not issubclass(found, FSDPModule))
    with torch.device("meta"):
        made: Any = kind(copy.deepcopy(model.config))
    made.load_state_dict({name: value.to(dtype) for name, value in values.items()}, strict=False, assign=True)
    for name, value in model.named_buffers():
        path, _, last = name.replace(WRAPPER, "").rpartition(".")
        made.get_submodule(path)._buffers[last] = value.clone()
    made.tie_weights()
    found: nn.Module = made.eval()
    return found
