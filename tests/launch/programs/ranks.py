"""Two ranks of torchrun, data-parallel over gloo."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
torch.manual_seed(1)
for _ in range(3):
    model(torch.randn(4, 8)).sum().backward()
dist.destroy_process_group()
os._exit(0)  # Python's own way out aborts in a thread of torch's, on a busy machine in one of ten runs, with a plan or without
