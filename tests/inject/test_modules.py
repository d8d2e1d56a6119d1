"""Module and layer sites: which tensor of a module is hit, when, and what hooks leave alone."""

import collections
import copy
import pickle

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import PlanError
from tests.inject.code_paths import Body
from tests.tensors import ids


@pytest.mark.parametrize("point", ["input", "output", "weight"])
def test_each_point_changes_what_it_names(point):
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    with st.inject(layer, f"gain:1@module.linear,point={point}") as ledger:
        assert torch.allclose(layer(x), 2 * torch.nn.functional.linear(x, layer.weight))
    assert ledger.forward == 1


@pytest.mark.parametrize("point", ["input", "output", "weight"])
def test_the_gradient_at_a_point_can_be_faulty_alone(point):
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    clean = layer(x)
    clean.sum().backward()
    before = [t.grad.clone() for t in (x, layer.weight, layer.bias)]
    layer.zero_grad()
    x.grad = None
    with st.inject(layer, f"gain:1@module.linear,point={point},direction=backward") as ledger:
        y = layer(x)
        y.sum().backward()
    assert torch.equal(y, clean)
    assert (ledger.forward, ledger.backward) == (0, 1)
    factors = {"input": (2, 1, 1), "output": (2, 2, 2), "weight": (1, 2, 1)}[point]
    for tensor, old, factor in zip((x, layer.weight, layer.bias), before, factors, strict=True):
        assert torch.allclose(tensor.grad, factor * old)


Named = collections.namedtuple("Named", "hidden cache")


def model_of(function):
    return nn.ModuleDict({"thing": Body(function)})


@pytest.mark.parametrize("shape", ["namedtuple", "model output", "none first"])
def test_only_the_first_tensor_of_an_output_is_changed(shape):
    from transformers.modeling_outputs import BaseModelOutput

    wrap = {
        "namedtuple": lambda x: Named(x, x),
        "model output": lambda x: BaseModelOutput(last_hidden_state=x, attentions=x),
        "none first": lambda x: (None, x, x),
    }[shape]
    model = model_of(wrap)
    with st.inject(model, "gain:1@module.thing"):
        out = model["thing"](torch.ones(3))
    first, *others = [m for m in (out.values() if isinstance(out, dict) else out) if m is not None]
    assert torch.equal(first, torch.full((3,), 2.0)) and all(torch.equal(m, torch.ones(3)) for m in others)
    assert type(out) is type(wrap(torch.ones(3)))


def test_faults_act_in_the_order_written():
    layer = nn.Identity()
    model = nn.Sequential(collections.OrderedDict(thing=layer))
    x = torch.tensor([1.0, 0.004, -0.004])
    with st.inject(model, "dead_zone:0.01@module.thing;systematic_bias:0.02@module.thing"):
        after = model(x)
    with st.inject(model, "systematic_bias:0.02@module.thing;dead_zone:0.01@module.thing", allow_inert=True):
        before = model(x)
    assert torch.allclose(after, torch.tensor([1.02, 0.0, 0.0]))
    assert torch.allclose(before, torch.tensor([1.02, 0.024, -0.024])), "noise in front lifts a signal over the dead zone"


def test_generate_is_a_rollout_by_itself_and_an_explicit_phase_wins(tiny_llama):
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    before = tiny_llama.generate.__func__
    with st.inject(tiny_llama, "gain:0.1@layer.0") as ledger:
        tiny_llama.generate(ids(), **options)
        tiny_llama(ids())
        tiny_llama.train()
        tiny_llama(ids())
        tiny_llama.eval()
        with st.phase("eval"):
            tiny_llama.generate(ids(), **options)
    forward = {k: v["forward"] for k, v in ledger.sites[0].by("phase").items()}
    assert forward == {"rollout": 2, "eval": 3, "train": 1}
    assert tiny_llama.generate.__func__ is before


def test_integer_tensors_are_refused():
    model = model_of(lambda x: x.long())
    with pytest.raises(st.PlanError, match=r"torch\.int64"), st.inject(model, "gain:1@module.thing"):
        model["thing"](torch.ones(2))
    assert not model["thing"]._forward_hooks


@pytest.mark.parametrize(
    "plan", ["gain:1@module.linear,point=input+output", "gain:1@module.rmsnorm,point=weight", "gain:1@op.all"]
)
def test_a_copy_made_meanwhile_is_clean_and_so_is_a_pickle(tiny_llama, plan):
    clean = tiny_llama(ids()).logits
    kinds = [type(m) for m in tiny_llama.modules()]
    with st.inject(tiny_llama, plan) as ledger:
        tiny_llama(ids())
        fires = ledger.forward
        twin = copy.deepcopy(tiny_llama)
        assert torch.equal(twin(ids()).logits, clean)
        assert torch.equal(pickle.loads(pickle.dumps(tiny_llama))(ids()).logits, clean)
        assert [type(m) for m in twin.modules()] == kinds
        assert ledger.forward == fires
    assert torch.equal(tiny_llama(ids()).logits, clean)
    with st.inject(twin, plan) as ledger:
        twin(ids())
    assert ledger.forward == fires


def test_the_input_is_the_hidden_state_and_not_a_mask():
    class Layer(nn.Module):
        def forward(self, mask, hidden_states, ids=None):
            return hidden_states

    model = nn.Sequential(collections.OrderedDict(thing=Layer()))
    x, mask = torch.ones(2, 3), torch.ones(2, 3)
    with st.inject(model.thing, "gain:1@module.Layer,point=input"):
        assert torch.equal(model.thing(mask=mask, hidden_states=x), 2 * x)
        assert torch.equal(model.thing(torch.ones(2, dtype=torch.bool), x), 2 * x)


def test_an_output_with_a_faulty_gradient_may_be_overwritten():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with st.inject(model, "gain:1@module.linear,direction=backward") as ledger:
        model(torch.ones(1, 4)).sum().backward()
    assert ledger.backward == 1


@pytest.mark.parametrize("point", ["input", "output"])
def test_a_module_without_a_tensor_there_is_named(point):
    model = model_of(lambda x: None)
    with pytest.raises(PlanError) as refused, st.inject(model, f"gain:1@module.thing,point={point}"):
        model["thing"](None)
    said = "was called without a tensor to change" if point == "input" else "returned no tensor to change"
    assert str(refused.value) == f"module.thing: thing {said}"


def test_what_is_no_model_is_refused():
    with pytest.raises(PlanError, match=r"^inject needs a torch\.nn\.Module, not dict$"):
        st.inject({}, "gain:1@module.linear")
