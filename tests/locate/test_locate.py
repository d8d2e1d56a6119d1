"""Locate: never a false alarm, and the right layer and operator for every fault that its assumption lets it see."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

import shaketable as st
from shaketable.errors import InertError, ModelError, ShaketableError
from shaketable.locate.diagnosis import PROBES
from shaketable.locate.locate import Locator
from shaketable.numerics import operators as operator_rounding
from tests.locate.architectures import ARCHITECTURES, TWINNED, build, tokens
from tests.locate.wrong_device import Wrong

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MATRIX = [
    (name, attention)
    for name in ARCHITECTURES
    for attention in ("eager", "sdpa")
    if (name, attention) != ("gemma2", "sdpa")  # transformers refuses: sdpa cannot cap logits
]


def found(model, mode="all", seed=0, **options):
    return st.locate(model, mode=mode, input_ids=tokens(seed), seed=seed, **options)


# ---- healthy


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), MATRIX)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_healthy_model_is_never_blamed(name, attention, dtype):
    for seed in (0, 1):
        model = build(name, dtype, attention, seed)
        for mode in ("host", "device", "all"):
            diagnosis = found(model, mode, seed)
            expected = "INCONCLUSIVE" if name not in TWINNED and mode == "device" else "HEALTHY"
            assert diagnosis.verdict == expected, diagnosis.sentence
            assert not diagnosis.evidence
            assert not diagnosis.suspicions


def test_locate_leaves_no_trace():
    """Weights, attributes, hooks, mode and the random stream are what they were."""
    model = build("llama").train()
    model.model.layers[0].eval()
    modes = {n: m.training for n, m in model.named_modules()}
    before = {n: p.detach().clone() for n, p in model.state_dict().items()}
    owners = {n: id(p) for n, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    found(model)
    assert modes == {n: m.training for n, m in model.named_modules()}
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert owners == {n: id(p) for n, p in model.named_parameters()}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ---- faults


@pytest.mark.parametrize("family", ["matmul", "softmax", "sdpa", "silu", "rms_norm"])
@pytest.mark.parametrize("layer", [0, 2])
def test_host_mode_names_the_module_of_an_operator_fault(family, layer):
    attention = "sdpa" if family == "sdpa" else "eager"
    model = build("llama", attention=attention)
    diagnosis = found(model, "host", plan=f"gain:0.01@op.{family},layers={layer},direction=forward")
    expected = {"matmul": "self_attn.q_proj", "silu": "mlp.act_fn", "rms_norm": "input_layernorm"}.get(family, "self_attn")
    assert (diagnosis.verdict, diagnosis.layer, diagnosis.op) == ("FAULT", layer, expected)
    names = {"softmax": "softmax", "sdpa": "scaled_dot_product_attention"}
    assert diagnosis.function == names.get(family)


def every_second_sum(first):
    """A device that makes every second residual addition wrong, from the first or from the second on."""
    number = itertools.count(first + 1)

    def is_wrong(args):
        is_residual = [a.shape for a in args[:2] if isinstance(a, torch.Tensor)] == [(1, 24, 32)] * 2
        return is_residual and next(number) % 2

    return Wrong(torch.ops.aten.add, lambda y, args: y * 1.01, is_wrong)


RESIDUALS = {"llama": ("self_attn", "mlp"), "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm")}


@pytest.mark.parametrize("name", RESIDUALS)
@pytest.mark.parametrize("second", [0, 1])
def test_the_two_residual_additions_are_told_apart(name, second):
    with every_second_sum(second):
        diagnosis = found(build(name, attention="eager"), "host")
    part = RESIDUALS[name][second]
    assert {(e.layer, e.op, e.function, e.after) for e in diagnosis.evidence} == {(i, None, "add", part) for i in range(3)}
    assert f"layer 0, output (add after {part})" in diagnosis.sentence
    assert diagnosis.sentence.endswith("Also faulty: layer 1, layer 2.")


def test_faults_outside_of_the_layers_are_named_too():
    head = found(build("llama"), "host", plan="gain:0.01@module.lm_head,include=lm_head")
    assert (head.verdict, head.layer, head.op) == ("FAULT", None, "lm_head")
    norm = found(build("llama"), "host", plan="gain:0.01@module.model.norm")
    assert (norm.layer, norm.op) == (None, "model.norm")
    first = found(build("llama"), "host", plan="gain:0.01@module.model.embed_tokens,include=embedding;gain:0.1@layer.1")
    assert (first.layer, first.op) == (None, "model.embed_tokens")


@pytest.mark.parametrize("plan", ["noise:0.1", "spike:50,rate=0.05"])
@pytest.mark.parametrize("mode", ["device", "host", "all"])
def test_results_that_change_from_call_to_call_are_found_in_every_mode(plan, mode):
    diagnosis = found(build("llama"), mode, plan=f"{plan}@module.mlp.up_proj,layers=1")
    assert (diagnosis.verdict, diagnosis.layer, diagnosis.op) == ("FAULT", 1, "mlp.up_proj")
    assert diagnosis.fault_class in ("noise", "spike")
    repeat = diagnosis.probes[1].results["repeat"]
    assert repeat.status == "fail"


class Sometimes:
    """A hook that changes the last token's results at some of its calls."""

    def __init__(self, *calls):
        self.calls, self.count = calls, 0

    def __call__(self, module, args, y):
        self.count += 1
        if self.count not in self.calls:
            return y
        y = y.clone()
        y[:, -1] = 0
        return y


@pytest.mark.parametrize("mode", ["device", "host", "all"])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.attack("faults below the plan language")
def test_a_head_that_is_wrong_in_one_forward_only_is_suspect(mode, call):
    """The two plain forwards are compared with the traced one, logit by logit."""
    model = build("llama")
    model.lm_head.register_forward_hook(Sometimes(call))
    diagnosis = found(model, mode)
    assert diagnosis.verdict == "INCONCLUSIVE"
    assert "differ in the logits of 1 of 24 tokens" in diagnosis.sentence


# ---- device mode


@pytest.mark.parametrize("plan", ["bias:0.1@module.self_attn.o_proj", "dead_zone:0.1,scope=token@module.mlp.up_proj",
                                  "saturation:0.3,scope=token@module.self_attn.v_proj", "bias:0.1@layer"])  # fmt: skip
def test_device_mode_finds_what_does_not_commute(plan):
    plan = plan.replace("@layer", "@layer.1") if plan.endswith("layer") else f"{plan},layers=1"
    diagnosis = found(build("llama"), "device", plan=plan)
    assert (diagnosis.verdict, diagnosis.layer) == ("FAULT", 1)
    assert diagnosis.fault_class == "asymmetric"
    assert "deterministic" in diagnosis.assumption


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.attack("faults below the plan language")
def test_device_mode_sees_a_mask_that_leaks(dtype, monkeypatch):
    """Every token sees the next one. It does so in every gauge, and twins agree."""
    softmax = torch.nn.functional.softmax
    model = build("llama", dtype, "eager")
    inside = []
    layer = model.model.layers[1]
    layer.register_forward_pre_hook(lambda m, a: inside.append(True))
    layer.register_forward_hook(lambda m, a, y: inside.clear())

    def leaking(scores, *args, **kwargs):
        if inside:
            scores = scores.clone()
            scores.diagonal(1, -2, -1).fill_(0)
        return softmax(scores, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "softmax", leaking)
    diagnosis = found(model, "device")
    assert (diagnosis.verdict, diagnosis.layer, diagnosis.fault_class) == ("FAULT", 1, "leak"), diagnosis.sentence
    assert diagnosis.op == "self_attn"
    assert diagnosis.probes[1].results["twin"].status == "pass"


def test_device_mode_says_what_it_cannot_see():
    diagnosis = found(build("llama"), "device", plan="gain:0.5@module.mlp.down_proj,layers=1")
    assert diagnosis.verdict == "HEALTHY"
    assert any("gain" in line for line in diagnosis.not_covered)
    assert found(build("llama"), "all", plan="gain:0.5@module.mlp.down_proj,layers=1").verdict == "FAULT"


# ---- honesty


def test_a_function_without_a_host_definition_makes_replay_inconclusive(monkeypatch):
    """Host and device differ, and nobody can say who is right: no verdict, and no crash."""
    monkeypatch.delitem(operator_rounding.BOUNDED, "softmax")
    model = build("llama", attention="eager")
    assert found(model, "host").verdict == "HEALTHY"
    diagnosis = found(model, "host", plan="gain:0.01@op.softmax,layers=1,direction=forward")
    assert (diagnosis.verdict, diagnosis.exit_code) == ("INCONCLUSIVE", 4)
    assert "no host definition of softmax" in diagnosis.sentence
    assert not diagnosis.evidence


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("saturation:1.0,scope=tensor@layer.1", r"changed no value: there was nothing to find$"),
        (
            "gain:0.1@layer.1;saturation:1.0,scope=tensor@layer.2",
            r"^saturation\S*@layer\.2 fired \d+ times and changed no value: ",
        ),
        ("gain:0.1@layer.1,phase=train", r"never fired: there was nothing to find$"),
    ],
)
def test_a_plan_of_which_a_clause_does_nothing_is_an_error_and_no_verdict(plan, why):
    model = build("llama")
    with pytest.raises(InertError, match=why):
        found(model, "host", plan=plan)
    assert found(model, "host").verdict == "HEALTHY", "and nothing of it is left"


def test_json_has_every_field(tmp_path):
    diagnosis = found(build("llama"), "all", plan="gain:0.1@layer.1")
    diagnosis.save(tmp_path / "d.json")
    data = json.loads((tmp_path / "d.json").read_text())
    needed = {"verdict", "layer", "op", "lanes", "fault_class", "assumption", "not_covered", "evidence", "planted", "sentence"}
    assert needed <= data.keys()
    assert [p["layer"] for p in data["probes"]] == [0, 1, 2, None]
    assert set(data["probes"][0]["results"]) == set(PROBES) - {"causal"}
    numbers = {"gain", "min_gain", "kurtosis", "instability", "pile_up", "distinct", "drop_z"}
    assert set(data["probes"][0]["statistics"]) == numbers
    assert data["cost_forwards"] > 0


# ---- what cannot be judged


def broken(change):
    model = build("llama")
    change(model)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: broken(lambda m: m.model.layers[1].mlp.up_proj.weight.data.view(-1)[3:5].fill_(float("nan"))), "2 of .* NaN"),
        (lambda: build("llama").to("meta"), "meta device"),
        (lambda: broken(lambda m: setattr(m.config, "quantization_config", {"quant_method": "gptq"})), "quantized .gptq."),
        (lambda: torch.nn.Linear(4, 4), "no list of decoder layers"),
        (lambda: "nano", "the model is a str; give a loaded model"),
    ],
)
def test_models_that_cannot_be_judged_are_refused_in_one_line(model, message):
    with pytest.raises(ModelError, match=message) as error:
        st.locate(model(), input_ids=tokens())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "both"}, "unknown mode 'both'"),
        ({"input_ids": None}, "no tokenizer"),
        ({"input_ids": None, "tokenizer": lambda text: {"input_ids": [1, 2, 3]}, "prompts": ["  ", ""]}, "prompts are empty"),
        ({"input_ids": torch.ones(2, 8, dtype=torch.long)}, "one sequence"),
        ({"input_ids": torch.ones(1, 1, dtype=torch.long)}, "at least 2 tokens"),
    ],
)
def test_bad_input_is_refused_in_one_line(options, message):
    with pytest.raises(ShaketableError, match=message):
        st.locate(build("llama"), **{"input_ids": tokens(), **options})


# ---- what a sceptical user found


def test_broken_links_outside_of_the_layers_are_found():
    for plan, op in [("gain:0.01@module.rotary_emb", "model.rotary_emb"), ("gain:0.01@module.model", "model")]:
        diagnosis = found(build("llama"), "host", plan=plan)
        assert (diagnosis.verdict, diagnosis.layer, diagnosis.op) == ("FAULT", None, op)


def test_one_dominating_channel_is_no_fault():
    model = build("llama", hidden=128)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0].mul_(1000)
        model.model.layers[1].mlp.down_proj.weight[:, 0].mul_(200)
        model.model.layers[1].mlp.up_proj.weight[0].mul_(200)
        model.model.layers[1].mlp.gate_proj.weight[0].mul_(20)
    for seed in range(4):
        assert found(model, "host", seed).verdict == "HEALTHY"


def test_autocast_around_the_call_changes_nothing():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert found(build("llama"), "host").verdict == "HEALTHY"


@pytest.mark.parametrize(
    ("model", "ids", "message"),
    [
        (lambda: build("llama").double(), tokens(), "judges float32, bfloat16 and float16"),
        (lambda: build("llama"), torch.full((1, 8), 5000), "a plain forward of LlamaForCausalLM fails"),
    ],
)
def test_models_that_do_not_run_are_told_in_one_line(model, ids, message):
    with pytest.raises(ModelError, match=message) as error:
        st.locate(model(), input_ids=ids)
    assert "\n" not in str(error.value)


def test_memory_that_is_full_is_told_with_what_helps(monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(Locator, "run", full)
    with pytest.raises(ModelError, match=r"^there is not enough memory on cpu for one layer's probes; use fewer tokens$"):
        found(build("llama"))
