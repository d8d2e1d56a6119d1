"""Jobs of verl whose own arguments ask for faults: under `shaketable run`, and guarded in Hydra.

Hydra and verl themselves are in tests/frameworks/verl/test_releases.py.
"""

import sys
import types

import pytest
from typer.testing import CliRunner

from shaketable.cli import app
from shaketable.integrations import job_keys
from shaketable.integrations.job_keys import READ, asks_for, judge, keys_of, run_with_keys, unread

READS = f"import os; open(os.environ[{READ!r}], 'w').write('read')"


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("+shaketable.plan=gain:0.1@layer.1", "shaketable.plan"),
        ("shaketable={plan:x}", "shaketable"),
        ("trainer.hw_error_injection.enabled=True", "trainer.hw_error_injection.enabled"),
        ("deadzone_layer=3", "deadzone_layer"),
        ("aqnx=3", None),
        ("data.shaketable.plan=3", None),
    ],
)
def test_keys_are_found_among_arguments(argument, key):
    assert keys_of(["python", argument]) == ([] if key is None else [key])


def test_the_origins_variable_asks_for_faults_in_a_job_of_verl_alone():
    variables = {"VERL_NOISY_OPS_ENABLED": "1", "HOME": "x"}
    assert keys_of(["python", "-m", "verl.trainer.main_ppo"], variables) == ["VERL_NOISY_OPS_ENABLED"]
    assert keys_of(["python", "train.py"], variables) == []
    assert keys_of(["python", "-m", "verl.trainer.main_ppo"], {"VERL_NOISY_OPS_ENABLED": "0"}) == []


def test_keys_that_somebody_read_leave_the_programs_own_exit():
    assert run_with_keys([sys.executable, "-c", READS], ["shaketable.plan"]) == 0
    assert run_with_keys([sys.executable, "-c", f"{READS}; raise SystemExit(7)"], ["shaketable.plan"]) == 7


def test_verl_is_given_the_plugin_whatever_its_settings_are(monkeypatch, capfd):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    run_with_keys([sys.executable, "-c", "import os; print(os.environ['VERL_USE_EXTERNAL_MODULES'])"], ["shaketable.plan"])
    assert capfd.readouterr().out.strip() == "mine,shaketable.integrations.verl"


def test_a_python_without_the_package_is_stopped_at_once(tmp_path, monkeypatch, capfd):
    (tmp_path / "shaketable").mkdir()
    (tmp_path / "shaketable" / "__init__.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_with_keys([sys.executable, "-c", "print('trained')"], ["shaketable.plan"]) == 2
    out, err = capfd.readouterr()
    assert "cannot inject into" in err and "Install shaketable there" in err
    assert "trained" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plan", "gain:0.1@layer.1"], "--plan and shaketable.plan both ask for"),
        (["--seed", "1"], "--seed, --ledger and --json go with --plan"),
    ],
)
def test_options_that_contradict_the_keys_are_refused(options, message):
    done = CliRunner().invoke(app, ["run", *options, "--", "python", "+shaketable.plan=x"])
    assert done.exit_code != 0
    assert message in str(done.exception)


def test_all_keys_that_nobody_read_are_named(capfd):
    assert run_with_keys([sys.executable, "-S", "-c", ""], ["shaketable.plan", "aqn.sigma"]) == 3
    said = "shaketable: nothing was injected: no process of this command has read shaketable.plan, aqn.sigma\n"
    assert capfd.readouterr().err == said


# ---- the guard in Hydra

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
        (DEAD_ZONE, {}, ["deadzone"], "dead_zone:0.01,scope=token@layer.3,phase=rollout+train"),
        ({"deadzone": {"enabled": False}}, {}, [], None),
        ({"deadzone": {"enabld": True}}, {}, ["deadzone.enabld"], None),
        ({}, {"VERL_NOISY_OPS_ENABLED": "1", "VERL_NOISY_OPS_SCALE": "0.05"}, ["trainer.noisy_ops"], None),
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
