"""Writes nano as a rank of verl writes its actor: the shards of an FSDP2 model, by `torch.save`; config and tokenizer once.

torchrun --standalone --nproc-per-node 2 tests/fsdp_checkpoint_writer.py FOLDER
"""

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from shaketable.models import NANO


def main(folder):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.save(model.state_dict(), folder / f"model_world_size_{size}_rank_{rank}.pt")
    if rank == 0:
        shutil.copytree(NANO, folder / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    dist.barrier()


main(Path(sys.argv[1]))
os._exit(0)  # Python's own way out aborts in a thread of gloo's, in one of four runs
