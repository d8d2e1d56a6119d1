"""torch.compile on an accelerator: in the graph, fresh at every call, changed live, and off in all bits.

`inductor` writes kernels of its own there. Where a fault stands between two operators that it would have fused, the clean program
keeps a value in float32 that ours rounds to the tensor's type, and sums are split into other blocks. So a plan that is off is not
in the graph: there are two graphs, and the one without is the clean one, for every plan.
"""

import functools

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import shaketable as st
from tests import tensors
from tests.gpu.shaken_device import DEVICE, ON_CUDA, ids, on_device, settle

pytestmark = [*on_device, pytest.mark.usefixtures("fresh_graphs")]
BACKEND = "inductor" if ON_CUDA else "aot_eager"
PLANS = {
    "relative_gaussian:0.05@module.linear,direction=both": (14, 14),
    "relative_gaussian:0.05@module.rmsnorm,point=weight": (5, 0),
    "dead_zone:0.1,scope=token@layer.all": (2, 0),
    "mxfp4@module.linear": (28, 0),
    # 14 linears, 2 attentions, 2 SiLUs and 5 norms; gradients of 28, 6, 2 and 10 inputs
    "relative_gaussian:0.05@op.all": (23, 46),
}
step = functools.partial(tensors.step_logits, n=16)
RUNS = [(plan, backend) for backend in sorted({"aot_eager", BACKEND}) for plan in PLANS]


def graphs():
    """Graphs since the counters were cleared."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("plan", "backend"), RUNS)
def test_the_plan_is_in_the_graph_and_stays_alive(tinier_llama, plan, backend):
    model = tinier_llama.to(DEVICE)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    clean = step(compiled, model)
    injection = st.inject(model, plan)
    with injection as ledger:
        first = step(compiled, model)
        settle()
        assert (ledger.forward, ledger.backward) == PLANS[plan]
        assert not torch.equal(first, clean)
        made = graphs()
        if "gaussian" in plan:
            assert not torch.equal(step(compiled, model), first), "fresh noise at every call"
        if "mxfp4" not in plan:
            injection.set_magnitude(1e-4)
            assert (step(compiled, model) - clean).abs().max() < (first - clean).abs().max()
        assert graphs() == made, "nothing was compiled again"
        injection.disable()
        assert torch.equal(step(compiled, model), clean)
        if "mxfp4" not in plan:
            injection.enable()
            injection.set_magnitude(0)
            assert torch.equal(step(compiled, model), clean)
            injection.set_magnitude(0.1)
        injection.enable()
        assert not torch.equal(step(compiled, model), clean)
        assert graphs() == made + 1, "one graph more, for when it is off"
        assert not torch._dynamo.utils.counters["graph_break"]
    assert torch.equal(step(compiled, model), clean)


def test_the_same_seed_is_the_same_noise(tinier_llama):
    model = tinier_llama.to(DEVICE)
    compiled = torch.compile(model, backend=BACKEND)

    def two(seed):
        with st.inject(model, "relative_gaussian:0.05@module.linear", seed=seed):
            return step(compiled, model), step(compiled, model)

    first, again, other = two(1), two(1), two(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("plan", ["relative_gaussian:0.05@op.all", "relative_gaussian:0.05@module.linear"])
def test_counts_layers_and_measures_are_those_of_eager(tinier_llama, plan):
    model = tinier_llama.to(DEVICE)
    with st.inject(model, plan) as eager:
        step(model, model)
    compiled = torch.compile(model, backend=BACKEND)
    with st.inject(compiled, plan) as ledger:
        step(compiled, model)
    settle()
    assert ledger.sites[0].by("layer") == eager.sites[0].by("layer")
    assert ledger.sites[0].by("phase") == eager.sites[0].by("phase")
    assert ledger.to_dict()["sites"][0]["measured_magnitude"] == pytest.approx(0.05, rel=0.05)


def test_phases_are_read_at_run_time(tinier_llama):
    model = tinier_llama.to(DEVICE)
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad(), st.inject(model, "gain:0.5@module.linear,phase=rollout") as ledger:
        clean = compiled(input_ids=ids()).logits
        with st.phase("rollout"):
            assert not torch.equal(compiled(input_ids=ids()).logits, clean)
        assert torch.equal(compiled(input_ids=ids()).logits, clean)
    settle()
    assert set(ledger.sites[0].by("phase")) == {"rollout"}


def test_gradients_are_those_of_the_fault():
    layer = torch.nn.Linear(8, 8, bias=False).to(DEVICE)
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    compiled = torch.compile(layer, backend=BACKEND)
    with st.inject(layer, "dead_zone:0.5@module.linear"):
        y = compiled(x)
        y.sum().backward()
    torch.testing.assert_close(x.grad, (y != 0).float() @ layer.weight, rtol=1e-4, atol=1e-5)


def test_checkpointed_layers_see_the_same_noise(tinier_llama):
    """The gradients with checkpointing are those without: what is computed again is computed with the same noise.

    Not asked of operators: dynamo leaves the graph there, and what runs eagerly has other keys than what is compiled.
    """
    model, found = tinier_llama.to(DEVICE).train(), []
    for checkpoint in (False, True):
        torch._dynamo.reset()
        if checkpoint:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        compiled = torch.compile(model, backend=BACKEND)
        with st.inject(model, "relative_gaussian:0.2@module.linear", seed=1) as ledger:
            step(compiled, model)
        settle()
        found.append((ledger.forward, [p.grad.clone() for p in model.parameters()]))
    assert found[0][0] == found[1][0] == 14
    for plain, again in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-3, atol=1e-5)


SAMPLED = "relative_gaussian:0.05@module.linear"
INFERRED = [
    (SAMPLED, torch.float32, {"backend": BACKEND}),
    (SAMPLED, torch.bfloat16, {"backend": BACKEND}),
    ("absolute_gaussian:0.05@module.linear", torch.float32, {"backend": BACKEND}),
    ("relative_gaussian:0.05,sparsity=0.5@module.linear", torch.float16, {"backend": BACKEND}),
    ("relative_gaussian:0.05@module.linear,point=input", torch.float32, {"backend": BACKEND}),
]
if ON_CUDA:
    INFERRED += [(SAMPLED, dtype, {"mode": "reduce-overhead"}) for dtype in (torch.float32, torch.bfloat16)]


def sampled(function, n=16):
    """Logits without gradients, as a sampler computes them; a copy, because captured graphs write to one place."""
    with torch.no_grad():
        return function(input_ids=ids(n)).logits.clone()


@pytest.mark.parametrize(("plan", "dtype", "how"), INFERRED)
def test_inference_is_fresh_live_counted_and_off(tinier_llama, plan, dtype, how):
    model = tinier_llama.to(DEVICE, dtype)
    compiled = torch.compile(model, **how)
    clean = [sampled(compiled) for _ in range(3)][-1]
    injection = st.inject(model, plan, seed=1)
    with injection as ledger:
        found = [sampled(compiled) for _ in range(5)]
        settle()
        assert ledger.forward == 5 * 14
        assert all(not torch.equal(a, b) for i, a in enumerate([clean, *found]) for b in found[i:])
        made = graphs()
        injection.set_magnitude(1e-3)
        quieter = (sampled(compiled) - clean).double().norm()
        assert quieter < 0.5 * (found[0] - clean).double().norm()
        assert graphs() == made, "nothing was compiled again"
        injection.disable()
        assert all(torch.equal(sampled(compiled), clean) for _ in range(3))
        injection.enable()
        injection.set_magnitude(0)
        assert torch.equal(sampled(compiled), clean)
        injection.set_magnitude(0.05)
        assert not torch.equal(sampled(compiled), clean)
        assert graphs() == made + 1, "one graph more, for when it is off"
        settle()
        assert ledger.forward == 7 * 14
    assert torch.equal(sampled(compiled), clean)


@pytest.mark.parametrize("how", [{"backend": BACKEND}, *([{"mode": "reduce-overhead"}] if ON_CUDA else [])])
def test_off_is_the_clean_program_where_sums_are_looped(how):
    """A norm over 1536 values is summed in blocks, and how many inductor tries out: in other kernels, other sums."""
    shape = {"vocab_size": 512, "hidden_size": 1536, "intermediate_size": 2048, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**shape, **heads)).eval().to(DEVICE, torch.bfloat16)
    compiled, n = torch.compile(model, **how), 512 if ON_CUDA else 16
    clean = [sampled(compiled, n) for _ in range(3)][-1]
    injection = st.inject(model, SAMPLED, seed=1)
    with injection as ledger:
        for _ in range(2):
            noisy = [sampled(compiled, n) for _ in range(3)]
            assert not any(torch.equal(y, clean) for y in noisy)
            injection.disable()
            assert all(torch.equal(sampled(compiled, n), clean) for _ in range(3))
            injection.enable()
        injection.set_magnitude(0)
        assert all(torch.equal(sampled(compiled, n), clean) for _ in range(3))
        settle()
        assert ledger.forward == 2 * 3 * 14
    assert torch.equal(sampled(compiled, n), clean)


def test_inference_is_keyed_and_knows_its_phase(tinier_llama):
    model = tinier_llama.to(DEVICE)
    compiled = torch.compile(model, backend=BACKEND)

    def three(seed):
        with st.inject(model, "relative_gaussian:0.05@module.linear,phase=rollout", seed=seed) as ledger:
            before = sampled(compiled)
            with st.phase("rollout"):
                found = [sampled(compiled) for _ in range(3)]
            assert torch.equal(sampled(compiled), before), "outside of its phase it is off"
        assert ledger.sites[0].by("phase") == {"rollout": {"forward": 3 * 14, "backward": 0}}
        return found

    first, again, other = three(1), three(1), three(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a in first for b in other)


def test_measured_equals_asked_in_inference(tinier_llama):
    model = tinier_llama.to(DEVICE)
    compiled = torch.compile(model, backend=BACKEND)
    with st.inject(model, "relative_gaussian:0.05@module.linear") as ledger:
        for _ in range(4):
            sampled(compiled)
    assert ledger.to_dict()["sites"][0]["measured_magnitude"] == pytest.approx(0.05, rel=0.05)


def test_a_layer_that_is_compiled_alone_is_shaken_and_counted(tinier_llama):
    model = tinier_llama.to(DEVICE)
    clean = sampled(model)
    model.model.layers[0].compile(backend=BACKEND)
    with st.inject(model, SAMPLED, seed=1) as ledger:
        found = [sampled(model) for _ in range(3)]
        settle()
        assert {layer: n["forward"] for layer, n in ledger.sites[0].by("layer").items()} == {"0": 21, "1": 21}
    assert all(not torch.equal(a, b) for i, a in enumerate([clean, *found]) for b in found[i:])


def test_two_plans_in_one_compiled_pass(tinier_llama):
    model = tinier_llama.to(DEVICE)
    compiled = torch.compile(model, backend=BACKEND)
    one = st.inject(model, "relative_gaussian:0.05@module.q_proj+k_proj", seed=1)
    two = st.inject(model, "absolute_gaussian:0.02@module.down_proj;relative_gaussian:0.1@module.up_proj", seed=2)
    with one as first, two as second:
        for _ in range(4):
            sampled(compiled)
        settle()
        assert (first.forward, [site.forward for site in second.sites]) == (16, [8, 8])
    found = [site.magnitude for site in (*first.sites, *second.sites)]
    assert found == pytest.approx([0.05, 0.02, 0.1], rel=0.1)


def test_a_model_of_any_length_is_compiled_once(tinier_llama):
    model = tinier_llama.to(DEVICE)
    compiled = torch.compile(model, backend=BACKEND, dynamic=True)
    with st.inject(model, SAMPLED, seed=1) as ledger, torch.no_grad():
        compiled(input_ids=ids(12))
        made = graphs()
        for n in (16, 20, 9):
            compiled(input_ids=ids(n))
        settle()
        assert graphs() == made
        assert ledger.forward == 4 * 14
