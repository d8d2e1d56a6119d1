"""Faulty weights that never replace the real ones: what a module reads, and what others see."""

import threading

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import shaketable as st


def test_tied_weights_are_faulty_only_where_the_plan_says(tiny_llama):
    tiny_llama.lm_head.weight = tiny_llama.model.embed_tokens.weight
    hidden = []
    tiny_llama.model.layers[0].register_forward_pre_hook(lambda m, args: hidden.append(args[0]))
    ids = torch.arange(8)[None]
    clean = tiny_llama(ids).logits
    with st.inject(tiny_llama, "gain:1@module.lm_head,point=weight") as ledger:
        assert torch.allclose(tiny_llama(ids).logits, 2 * clean)
    assert torch.equal(hidden[0], hidden[1])
    assert ledger.sites[0].matched == 1


def test_experts_have_their_stacked_weights_quantized():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = MixtralForCausalLM(MixtralConfig(**shape, num_key_value_heads=2, num_local_experts=4)).eval()
    with torch.no_grad():
        clean = model(torch.arange(8)[None]).logits
        with st.inject(model, "mxfp4@module.experts,point=weight") as ledger:
            noisy = model(torch.arange(8)[None]).logits
    assert sorted(ledger.sites[0].spots) == [
        "model.layers.0.mlp.experts.down_proj:weight",
        "model.layers.0.mlp.experts.gate_up_proj:weight",
    ]
    assert not torch.equal(clean, noisy)


@pytest.mark.parametrize("fault", ["dead_zone:0.3,scope=token", "gain:0.5,sparsity=0.5", "mxfp4"])
def test_a_weight_that_is_stored_the_other_way_round_has_the_values_and_gradients_of_a_linear(fault):
    """Rows of a linear are columns of GPT-2's Conv1D: what is faulty, and which gradient vanishes, must not depend on it."""
    torch.manual_seed(0)
    linear, turned = nn.Linear(8, 6, bias=False), Conv1D(6, 8)
    with torch.no_grad():
        turned.weight.copy_(linear.weight.T)
        turned.bias.zero_()
    x, found = torch.randn(3, 8), []
    for module in (linear, turned):
        model = nn.ModuleDict({"part": module})
        with st.inject(model, f"{fault}@module.part,point=weight", seed=1):
            y = module(x)
            y.square().sum().backward()
        found.append((y.detach(), module.weight.grad))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6) and torch.allclose(found[0][1], found[1][1].T, atol=1e-5)
    assert not torch.allclose(found[0][0], x @ linear.weight.T)


X = torch.ones(1, 4)


def test_a_weight_that_is_read_twice_in_a_call_is_made_and_counted_once():
    class Twice(nn.Linear):
        def forward(self, x):
            self.seen = self.weight, self.weight
            return super().forward(x)

    layer = Twice(4, 4)
    with st.inject(layer, "relative_gaussian:0.1@module.Twice,point=weight") as ledger:
        layer(X)
        first = layer.seen
        layer(X)
    assert first[0] is first[1] and ledger.forward == 2 and not torch.equal(first[0], layer.seen[0]), "another for each call"


class Careful(nn.Linear):
    """Looks at its weight where gradients are off before it multiplies with it, and raises when it is told to."""

    fails = False

    def forward(self, x):
        with torch.no_grad():
            kind = self.weight.dtype
        y = super().forward(x.to(kind))
        if self.fails:
            raise ZeroDivisionError
        return y


def test_a_first_look_without_gradients_costs_no_gradient():
    layer = Careful(4, 4)
    with st.inject(layer, "gain:1@module.Careful,point=weight"):
        layer(torch.ones(1, 4)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 2.0))


def test_a_weight_that_is_written_replaced_moved_or_left_by_an_error_is_faulty_in_calls_and_clean_outside():
    layer = Careful(4, 4, bias=False)

    def assert_faulty_inside_alone(value):
        found = []
        thread = threading.Thread(target=lambda: found.append(layer(X)))
        thread.start()
        thread.join()
        assert torch.equal(found[0], layer(X)) and torch.equal(found[0], 2 * X.to(value.dtype) @ value.T)
        assert layer.weight is layer._parameters["weight"]
        assert torch.equal(layer.state_dict()["weight"], value) and torch.equal(layer.weight, value)

    with torch.no_grad(), st.inject(layer, "gain:1@module.Careful,point=weight"):
        assert_faulty_inside_alone(layer.weight.clone())
        layer.weight.data.fill_(3)
        assert_faulty_inside_alone(torch.full((4, 4), 3.0))
        layer.weight = nn.Parameter(torch.eye(4))
        assert_faulty_inside_alone(torch.eye(4))
        layer.double()
        assert_faulty_inside_alone(torch.eye(4).double())
        layer.fails = True
        with pytest.raises(ZeroDivisionError):
            layer(X)
        layer.fails = False
        assert_faulty_inside_alone(torch.eye(4).double())
    assert type(layer) is Careful and torch.equal(layer(X), X.double())
