"""The checkpoint folders of verl: the weights of an FSDP model, a file per rank, put together again.

    global_step_116/actor/model_world_size_8_rank_0.pt …     shards, as DTensors that know their place in the whole
    global_step_116/actor/huggingface/                       config and tokenizer; the whole model too, if verl was told so

A shard is a slice of each parameter along one dimension, and the slices of all ranks in their order are the parameter. With
HSDP several rows of ranks hold the same, and one row is enough. Nothing is written: the weights go from the files, which are
mapped and not read whole, into the model. verl's own merger turns all weights into bfloat16; here they keep their type until
the model's is known.

The files are pickles. They are opened with torch's `weights_only`, which runs nothing that a file brings, and knows DTensors.
FSDP1 without a device mesh wrote ShardedTensors, which cannot be opened outside of the process group that wrote them: refused,
with verl's command that merges.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaketable.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

HF = "huggingface"


def sharded_folder(path: Path) -> Path | None:
    """The folder with the shards: the path itself, or its `actor`; None when there is none."""
    found = (path, path / "actor")
    return next((folder for folder in found if any(folder.glob("model_world_size_*_rank_*.pt"))), None)


def merged_weights(folder: Path) -> dict[str, Tensor]:
    """All parameters of a model, by name, whole and of the type in which they were saved.

    Raises:
        ModelError: A rank's file is missing or cannot be read, or the parts of a parameter do not make a whole.
    """
    first = _load(folder, 0)
    others = [_load(folder, rank) for rank in _ranks(first)[1:]]
    return {name: _whole(folder, name, [value, *(shard[name] for shard in others)]) for name, value in first.items()}


def _ranks(shard: dict[str, Any]) -> list[int]:
    """The ranks whose shards are a whole model: a row of the mesh. A model that was not sharded is whole in each."""
    mesh = next((value.device_mesh for value in shard.values() if hasattr(value, "device_mesh")), None)
    if mesh is None:
        return [0]
    if mesh.ndim > 1 and "tp" in (mesh.mesh_dim_names or ()):
        raise ModelError(f"shards over {mesh.mesh_dim_names} are not merged here; merge them with verl")
    ranks: list[int] = mesh.mesh.reshape(-1, mesh.shape[-1])[0].tolist()
    return ranks


def _load(folder: Path, rank: int) -> dict[str, Any]:
    import torch
    import torch.distributed.tensor

    files = list(folder.glob(f"model_world_size_*_rank_{rank}.pt"))
    if len(files) != 1:
        raise ModelError(
            f"{folder} has {len(files)} shards of rank {rank}; bring those of all machines, of one run, into one folder"
        )
    file = files[0]
    try:
        found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        merge = f"python -m verl.model_merger merge --backend fsdp --local_dir {file.parent} --target_dir MERGED"
        why = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelError(f"{file} cannot be opened ({why}); verl may be able to merge it: {merge}") from None
    return found


def _whole(folder: Path, name: str, parts: list[Any]) -> Tensor:
    import torch

    first: Any = parts[0]
    if not hasattr(first, "device_mesh"):
        plain: Tensor = first
        return plain
    placement = first.placements[-1]
    if placement.is_replicate():
        replica: Tensor = first.to_local()
        return replica
    whole = torch.cat([part.to_local() for part in parts], dim=placement.dim)
    if whole.shape != first.shape:
        raise ModelError(f"{folder}: the shards of {name} make {tuple(whole.shape)}, and it is {tuple(first.shape)}")
    return whole
