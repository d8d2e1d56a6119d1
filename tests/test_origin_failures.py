"""The failures of the origin study, one test each. The numbers are those of the project's list of failures.

Each of these really happened there, silently. Here each is impossible or loud.
"""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.sites.structure import Anatomy
from tests.tensors import ids

NOISE = "relative_gaussian:0.05"


def vllm_class(name):
    """A class as vLLM has them: its own RMSNorm and linears, no relation to Hugging Face's."""

    class RMSNorm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x, residual=None):
            y = x if residual is None else x + residual
            out = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
            return out if residual is None else (out, y)

    class Parallel(nn.Module):
        def __init__(self, width, out):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(out, width) * 0.1)

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight), None

    return RMSNorm if name == "RMSNorm" else type(name, (Parallel,), {})


def vllm_model():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_layernorm = vllm_class("RMSNorm")(8)
            self.qkv_proj = vllm_class("QKVParallelLinear")(8, 24)
            self.o_proj = vllm_class("RowParallelLinear")(24, 8)

        def forward(self, x, residual):
            x, residual = self.input_layernorm(x, torch.zeros_like(x) if residual is None else residual)
            return self.o_proj(self.qkv_proj(x)[0])[0], residual

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(3)])
            self.norm = vllm_class("RMSNorm")(8)

        def forward(self, x):
            residual = None
            for layer in self.layers:
                x, residual = layer(x, residual)
            return self.norm(x, residual)[0]

    torch.manual_seed(0)
    return Model()


def test_01_rmsnorm_is_found_by_class_name_also_in_vllm():
    model = vllm_model()
    with st.inject(model, f"{NOISE}@module.rmsnorm") as ledger:
        model(torch.randn(2, 8))
    assert ledger.sites[0].matched == 4
    assert ledger.forward == 4


def test_06_what_is_counted_is_what_is_reported(tiny_llama):
    calls = []
    for module in tiny_llama.modules():
        if isinstance(module, nn.Linear) and module is not tiny_llama.lm_head:
            module.register_forward_hook(lambda *_: calls.append(1))
    with st.inject(tiny_llama, f"{NOISE}@module.linear") as ledger:
        tiny_llama(ids())
    record = json.loads(json.dumps(ledger.to_dict()))
    assert record["forward"] == record["sites"][0]["forward"] == len(calls) == 28


def test_07_an_evaluation_that_injected_nothing_is_an_error(tiny_llama):
    with pytest.raises(st.InertError, match="never fired"), st.inject(tiny_llama, f"{NOISE}@module.linear,phase=eval"):
        tiny_llama.train()
        tiny_llama(ids())


def test_08_a_worker_process_has_the_plan_too(tmp_path):
    body = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2))'], check=True)\n"
    )
    words = [
        sys.executable,
        "-m",
        "shaketable",
        "run",
        "--plan",
        f"{NOISE}@module.linear",
        "--ledger",
        str(tmp_path / "l"),
        "--",
    ]
    done = subprocess.run([*words, sys.executable, "-c", body], capture_output=True, text=True, env=os.environ.copy())
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "l" / "ledger.json").read_text())["forward"] == 1


def test_09_a_plan_after_compilation_takes_effect(tiny_llama):
    compiled = torch.compile(tiny_llama, backend="aot_eager")
    with torch.no_grad():
        clean = compiled(ids()).logits
        with st.inject(tiny_llama, f"{NOISE}@module.linear") as ledger:
            noisy = compiled(ids()).logits
        after = compiled(ids()).logits
    assert ledger.forward == 28
    assert not torch.equal(noisy, clean)
    assert torch.equal(after, clean)


def test_10_gate_proj_does_not_make_a_model_a_mixture_of_experts(tiny_llama):
    assert any("gate_proj" in name for name, _ in tiny_llama.named_modules())
    assert not Anatomy.of(tiny_llama).is_moe


def test_11_lm_head_is_left_out_unless_named(tiny_llama):
    with st.inject(tiny_llama, f"{NOISE}@module.linear") as ledger:
        tiny_llama(ids())
    assert not any("lm_head" in spot for spot in ledger.sites[0].spots)
    with st.inject(tiny_llama, f"{NOISE}@module.linear,include=lm_head") as ledger:
        tiny_llama(ids())
    assert any("lm_head" in spot for spot in ledger.sites[0].spots)
    with st.inject(tiny_llama, f"{NOISE}@op.matmul") as ledger:
        tiny_llama(ids())
    assert ledger.forward == 28


def lora(model, task=None):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False, task_type=task)
    return get_peft_model(model, config)


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_12_lora_adapters_are_left_out_unless_named(tiny_llama, task):
    model = lora(tiny_llama, task)
    with st.inject(model, "relative_gaussian:0.1@op.matmul") as ledger:
        model(input_ids=ids())
    assert ledger.forward == 28
    with st.inject(model, "mxfp4@module.linear,include=lora,point=weight") as ledger:
        model(input_ids=ids())
    assert ledger.forward == ledger.sites[0].matched == 28 + 16
    with st.inject(model, "mxfp4@module.linear") as ledger:
        model(input_ids=ids())
    assert not any("lora" in spot for spot in ledger.sites[0].spots)
    with st.inject(model, f"{NOISE}@module.linear,include=lora") as ledger:
        model(input_ids=ids())
    assert any("lora" in spot for spot in ledger.sites[0].spots)


def test_13_wrapper_and_base_layer_are_never_both_hit(tiny_llama):
    model = lora(tiny_llama)
    with st.inject(model, f"{NOISE}@module.q_proj") as ledger:
        model(ids())
    assert ledger.forward == ledger.sites[0].matched == 4
    assert ledger.to_dict()["sites"][0]["measured_error"] == pytest.approx(0.05, rel=0.15)


def test_14_backward_uses_the_weight_that_forward_used():
    torch.manual_seed(0)
    layer = nn.Linear(32, 8, bias=False)
    x = torch.randn(4, 32, requires_grad=True)
    with st.inject(layer, "mxfp4@module.linear,point=weight") as _:
        y = layer(x)
        used = torch.autograd.grad(y.sum(), x, retain_graph=True)[0][0]
        y.sum().backward()
    from shaketable.faults import Draw, make_fault

    quantized = make_fault({"kind": "mxfp4"}).apply(layer.weight.detach(), Draw(0))
    assert torch.allclose(used, quantized.sum(0))
    assert layer.weight.grad is not None, "the straight-through gradient reaches the real parameter"
    assert torch.allclose(layer.weight.grad, x.detach().sum(0).expand(8, 32))


def test_15_a_format_quantizes_what_the_unit_reads():
    assert st.Plan.parse("mxfp4@module.linear").clauses[0].points == ("weight", "input")
    seen = []
    layer = nn.Linear(32, 8)
    layer.register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    with st.inject(layer, "mxfp4@module.linear,point=input"):
        layer(torch.randn(4, 32))
    x, y = seen[0]
    assert (x[0].abs() / x[0].abs().max()).unique().numel() <= 8
    assert (y[0].abs() / y[0].abs().max()).unique().numel() == 8


def test_21_noise_on_weights_never_accumulates(tiny_llama):
    before = copy.deepcopy(tiny_llama.state_dict())
    with st.inject(tiny_llama, f"{NOISE}@module.rmsnorm+linear,point=weight"):
        for _ in range(3):
            tiny_llama(ids())
            inside = tiny_llama.state_dict()
            assert all(torch.equal(inside[k], v) for k, v in before.items())
    assert all(torch.equal(v, before[k]) for k, v in tiny_llama.state_dict().items())


def test_22_merged_and_unmerged_adapters_are_different_conditions(tiny_llama):
    """Formats see another weight once an adapter is merged; the ledger names the same sites either way."""
    model = lora(tiny_llama)
    logits, spots = [], []
    for merged in (False, True):
        if merged:
            model.merge_adapter()
        with st.inject(model, "mxfp4@module.linear,point=weight") as ledger:
            logits.append(model(ids()).logits)
        spots.append(set(ledger.sites[0].spots))
    assert spots[0] == spots[1]
    assert not torch.allclose(logits[0], logits[1], atol=1e-6)


def moe():
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, shared_expert_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config).eval()


def test_23_the_router_of_a_mixture_of_experts_is_left_alone():
    model = moe()
    assert Anatomy.of(model).is_moe
    with st.inject(model, f"{NOISE}@module.linear;{NOISE}@op.matmul") as ledger:
        model(ids())
    spots = ledger.sites[0].spots
    assert any("experts" in s for s in spots)
    assert not any(s.endswith((".gate", "shared_expert_gate")) for s in spots)
    routed = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda m, args, out: routed.append((args[0], m.weight, out)))
    with st.inject(model, f"{NOISE}@op.matmul"):
        model(ids())
    x, weight, out = routed[0]
    logits = out[0] if isinstance(out, tuple) else out
    clean = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), weight)
    assert torch.equal(logits.reshape(clean.shape), clean) or torch.allclose(logits.reshape(clean.shape), clean.softmax(-1))


def test_24_a_fault_and_a_layer_filter_that_match_nothing_are_an_error(tiny_llama):
    for plan in (f"{NOISE}@module.lm_head,layers=0-3", f"{NOISE}@layer.9", f"{NOISE}@op.matmul,layers=4"):
        with pytest.raises(st.NoMatchError):
            st.inject(tiny_llama, plan)


def test_25_weight_faults_without_gradients_leave_the_weights_alone():
    layer = nn.Linear(64, 64)
    before = layer.weight.detach().clone()
    address = layer.weight.data_ptr()
    with torch.no_grad(), st.inject(layer, "mxfp4@module.linear,point=weight") as ledger:
        first = layer(torch.ones(1, 64))
        second = layer(torch.ones(1, 64))
    assert ledger.forward == 2
    assert torch.equal(first, second)
    assert torch.equal(layer.weight, before)
    assert layer.weight.data_ptr() == address


def test_27_gradients_are_counted_in_the_layer_they_belong_to(tiny_llama):
    with st.inject(tiny_llama, f"{NOISE}@op.matmul,layers=1,direction=backward") as ledger:
        tiny_llama(ids(), labels=ids()).loss.backward()
    assert ledger.sites[0].by("layer") == {"1": {"forward": 0, "backward": 14}}
    touched = {n.split(".")[2] for n, p in tiny_llama.named_parameters() if "layers" in n and p.grad is not None}
    assert touched == {"0", "1", "2", "3"}


def test_28_noise_is_keyed_and_no_generator_is_needed():
    state = torch.get_rng_state()
    layer = nn.Linear(8, 8)
    torch.set_rng_state(state)
    outputs = []
    for seed, globally in ((1, 10), (1, 11), (2, 12)):
        torch.manual_seed(globally)
        before = torch.get_rng_state()
        with st.inject(layer, f"{NOISE}@module.linear", seed=seed):
            outputs.append(layer(torch.ones(4, 8)))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
