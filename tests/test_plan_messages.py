"""Every refusal of a plan, word for word: a message says what was wrong, what is valid, and the nearest name."""

import pytest

from shaketable.errors import PlanError
from shaketable.io.yaml_file import LONGEST
from shaketable.plan import Plan

EMPTY = "plan: clauses: the plan is empty; write e.g. relative_gaussian:0.01@module.linear"
FAULTS = (
    "absolute_gaussian, bias, bit_flip, dead_zone, fp8_e4m3, fp8_e5m2, gain, mxfp4, noise, non_determinism, nvfp4, "
    "relative_gaussian, rms_gaussian, saturation, spike, stuck_bit, systematic_bias, truncation"
)
KEYS = "direction, include, layers, magnitude, phase, point, sparsity"
NOTHING = "names nothing; write e.g. module.linear, layer.3 or op.matmul"
INDICES = "is not a list of indices and ranges such as 0+4-6+29"
NO_POINT = "gain: operator sites take no point: the error is on what the operator computes"
WRITE = "a clause needs FAULT[:MAGNITUDE]@SITE, e.g. gain:0.1@module.linear"
REFUSALS = {
    "": EMPTY,
    " ; ": EMPTY,
    "gain:0.2": "'gain:0.2' names no site; write FAULT[:MAGNITUDE]@SITE, e.g. gain:0.2@module.linear",
    "@module.linear": f"'@module.linear' names no fault; {WRITE}",
    "gain:0.1@": f"'gain:0.1@' names no site; {WRITE}",
    "@@;;": f"'@@' names no fault; {WRITE}",
    "@": f"'@' names no fault and no site; {WRITE}",
    "gain:0.1@module": f"the site 'module' {NOTHING}",
    "gain:0.1@module.": f"the site 'module.' {NOTHING}",
    "gian:0.1@module.linear": f"unknown fault 'gian'; did you mean 'gain'? valid: {FAULTS}",
    "gain@module.linear": "gain needs a magnitude, e.g. gain:0.01",
    "mxfp4:1@module.linear": "mxfp4 is a format and takes no magnitude; write mxfp4@module.linear",
    "gain:0.1,magnitude=2@layer.1": "magnitude is given twice in 'gain:0.1,magnitude=2@layer.1'",
    "gain:0.1,site=x@layer.1": "site is given twice in 'gain:0.1,site=x@layer.1'",
    "gain:0.1@layer.1,fault=x": "fault is given twice in 'gain:0.1@layer.1,fault=x'",
    "gain:1,site=x,fault=y@layer.1": "fault is given twice in 'gain:1,site=x,fault=y@layer.1'",
    "gain:1,sparsity=1,sparsity=1@layer.1": "sparsity is given twice in 'gain:1,sparsity=1,sparsity=1@layer.1'",
    "gain:1@layer.1,point=input,point=input": "point is given twice in 'gain:1@layer.1,point=input,point=input'",
    "gain:0.1,sparsity@layer.1": "'sparsity' in 'gain:0.1,sparsity@layer.1' is not key=value",
    "gain:0.1@layer.1,point=": "'point=' in 'gain:0.1@layer.1,point=' is not key=value",
    "gain:0.1@layer.1,=input": "'=input' in 'gain:0.1@layer.1,=input' is not key=value",
    "gain:0.1,sparcity=1@layer.1": f"unknown key for gain 'sparcity'; did you mean 'sparsity'? valid: {KEYS}",
    "gain:0.1@layer.1,poitn=input": f"unknown key for gain 'poitn'; did you mean 'point'? valid: {KEYS}",
    "gain:0.1@leyer.1": "unknown site level 'leyer'; did you mean 'layer'? valid: layer, module, op",
    "gain:0.1@layer.x": f"layer.x: layers 'x' {INDICES}",
    "gain:0.1@layer.3-1": "layer.3-1: layers '3-1': the range 3-1 runs backwards",
    "gain:0.1@module.linear,layers=x": f"layers 'x' {INDICES}",
    "gain:0.1@module.linear,layers=0+5-2": "layers '0+5-2': the range 5-2 runs backwards",
    "gain:0.1@op.matmull": "op.matmull: unknown operator family 'matmull'; did you mean 'matmul'? valid: all, gelu, layer_norm, "
    "matmul, rms_norm, sdpa, silu, softmax",
    "gain:0.1@module.linear,point=inputs": "module.linear: unknown point 'inputs'; did you mean 'input'? valid: input, output, "
    "weight",
    "gain:0.1@module.linear,phase=eva": "module.linear: unknown phase 'eva'; did you mean 'eval'? valid: eval, rollout, train",
    "gain:0.1@module.linear,include=lmhead": "module.linear: unknown include 'lmhead'; did you mean 'lm_head'? valid: embedding, "
    "lm_head, lora, rotary, router",
    "gain:0.1@module.linear,include=lora+x": "module.linear: unknown include 'x'; valid: embedding, lm_head, lora, rotary, router",
    "gain:0.1@module.linear,direction=forwards": "module.linear: unknown direction 'forwards'; did you mean 'forward'? valid: "
    "backward, both, forward",
    "mxfp4@op.matmul": "mxfp4: mxfp4 works on modules, e.g. mxfp4@module.linear,point=weight+input",
    "gain:0.1@layer.1,point=weight": "gain: layer sites take point=input or point=output; name the weight's module instead",
    "gain:0.1@layer.1,point=input+weight": "gain: layer sites take point=input or point=output; name the weight's module instead",
    "gain:0.1@op.matmul,point=weight": NO_POINT,
    "gain:0.1@op.matmul,point=input+output": NO_POINT,
    "gain:0.1@layer.1,layers=2": "gain: layer sites name their layers already: drop layers=",
    "stuck_bit:1.5@layer.1": "stuck_bit: magnitude: the magnitude counts mantissa bits: a whole number",
}


@pytest.mark.parametrize("text", REFUSALS)
def test_a_refusal_says_exactly_this(text):
    with pytest.raises(PlanError) as refused:
        Plan.parse(text)
    assert str(refused.value) == REFUSALS[text]
    if text.strip(" ;"):
        with pytest.raises(PlanError) as second:
            Plan.parse(f"gain:0.1@layer.0;{text}")
        assert str(second.value) == REFUSALS[text], "the second clause is read as closely as the first"


WORDS = {
    "point": ("input", "output", "weight"),
    "direction": ("forward", "backward", "both"),
    "phase": ("rollout", "train", "eval"),
    "include": ("lm_head", "embedding", "router", "lora", "rotary"),
}


@pytest.mark.parametrize(("key", "word"), [(key, word) for key, words in WORDS.items() for word in words])
def test_every_word_is_taken_and_written_back(key, word):
    text = f"gain:0.1@module.linear,{key}={word}"
    clause = Plan.parse(text).clauses[0]
    assert Plan.parse(text).text() == text
    assert getattr(clause.site, key) == (word if key == "direction" else (word,))


@pytest.mark.parametrize("family", ["matmul", "softmax", "silu", "gelu", "layer_norm", "rms_norm", "sdpa", "all"])
def test_every_operator_is_a_site_whose_error_is_on_what_it_computes(family):
    clause = Plan.parse(f"gain:0.1@op.{family}").clauses[0]
    assert (clause.points, clause.site.directions) == (("output",), ("forward", "backward"))


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64])
def test_a_seed_of_more_bits_is_none(seed):
    with pytest.raises(PlanError, match="seed"):
        Plan.parse("gain:0.1@layer.1", seed=seed)


def test_a_plan_that_is_longer_than_any_file_is_refused_and_one_character_less_is_not():
    clause = "gain:0.1@layer.1"
    text = clause + ";" * (LONGEST - len(clause))
    assert Plan.parse(text).text() == clause
    with pytest.raises(PlanError) as refused:
        Plan.parse(f"{text};")
    assert str(refused.value) == f"the plan has {LONGEST + 1:,} characters, and may have {LONGEST:,}"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"plan": 5}, "here.yaml: 'plan' must be a list of clauses, not int"),
        ({"plna": []}, "unknown plan file key 'plna'; did you mean 'plan'? valid: plan, seed"),
        ({"plan": [5]}, "a clause is a line of text or a mapping with fault and site, not 5"),
        ({"plan": []}, "here.yaml: clauses: the plan is empty; write e.g. relative_gaussian:0.01@module.linear"),
        (
            {"plan": ["gain:1@layer.1"], "seed": 2**64},
            f"here.yaml: seed: Input should be less than 18446744073709551616 (got {2**64})",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused_by_its_name(data, said):
    with pytest.raises(PlanError) as refused:
        Plan.from_data(data, name="here.yaml")
    assert str(refused.value) == said


@pytest.mark.parametrize("model", [Plan.parse("gain:1@layer.1"), Plan.parse("gain:1@layer.1").clauses[0].site])
def test_plans_and_sites_cannot_be_changed_and_take_no_other_fields(model):
    with pytest.raises(ValueError, match="frozen"):
        model.seed = 3
    with pytest.raises(ValueError, match="Extra inputs"):
        type(model)(**model.model_dump(), other=1)
