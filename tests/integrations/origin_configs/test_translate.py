"""Configs of the origin study become a plan and an AQN, or an error that names the key. The table of the docs is the golden one."""

import json
import re

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as some

import shaketable as st
from shaketable.errors import ShaketableError
from shaketable.integrations.origin_configs import translate as origin
from shaketable.integrations.origin_configs.translate import Translation, translate
from tests import ROOT

PAGE = ROOT / "docs" / "origin-configs.md"
GROUPS = {
    group.name: group
    for group in (origin.HardwareKeys, origin.OperatorKeys, origin.DeadZoneKeys, origin.WeightNoiseKeys, origin.OutputNoiseKeys)
}


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


def weights(**keys):
    return translate(on("trainer.noise_injection", **keys)).aqn


# ---- the page


@pytest.mark.parametrize(("old", "new"), rows("Faults"))
def test_the_page_says_what_faults_become(old, new):
    found = translate(*config_of(old))
    assert found.aqn is None
    assert found.plan == (None if new == "off" else st.Plan.parse(new.strip("`")))
    assert new == "off" or found.plan.text() == new.strip("`").replace("scope=tensor,", "")


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
    assert "; " in str(error.value), "says what is accepted"


def test_the_page_is_not_empty_and_shows_every_key_and_variable():
    assert [len(rows(heading)) for heading in ("Faults", "AQN", "What is an error")] == [24, 16, 21]
    text = " ".join(cell for heading in ("Faults", "AQN", "What is an error") for row in rows(heading) for cell in row)
    groups = (*GROUPS.values(), origin.LayerKeys)
    for key in {*(key for group in groups for key in group.model_fields), *origin.VARIABLES}:
        assert key == "config" or re.search(rf"\b{key}[:=]", text), key


def test_the_example_of_the_page_runs(capsys):
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)), {})
    assert "trainer.noise_injection → epoch_aware:0.05-" in capsys.readouterr().out


# ---- nothing, off, and what is said


def test_a_config_without_the_origins_keys_is_an_empty_translation():
    assert translate({}) == Translation()
    assert (
        translate({"trainer": {"total_epochs": 2}, "data": {"deadzone": 1}}, {"PATH": "x", "VERL_OTHER": "1"}) == Translation()
    )
    assert translate({"trainer": None, "aqn": None}) == Translation()


def test_what_is_off_is_said_to_be_off():
    groups = ("trainer.hw_error_injection", "trainer.noisy_ops", "deadzone", "trainer.noise_injection", "aqn")
    config = {}
    for group in groups:
        config = nested(config, group, {"enabled": False})
    assert translate(config) == Translation(lines=tuple(f"{group} → off" for group in groups))
    assert translate({"deadzone": {}}).lines == ("deadzone → off",)


@pytest.mark.parametrize(
    ("group", "keys"),
    [
        ("trainer.hw_error_injection", {"error_scale": 0}),
        ("trainer.hw_error_injection", {"error_type": "deadzone", "deadzone_threshold": 0}),
        ("trainer.noisy_ops", {"error_scale": "0.0"}),
        ("deadzone", {"layer": 3, "threshold": 0}),
        ("trainer.noise_injection", {"sigma_start": 0}),
        ("aqn", {"sigma": 0}),
    ],
)
def test_a_magnitude_of_zero_is_off_and_not_a_plan_that_does_nothing(group, keys):
    found = translate(on(group, **keys))
    assert (found.plan, found.aqn) == (None, None)
    assert re.fullmatch(rf"{re.escape(group)} → off: .* is 0", found.lines[0])


def test_each_group_is_one_line_with_what_it_became():
    config = nested(on("trainer.noisy_ops", error_scale="5e-2"), "deadzone", {"enabled": True, "layer": 15})
    config = nested(config, "trainer.noise_injection", {"enabled": True})
    found = translate(config)
    texts = [*found.plan.text().split(";"), found.aqn.text()]
    names = ["trainer.noisy_ops", "deadzone", "trainer.noise_injection"]
    assert [line.partition(" (")[0] for line in found.lines] == [f"{n} → {t}" for n, t in zip(names, texts, strict=True)]
    assert "not in validation" in found.lines[0]
    assert "deadzone.scope=tensor" in found.lines[1]


def test_config_and_environment_that_agree_are_one_fault():
    environ = {"VERL_NOISY_OPS_ENABLED": "1", "VERL_NOISY_OPS_SCALE": "5e-2", "VERL_NOISY_OPS_FORWARD_ONLY": "1"}
    found = translate(on("trainer.noisy_ops", error_scale=0.05), environ)
    assert found.plan.text() == "relative_gaussian:0.05@op.matmul,direction=forward,phase=rollout+train"
    assert found.lines[0].startswith("trainer.noisy_ops and VERL_NOISY_OPS_* → ")


@pytest.mark.parametrize(
    ("keys", "environ"),
    [
        ({"error_scale": 1e-4, "error_type": "absolute_gaussian"}, {"TYPE": "relative_gaussian"}),
        ({"error_scale": 1e-4, "all_ops_mode": False}, {"ALL_OPS": "1"}),
        ({"error_scale": 1e-4}, {"ENABLED": "0"}),
    ],
)
def test_config_and_environment_that_disagree_are_refused(keys, environ):
    environ = {f"VERL_NOISY_OPS_{name}": value for name, value in environ.items()}
    with pytest.raises(
        ShaketableError, match=rf"trainer\.noisy_ops\.\w+ is .* and {next(iter(environ))} is .*; make them agree"
    ):
        translate(on("trainer.noisy_ops", **keys), environ)


@pytest.mark.parametrize("name", ["ENABLE", "SKIP_VLLM", "LAYERS"])
def test_an_unknown_variable_is_refused_even_when_all_is_off(name):
    with pytest.raises(ShaketableError, match=rf"^VERL_NOISY_OPS_{name}: unknown variable; .*VERL_NOISY_OPS_"):
        translate({}, {f"VERL_NOISY_OPS_{name}": "1"})


@pytest.mark.parametrize(
    ("name", "text"), [("ENABLED", "on"), ("SCALE", "big"), ("SCALE", "-1"), ("SCALE", "nan"), ("TYPE", "gain")]
)
def test_a_variable_that_cannot_be_read_is_refused(name, text):
    with pytest.raises(ShaketableError, match=rf"^VERL_NOISY_OPS_{name} is '{text}'; "):
        translate({}, {f"VERL_NOISY_OPS_{name}": text})


# ---- values


@pytest.mark.parametrize(
    "group", ["trainer.hw_error_injection", "trainer.noisy_ops", "trainer.noise_injection", "deadzone", "aqn"]
)
def test_a_key_that_nobody_reads_is_refused_in_a_group_that_is_off_too(group):
    with pytest.raises(ShaketableError, match=rf"^{re.escape(group)}\.enabld: unknown key; did you mean 'enabled'\?"):
        translate(nested({}, group, {"enabld": True}))
    with pytest.raises(ShaketableError, match=rf"^{re.escape(group)} is 5; it must be a mapping"):
        translate(nested({}, group, 5))


@pytest.mark.parametrize(
    ("group", "key", "value", "accepted"),
    [
        ("trainer.hw_error_injection", "enabled", "true", "valid boolean"),
        ("trainer.hw_error_injection", "error_scale", "1e-4x", "write a number"),
        ("trainer.hw_error_injection", "error_scale", -1, "greater than or equal to 0"),
        ("trainer.hw_error_injection", "error_scale", float("nan"), "write a number"),
        ("trainer.hw_error_injection", "error_type", "gausian", "valid: "),
        ("trainer.hw_error_injection", "injection_point", "outptu", "did you mean 'output'"),
        ("trainer.hw_error_injection", "target_modules", {"linear": 1}, "list of names"),
        ("trainer.hw_error_injection", "exclude_modules", [["linear"]], "write a name or a list of names"),
        ("trainer.hw_error_injection", "exclude_modules", "rmsnorm", "it takes away all of target_modules, rmsnorm"),
        ("trainer.hw_error_injection", "target_layers", [1, -2], "layer indices"),
        ("deadzone", "layer", "last", "layer indices"),
        ("deadzone", "threshold", 1.5, "less than or equal to 1"),
        ("deadzone", "sparsity", 0, "greater than 0"),
        ("deadzone", "scope", "row", "valid: block, tensor, token"),
        ("trainer.noise_injection", "sigma_end", 0, "greater than 0"),
        ("trainer.noise_injection", "sigma_end", 0.1, "at or below sigma_start, which is 0.05"),
        ("trainer.noise_injection", "num_stages", 2, "greater than or equal to 3"),
        ("trainer.noise_injection", "num_stages", 4.5, "valid integer"),
        ("trainer.noise_injection", "layer_sigma_config", 3, "mapping with enabled"),
        ("trainer.noise_injection", "layer_sigma_config", {"default_multiplier": -1}, "greater than or equal to 0"),
        ("trainer.noise_injection", "layer_sigma_config", {"default_multiplier": 0}, "there would be no noise"),
        ("trainer.noise_injection", "layer_sigma_config", {"layer_multipliers": {"x": 1}}, "index of a layer"),
        ("trainer.noise_injection", "layer_sigma_config", {"layer_multipliers": {1: 1, "1": 2}}, "given twice"),
        ("trainer.noise_injection", "layer_sigma_config", {"layer_multipliers": {1: "much"}}, "number of 0 or more"),
        ("trainer.noise_injection", "layer_sigma_config", {"multipliers": {1: 2}}, "did you mean 'layer_multipliers'"),
        ("trainer.noise_injection", "layer_sigma_config", {"zone_schedule": True}, "zones"),
        ("trainer.noise_injection", "layer_sigma_config", "nowhere.yaml", "nowhere.yaml: No such file"),
        ("trainer.noise_injection", "layer_sigma_config", {"aqn": {"enabled": True}}, "layer_specific"),
        ("aqn", "sigma", None, "aqn.sigma is missing"),
        ("aqn", "schedule", "epoch", "did you mean 'epoch_aware'"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_one_line_that_names_the_key(group, key, value, accepted):
    base = {"deadzone": {"layer": 1}, "aqn": {"sigma": 0.1}}.get(group, {})
    with pytest.raises(ShaketableError) as error:
        translate(on(group, **{**base, key: value}))
    message = str(error.value)
    assert f"{group}.{key}" in message and accepted in message and "\n" not in message


@pytest.mark.parametrize("epochs", [0, 1.5, "two", 10**9, True])
def test_a_number_of_epochs_that_is_none_is_refused(epochs):
    config = nested(on("trainer.noise_injection", epoch_aware=True), "trainer.total_epochs", epochs)
    with pytest.raises(ShaketableError, match=r"trainer\.total_epochs is .*; write a whole number from 1"):
        translate(config)


def test_epochs_of_a_run_that_is_cut_short_are_said_to_be_equal_parts():
    config = nested(on("trainer.noise_injection", epoch_aware=True, num_stages=10), "trainer.total_epochs", "2")
    assert "num_stages not used" in translate(config).lines[0]
    (line,) = translate(nested(config, "trainer.total_training_steps", 10)).lines
    assert line.endswith(
        "an epoch is a pass through the data; where trainer.total_training_steps ends the run, the rest is left out)"
    )
    assert "equal" not in translate(nested(config, "trainer.total_training_steps", None)).lines[0]


# ---- σ of each layer, by the origin's formulas


def origin_sigma(step, total, start, end, stages):
    stage = int(step // (total / stages))
    return 0.0 if stage == 0 else start * (end / start) ** (min(stage - 1, stages - 2) / (stages - 2))


@given(
    some.floats(1e-3, 1),
    some.floats(1e-3, 1),
    some.integers(3, 12),
    some.sampled_from([0, 0.25, 1, 1.7]),
    some.dictionaries(some.integers(0, 7), some.sampled_from([0, 0.5, 1, 1.5, 3]), min_size=1),
)
def test_the_sigma_of_every_layer_is_the_origins(start, part, stages, default, factors):
    if default == 0 and not any(factors.values()):
        return
    config = {"default_multiplier": default, "layer_multipliers": {str(layer): f for layer, f in factors.items()}}
    aqn = weights(sigma_start=start, sigma_end=start * part, num_stages=stages, layer_sigma_config=config)
    total = 10 * stages
    groups = aqn.groups(8)
    for step in (0, 10, 25, total - 1):
        want = origin_sigma(step, total, start, start * part, stages)
        found = {layer: aqn.sigma(g, step, total) for g in groups for layer in g.layers}
        for layer in range(8):
            assert found.get(layer, 0.0) == pytest.approx(want * factors.get(layer, default), rel=1e-9)
        beyond = [aqn.sigma(g, step, total) for g in groups if g.outside]
        assert beyond == ([pytest.approx(want * default, rel=1e-9)] if default else [])


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump])
def test_layer_sigmas_may_be_a_file(tmp_path, write):
    path = tmp_path / "layers"
    path.write_text(write({"enabled": True, "default_multiplier": 0.0, "layer_multipliers": {"14": 1.0, "15": 1.5}}))
    assert weights(layer_sigma_config=str(path)).text().endswith("layers=14-15,multipliers=15:1.5")
    path.write_text(write({"15": 0.1}))
    assert weights(layer_sigma_config=str(path)).multipliers == {15: 2.0}


def test_layer_sigmas_that_are_off_change_nothing():
    off = {"enabled": False, "default_multiplier": 0, "zone_schedule": {"enabled": True}}
    assert weights(layer_sigma_config=off) == weights(layer_sigma_config={}) == weights()
    assert weights(layer_sigma_config={"zone_schedule": {"enabled": False}}) == weights()


# ---- spellings


TEST_3A = """
data.train_batch_size: 128
trainer.noise_injection.enabled: true
trainer.noise_injection.sigma_start: 0.05
trainer.noise_injection.sigma_end: 0.0005
trainer.noise_injection.num_stages: 10
"""


def test_dotted_keys_of_a_file_are_read_as_paths():
    found = translate(yaml.safe_load(TEST_3A))
    assert found.aqn.text() == "global_decay:0.05-0.0005,stages=10,unit=absolute"
    beside = yaml.safe_load(TEST_3A) | {"trainer": {"noise_injection": {"layer_types": ["linear"]}, "nnodes": 1}}
    assert translate(beside).aqn.roles == ("linear",)
    assert beside["trainer"] == {"noise_injection": {"layer_types": ["linear"]}, "nnodes": 1}, "the caller's is left alone"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"deadzone_layer": 3, "deadzone": {"enabled": True, "layer": 3}},
            "deadzone_layer and deadzone.layer are the same key",
        ),
        ({"aqn_sigma": 0.1, "aqn": "strong"}, "aqn_sigma is there and aqn is 'strong'; write aqn.sigma alone"),
        ({"aqn_sigm": 0.1, "aqn": {"enabled": True}}, "aqn.sigm: unknown key; did you mean 'sigma'?"),
        ({"aqn_sigma": 0.1}, "aqn has sigma and no enabled, so it is neither on nor off; add +aqn.enabled=True"),
    ],
)
def test_a_key_in_two_spellings_or_a_misspelt_flat_one_is_refused(config, message):
    with pytest.raises(ShaketableError, match=re.escape(message)):
        translate(config)


GUIDED = {"enabled": True, "layer_specific": True, "base_sigma": 0.05, "layer_sigmas": {3: 0.1}, "schedule": "global_decay"}


def test_a_file_beside_flat_keys_is_what_train_ppo_took(tmp_path):
    path = tmp_path / "aqn_config.yaml"
    path.write_text(yaml.safe_dump({"aqn": GUIDED, "srdd_metadata": {"num_layers": 8}}))
    found = translate({"aqn_config": str(path), "aqn_schedule": "constant"})
    assert found.aqn.text() == "constant:0.05,form=output,layers=0-7,multipliers=3:2,where=both"
    assert translate({"aqn_config": str(path)}).aqn.schedule == st.GlobalDecay(0.05, 0.0005)
    with pytest.raises(ShaketableError, match=r"aqn.sigma is 0.1; the file of aqn.config says it"):
        translate({"aqn_config": str(path), "aqn_sigma": 0.1})
    path.write_text("layers: 3")
    with pytest.raises(ShaketableError, match="has no schedule"):
        translate({"aqn_config": str(path)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_specific": None}, "it is used with +aqn.layer_specific=true"),
        ({"layer_sigmas": None}, "layer_specific needs it"),
        ({"sigma": 0.1}, "aqn.sigma is 0.1; and base_sigma is 0.05"),
        ({"layer_sigmas": {"x": 1}}, "not the index of a layer"),
    ],
)
def test_layer_sigmas_that_do_not_fit_together_are_refused(change, message):
    with pytest.raises(ShaketableError, match=re.escape(message)):
        translate({"aqn": GUIDED | change})


def test_layer_sigmas_that_layer_specific_switches_off_are_said_to_be_unused():
    found = translate({"aqn": GUIDED | {"layer_specific": False}})
    assert found.aqn.text() == "global_decay:0.05-0.0005,stages=10,form=output,where=both"
    assert "layer_sigmas not used" in found.lines[0]
    assert "high_priority_layers not used" in translate({"aqn": GUIDED | {"high_priority_layers": [3]}}).lines[0]


def test_norms_by_name_are_hit_and_no_others(tiny_llama):
    aqn = weights(target_modules=["post_attention_layernorm"], sigma_end=0.05)
    with aqn.attach(tiny_llama, total_steps=10) as noise:
        noise.step = 5
        with st.phase("rollout"):
            tiny_llama(torch.arange(1, 9)[None])
    assert {name.split(".")[-1] for name in noise.modules_hit} == {"post_attention_layernorm:weight"}


# ---- on a model


def test_a_translated_plan_acts_in_rollouts_and_training_and_never_in_validation(tiny_llama):
    config = nested(on("trainer.noisy_ops", error_scale="5e-2"), "deadzone", {"enabled": True, "layer": 1, "threshold": 0.2})
    config = nested(config, "trainer.hw_error_injection", {"enabled": True, "apply_during": "both", "error_scale": 0.01})
    ids = torch.arange(1, 9)[None]
    clean = tiny_llama(ids).logits
    with st.inject(tiny_llama, translate(config).plan) as ledger:
        seen = {}
        for name in ("rollout", "train", "eval"):
            with st.phase(name):
                seen[name] = tiny_llama(ids).logits
    assert torch.equal(seen["eval"], clean)
    assert not torch.equal(seen["rollout"], clean) and not torch.equal(seen["train"], clean)
    assert len(ledger.sites) == 3


# ---- properties

index, flag = some.integers(0, 60), some.booleans()
junk = some.recursive(
    some.none() | flag | some.integers() | some.floats() | some.text(max_size=8) | some.sampled_from(["all", "linear", "1e-4"]),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=4) | index, inner, max_size=3),
    max_leaves=6,
)


@given(some.data())
def test_whatever_a_key_holds_it_is_translated_or_refused_in_one_line(data):
    groups = GROUPS | {origin.LayerKeys.name: origin.LayerKeys}
    group = data.draw(some.sampled_from(sorted(groups)))
    keys = data.draw(some.dictionaries(some.sampled_from(list(groups[group].model_fields)), junk, max_size=4))
    config = nested(on("trainer.noise_injection"), group, {**keys, "enabled": True})
    config = nested(config, "trainer.total_epochs", 2)
    found = translated_or_message(config)
    if isinstance(found, str):
        assert "\n" not in found and len(found) < 600
        assert group.removesuffix(".layer_sigma_config") in found
    else:
        assert found.lines


def translated_or_message(config):
    try:
        return translate(config)
    except ShaketableError as error:
        return str(error)
