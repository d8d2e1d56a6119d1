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


@pytest.mark.parametrize("names", ["matmul+quux", "quux+matmul", "matmul+softmax+quux"])
def test_each_of_several_operators_must_be_one(names):
    assert refused(f"gain:1@op.{names}").startswith(f"op.{names}: unknown operator family 'quux'; valid: all, gelu, ")


@pytest.mark.parametrize("place", ["all+3", "3+all", "all+all", "all-3", "ALL", "3+"])
def test_all_layers_are_named_alone(place):
    text = refused(f"gain:1@layer.{place}")
    assert place in text and ("0+4-6+29" in text or "needs a name" in text)


# What is in effect


@pytest.mark.parametrize(
    ("site", "directions"),
    [
        ("module.a", ("forward",)),
        ("layer.1", ("forward",)),
        ("op.silu", ("forward", "backward")),
        ("module.a,direction=both", ("forward", "backward")),
        ("layer.1,direction=both", ("forward", "backward")),
        ("op.silu,direction=both", ("forward", "backward")),
        ("module.a,direction=backward", ("backward",)),
        ("layer.1,direction=backward", ("backward",)),
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


@pytest.mark.parametrize("magnitude", [None, 0.5])
@pytest.mark.parametrize("text", ["gian@module.a", "gain@module.b;gian@module.a", "gian:1@module.a"])
def test_an_unknown_fault_is_named_also_where_a_magnitude_is_filled_in(text, magnitude):
    said = refused(text, magnitude=0.5) if magnitude or ";" in text else refused(text)
    assert said.startswith("unknown fault 'gian'; did you mean 'gain'?")


def test_a_magnitude_that_does_not_fit_is_refused_though_it_was_filled_in():
    assert refused("dead_zone@module.a", magnitude=2.0).startswith(
        "dead_zone: magnitude: Input should be less than or equal to 1"
    )


# Text


@pytest.mark.parametrize("text", ["a.txt", "plan.yaml.bak", "plan.yam", "yaml", ".yamlx"])
def test_what_does_not_end_as_a_file_is_read_as_a_plan(text):
    assert refused(text, Plan.load) == f"{text!r} names no site; write FAULT[:MAGNITUDE]@SITE, e.g. {text}@module.linear"


def test_a_path_is_read_whatever_its_ending(tmp_path):
    file = tmp_path / "plan.txt"
    file.write_text("plan: gain:1@layer.3\nseed: 5\n")
    assert Plan.load(file) == Plan.parse("gain:1@layer.3", seed=5)


@pytest.mark.parametrize(
    ("text", "magnitude", "name"), [("gain:1:2@module.a", None, None), ("gain:0.5@module.a@b", 0.5, "a@b"), ("gain:1@module.a:b", 1, "a:b")]
)  # fmt: skip
def test_the_first_colon_and_the_first_at_part_a_clause(text, magnitude, name):
    if magnitude is None:
        assert "1:2" in refused(text)
    else:
        found = clause(text)
        assert (found.fault.magnitude, found.site.names) == (magnitude, (name,))


def test_keys_of_fault_and_site_may_stand_on_either_side():
    wanted = Plan.parse("dead_zone:0.5,scope=token@module.a,phase=eval")
    assert Plan.parse("dead_zone:0.5,phase=eval@module.a,scope=token") == wanted
    assert Plan.parse("dead_zone,scope=token,phase=eval,magnitude=0.5@module.a") == wanted
    assert Plan.parse("dead_zone@module.a,phase=eval,magnitude=0.5,scope=token") == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_a_fault_is_offered_and_its_kind_is_not(kind):
    magnitude = "" if issubclass(KINDS[kind], Format) else ":1"
    said = refused(f"{kind}{magnitude},zzzz=1@module.a")
    own = set(KINDS[kind].model_fields) - {"kind"}
    assert (
        said
        == f"unknown key for {kind} 'zzzz'; valid: {', '.join(sorted(own | {'point', 'direction', 'layers', 'phase', 'include'}))}"
    )


# Data of a file


def test_a_key_that_is_no_text_is_refused_as_any_other():
    assert refused({1: 2}, Plan.from_data) == "unknown plan file key '1'; valid: plan, seed"
    item = {"fault": "gain", "magnitude": 1, "site": "layer.1", 7: 8}
    assert refused([item], Plan.from_data).startswith("unknown key for gain '7'; valid: direction, ")


@pytest.mark.parametrize("missing", [None, "", [], 0])
@pytest.mark.parametrize("key", ["fault", "site"])
def test_a_clause_whose_fault_or_site_is_empty_has_none(key, missing):
    item = {"fault": "gain", "magnitude": 1, "site": "layer.1", key: missing}
    assert refused([item], Plan.from_data).startswith(f"a clause needs {key}: ")


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        (0, "0"),
        ("0", "0"),
        (3, "3"),
        ("1-2", "1-2"),
        ([0], "0"),
        ([2, 1, 0], "0-2"),
        (["0-1", 5], "0-1+5"),
        ([3, "4+6"], "3-4+6"),
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


@pytest.mark.parametrize("content", ["plan: 5", "plan: []", "plan: [gain:1@layer.1]\nseed: 1.5", "plan:\n  gain: 1"])
def test_a_file_that_holds_no_plan_is_refused_by_its_path(tmp_path, content):
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    assert refused(file, Plan.load).startswith(f"{file}: ")
    assert refused(str(file), Plan.load).startswith(f"{file}: ")
