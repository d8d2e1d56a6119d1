"""A TRL GRPO script for `accelerate launch`: two lines of it are about Shaketable. Writes what each rank saw as JSON.

accelerate launch --multi_gpu --num_processes 2 accelerated.py OUT
"""

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[4]))
from shaketable.errors import InertError
from shaketable.integrations.trl import ShaketableCallback
from tests.integrations.hf.small_trainers import grpo, llama, sft

PLAN = "relative_gaussian:0.1,sparsity=0.25@module.down_proj,layers=1"
torch.set_num_threads(1)
out = Path(sys.argv[1])


class Lanes:
    """The channels in which an MLP, at its first pass with gradients, does not return what its last weight says."""

    def __init__(self, mlp):
        self.found, self.noise = None, 0.0
        mlp.down_proj.register_forward_pre_hook(self._keep)
        mlp.register_forward_hook(self._look)

    def _keep(self, module, args):
        self.clean = args[0].detach() @ module._parameters["weight"].detach().t()

    def _look(self, module, args, output):
        if self.found is None and torch.is_grad_enabled():
            error = output.detach() - self.clean
            self.found = (error.abs() > 1e-6).flatten(0, -2).any(0).nonzero().flatten().tolist()
            self.noise = float(error.abs().sum())


model = llama()
callback = ShaketableCallback(plan=PLAN, aqn="constant:0.1", seed=0, ledger=out / "ledger.json")
trainer = grpo(out, model, callback, max_steps=2)
lanes = Lanes(model.model.layers[1].mlp)
trainer.train()
rank = trainer.accelerator.process_index
seen = {"ranks": trainer.accelerator.num_processes, "lanes": lanes.found, "noise": lanes.noise}
seen |= {"own": callback.ledger.forward, "merged": callback.merged.forward, "processes": callback.merged.processes}
seen["weights"] = float(sum(p.detach().double().abs().sum() for p in model.parameters()))

model = llama()
trainer = sft(out, model, ShaketableCallback(plan=PLAN, seed=0), max_steps=3, ddp_find_unused_parameters=True)
if rank == 1:  # its MLP goes another way, where the plan is not
    model.model.layers[1].mlp.forward = lambda x: x
try:
    trainer.train()
except InertError as error:
    seen["early"] = [str(error), trainer.state.global_step]
(out / f"rank-{rank}.json").write_text(json.dumps(seen))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # all is written; Python's own way out has been seen to abort in a thread of torch's, once in some hundred runs
