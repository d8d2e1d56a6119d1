"""A weight is faulty inside of its module's forward and clean everywhere else, whatever reads, copies or replaces it."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import shaketable as st

GAIN = "gain:1@module.linear,point=weight"
X = torch.ones(1, 4)


def linear():
    return nn.Linear(4, 4, bias=False)


@pytest.mark.parametrize(("dtype", "seen"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float64)])
def test_under_autocast_the_fault_of_a_product_acts_on_the_type_that_is_multiplied(dtype, seen):
    layer = linear().to(dtype)
    found = []
    with st.inject(layer, GAIN):
        layer.register_forward_pre_hook(lambda m, _: found.append(m.weight.dtype))
        layer(X.to(dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(X.to(dtype))
    assert found == [dtype, seen]


def test_a_weight_that_is_not_multiplied_or_not_hit_stays_in_its_own_type_under_autocast():
    model = nn.Sequential(nn.LayerNorm(4), linear())
    found = []
    with st.inject(model, "gain:1@module.0+linear,point=weight,phase=train"):
        for part in model:
            part.register_forward_pre_hook(lambda m, _: found.append(m.weight.dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.train()(X)
            model.eval()(X)
    assert found == [torch.float32, torch.bfloat16, torch.float32, torch.float32]


def test_clauses_on_one_weight_act_in_the_order_of_the_plan():
    layer = linear()
    clean = layer.weight.detach().clone()
    for plan, expected in (
        ("gain:1@module.linear,point=weight;saturation:0.1,scope=absolute@module.linear,point=weight", (2 * clean).clamp(-0.1, 0.1)),
        ("saturation:0.1,scope=absolute@module.linear,point=weight;gain:1@module.linear,point=weight", 2 * clean.clamp(-0.1, 0.1)),
    ):  # fmt: skip
        with torch.no_grad(), st.inject(layer, plan, allow_inert=True):
            assert torch.allclose(layer(torch.eye(4)).t(), expected, atol=1e-6)


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


def test_a_call_inside_of_a_call_has_frames_of_its_own_and_leaves_the_weight_clean():
    class Again(nn.Linear):
        depth = 0

        def forward(self, x):
            self.depth += 1
            y = super().forward(x)
            return self(y) if self.depth < 2 else y

    layer = Again(4, 4, bias=False)
    with st.inject(layer, "gain:1@module.Again,point=weight") as ledger:
        y = layer(X)
        assert layer.weight is layer._parameters["weight"]
    weight = layer.weight.detach()
    assert torch.allclose(y, 4 * X @ weight.T @ weight.T) and ledger.forward == 2


def test_a_plan_that_is_off_on_a_module_that_another_is_on_does_nothing():
    layer = linear()
    clean = layer(X)
    plans = (GAIN, "gain:2@module.linear,point=weight")
    first, second = (st.inject(layer, plan, allow_inert=True).enable() for plan in plans)
    first.disable()
    assert torch.allclose(layer(X), 3 * clean)
    second.disable()
    assert torch.equal(layer(X), clean)
    first.enable()
    assert torch.allclose(layer(X), 2 * clean)
    first.close()
    second.close()
    assert type(layer) is nn.Linear and torch.equal(layer(X), clean)


def test_keywords_reach_a_module_that_has_taps():
    class Named(nn.Linear):
        def forward(self, *, x, scale=1.0):
            return scale * super().forward(x)

    layer = Named(4, 4, bias=False)
    with st.inject(layer, "gain:1@module.Named,point=weight"):
        assert torch.allclose(layer(x=X, scale=3.0), 6 * X @ layer._parameters["weight"].T)


def test_after_an_exception_and_in_other_threads_the_weight_is_clean_and_the_next_call_is_hit():
    class Fails(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if x.sum() < 0:
                raise ZeroDivisionError
            return y

    layer = Fails(4, 4, bias=False)
    clean = layer(X).detach()
    with st.inject(layer, "gain:1@module.Fails,point=weight") as ledger:
        with pytest.raises(ZeroDivisionError):
            layer(-X)
        assert layer.weight is layer._parameters["weight"]
        seen = []
        thread = threading.Thread(target=lambda: seen.append(layer(X).detach()))
        thread.start()
        thread.join()
        assert torch.allclose(seen[0], 2 * clean) and torch.allclose(layer(X), 2 * clean) and ledger.forward == 3


def test_a_module_may_look_whether_it_has_a_weight():
    class Maybe(nn.Linear):
        def forward(self, x):
            return x if self.weight is None else super().forward(x)

    layer = Maybe(4, 4, bias=False)
    with st.inject(layer, "gain:1@module.Maybe,point=weight") as ledger:
        layer(X)
        layer._parameters["weight"] = None
        assert torch.equal(layer(X), X) and ledger.forward == 1


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.eye(4)[None])

    def forward(self, x):
        return x @ self.up[0]


@pytest.mark.parametrize(("make", "name"), [(linear, "weight"), (Experts, "up")])
def test_a_weight_that_was_taken_out_cannot_be_replaced_by_a_tensor(make, name):
    model = make()
    with st.inject(model, GAIN):
        model(X)
        parameter = model._parameters.pop(name)
        with pytest.raises(AttributeError, match=rf"^{name} cannot be replaced by a plain tensor while a plan acts on it$"):
            setattr(model, name, torch.ones(4, 4))
        model._parameters[name] = parameter
        assert getattr(model, name) is parameter


def test_a_class_that_somebody_made_of_ours_keeps_its_name_and_loses_ours_from_below():
    layer = linear()
    injection = st.inject(layer, GAIN).enable()
    below = type(layer)
    layer.__class__ = type("Sharded", (below,), {"more": lambda self: "more"})
    assert torch.allclose(layer(X), 2 * X @ layer._parameters["weight"].T)
    injection.close()
    assert type(layer).__name__ == "Sharded" and layer.more() == "more" and type(layer).__mro__[1] is nn.Linear


class Stateful(nn.Linear):
    """A class with a `__getstate__` of its own, which does not ask torch's."""

    def __getstate__(self):
        return dict(self.__dict__)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_where_a_class_has_a_state_of_its_own_a_hook_becomes_one_that_does_nothing(copied):
    model = nn.Sequential(Stateful(4, 4))
    clean = model(X)
    with st.inject(model, "gain:1@module.Stateful") as ledger:
        twin = copied(model)
        assert torch.equal(twin(X), clean) and torch.equal(model(X), 2 * clean)
    assert ledger.forward == 1


@pytest.mark.parametrize(
    "plan",
    ["gain:1@module.linear,point=input+output+weight", "gain:1@op.all", "gain:1@module.linear,point=weight,direction=both"],
)
def test_a_copy_of_a_copy_has_no_trace_and_trains(plan):
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.RMSNorm(4))
    clean = model(X)
    with st.inject(model, plan):
        twin = copy.deepcopy(copy.copy(model))
        model(X)
    assert torch.equal(twin(X), clean) and [type(m) for m in twin] == [nn.Linear, nn.SiLU, nn.RMSNorm]
    twin(X).sum().backward()
    for module in twin.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not any("shaketable" in name for name in vars(module))
