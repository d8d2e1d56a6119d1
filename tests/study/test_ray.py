"""The same study on a real Ray, started here: the same findings, one task per run, records where all can see them."""

import json
import os

import pytest
import ray
import torch

from shaketable.records.record import RunRecord
from shaketable.study.cells import cells_of
from shaketable.study.execute import run_study
from shaketable.study.run_cell import do
from shaketable.study.store import define
from tests.study.small_studies import data, findings, study


def numbers(found):
    return json.loads(json.dumps({k: [{n: v for n, v in a.items() if n != "cost"} for a in found["arms"]] for k in ("arms",)}))


@pytest.mark.slow
def test_a_study_on_ray_is_the_study(tmp_path):
    arms = {name: data()["arms"][name] for name in ("noise", "targeted", "as it comes")}
    compare = {"primary": {"a": "targeted", "b": "noise", "condition": "noise"}}
    asked = study(arms=arms, compare=compare, seeds=1, engine={"kind": "ray", "workers": 2})
    told = []
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        states = run_study(asked, tmp_path / "ray", lambda what, cell, error: told.append((what, cell.arm)))
    finally:
        ray.shutdown()
    assert set(states.values()) == {"done"}
    assert ("start", "targeted") in told and ("done", "noise") in told
    for cell in cells_of(asked):
        [attempt] = RunRecord.open(tmp_path / "ray" / "small" / "runs" / cell.name).events("attempt")
        assert attempt["engine"] == "ray" and attempt["pid"] != os.getpid()

    torch.set_num_threads(1)
    define(asked, tmp_path / "here")
    for cell in cells_of(asked):
        do(cell, "small", tmp_path / "here" / "small" / "runs", "test")
    assert numbers(findings(asked, tmp_path / "ray" / "small")) == numbers(findings(asked, tmp_path / "here" / "small"))
