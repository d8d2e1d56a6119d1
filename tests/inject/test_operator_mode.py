"""Operator sites: every covered operator, forward and backward, and nothing else."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shaketable as st
from tests.inject.code_paths import Body

PLAN = "relative_gaussian:0.1@op.all"


A = torch.linspace(-1, 1, 16).view(4, 4)
Q = torch.linspace(-1, 1, 2 * 3 * 8).view(1, 2, 3, 8)
OPERATORS = {
    "addmm": (lambda a, b: torch.addmm(a, a, b), 3),
    "linear": (lambda a, b: F.linear(a, b), 2),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), 2),
    "softmax": (lambda a, b: F.softmax(a, -1), 1),
    "gelu": (lambda a, b: F.gelu(a), 1),
    "layer_norm": (lambda a, b: F.layer_norm(a, (4,), b[0], b[1]), 3),
    "rms_norm": (lambda a, b: F.rms_norm(a, (4,), b[0]), 2),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_hit_and_so_is_every_gradient_it_makes(name):
    function, gradients = OPERATORS[name]
    a, b = A.clone().requires_grad_(), (A + 1).requires_grad_()
    clean = function(a, b)
    model = Body(function)
    with st.inject(model, PLAN) as ledger:
        noisy = model(a, b)
        noisy.square().sum().backward()
    assert not torch.equal(clean, noisy)
    assert (ledger.forward, ledger.backward) == (1, gradients)


def test_gradients_of_other_arguments_and_of_other_products_have_errors_that_are_unlike():
    """All four gradients are ones, so what differs is the error: by argument, and by product of the same layer."""
    given = [torch.ones(32, requires_grad=True) for _ in range(4)]
    model = Body(lambda a, b, c, d: torch.inner(a, b) + torch.inner(c, d))
    with st.inject(model, "relative_gaussian:0.1@op.matmul,direction=backward") as ledger:
        found = torch.autograd.grad(model(*given), given)
    assert ledger.backward == 4
    assert len({tuple(g.tolist()) for g in found}) == 4
    errors = torch.stack(found) - 1
    assert float(errors.std()) == pytest.approx(0.1, rel=0.2)
    assert float(torch.corrcoef(errors).fill_diagonal_(0).abs().max()) < 0.6


def test_an_rms_norm_written_out_in_python_is_one_operator(tiny_llama):
    ids = torch.arange(8)[None]
    with st.inject(tiny_llama, "relative_gaussian:0.1@op.rms_norm") as ledger:
        tiny_llama(ids, labels=ids).loss.backward()
    # 9 norms; each makes a gradient for its input and for its weight
    assert (ledger.forward, ledger.backward) == (9, 18)


def test_fused_attention_is_hit_as_one_and_its_products_are_counted_as_hidden():
    model = Body(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    clean = model(Q)
    with st.inject(model, "relative_gaussian:0.1@op.sdpa") as ledger:
        assert not torch.equal(model(Q), clean)
    assert ledger.forward == 1
    with st.inject(model, "relative_gaussian:0.1@op.matmul", allow_inert=True) as ledger:
        assert torch.equal(model(Q), clean)
    assert (ledger.forward, ledger.sites[0].fused) == (0, 1)
    assert "not exposed" in str(ledger)


def test_a_transformer_encoder_of_torch_is_met_in_eval_mode_too():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad(), st.inject(model, "relative_gaussian:0.1@op.matmul") as ledger:
        model(torch.randn(1, 3, 8))
    assert ledger.forward >= 4


def test_other_threads_are_shaken_and_do_not_mix():
    models = [Body(lambda a: a @ a) for _ in range(2)]
    results = {}

    def work(i):
        for _ in range(20):
            results.setdefault(i, []).append(models[i](A))

    with st.inject(models[0], PLAN) as ledger:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert ledger.forward == 20
    assert all(torch.equal(r, A @ A) for r in results[1])
    assert len({r.sum().item() for r in results[0]}) == 20


def test_a_mode_that_another_thread_closed_goes_with_the_next_plan():
    model = Body(lambda a: a @ a)
    injection = st.inject(model, PLAN).enable()
    model(A)
    thread = threading.Thread(target=injection.close)
    thread.start()
    thread.join()
    with st.inject(model, PLAN) as ledger:
        model(A)
    assert ledger.forward == 1
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_bias_has_a_unit_of_its_own_for_every_gradient():
    layer = nn.Linear(8, 8)
    with st.inject(layer, "bias:0.1@op.matmul") as ledger:
        (layer(torch.randn(4, 8)).square().mean() * 1e-3).backward()
    assert ledger.to_dict()["sites"][0]["measured_error_backward"] < 1


class TinyRotaryEmbedding(nn.Module):
    """Angles as transformers 5.17 makes them, with a matrix product."""

    def forward(self, x):
        return torch.arange(1.0, 5.0)[:, None] @ torch.ones(1, 4)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary, self.linear = TinyRotaryEmbedding(), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) + self.rotary(x)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("plan", "fires"), [("gain:1@op.matmul", 1), ("gain:1@op.matmul,include=rotary", 2)])
def test_a_product_that_makes_rotary_angles_is_left_out_unless_it_is_named(plan, fires, compiled):
    torch.compiler.reset()
    model, x = Turned(), torch.ones(4, 4)
    linear, angles = model.linear(x), model.rotary(x)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    with torch.no_grad(), st.inject(model, plan) as ledger:
        found = run(x)
    assert ledger.forward == fires
    assert torch.equal(found, 2 * linear + angles * fires)
