"""`shaketable run` without a plan: around a job whose own arguments ask for faults, which somebody has to read."""

import sys

import pytest
from typer.testing import CliRunner

from shaketable.cli import app
from shaketable.integrations.job_keys import READ, keys_of, run_with_keys

READS = f"import os; open(os.environ[{READ!r}], 'w').write('read')"


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("+shaketable.plan=gain:0.1@layer.1", "shaketable.plan"),
        ("++shaketable.aqn=constant:0.1", "shaketable.aqn"),
        ("shaketable={plan:x}", "shaketable"),
        ("+trainer.noisy_ops.enabled=true", "trainer.noisy_ops.enabled"),
        ("trainer.hw_error_injection.enabled=True", "trainer.hw_error_injection.enabled"),
        ("+deadzone.layer=3", "deadzone.layer"),
        ("deadzone_layer=3", "deadzone_layer"),
        ("+aqn_enabled=True", "aqn_enabled"),
        ("aqnx=3", None),
        ("trainer.nnodes=1", None),
        ("--plan=shaketable.plan", None),
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
    ("arguments", "message"),
    [
        (["run", "--", "python", "train.py"], "no plan; write: shaketable run --plan PLAN"),
        (
            ["run", "--plan", "gain:0.1@layer.1", "--", "python", "+shaketable.plan=x"],
            "--plan and shaketable.plan both ask for",
        ),
        (["run", "--seed", "1", "--", "python", "+shaketable.plan=x"], "--seed, --ledger and --json go with --plan"),
    ],
)
def test_usage_errors_are_one_line(arguments, message):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert message in str(done.exception)


def test_all_keys_that_nobody_read_are_named(capfd):
    assert run_with_keys([sys.executable, "-S", "-c", ""], ["shaketable.plan", "aqn.sigma"]) == 3
    said = "shaketable: nothing was injected: no process of this command has read shaketable.plan, aqn.sigma\n"
    assert capfd.readouterr().err == said
