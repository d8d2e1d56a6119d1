"""The state of a run between two steps, in a folder that a kill cannot spoil (`grpo/checkpoints.py` says how).

Weights and the optimizer's moments are safetensors: nothing is ever unpickled. Rungs may have given the model biases or
adapters, which the file names; the model is given the same before the file is read.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import nn

from shaketable.harden.distil import TrainingSteps
from shaketable.records.record import RunRecord
from shaketable.train import checkpoints

WEIGHTS = "model.safetensors"


def save(record: RunRecord, step: int, model: nn.Module, training: TrainingSteps | None, facts: dict[str, Any]) -> None:
    """Write what the run goes on from after `step`, and bind it to the record."""
    folder = record.folder / f"checkpoint-{step}"
    with checkpoints.writing(folder.name, record.folder):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        save_model(model, str(folder / WEIGHTS))
        if training is not None:
            training.save(folder)
        checkpoints.seal(folder, facts)
        record.append("checkpoint", step=step, files=checkpoints.hashes(folder))
        checkpoints.drop_old(record.folder)


def load_weights(folder: Path, model: Any) -> None:
    """Put saved weights into a model; Linears that were given a bias meanwhile get one."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        given = {name: file.get_slice(name).get_shape() for name in file.keys() if name.endswith(".bias")}  # noqa: SIM118
    for name in given.keys() - {name for name, _ in model.named_parameters()}:
        module = model.get_submodule(name.rpartition(".")[0])
        module.register_parameter("bias", nn.Parameter(module.weight.new_zeros(given[name])))
    load_model(model, folder / WEIGHTS, device=str(model.device))
