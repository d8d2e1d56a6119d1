"""Sites, clauses and plan files in their rare shapes: several names, points and directions in effect, odd keys in YAML."""

import pytest

from shaketable.errors import PlanError
from shaketable.faults import KINDS, Format
from shaketable.plan import Plan


def clause(text):
    (found,) = Plan.parse(text).clauses
    return found


def refused(plan, read=Plan.parse, **more):
    with pytest.raises(PlanError) as caught:
        read(plan, **more)
    return str(caught.value)


# Several names


@pytest.mark.parametrize("place", ["all+3", "3+all", "all+all", "all-3", "ALL", "3+"])
def test_all_layers_are_named_alone(place):
    text = refused(f"gain:1@layer.{place}")
    assert place in text and ("0+4-6+29" in text or "needs a name" in text)


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


# Magnitudes that are filled in


def test_a_magnitude_that_does_not_fit_is_refused_though_it_was_filled_in():
    assert refused("dead_zone@module.a", magnitude=2.0).startswith(
        "dead_zone: magnitude: Input should be less than or equal to 1"
    )


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
