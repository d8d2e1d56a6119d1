"""Configs of training runs; needs no torch."""

from shaketable.train.config import TrainConfig


def config(**fields):
    return TrainConfig.checked(**{"model": "nano", "task": "arithmetic", "steps": 10} | fields)
