"""Noise before or after a dead zone, in training."""

import pytest

from shaketable.errors import ShaketableError
from shaketable.train.plans import rehearse
from tests.train.training_runs import prepared, small

ZONE = "dead_zone:0.5,scope=token@layer.3"
NOISE = "constant:1,form=output,layers=3,unit=absolute"


@pytest.mark.parametrize("order", ["before", "after"])
def test_order_is_part_of_a_run(tmp_path, order):
    """Additive noise behind a dead zone leaves no zero; in front of it, the dead zone has the last word."""
    run = prepared(tmp_path / "run", plan=ZONE, aqn=f"{NOISE},where=both,order={order}", steps=1, eval_n=2, conditions={})
    zeros = []
    run.policy.model.layers[4].register_forward_pre_hook(lambda m, x: zeros.append(bool((x[0] == 0).any())))
    run.run()
    (finished,) = run.record.events("finished")
    assert finished["ledgers"]["aqn"]["forward"] > 0
    assert 0 < finished["ledgers"]["plan"]["sites"][0]["survival_rate"] < 1
    assert any(zeros) == (order == "before")


@pytest.mark.parametrize("fields", [{}, {"plan": "dead_zone:0.5@layer.2"}])
def test_order_without_a_fault_to_come_before_is_refused_before_the_run(fields):
    with pytest.raises(ShaketableError, match="order=before"):
        rehearse(small(aqn=f"{NOISE},order=before", **fields))
