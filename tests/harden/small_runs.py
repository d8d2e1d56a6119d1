"""Small hardening runs on nano."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from shaketable.harden.config import HardenConfig
from shaketable.harden.run import Hardening
from shaketable.models import load_model
from shaketable.records.record import RunRecord

HURTS = "dead_zone:0.7,scope=token@layer.3"
SMALL = {
    "model": "nano",
    "task": "arithmetic",
    "plans": (HURTS,),
    "steps": 6,
    "batch": 16,
    "eval_n": 40,
    "eval_batch": 40,
    "save_every": 2,
}


def small(**fields):
    return HardenConfig.checked(**SMALL | fields)


def prepared(folder, tell=None, **fields):
    """A run that has not begun."""
    config = small(**fields)
    record = RunRecord.create(folder, "harden", config.model_dump(mode="json"), {})
    return Hardening(config, record, tell, loaded=load_model(config.model, dtype=torch.float32))


def hardened(folder, tell=None, **fields):
    """A finished run."""
    run = prepared(folder, tell, **fields)
    run.run()
    return run


def gone_on(folder, tell=None):
    """The run in a folder, gone on with in a new process, as far as the run can tell."""
    record = RunRecord.open(folder, "harden")
    run = Hardening(HardenConfig.checked(**record.config), record, tell)
    run.run(resume=True)
    return run


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def same_weights(one, other):
    """Whether two runs ended in the same bits."""
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
