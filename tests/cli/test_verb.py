"""What all verbs share: groups of help, --config, --force, one line for what cannot be parsed."""

import json

import pytest
import yaml

from tests.cli.command_server import shaketable

VERBS = ["run", "inspect", "locate", "fingerprint", "compare", "guide", "sweep", "train", "harden", "mismatch"]


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_about_eight_options_before_the_advanced_ones(verb, tmp_path):
    basic, _, advanced = shaketable(tmp_path, verb, "--help").stdout.partition("─ Advanced ─")
    options = [line for line in basic.splitlines() if line.startswith("│ ") and " --" in line[:12]]
    assert 2 <= len(options) <= 11
    assert "--force" in advanced and "--config" in advanced and "--show-config" in advanced


CONFIG = {"models": ["nano"], "task": "arithmetic", "plan": "gain@op.silu", "magnitudes": [0, 0.5], "limit": 4, "seeds": 1}


def test_a_config_file_is_the_same_as_the_options_and_the_command_line_wins(tmp_path):
    def sweep(*words):
        return shaketable(tmp_path, "sweep", *words)

    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(CONFIG))
    shown = sweep("--config", "sweep.yaml", "--show-config", "-n", "3", "--dtype", "float32")
    assert shown.code == 0, shown.stderr
    resolved = yaml.safe_load(shown.stdout)
    assert (resolved["models"], resolved["magnitudes"], resolved["limit"]) == (["nano"], "0,0.5", 3)
    assert (resolved["dtype"], resolved["device"], resolved["json"]) == ("float32", "auto", None)
    (tmp_path / "again.yaml").write_text(shown.stdout)
    done = sweep("--config", "again.yaml", "--json", "out.json")
    assert done.code == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["config"]["n"], [p["magnitude"] for p in found["points"]]) == (3, [0, 0.5])


@pytest.mark.parametrize(
    ("text", "says"), [("modle: nano", "unknown key 'modle'"), (None, "cannot read the config sweep.yaml")]
)
def test_a_config_that_cannot_be_read_is_one_line(tmp_path, text, says):
    if text is not None:
        (tmp_path / "sweep.yaml").write_text(text)
    done = shaketable(tmp_path, "sweep", "--config", "sweep.yaml")
    (line,) = done.stderr.splitlines()
    assert (done.code, done.stdout) == (2, "") and line.startswith("error: ") and says in line


def test_a_file_that_exists_is_replaced_with_force_alone(tmp_path):
    def inspect(model, *words):
        return shaketable(tmp_path, "inspect", model, "--json", "out.json", *words)

    (tmp_path / "out.json").write_text('{"mine": 1}')
    refused = inspect("nano")
    assert (refused.code, refused.stdout) == (2, "")
    assert "add --force" in refused.stderr
    assert (tmp_path / "out.json").read_text() == '{"mine": 1}'
    assert inspect("nano", "--force").code == 0


def test_what_plans_and_studies_can_name_is_listed(tmp_path):
    from shaketable.faults import KINDS
    from shaketable.study.file import shipped

    listed = shaketable(tmp_path, "faults").stdout
    assert all(kind in listed for kind in KINDS)
    listed = shaketable(tmp_path, "studies").stdout
    assert all(name in listed for name in shipped())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inspekt", "nano"], "Did you mean 'inspect'?"),
        (["inspect", "nano", "--tokenz", "3"], "--tokens"),
    ],
)
def test_a_command_that_cannot_be_parsed_is_one_line(tmp_path, words, says):
    done = shaketable(tmp_path, *words)
    (line,) = done.stderr.splitlines()
    assert done.code == 2 and line.startswith("error: ") and says in line and line.endswith("--help")
