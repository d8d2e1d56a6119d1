"""A config of verl that asks for faults passes where they will be read, and ends the program with one line where they will not.

Hydra and verl themselves are in tests/frameworks/verl/test_releases.py.
"""

import sys
import types

import pytest

from shaketable.integrations import job_keys
from shaketable.integrations.job_keys import asks_for, judge, unread

PLAN = "gain:0.1@layer.1"
V1 = {"trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}}, "actor_rollout_ref": {}}
BEFORE_V1 = {"trainer": {"nnodes": 1}, "actor_rollout_ref": {}}
DEAD_ZONE = {"deadzone": {"enabled": True, "layer": 3, "threshold": 0.01}}


@pytest.fixture
def ray(monkeypatch):
    """A Ray that starts when it is told to."""
    module = types.SimpleNamespace(init=lambda: "started")
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, job_keys.PLUGIN, types.ModuleType("plugin"))
    monkeypatch.setattr(job_keys, "_read", False)
    monkeypatch.delenv(job_keys.READ, raising=False)
    return module


@pytest.mark.parametrize(
    ("config", "environ", "keys", "plan"),
    [
        ({}, {}, [], None),
        ({"shaketable": {"plan": PLAN, "seed": 1}}, {}, ["shaketable.plan", "shaketable.seed"], PLAN),
        ({"shaketable": {}}, {}, ["shaketable"], None),
        ({"shaketable": 5}, {}, ["shaketable"], None),
        (DEAD_ZONE, {}, ["deadzone"], "dead_zone:0.01,scope=token@layer.3,phase=rollout+train"),
        ({"deadzone": {"enabled": False}}, {}, [], None),
        ({"deadzone": {"enabld": True}}, {}, ["deadzone.enabld"], None),
        ({}, {"VERL_NOISY_OPS_ENABLED": "1", "VERL_NOISY_OPS_SCALE": "0.05"}, ["trainer.noisy_ops"], None),
        ({}, {"VERL_NOISY_OPS_ENABLED": "1"}, ["trainer.noisy_ops.error_scale"], None),
    ],
)
def test_what_a_config_asks_for(config, environ, keys, plan):
    found, amounts_to = asks_for(config, environ)
    assert found == keys
    assert plan is None or amounts_to == plan


def test_a_release_that_reads_nothing_is_named_with_those_that_do_and_the_command_that_works():
    line = unread(
        BEFORE_V1, ["shaketable.plan"], "gain:0.1@layer.1,phase=train;mxfp4@layer.2", "verl.trainer.main_ppo", "0.8.0", False
    )
    assert line.startswith("verl.trainer.main_ppo of verl 0.8.0 does not read shaketable.plan: nothing would be injected")
    assert "verl 0.9.0 and 0.9.1" in line
    assert "shaketable run --plan 'gain:0.1@layer.1,phase=train;mxfp4@layer.2' -- …" in line


def test_a_plugin_that_verl_did_not_load_is_named_with_the_variable_that_loads_it(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    line = unread(V1, ["shaketable.plan"], PLAN, "verl.trainer.main_ppo", "0.9.1", loaded=False)
    assert "VERL_USE_EXTERNAL_PLUGINS=none leaves it out" in line
    assert line.endswith("set VERL_USE_EXTERNAL_MODULES=shaketable.integrations.verl")
    assert unread(V1, ["shaketable.plan"], PLAN, "verl.trainer.main_ppo", "0.9.1", loaded=True) is None


def test_what_asks_for_nothing_passes(ray):
    judge(BEFORE_V1)
    assert ray.init() == "started"


def test_ray_does_not_start_before_the_keys_were_read(ray, capsys):
    judge(V1 | {"shaketable": {"plan": PLAN}})
    judge(V1 | {"shaketable": {"plan": PLAN}})
    with pytest.raises(SystemExit, match="2"):
        ray.init()
    assert "Ray starts, and nothing has read shaketable.plan" in capsys.readouterr().err
    job_keys.keys_were_read("here")
    assert ray.init() == "started"


def test_the_origins_own_verl_is_left_to_itself(ray, monkeypatch, capsys):
    monkeypatch.setattr(job_keys, "OF_THE_ORIGIN", ("no.such.module", "json"))
    judge(BEFORE_V1 | DEAD_ZONE)
    assert "deadzone: this verl reads them itself (json), and no ledger proves it" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        judge(BEFORE_V1 | {"shaketable": {"plan": PLAN}})
