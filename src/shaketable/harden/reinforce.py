"""The last rung: a short GRPO under the plan from the hardened model, with a KL that keeps it near. `train` as it is.

A run of its own in a folder of its own, with its own record; after a kill it goes on by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shaketable.errors import ShaketableError
from shaketable.harden.config import HardenConfig
from shaketable.harden.students import Students
from shaketable.models import load_model
from shaketable.records.environment import gather
from shaketable.records.record import FILE, RunRecord
from shaketable.train.config import TrainConfig
from shaketable.train.run import Training

FOLDER, START = "reinforce", "hardened"


def reinforce(config: HardenConfig, students: Students, tokenizer: Any, out: Path, tell: Any) -> dict[str, Any]:
    """Train the student further; returns what it cost."""
    if len(config.plans) != 1:
        raise ShaketableError("reinforce takes one plan; harden against several without it")
    start, folder = out / START, out / FOLDER
    begun = (folder / FILE).is_file()
    if not begun:
        students.model.save_pretrained(start)
        tokenizer.save_pretrained(start)
    asked = TrainConfig.checked(
        model=str(start),
        task=config.task,
        steps=config.reinforce_steps,
        seed=config.seed,
        plan=config.plans[0],
        beta=config.reinforce_beta,
        eval_n=min(config.eval_n, 64),
        device=config.device,
        dtype=config.dtype,
        report_to=(),
    )
    record = (
        RunRecord.open(folder, "train") if begun else RunRecord.create(folder, "train", asked.model_dump(mode="json"), gather())
    )
    if not record.events("finished"):
        Training(asked, record, tell).run(resume=begun)
    trained, _ = load_model(str(folder / "model"), device=config.device, dtype=torch.float32)
    students.model.load_state_dict(trained.state_dict())
    return {"sequences": asked.steps * asked.batch, "record": FOLDER}
