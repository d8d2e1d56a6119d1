"""Guidance has one meaning, whichever way it reaches verl: σ of every layer, as a worker that was given it would have it."""

import json
import re
import shlex

import pytest
import yaml
from typer.testing import CliRunner

import shaketable as st
from shaketable.cli import app
from shaketable.integrations.origin_configs.command_line import answer
from shaketable.integrations.verl.settings import shaking_of
from shaketable.models import load_model
from tests.project.test_verl_recipes import recipe

MODEL_A = "--deadzone_enabled true --deadzone_layer 3 --deadzone_threshold 0.01 --aqn_enabled true --aqn_target_layers 3 --aqn_sigma 0.05"
STEPS = 20


def verl_config(tmp_path):
    sampler = {"name": "vllm", "enforce_eager": True, "calculate_log_probs": True, "engine_kwargs": {"vllm": {}}}
    trainer = {"use_v1": True, "v1": {"trainer_mode": "sync"}, "default_local_dir": str(tmp_path), "total_epochs": 2}
    return {
        "trainer": trainer | {"device": "cuda"},
        "actor_rollout_ref": {"rollout": sampler, "actor": {"strategy": "fsdp2"}},
        "algorithm": {"rollout_correction": {"bypass_mode": False}},
    }


@pytest.fixture(scope="module")
def model():
    return load_model("nano")[0]


@pytest.fixture(scope="module")
def guided(tmp_path_factory):
    """What `shaketable guide --target fault` writes for a dead zone at layer 3 of eight."""
    folder = tmp_path_factory.mktemp("guided")
    statistics = {"gain": 1.0, "kurtosis": 9.0, "instability": 0.0}
    probes = [{"layer": i, "statistics": statistics} for i in range(8)]
    about = {"schema": 1, "kind": "diagnosis", "model": "m", "device": "cpu", "date": "x", "num_layers": 8, "probes": probes}
    diagnosis = about | {"verdict": "FAULT", "layer": 3, "fault_class": "dead_zone"}
    (folder / "d.json").write_text(json.dumps(diagnosis))
    done = CliRunner().invoke(app, ["guide", str(folder / "d.json"), "-o", str(folder / "aqn.yaml"), "--target", "fault"])
    assert done.exit_code == 0, done.output
    return folder / "aqn.yaml"


def in_worker(model, tmp_path, role, overrides):
    """σ of every layer at three steps, in a worker of this role whose run has these keys; None where it has no noise."""
    config = verl_config(tmp_path)
    for key, value in overrides.items():
        at = config
        *path, last = key.split(".")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    instructions = shaking_of(config, {}).instructions(role, STEPS)
    if instructions is None or instructions.aqn is None:
        return None
    aqn = st.AQN.load(instructions.aqn)
    with aqn.attach(model, instructions.total_steps, allow_inert=True) as noise:
        found = []
        for noise.step in (0, 5, 15):
            found.append({layer: pytest.approx(sigma) for layer, sigma in noise.sigmas.items() if sigma})
    return aqn.form, found


def printed(command):
    """The keys that a printed command gives verl."""
    words = shlex.split(answer(["python", *command], {}).partition("here: ")[2])
    keys = (word.lstrip("+").partition("=") for word in words if re.match(r"\+*(aqn|deadzone|shaketable)\.", word))
    found = {key: yaml.safe_load(value) for key, _, value in keys}
    names = {"PLAN": "shaketable.plan", "AQN": "shaketable.aqn"}
    return found | {names[k]: v for k, _, v in (word.partition("=") for word in words) if k in names}


@pytest.mark.parametrize("role", ["sampler", "actor"])
def test_what_guide_writes_means_the_same_on_every_route(model, guided, tmp_path, role):
    aqn = st.AQN.load(guided)
    routes = {
        "shaketable.aqn": {"shaketable.aqn": str(guided)},
        "train_ppo.py": printed(["train_ppo.py", "--model_path", "M", "--aqn_config", str(guided)]),
        "train_ppo.py with a schedule": printed(
            ["train_ppo.py", "--model_path", "M", "--aqn_config", str(guided), "--aqn_schedule", "epoch_aware"]
        ),
        "its line": {"shaketable.aqn": aqn.text()},
    }
    found = {name: in_worker(model, tmp_path, role, keys) for name, keys in routes.items()}
    assert found == dict.fromkeys(routes, found["shaketable.aqn"])
    if role == "sampler":
        form, sigmas = found["shaketable.aqn"]
        assert form == aqn.form
        assert [list(layers) for layers in sigmas] == [[3]] * 3, "noise at the located layer and nowhere else"
        assert sigmas[0][3] == 0.075


@pytest.mark.parametrize("role", ["sampler", "actor"])
def test_model_a_is_the_same_on_every_route(model, tmp_path, role):
    flat = dict(zip(*[iter(word.removeprefix("--") for word in MODEL_A.split())] * 2, strict=True))
    script = recipe("srdd_guided.sh", tmp_path, MODEL="nano", PLAN="dead_zone:0.01,scope=token@layer.3")[2]
    routes = {
        "train_ppo.py": printed(["train_ppo.py", "--model_path", "M", *MODEL_A.split()]),
        "flat keys": {key: yaml.safe_load(value) for key, value in flat.items()},
        "groups": {f"{key.partition('_')[0]}.{key.partition('_')[2]}": yaml.safe_load(v) for key, v in flat.items()},
        "srdd_guided.sh": {f"shaketable.{name}": script[f"+shaketable.{name}"].strip("'") for name in ("plan", "aqn")},
    }
    found = {name: in_worker(model, tmp_path, role, keys) for name, keys in routes.items()}
    assert found == dict.fromkeys(routes, found["flat keys"])
    assert found["flat keys"][0] == "output" and found["flat keys"][1][0] == {3: 0.05}
