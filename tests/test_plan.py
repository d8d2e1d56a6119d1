"""The plan language: what it reads, what it writes back, and one clear line for everything else. Needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shaketable.errors import PlanError
from shaketable.faults import KINDS, Format
from shaketable.plan import INCLUDABLE, OPS, PHASES, Plan

often = settings(max_examples=200)

EXAMPLES = [
    "relative_gaussian:0.05@op.matmul",
    "dead_zone:0.01,sparsity=0.1,scope=token@layer.15",
    "mxfp4@module.linear,point=weight+input",
    "relative_gaussian:1e-05@module.linear,point=input,phase=rollout",
    "relative_gaussian:0.05@op.all,direction=forward",
    "systematic_bias:0.001@module.mlp.down_proj,layers=10-19",
    "spike:8,rate=0.001,mode=max@layer.all,point=input",
    "bit_flip:1e-06,bit=30@module.q_proj+k_proj,layers=0+4-6+29,include=lora+lm_head",
    "fp8_e4m3,rounding=stochastic,scope=block@module.linear,phase=train+eval",
    "non_determinism:2,mode=amplified@layer.0-3+7,direction=backward",
    "gain:0@module.*.mlp.[ud]*,direction=both",
]


def refused(plan: Any, read=Plan.parse) -> str:
    """The one line with which a plan is refused."""
    with pytest.raises(PlanError) as caught:
        read(plan)
    return one_line(caught.value)


def one_line(error: PlanError) -> str:
    """The message, which must be one line."""
    line = str(error)
    assert len(line.splitlines()) == 1
    return line


def written(folder: Path, text: str | bytes) -> Path:
    """A plan file with that content."""
    path = folder / "plan.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# What is read


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_are_read_and_written_back_as_they_are(text):
    assert Plan.parse(text).text() == text


@pytest.mark.parametrize(("loose", "tight"), [
    ("dead_zone:0.01,scope=token,sparsity=0.1@layer.15", EXAMPLES[1]),
    (" gain : 0.50 @ module.linear , phase = train + eval ;; ", "gain:0.5@module.linear,phase=train+eval"),
    ("gain:0.5,phase=train@module.linear", "gain:0.5@module.linear,phase=train"),
    ("gain:0.5,sparsity=1@module.linear,layers=3+1+2+2", "gain:0.5@module.linear,layers=1-3"),
    ("mxfp4,rounding=even@module.linear", "mxfp4@module.linear"),
    ("gain:1@module. q_proj+ k_proj +v_proj ", "gain:1@module.q_proj+k_proj+v_proj"),
    ("gain:1@op.matmul+silu+matmul,phase=train+train", "gain:1@op.matmul+silu,phase=train"),
    ("dead_zone,phase=eval,magnitude=0.5@module.a,scope=token", "dead_zone:0.5,scope=token@module.a,phase=eval"),
])  # fmt: skip
def test_loose_writing_is_tightened(loose, tight):
    assert Plan.parse(loose).text() == tight


def test_a_sweep_fills_in_missing_magnitudes_only():
    plan = Plan.parse("gain@module.a;bias:0.5@module.b;mxfp4@module.c;gain,magnitude=1@module.d", magnitude=0)
    assert plan.text() == "gain:0@module.a;bias:0.5@module.b;mxfp4@module.c;gain:1@module.d"


# What is in effect


def test_operators_are_faulty_both_ways_and_all_else_forward_unless_a_direction_is_named():
    sites = ("module.a", "op.silu", "layer.1,direction=both", "op.silu,direction=forward")
    both = ("forward", "backward")
    assert [Plan.parse(f"gain:1@{site}").clauses[0].site.directions for site in sites] == [
        ("forward",),
        both,
        both,
        ("forward",),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_format_acts_on_weight_and_input_of_modules_and_all_else_on_the_output(kind):
    is_format = issubclass(KINDS[kind], Format)
    fault = kind if is_format else f"{kind}:1"
    wanted = {
        "module.a": ("weight", "input") if is_format else ("output",),
        "layer.1": ("output",),
        "module.a,point=input": ("input",),
    }
    for site, points in wanted.items():
        assert Plan.parse(f"{fault}@{site}").clauses[0].points == points


# YAML


def test_yaml_and_text_make_the_same_plan(tmp_path):
    text = """
    seed: 7
    plan:
      - fault: dead_zone
        magnitude: 1e-2
        scope: token
        site: layer.15
        phase: rollout
      - {fault: mxfp4, site: module.linear, point: [weight, input], layers: [0, 4-6, 29]}
      - relative_gaussian:0.05@op.matmul;gain:1@layer.3
    """
    plan = Plan.load(written(tmp_path, text))
    assert plan == Plan.parse(
        "dead_zone:0.01,scope=token@layer.15,phase=rollout;mxfp4@module.linear,point=weight+input,layers=0+4-6+29;"
        "relative_gaussian:0.05@op.matmul;gain:1@layer.3",
        seed=7,
    )
    assert Plan.load(str(tmp_path / "plan.yaml"), seed=9) == Plan.load(plan, seed=9) != plan
    assert Plan.load(plan) is plan


def test_a_seed_that_is_given_wins_over_the_plans_own_and_zero_is_a_seed(tmp_path):
    file = tmp_path / "plan.txt"
    file.write_text("seed: 7\nplan: gain:1@op.matmul\n")
    plan = Plan.load(file)
    assert plan.seed == 7
    assert Plan.load(file, seed=0).seed == Plan.load(plan, seed=0).seed == Plan.load("gain:1@op.matmul", seed=0).seed == 0


def test_yaml_may_be_a_bare_list_or_one_line(tmp_path):
    wanted = Plan.parse("gain:1@layer.3")
    for text in ("- gain:1@layer.3", "plan: gain:1@layer.3", "gain:1@layer.3", "[{fault: gain, magnitude: 1, site: layer.3}]"):
        assert Plan.load(written(tmp_path, text)) == wanted
    assert Plan.load("gain:1@layer.3") == wanted


@pytest.mark.parametrize(("layers", "wanted"), [("0", "0"), (3, "3"), ([2, 1, 0], "0-2"), (["0-1", 5], "0-1+5")])
def test_layers_in_yaml_are_numbers_ranges_or_lists_of_both(layers, wanted):
    plan = Plan.from_data([{"fault": "gain", "magnitude": 1, "site": "module.a", "layers": layers}])
    assert plan.text() == f"gain:1@module.a,layers={wanted}"


# Every fault at every level


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_at_every_level_survives_its_own_text_and_yaml(kind):
    is_format = issubclass(KINDS[kind], Format)
    levels = ["module.q_proj+mlp.*", "layer.0-3+7"] + ([] if is_format else ["op.matmul+silu"])
    keys = f"direction=both,phase={'+'.join(PHASES)},include={'+'.join(INCLUDABLE)}"
    for level in levels:
        plan = Plan.parse(f"{kind}{'' if is_format else ':1'},sparsity=0.25@{level},{keys}", seed=-(2**63))
        data = {"plan": [clause.text() for clause in plan.clauses], "seed": plan.seed}
        assert plan == Plan.parse(plan.text(), seed=plan.seed) == Plan.from_data(yaml.safe_load(yaml.safe_dump(data)))
        assert plan.model_dump(mode="json") == {"clauses": data["plan"], "seed": plan.seed}


# Bad plans

EMPTY = "plan: clauses: the plan is empty; write e.g. relative_gaussian:0.01@module.linear"
FAULTS = (
    "absolute_gaussian, bias, bit_flip, dead_zone, fp8_e4m3, fp8_e5m2, gain, mxfp4, noise, non_determinism, nvfp4, "
    "relative_gaussian, rms_gaussian, saturation, spike, stuck_bit, systematic_bias, truncation"
)
KEYS = "direction, include, layers, magnitude, phase, point, sparsity"
NOTHING = "names nothing; write e.g. module.linear, layer.3 or op.matmul"
INDICES = "is not a list of indices and ranges such as 0+4-6+29"
NO_POINT = "gain: operator sites take no point: the error is on what the operator computes"
REFUSALS = {
    "": EMPTY,
    "gain:0.2": "'gain:0.2' names no site; write FAULT[:MAGNITUDE]@SITE, e.g. gain:0.2@module.linear",
    "@module.linear": "a clause needs fault: it has fault=, site=module.linear",
    "gain:0.1@module": f"the site 'module' {NOTHING}",
    "gian:0.1@module.linear": f"unknown fault 'gian'; did you mean 'gain'? valid: {FAULTS}",
    "gain@module.linear": "gain needs a magnitude, e.g. gain:0.01",
    "mxfp4:1@module.linear": "mxfp4 is a format and takes no magnitude; write mxfp4@module.linear",
    "gain:0.1,magnitude=2@layer.1": "magnitude is given twice in 'gain:0.1,magnitude=2@layer.1'",
    "gain:0.1,sparsity@layer.1": "'sparsity' in 'gain:0.1,sparsity@layer.1' is not key=value",
    "gain:0.1@layer.1,poitn=input": f"unknown key for gain 'poitn'; did you mean 'point'? valid: {KEYS}",
    "gain:0.1@leyer.1": "unknown site level 'leyer'; did you mean 'layer'? valid: layer, module, op",
    "gain:0.1@layer.3-1": "layer.3-1: layers '3-1': the range 3-1 runs backwards",
    "gain:0.1@module.linear,layers=x": f"layers 'x' {INDICES}",
    "gain:0.1@op.matmull": "op.matmull: unknown operator family 'matmull'; did you mean 'matmul'? valid: all, gelu, layer_norm, "
    "matmul, rms_norm, sdpa, silu, softmax",
    "mxfp4@op.matmul": "mxfp4: mxfp4 works on modules, e.g. mxfp4@module.linear,point=weight+input",
    "gain:0.1@op.matmul,point=weight": NO_POINT,
    "gain:0.1@layer.1,layers=2": "gain: layer sites name their layers already: drop layers=",
    "stuck_bit:1.5@layer.1": "stuck_bit: magnitude: the magnitude counts mantissa bits: a whole number",
    "non_determinism:0.5@layer.1": "non_determinism: magnitude: non_determinism's magnitude is a"
    " variance factor: 0 (off) or at least 1",
}


@pytest.mark.parametrize("text", REFUSALS)
@pytest.mark.attack("hostile inputs")
def test_a_refusal_says_what_was_wrong_what_is_valid_and_the_nearest_name(text):
    assert refused(text) == REFUSALS[text]
    if text.strip(" ;"):
        assert refused(f"gain:0.1@layer.0;{text}") == REFUSALS[text], "the second clause is read as closely as the first"


BAD = [
    ("gain:0.1,scope=token@module.linear", "'scope'", "valid: "),
    ("mxfp4,rounding=evn@module.linear", "'evn'", "'even'"),
    ("gain:nan@module.linear", "nan", "finite"),
    ("gain:0.1@module.a+", "module.a+", "needs names"),
    ("gain:0.1@module.linear,point=input,point=output", "point", "twice"),
    ("gain:0.1@module.linear,", "''", "key=value"),
    ("one\ntwo", "one", "names no site"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "word", "help_"), BAD, ids=[repr(b[0]) for b in BAD])
@pytest.mark.attack("hostile inputs")
def test_bad_plans_get_one_line_that_names_the_word(text, word, help_):
    line = refused(text)
    assert word in line
    assert help_ in line


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 2**70])
def test_a_seed_of_more_than_64_bits_is_refused(seed):
    for read, plan in ((Plan.parse, "gain:0.1@layer.1"), (Plan.load, Plan.parse("gain:1@layer.1"))):
        with pytest.raises(PlanError, match="seed"):
            read(plan, seed=seed)


BAD_DATA = [
    (None, "NoneType", "list"),
    ({"plan": {"fault": "gain"}}, "dict", "list"),
    ({"paln": []}, "'paln'", "did you mean 'plan'"),
    ({"plan": [5]}, "5", "mapping"),
    ({"plan": [{"fault": "gain", "magnitude": None, "site": "layer.3"}]}, "None", "number"),
    ({"plan": [{"fault": "gain", "magnitude": 1, "site": "module.a", "phase": ["trian"]}]}, "trian", "did you mean 'train'"),
    ({"plan": ["gain:1@layer.3"], "seed": 1.5}, "1.5", "integer"),
    ({"plan": ["gain:1@layer.3"], "seed": 10**5000}, "seed", ""),
    ({"plan": [{"fault": "gain", "magnitude": 1, "site": "module.a;b"}]}, "a;b", ""),
]  # fmt: skip


@pytest.mark.parametrize(("data", "word", "help_"), BAD_DATA, ids=range(len(BAD_DATA)))
@pytest.mark.attack("hostile inputs")
def test_bad_yaml_data_gets_one_line_that_names_the_word(data, word, help_):
    line = refused(data, Plan.from_data)
    assert word in line
    assert help_ in line


BAD_FILES = [
    "plan: [gain",
    "\x00",
    b"\xff\xfe\x00\x80",
    "plan: !!python/object:os.system x",
    "plan: gain:1@layer.3\nseed: " + "9" * 5000,
    "[" * 3000,
]


@pytest.mark.parametrize("content", BAD_FILES, ids=range(len(BAD_FILES)))
@pytest.mark.attack("hostile inputs")
def test_files_that_are_not_yaml_get_one_line_that_names_the_file(content, tmp_path):
    line = refused(written(tmp_path, content), Plan.load)
    assert "plan.yaml" in line


@pytest.mark.attack("hostile inputs")
def test_unreadable_files_get_one_line_that_names_the_file(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere.yaml", tmp_path / ("x" * 300 + ".yaml")):
        assert path.name[:50] in refused(path, Plan.load)
    assert "nowhere.yml" in refused("nowhere.yml", Plan.load)
    assert "plan file" in refused("null\0byte.yaml", Plan.load)


# Anything at all


def reads_or_refuses(read, plan: Any) -> None:
    """A plan that survives its own text, or one line; nothing else."""
    try:
        found = read(plan)
    except PlanError as error:
        one_line(error)
    else:
        assert Plan.parse(found.text(), seed=found.seed) == found


WORDS = st.sampled_from([
    *KINDS, *OPS, *PHASES, "module", "layer", "op", "all", "linear", "point", "layers", "magnitude", "scope", "site",
    *"@:;,=+-.*", "\n", " ", "0", "1", "-1", "0.1", "1e-5", "nan", "inf", "9" * 400, "5-2", "None", "é", "\u2028",
])  # fmt: skip


@often
@given(st.lists(WORDS, max_size=14).map("".join))
@pytest.mark.attack("hostile inputs")
def test_any_words_of_the_language(text):
    reads_or_refuses(Plan.parse, text)


@often
@given(
    st.sampled_from(EXAMPLES),
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 3), WORDS | st.text(max_size=2)), max_size=3),
)
@pytest.mark.attack("hostile inputs")
def test_any_mutation_of_a_valid_plan(text, edits):
    for at, cut, new in edits:
        text = text[:at] + new + text[at + cut :]
    reads_or_refuses(Plan.parse, text)


# No torch


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)


def test_reading_a_plan_does_not_import_torch():
    code = f"""
import sys
import shaketable, shaketable.plan
plan = shaketable.Plan.parse({";".join(EXAMPLES)!r})
print(len(plan.clauses), "torch" in sys.modules, "numpy" in sys.modules)
"""
    assert run(code).stdout.split() == [str(len(EXAMPLES)), "False", "False"]


def test_help_does_not_import_torch():
    code = """
import sys
import shaketable.cli
sys.argv = ["shaketable", "run", "--help"]
try:
    shaketable.cli.main()
except SystemExit as stop:
    print("exit", stop.code, "torch" in sys.modules)
"""
    out = run(code).stdout
    assert "Usage" in out
    assert out.split()[-3:] == ["exit", "0", "False"]
