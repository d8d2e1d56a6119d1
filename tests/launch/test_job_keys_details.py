"""Jobs whose own arguments ask for faults: what is such an argument, what the job is given, and how it ends."""

import os
from pathlib import Path

import pytest

from shaketable.launch import job_keys
from shaketable.launch.job_keys import MODULES, PLUGIN, READ, keys_of, run_with_keys
from shaketable.launch.run import STARTUP

VERL = ["python", "-m", "verl.trainer.main_ppo"]


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("trainer.noise_injection.sigma=0.1", "trainer.noise_injection.sigma"),
        ("+trainer.noise_injection=x", "trainer.noise_injection"),
        ("++trainer.hw_error_injection.a.b=1", "trainer.hw_error_injection.a.b"),
        ("trainer.noisy_ops={a:1}", "trainer.noisy_ops"),
        ("shaketable.aqn.sigma.start=1", "shaketable.aqn.sigma.start"),
        ("aqn.sigma_start=1", "aqn.sigma_start"),
        ("aqn=1", "aqn"),
        ("deadzone=1", "deadzone"),
        ("++deadzone_threshold=1", "deadzone_threshold"),
        ("aqn_sigma=a=b", "aqn_sigma"),
        ("+shaketable.plan=", "shaketable.plan"),
        ("+++shaketable.plan=1", None),
        ("shaketable.plan", None),
        ("shaketable_plan=1", None),
        ("trainerxnoisy_ops=1", None),
        ("trainer.noisy_opsx=1", None),
        ("trainer.aqn=1", None),
        ("deadzone_=1", None),
        ("~shaketable.plan=1", None),
        (" shaketable.plan=1", None),
        ("shaketable-plan=1", None),
    ],
)
def test_an_argument_is_a_key_from_its_first_character_to_the_sign(argument, key):
    assert keys_of([argument]) == ([] if key is None else [key])


def test_keys_are_told_in_the_order_of_the_arguments_and_the_variable_last():
    command = [*VERL, "aqn.b=1", "trainer.nnodes=1", "+shaketable.a=2", "aqn.b=3"]
    assert keys_of(command) == ["aqn.b", "shaketable.a", "aqn.b"]
    assert keys_of(command, {"VERL_NOISY_OPS_ENABLED": "on"}) == ["aqn.b", "shaketable.a", "aqn.b", "VERL_NOISY_OPS_ENABLED"]


@pytest.mark.parametrize(
    ("value", "is_on"),
    [("1", True), ("true", True), ("True", True), (" YES ", True), ("on", True), ("On\n", True),
     ("0", False), ("", False), ("no", False), ("off", False), ("2", False), ("truth", False), ("y", False)],
)  # fmt: skip
def test_the_origins_variable_is_on_for_these_words(value, is_on):
    assert keys_of(VERL, {"VERL_NOISY_OPS_ENABLED": value}) == (["VERL_NOISY_OPS_ENABLED"] if is_on else [])


@pytest.mark.parametrize(
    ("command", "is_verl"),
    [
        (["python", "-mverl.trainer.main_ppo"], True),
        (["sh", "-c", "python3 -m verl.trainer.main_ppo x=1"], True),
        (["python", "-m", "verl"], False),
        (["python", "verl/trainer/main_ppo.py"], False),
        ([], False),
    ],
)
def test_a_job_of_verl_has_its_trainer_somewhere_among_its_words(command, is_verl):
    assert bool(keys_of(command, {"VERL_NOISY_OPS_ENABLED": "1"})) is is_verl


def test_the_variables_of_this_process_are_not_those_of_the_job(monkeypatch):
    monkeypatch.setenv("VERL_NOISY_OPS_ENABLED", "1")
    assert keys_of(VERL) == [] == keys_of(VERL, {})


@pytest.mark.parametrize(
    ("code", "is_read", "exits"),
    [(0, True, 0), (0, False, 3), (5, False, 5), (5, True, 5), (1, False, 1), (-15, True, 143), (-9, False, 137)],
)
def test_how_a_job_ends(monkeypatch, capsys, code, is_read, exits):
    seen = {}

    def run_command(command, env):
        seen.update(command=command, path=Path(env[READ]))
        assert seen["path"].parent.is_dir() and not seen["path"].exists()
        if is_read:
            seen["path"].write_text("read")
        return code

    monkeypatch.setattr(job_keys, "run_command", run_command)
    assert run_with_keys(["a", "b"], ["x.y", "z"]) == exits
    assert seen["command"] == ["a", "b"] and not seen["path"].parent.exists(), "nothing is left behind"
    line = "shaketable: nothing was injected: no process of this command has read x.y, z\n"
    assert capsys.readouterr().err == (line if exits == 3 else "")


@pytest.mark.parametrize(
    ("modules", "given"),
    [(None, PLUGIN), ("", PLUGIN), ("a,b", f"a,b,{PLUGIN}"), (PLUGIN, PLUGIN), (f"{PLUGIN},a", f"{PLUGIN},a"), ("a,a", f"a,{PLUGIN}")],
)  # fmt: skip
@pytest.mark.parametrize("path", [None, "", "/some/where:/else"])
def test_a_job_is_given_our_plugin_once_and_our_folder_in_front(monkeypatch, modules, given, path):
    for name, value in ((MODULES, modules), ("PYTHONPATH", path)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    found = job_keys._environment(Path("/the/file"))
    assert found[MODULES] == given and found[READ] == "/the/file" and found["SOMETHING_ELSE"] == "kept"
    assert found["PYTHONPATH"] == (f"{STARTUP}:{path}" if path else str(STARTUP))
    assert found.keys() - os.environ.keys() <= {MODULES, READ, "PYTHONPATH"} and READ not in os.environ


def test_a_job_is_not_given_a_plan():
    assert "SHAKETABLE_PLAN" not in job_keys._environment(Path("x"))
