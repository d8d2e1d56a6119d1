"""Sites, clauses and plan files in their rare shapes: points and directions in effect, odd keys in YAML."""

import pytest

from shaketable.errors import PlanError
from shaketable.faults import KINDS, Format
from shaketable.plan import Plan


def clause(text):
    (found,) = Plan.parse(text).clauses
    return found


def refused(text):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    return str(caught.value)


# What is in effect


@pytest.mark.parametrize(
    ("site", "directions"),
    [
        ("module.a", ("forward",)),
        ("op.silu", ("forward", "backward")),
        ("layer.1,direction=both", ("forward", "backward")),
        ("module.a,direction=backward", ("backward",)),
        ("op.silu,direction=forward", ("forward",)),
    ],
)
def test_directions_in_effect(site, directions):
    assert clause(f"gain:1@{site}").site.directions == directions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["module.a", "layer.1", "op.silu"])
def test_points_in_effect_are_the_faults_own_on_modules_and_the_output_elsewhere(kind, level):
    is_format = issubclass(KINDS[kind], Format)
    text = f"{kind}@{level}" if is_format else f"{kind}:1@{level}"
    if is_format and level == "op.silu":
        assert refused(text) == f"{kind}: {kind} works on modules, e.g. {kind}@module.linear,point=weight+input"
        return
    wanted = ("weight", "input") if is_format and level == "module.a" else ("output",)
    assert clause(text).points == wanted
    assert clause(f"{text},point=output").points == ("output",)


# Text


def test_a_path_is_read_whatever_its_ending(tmp_path):
    file = tmp_path / "plan.txt"
    file.write_text("plan: gain:1@layer.3\nseed: 5\n")
    assert Plan.load(file) == Plan.parse("gain:1@layer.3", seed=5)


def test_keys_of_fault_and_site_may_stand_on_either_side():
    wanted = Plan.parse("dead_zone:0.5,scope=token@module.a,phase=eval")
    assert Plan.parse("dead_zone:0.5,phase=eval@module.a,scope=token") == wanted
    assert Plan.parse("dead_zone,scope=token,phase=eval,magnitude=0.5@module.a") == wanted
    assert Plan.parse("dead_zone@module.a,phase=eval,magnitude=0.5,scope=token") == wanted


# Data of a file


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ("0", "0"),
        (3, "3"),
        ([2, 1, 0], "0-2"),
        (["0-1", 5], "0-1+5"),
    ],
)
def test_layers_in_yaml_are_numbers_ranges_or_lists_of_both(layers, wanted):
    plan = Plan.from_data([{"fault": "gain", "magnitude": 1, "site": "module.a", "layers": layers}])
    assert plan.text() == f"gain:1@module.a,layers={wanted}"


@pytest.mark.parametrize("key", ["point", "phase", "include"])
def test_words_in_yaml_are_text_or_lists(key):
    words = {"point": ["input", "weight"], "phase": ["eval", "train"], "include": ["lora", "router"]}[key]
    for value in (words, "+".join(words), " + ".join(words)):
        plan = Plan.from_data([{"fault": "gain", "magnitude": 1, "site": "module.a", key: value}])
        assert plan.text() == f"gain:1@module.a,{key}={'+'.join(words)}"
