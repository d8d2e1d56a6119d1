"""Two ranks of torchrun, one of which does something else.

ranks_apart.py KIND
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)
kind = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(32, 16)
model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
if kind == "other model" and rank == 1:
    nn.Sequential(nn.Conv1d(1, 1, 3))(x[:, None])
elif kind == "no model" and rank == 1:
    pass
elif kind == "loader":  # workers are forks of a rank, and are none themselves
    for batch in DataLoader(x, batch_size=16, num_workers=2):
        model(batch)
else:
    for _ in range(3):
        model(x)
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
