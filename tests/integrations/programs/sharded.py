"""A tiny Llama under FSDP2 on the ranks of torchrun, beside the same model unsharded; writes what it saw as JSON.

    torchrun --nproc-per-node 2 sharded.py OUT

Every comparison is with the unsharded model under the same plan and the same key, so `rank=0` is given to both.
"""

import functools
import itertools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from transformers import LlamaConfig, LlamaForCausalLM

import shaketable as st

PLANS = {
    "weights": "relative_gaussian:0.05@module.linear,point=weight",
    "norms": "absolute_gaussian:0.05@module.rmsnorm,point=weight",
    "mxfp4": "mxfp4@module.linear,point=weight+input",
    "layer": "dead_zone:0.01,scope=token@layer.1",
    "operators": "relative_gaussian:0.05@op.matmul",
}
LEAVES = (PLANS["weights"], PLANS["norms"])
"""Also tried on leaves that are sharded one by one."""
IDS = torch.arange(24).reshape(2, 12) % 64


def llama():
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape)).train()


def not_at_all(model):
    return model


def by_layer(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def by_leaf(model):
    """Every module with a weight is sharded by itself: its gathering hook and our hooks are on one module."""
    for module in list(model.modules()):
        if module._parameters:
            fully_shard(module)
    return by_layer(model)


def whole(parameter):
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().clone()


def one_step(model):
    """Loss, gradients and weights of one step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss.detach()} | gradients | {f"new {name}": whole(p) for name, p in model.named_parameters()}


def shaken(plan, shard, order):
    """One step under a plan, and what is left behind."""
    model = llama()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = shard(model) if order == "shard first" else model
    injection = st.inject(model, plan, seed=3, rank=0)
    with injection as ledger:
        model = shard(model) if order == "inject first" else model
        with torch.no_grad():
            first = model(input_ids=IDS).logits
        clean = {name: bool(torch.equal(whole(v), before[name])) for name, v in model.state_dict().items()}
        sharded = all(type(v).__name__ == "DTensor" for v in model.state_dict().values())
        injection.step = 1
        found = one_step(model) | {"logits": first}
    return {
        "found": found,
        "ledger": ledger,
        "state is clean": all(clean.values()),
        "state is sharded": sharded,
        "classes": classes(model) == classes_of(shard),
        "taps are gone": not any("_shaketable_weights" in m.__dict__ for m in model.modules()),
        "clean again": torch.equal(evaluated(model), evaluated(unsharded_copy(model))),
    }


def classes(model):
    return [type(m).__mro__[1:] for m in model.modules()]


@functools.cache
def classes_of(shard):
    """The classes of a model that was never shaken."""
    return classes(shard(llama()))


def evaluated(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def unsharded_copy(model):
    copy = llama()
    copy.load_state_dict({name: whole(v) for name, v in model.state_dict().items()})
    return copy


def difference(a, b):
    """The largest difference between two results, relative to the largest value."""
    return max(float((a[k] - b[k]).abs().max() / b[k].abs().max().clamp_min(1e-12)) for k in b)


def report(plan):
    expected = shaken(plan, not_at_all, "shard first")
    rows = {"effect": difference(expected["found"], one_step(llama()))}
    for shard, order in itertools.product(
        (by_layer, by_leaf) if plan in LEAVES else (by_layer,), ("shard first", "inject first")
    ):
        found = shaken(plan, shard, order)
        site, same = found["ledger"].sites[0], expected["ledger"].sites[0]
        facts = {k: v for k, v in found.items() if isinstance(v, bool)}
        rows[f"{shard.__name__}, {order}"] = facts | {
            "difference": difference(found["found"], expected["found"]),
            "fires": [site.forward, site.backward],
            "expected fires": [same.forward, same.backward],
            "asked": site.asked,
            "measured": site.magnitude,
            "error": site.measured().error,
            "expected error": same.measured().error,
        }
    return rows


def aqn():
    """Two rollouts under AQN, sharded and not, and the weights after them."""
    noisy, kept, measured = [], [], []
    for shard in (not_at_all, by_layer):
        model = shard(llama()).eval()
        before = {name: whole(p) for name, p in model.named_parameters()}
        with st.AQN(st.Constant(0.2)).attach(model, total_steps=2, rank=0) as noise:
            logits = []
            for step in range(2):
                noise.step = step
                kind = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 3}
                logits.append(torch.stack(model.generate(IDS[:, :4], pad_token_id=0, **kind).logits))
        noisy.append({str(i): x for i, x in enumerate(logits)})
        kept.append(all(torch.equal(whole(p), before[name]) for name, p in model.named_parameters()))
        measured.append(noise.ledger.sites[0].magnitude)
    differs = not torch.allclose(noisy[0]["0"], noisy[0]["1"], atol=1e-3)
    return {"difference": difference(noisy[1], noisy[0]), "kept": kept, "measured": measured, "steps differ": differs}


class Block(nn.Module):
    """Two linears, small enough to compile."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


def compiled():
    """Losses and gradients of two blocks, whole and eager, and compiled and sharded, under plans that draw no noise."""
    found = []
    for plan in ("gain:1@module.linear,point=weight", "gain:1@module.linear"):
        for sharded in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(Block(), Block())
            for block in model if sharded else ():
                block.compile(backend="aot_eager")
                fully_shard(block)
            model = fully_shard(model) if sharded else model
            with st.inject(model, plan, rank=0) as ledger:
                loss = model(torch.ones(2, 8)).sum()
                loss.backward()
            gradient = whole(model[0].first.weight.grad).abs().sum()
            found.append([float(loss.detach()), float(gradient), ledger.forward])
    return found


def refused():
    """A layer that is called past the root that gathers its weight."""
    model = fully_shard(llama())
    with torch.no_grad(), st.inject(model, PLANS["norms"], allow_inert=True):
        try:
            model.model.norm(torch.ones(1, 2, 32))
        except st.PlanError as error:
            return str(error)
    return ""


torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard = functools.partial(fsdp.fully_shard, mesh=mesh)
found = {name: report(plan) for name, plan in PLANS.items()}
found |= {
    "aqn": aqn(),
    "compiled": compiled(),
    "refused": refused(),
}
Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
dist.destroy_process_group()
os._exit(0)  # Python's own way out aborts in a thread of torch's, on a busy machine in one of ten runs, shaken or not
