"""Configs of the origin study become a plan and an AQN, or an error that names the key. The table of the docs is the golden one."""

import re

import pytest
import yaml

import shaketable as st
from shaketable.errors import ShaketableError
from shaketable.integrations.origin_configs.translate import GROUPS, VARIABLES, translate
from tests import ROOT

PAGE = ROOT / "docs" / "origin-configs.md"


def rows(heading):
    """Cells of the table under a heading of the page."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]


def config_of(cell):
    """The config and the environment that a cell of the page writes down."""
    config, environ = {}, {}
    for part in re.findall(r"`([^`]+)`", cell):
        if part.startswith("VERL_"):
            environ |= dict(word.split("=", 1) for word in part.split())
            continue
        ((key, value),) = yaml.safe_load(part).items()
        config = nested(config, key, value)
    return config, environ


def nested(config, dotted, value):
    first, _, rest = dotted.partition(".")
    return {**config, first: nested(config.get(first, {}), rest, value) if rest else value}


def on(group, **keys):
    return nested({}, group, {"enabled": True, **keys})


# ---- the page


@pytest.mark.parametrize(("old", "new"), rows("Faults"))
def test_the_page_says_what_faults_become(old, new):
    found = translate(*config_of(old))
    assert found.aqn is None
    assert new == "off" if found.plan is None else found.plan.text() == new.strip("`")


@pytest.mark.parametrize(("old", "new"), rows("AQN"))
def test_the_page_says_what_aqn_becomes(old, new):
    found = translate(*config_of(old))
    assert found.plan is None
    assert found.aqn == (None if new == "off" else st.AQN.load(new.strip("`")))
    assert new == "off" or found.aqn.text() == new.strip("`")


@pytest.mark.parametrize(("old", "message"), rows("What is an error"))
def test_the_page_says_what_is_an_error(old, message):
    with pytest.raises(ShaketableError) as error:
        translate(*config_of(old))
    assert str(error.value).startswith(message.strip("`"))


def test_the_page_shows_every_key_and_variable():
    text = " ".join(cell for heading in ("Faults", "AQN", "What is an error") for row in rows(heading) for cell in row)
    for key in {*(key for group in GROUPS for key in group.model_fields), *VARIABLES}:
        assert re.search(rf"\b{key}[:=]", text), key


def test_the_example_of_the_page_runs(capsys):
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)), {})
    assert "trainer.noise_injection → epoch_aware:0.05-" in capsys.readouterr().out


# ---- nothing, off, and what is said


@pytest.mark.parametrize("config", [on("deadzone", layer=3, threshold=0), on("aqn", sigma="0.0")])
def test_a_magnitude_of_zero_is_off_and_not_a_plan_that_does_nothing(config):
    found = translate(config)
    assert (found.plan, found.aqn) == (None, None)
    assert found.lines[0].endswith(" → off")


def test_config_and_environment_that_agree_are_one_fault():
    environ = {"VERL_NOISY_OPS_ENABLED": "1", "VERL_NOISY_OPS_SCALE": "5e-2"}
    found = translate(on("trainer.noisy_ops", error_scale=0.05), environ)
    assert found.plan.text() == "relative_gaussian:0.05@op.matmul,phase=rollout+train"
    with pytest.raises(ShaketableError, match="are not the same"):
        translate(on("trainer.noisy_ops", error_scale=0.05), {"VERL_NOISY_OPS_ENABLED": "0"})


# ---- values


@pytest.mark.parametrize("group", [group.name for group in GROUPS])
def test_an_unknown_key_is_refused_in_a_group_that_is_off_too(group):
    with pytest.raises(ShaketableError, match=rf"^{re.escape(group)}\.enabld: unknown key; did you mean 'enabled'\?"):
        translate(nested({}, group, {"enabld": True}))
    with pytest.raises(ShaketableError, match=rf"^{re.escape(group)} is a group of keys .*not 5"):
        translate(nested({}, group, 5))


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("trainer.hw_error_injection", "error_scale", "1e-4x"),
        ("trainer.hw_error_injection", "target_modules", ["all"]),
        ("deadzone", "layer", [1, -2]),
        ("trainer.noise_injection", "exclude_patterns", ["layers.0"]),
        ("aqn", "schedule", "epoch"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_one_line_that_names_the_key(group, key, value):
    base = {"deadzone": {"layer": 1}, "aqn": {"sigma": 0.1}}.get(group, {})
    with pytest.raises(ShaketableError, match=rf"^{re.escape(group)}\.{key}.*: ") as error:
        translate(on(group, **{**base, key: value}))
    assert "\n" not in str(error.value)


# ---- spellings


def test_dotted_keys_of_a_file_are_read_as_paths():
    config = {"data.train_batch_size": 128, "trainer.noise_injection.enabled": True, "trainer": {"nnodes": 1}}
    assert translate(config).aqn.text() == "global_decay:0.05-0.0005,stages=10,unit=absolute"
    assert config["trainer"] == {"nnodes": 1}, "the caller's is left alone"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"deadzone_layer": 3, "deadzone": {"enabled": True, "layer": 3}},
            "deadzone_layer and deadzone.layer are the same key",
        ),
        ({"aqn_sigm": 0.1, "aqn": {"enabled": True}}, "aqn.sigm: unknown key; did you mean 'sigma'?"),
    ],
)
def test_a_key_in_two_spellings_or_a_misspelt_flat_one_is_refused(config, message):
    with pytest.raises(ShaketableError, match=re.escape(message)):
        translate(config)
