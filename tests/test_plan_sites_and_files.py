"""Sites, clauses and plan files in their rare shapes: several names, every key alone, made in Python, odd keys in YAML."""

import pytest

from shaketable.errors import PlanError
from shaketable.faults import KINDS, Format
from shaketable.layer_ranges import Layers, parse_layers
from shaketable.plan import Plan, Site


def clause(text):
    (found,) = Plan.parse(text).clauses
    return found


def refused(plan, read=Plan.parse, **more):
    with pytest.raises(PlanError) as caught:
        read(plan, **more)
    return str(caught.value)


def test_layer_zero_is_a_layer_in_yaml_too():
    for layers in (0, "0", [0]):
        (found,) = Plan.from_data([{"fault": "gain", "magnitude": 1, "site": "module.linear", "layers": layers}]).clauses
        assert found.text() == "gain:1@module.linear,layers=0"


# Several names


@pytest.mark.parametrize("names", ["matmul+quux", "quux+matmul", "matmul+softmax+quux"])
def test_each_of_several_operators_must_be_one(names):
    assert refused(f"gain:1@op.{names}").startswith(f"op.{names}: unknown operator family 'quux'; valid: all, gelu, ")


@pytest.mark.parametrize("place", ["all+3", "3+all", "all+all", "all-3", "ALL", "3+"])
def test_all_layers_are_named_alone(place):
    text = refused(f"gain:1@layer.{place}")
    assert place in text and ("0+4-6+29" in text or "needs a name" in text)


@pytest.mark.parametrize("names", [("a", "b,c"), ("a", "b;c"), ("a", "b+c"), ("a,b", "c")])
def test_a_separator_is_refused_in_every_name_and_the_name_is_quoted(names):
    bad = next(name for name in names if len(name) > 1)
    with pytest.raises(ValueError, match="which separate names, keys and clauses") as caught:
        Site(level="module", names=names)
    assert f"the name {bad!r} holds" in str(caught.value)


@pytest.mark.parametrize("names", [(), ("",), ("a", ""), ("", "a")])
def test_a_site_made_in_python_needs_names_too(names):
    with pytest.raises(ValueError, match="a site needs a name after its level"):
        Site(level="module", names=names)


@pytest.mark.parametrize(
    ("loose", "names"),
    [
        ("module.q_proj + k_proj", ("q_proj", "k_proj")),
        ("module. q_proj+ k_proj +v_proj ", ("q_proj", "k_proj", "v_proj")),
        ("op. matmul + softmax", ("matmul", "softmax")),
        ("layer. 1 + 3 - 4", ("1", "3 - 4")),
    ],
)
def test_space_around_a_name_does_not_count(loose, names):
    assert clause(f"gain:1@{loose}").site.names == names


@pytest.mark.parametrize("name", ["model.layers.3.mlp", "a@b", "a:b", "a=b", "*.mlp.[ud]*", "h.?.c_fc", "LlamaRMSNorm"])
def test_a_name_of_a_module_may_hold_dots_colons_and_the_like(name):
    found = clause(f"gain:1@module.{name}")
    assert (found.site.level, found.site.names, found.site.label) == ("module", (name,), f"module.{name}")


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


@pytest.mark.parametrize("layers", ["0", "0-3", "1+3"])
@pytest.mark.parametrize("place", ["layer.all", "layer.0"])
def test_layers_of_layers_are_refused(place, layers):
    assert refused(f"gain:1@{place},layers={layers}") == "gain: layer sites name their layers already: drop layers="


# Made in Python


@pytest.mark.parametrize("layers", [(3, 1, 2, 7), [3, 1, 2, 7]])
def test_a_site_made_in_python_takes_numbers_of_layers(layers):
    site = Site(level="module", names=("a",), layers=layers)
    assert site.layers == Layers((range(1, 4), range(7, 8))) and site.text() == "module.a,layers=1-3+7"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("point", ("inputs",), "unknown point 'inputs'; did you mean 'input'?"),
        ("point", ("input", "inputs"), "unknown point 'inputs'"),
        ("phase", ("train", "tests"), "unknown phase 'tests'"),
        ("include", ("lora", "loras"), "unknown include 'loras'; did you mean 'lora'?"),
        ("direction", "sideways", "unknown direction 'sideways'"),
    ],
)
def test_a_site_made_in_python_is_checked_as_one_in_text(field, value, said):
    with pytest.raises(ValueError, match="unknown") as caught:
        Site(level="module", names=("a",), **{field: value})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "module.a+b"),
        ({"point": ("weight",)}, "module.a+b,point=weight"),
        ({"direction": "both"}, "module.a+b,direction=both"),
        ({"layers": (0,)}, "module.a+b,layers=0"),
        ({"phase": ("eval", "train")}, "module.a+b,phase=eval+train"),
        ({"include": ("router",)}, "module.a+b,include=router"),
        (
            {"include": ("lora",), "phase": ("eval",), "layers": (1, 2), "direction": "forward", "point": ("input", "output")},
            "module.a+b,point=input+output,direction=forward,layers=1-2,phase=eval,include=lora",
        ),
    ],
)
def test_a_site_writes_what_was_said_and_in_one_order(fields, text):
    assert Site(level="module", names=("a", "b"), **fields).text() == text


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dead_zone:0.1,block=0@layer.1", "dead_zone: block: Input should be greater than or equal to 1 (got '0')"),
        ("spike:8,rate=0@layer.1", "spike: rate: Input should be greater than 0 (got '0')"),
        ("truncation:53@layer.1", "truncation: magnitude: Input should be less than or equal to 52 (got '53')"),
        ("bit_flip:0.5,bit=-1@layer.1", "bit_flip: bit: Input should be greater than or equal to 0 (got '-1')"),
        ("gain:1,sparsity=1.5@layer.1", "gain: sparsity: Input should be less than or equal to 1 (got '1.5')"),
        ("non_determinism:0.5@layer.1", "non_determinism: magnitude: non_determinism's magnitude is a variance factor: 0 (off) or at least 1"),
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_is_named_with_fault_field_and_what_was_given(text, said):
    assert refused(text) == said


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
    [(3, "3"), ("1-2", "1-2"), ([0], "0"), ([2, 1, 0], "0-2"), (["0-1", 5], "0-1+5"), ([3, "4+6"], "3-4+6")],
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


# Layers


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ([], ""),
        ([range(3, 5)], "3-4"),
        ([range(5, 7), range(2)], "0-1+5-6"),
        ([range(2), range(2, 3)], "0-2"),
        ([range(9), range(2, 3), range(9, 10)], "0-9"),
        ([range(2), range(3, 4)], "0-1+3"),
    ],
)
def test_ranges_are_sorted_and_joined_where_they_touch(runs, text):
    found = Layers.joined(iter(runs))
    assert str(found) == text and len(found) == len({i for run in runs for i in run})


@pytest.mark.parametrize(("layer", "inside"), [(0, False), (1, True), (2, False), (3, False), (4, True), (6, True), (7, False), (9, True), (10, False), (-1, False)])  # fmt: skip
def test_a_layer_is_in_one_of_the_ranges_or_in_none(layer, inside):
    assert (layer in parse_layers("1+4-6+9")) is inside
