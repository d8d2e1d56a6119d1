"""Small training runs of nano, in this process."""

from safetensors.torch import load_file

from shaketable.records.record import RunRecord
from shaketable.train.config import TrainConfig
from shaketable.train.run import Training

SMALL = {
    "model": "nano", "task": "arithmetic", "steps": 3, "prompts": 4, "samples": 4, "eval_n": 8, "lr": 1e-3, "report_to": (),
    "temperature": 2.0,
}  # fmt: skip


def small(**fields):
    return TrainConfig.checked(**SMALL | fields)


def prepared(folder, tell=None, loaded=None, **fields):
    config = small(**fields)
    return Training(config, RunRecord.create(folder, "train", config.model_dump(mode="json"), {}), tell, loaded=loaded)


def trained(folder, tell=None, **fields):
    training = prepared(folder, tell, **fields)
    training.run()
    return training


def weights(folder):
    return load_file(folder / "model.safetensors")
