"""Everything that the origin's documents print is accepted as it stands, or answered with a command that exists here."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

import shaketable as st
from shaketable.cli import app
from shaketable.errors import ShaketableError
from shaketable.evaluate.sweep.config import parse_magnitudes, resolve_plans
from shaketable.integrations.origin_configs.command_line import DOCUMENTS, accepted, answer, instead
from shaketable.integrations.origin_configs.translate import translate
from shaketable.study.file import load_study
from tests import ROOT

DATA = yaml.safe_load(DOCUMENTS.read_text())
ROWS = DATA["rows"]
VERBS = typer.main.get_command(app).commands


def named(*keys):
    """Rows that print one of these, with a name each."""
    rows = [row for row in ROWS if any(key in row for key in keys)]
    return [pytest.param(row, id=f"{row['document']}: {row['section']}"[:60]) for row in rows]


def commands_of(row):
    """The commands that a row gives, one by one."""
    here = instead(shlex.split(row["script"])[1:], {}) if "script" in row else row["here"]
    whole = [here] if isinstance(here, str) else here
    return [line.removesuffix(" ; wait").removesuffix(" &") for line in whole]


# ---- every command exists


@pytest.mark.parametrize("row", named("script", "here"))
def test_the_command_of_a_row_can_be_given(row):
    for line in commands_of(row):
        words = shlex.split(line)
        variables = {}
        while re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words[0] == "shaketable":
            check_verb(words[1:])
        else:
            check_recipe(variables, words)


def check_verb(words):
    verb, rest = VERBS[words[0]], words[1:]
    if words[0] == "study":
        verb, rest = verb.commands[rest[0]], rest[1:]
    rest, own = (rest[: rest.index("--")], rest[rest.index("--") :]) if "--" in rest else (rest, [])
    given = verb.make_context(words[0], [*rest, *own]).params
    if given.get("plan") is not None:
        scale = parse_magnitudes(given["magnitudes"]) if given.get("magnitudes") else None
        resolve_plans(given["plan"], scale) if words[0] == "sweep" else st.Plan.load(given["plan"])
    if words[0] == "study":
        load_study(given["file"] if "file" in given else ROOT / given["what"])


def check_recipe(variables, words):
    """The recipe exists, and can read its plan and its AQN."""
    assert words[0] == "bash" and (ROOT / words[1]).is_file()
    if "PLAN" in variables:
        st.Plan.load(variables["PLAN"])
    if "AQN" in variables:
        st.AQN.load(variables["AQN"])


# ---- every key is read


@pytest.mark.parametrize("row", named("config", "environ", "verl"))
def test_keys_become_what_the_row_says_or_are_answered(row):
    config, environ = row.get("config", {}), {}
    if "environ" in row:
        environ = dict(word.split("=", 1) for word in row["environ"].split())
    if "verl" in row:
        arguments = (word.removeprefix("++").partition("=") for word in accepted(shlex.split(row["verl"])[3:])[0])
        config = {key: yaml.safe_load(value) for key, _, value in arguments if key.startswith("trainer.")}
    if "answer" in row:
        with pytest.raises(ShaketableError) as error:
            translate(config, environ)
        assert str(error.value) == row["answer"]
        return
    found = translate(config, environ)
    assert (found.plan and found.plan.text()) == row.get("plan")
    assert (found.aqn and found.aqn.text()) == row.get("aqn")


@pytest.mark.parametrize("row", named("python"))
def test_python_of_a_row_runs_and_changes_values(row, tiny_llama):
    ids = torch.arange(1, 9)[None]
    names = {"st": st, "model": tiny_llama, "ids": ids}
    exec(row["python"].replace("layer.15", "layer.2").replace("dead_zone:0.01", "dead_zone:0.2"), names)
    assert names["ledger"].forward > 0


# ---- nothing is left out


def test_the_page_is_what_the_list_says():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "origin_documents.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# ---- answers


def test_the_four_phases_are_printed_with_his_paths_and_recipes_that_an_installed_package_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"MODEL_PATH": "/models/qwen", "TRAIN_DATA": "/data/gsm8k/train.parquet"}
    done = CliRunner().invoke(app, ["run", "--", "python", "scripts/run_srdd_aqn_experiment.py"], env=files)
    assert done.exit_code == 2
    _, diagnose, *train, add_a, add_b, report = done.output.splitlines()
    assert diagnose.split()[:3] == ["shaketable", "locate", "/models/qwen"]
    assert all(line.startswith("  MODEL=/models/qwen DATA=/data/gsm8k OUT=runs/model-") for line in train)
    assert all("shaketable study add" in line for line in (add_a, add_b))
    named = [word for line in (*train, report) for word in line.split() if word.endswith((".sh", ".yaml"))]
    assert len(named) == 3 and all(Path(word).is_absolute() and Path(word).is_file() for word in named)


@pytest.mark.parametrize("command", [["python", "train.py"], []])
def test_other_commands_are_nobodys_business(command):
    assert answer(command, {}) is None


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bash test_noisy_ops_a100.sh strong 8", "the scale is 'strong'; write a number"),
        ("bash test_hw_error_injection_a100.sh mpl 8 1e-5", "scope is 'mpl'; valid: minimal, rmsnorm, mlp, linear, all"),
        ("python train_ppo.py --lr 1e-4", "train_ppo.py of the origin study has no --lr"),
        ("python train_ppo.py --deadzone_enabled true --deadzone_layr 3", "deadzone.layr: unknown key; did you mean 'layer'?"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(command, message):
    with pytest.raises(ShaketableError, match=re.escape(message)):
        answer(command.split(), {})


def test_variables_that_only_verl_reads_are_answered_elsewhere():
    environ = {"VERL_NOISY_OPS_ENABLED": "1", "VERL_NOISY_OPS_SCALE": "1e-4"}
    line = answer(["python", "train.py"], environ)
    assert line.endswith("unset them and write --plan relative_gaussian:0.0001@op.matmul -- python train.py")
    assert answer(["python", "-m", "verl.trainer.main_ppo"], environ) is None, "verl reads them itself"
    assert answer(["python", "train.py"], {"VERL_NOISY_OPS_ENABLED": "0"}) is None


# ---- keys without +


def test_only_the_origins_keys_are_given_a_prefix():
    given = [
        "--config-name=ppo_trainer",
        "trainer.total_epochs=2",
        "trainer.noisy_ops.enabled=true",
        "+trainer.noisy_ops.error_scale=1e-4",
        "deadzone_layer=15",
        "aqn.sigma=0.05",
        "data.aqn=1",
        "'trainer.noisy_ops.error_type'=x",
        "aqn",
    ]
    found, changed = accepted(given)
    assert changed == ["trainer.noisy_ops.enabled", "deadzone_layer", "aqn.sigma"]
    assert found[2] == "++trainer.noisy_ops.enabled=true"
    assert found[4:6] == ["++deadzone.layer=15", "++aqn.sigma=0.05"]
    assert [found[i] for i in (0, 1, 3, 6, 7, 8)] == [given[i] for i in (0, 1, 3, 6, 7, 8)]
