"""nano as verl's `strategy=fsdp` wraps it, beside nano alone, under the same plan: prints one line of JSON per plan.

torchrun --standalone --nproc-per-node 2 fsdp1_actor.py PLAN …
"""

import functools
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM

import shaketable as st
from shaketable.inject.injection import Injection
from shaketable.models import NANO

IDS = torch.arange(24).reshape(2, 12) + 10


def wrapped(model):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def step(model, plan):
    """Logits, and the ledger's counts and places, of an update under the plan."""
    injection = Injection(st.Plan.parse(plan, seed=3), rank=0, allow_inert=True)
    injection.attach(model)
    injection.enable().drop_mode()
    with st.phase("train"):
        logits = model(input_ids=IDS).logits
        logits.square().mean().backward()
    injection.close(check=False)
    (site,) = injection.ledger.sites
    return logits.detach(), [site.forward, site.backward, sorted(site.spots)]


def main():
    dist.init_process_group("gloo")
    for plan in sys.argv[1:]:
        clean = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
        (alone, ledger), (sharded, other) = step(clean, plan), step(wrapped(AutoModelForCausalLM.from_pretrained(NANO)), plan)
        if dist.get_rank() == 0:
            print(json.dumps({"plan": plan, "same": torch.equal(alone, sharded), "ledgers": [ledger, other]}), flush=True)
    dist.barrier()


main()
sys.stdout.flush()
os._exit(0)  # Python's own way out aborts in a thread of gloo's, in one of four runs
