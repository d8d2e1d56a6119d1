"""Faults that are written into the weights of a sampling engine: what is kept of each weight, and when it is put back."""

import gc
import weakref

import pytest
import torch
from torch import nn

from shaketable.inject import weights_in_place
from shaketable.inject.injection import Injection
from shaketable.inject.weights_in_place import Written, checksum
from shaketable.plan import Plan
from shaketable.sites.phases import phase

GAIN = "gain:1@module.linear,point=weight"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.b(self.a(x))


def put_on(model, plan=GAIN, **options):
    injection = Injection(Plan.parse(plan, seed=1), sampler=True, allow_inert=True, **options)
    injection.attach(model)
    return injection.enable()


def written(injection):
    return injection.models[0].written


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def clean(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_every_weight_of_a_plan_holds_a_fault_while_it_is_on(model, clean):
    injection = put_on(model)
    found = written(injection)
    assert [(w.module(), w.name) for w in found.faulty()] == [(model.a, "weight"), (model.b, "weight")]
    assert all(torch.equal(p, 2 * clean[name]) for name, p in model.named_parameters())
    injection.disable()
    assert found.faulty() == [] and all(torch.equal(p, clean[name]) for name, p in model.named_parameters())
    injection.close()


def test_only_those_on_which_a_clause_acts_hold_a_fault(model, clean):
    plan = "gain:1@module.a,point=weight,phase=rollout;gain:2@module.b,point=weight,phase=eval"
    injection = put_on(model, plan)
    found = written(injection)
    assert [w.module() for w in found.faulty()] == [model.a] and torch.equal(model.b.weight, clean["b.weight"])
    injection.phase = "eval"
    assert [w.module() for w in found.faulty()] == [model.b] and torch.equal(model.a.weight, clean["a.weight"])
    assert torch.equal(model.b.weight, 3 * clean["b.weight"])
    injection.close()


def test_a_gradient_is_nothing_to_write(model, clean):
    injection = put_on(model, f"{GAIN},direction=backward")
    assert written(injection).faulty() == [] and torch.equal(model.a.weight, clean["a.weight"])
    injection.close()
    injection = put_on(model, f"{GAIN},direction=both")
    assert torch.equal(model.a.weight, 2 * clean["a.weight"])
    injection.close()


def test_several_clauses_on_one_weight_act_one_after_the_other_from_one_clean_copy(model, clean):
    injection = put_on(
        model, "saturation:0.1,scope=absolute@module.a,point=weight;gain:1@module.a,point=weight;gain:2@module.b,point=weight"
    )
    found = written(injection)
    assert len(found._weights) == 2 and [len(w.taps) for w in found._weights] == [2, 1]
    assert torch.allclose(model.a.weight, 2 * clean["a.weight"].clamp(-0.1, 0.1))
    assert torch.equal(model.b.weight, 3 * clean["b.weight"])
    injection.set_magnitude(0.0, clause=1)
    assert torch.allclose(model.a.weight, clean["a.weight"].clamp(-0.1, 0.1))
    injection.close()
    assert all(torch.equal(p, clean[name]) for name, p in model.named_parameters())


def test_the_clean_copy_is_a_copy_and_not_the_weight_itself(model, clean):
    injection = put_on(model)
    (first, _) = written(injection).faulty()
    assert torch.equal(first.clean, clean["a.weight"]) and first.clean.data_ptr() != model.a.weight.data_ptr()
    assert first.clean.device.type == "cpu" and first.ours == checksum(model.a.weight) == checksum(2 * clean["a.weight"])
    injection.close()
    assert first.clean is None


def test_parameters_stay_the_same_objects_at_the_same_addresses(model):
    before = [(p, p.data_ptr(), p.requires_grad) for p in model.parameters()]
    injection = put_on(model)
    injection.step = 1
    injection.close()
    assert all(p is q and q.data_ptr() == at and q.requires_grad is grad for p, (q, at, grad) in zip(model.parameters(), before, strict=True))  # fmt: skip


def test_weights_can_be_made_clean_whatever_the_plan_says_and_faulty_again(model, clean):
    injection = put_on(model)
    written(injection).put_back()
    assert all(torch.equal(p, clean[name]) for name, p in model.named_parameters()) and written(injection).faulty() == []
    written(injection).put_back()
    assert torch.equal(model.a.weight, clean["a.weight"])
    written(injection).update()
    assert torch.equal(model.a.weight, 2 * clean["a.weight"])
    injection.close()


@pytest.mark.parametrize("how", ["update", "put_back"])
def test_new_weights_are_the_clean_ones_and_those_that_nobody_touched_are_put_back(model, clean, how):
    injection = put_on(model)
    with torch.no_grad():
        model.a.weight.data.fill_(5.0)
    getattr(written(injection), how)()
    times = 2 if how == "update" else 1
    assert torch.equal(model.a.weight, torch.full((4, 4), 5.0 * times)) and torch.equal(
        model.b.weight, times * clean["b.weight"]
    )
    injection.close()
    assert torch.equal(model.a.weight, torch.full((4, 4), 5.0)) and torch.equal(model.b.weight, clean["b.weight"])


def test_new_weights_count_again_for_every_tap_on_them_and_on_no_other(model):
    injection = put_on(model, "gain:1@module.a,point=weight;gain:2@module.a,point=weight;gain:1@module.b,point=weight")
    assert [site.forward for site in injection.ledger.sites] == [1, 1, 1]
    injection.rewrite()
    assert [site.forward for site in injection.ledger.sites] == [1, 1, 1]
    with torch.no_grad():
        model.a.weight.data.fill_(5.0)
    injection.rewrite()
    assert [site.forward for site in injection.ledger.sites] == [2, 2, 1]
    injection.close()


def test_weights_that_are_clean_already_are_not_taken_for_new_ones(model):
    injection = put_on(model)
    injection.disable().disable().enable().disable()
    written(injection).put_back()
    injection.enable()
    assert injection.ledger.forward == 2
    injection.close()


def test_a_parameter_that_was_replaced_by_another_is_seen(model):
    injection = put_on(model)
    model.a._parameters["weight"] = nn.Parameter(torch.full((4, 4), 7.0))
    injection.rewrite()
    assert torch.equal(model.a.weight, torch.full((4, 4), 14.0))
    injection.close()
    assert torch.equal(model.a.weight, torch.full((4, 4), 7.0))


def test_what_is_written_is_drawn_for_the_phase_of_now(model, clean):
    injection = put_on(model, f"{GAIN},phase=eval")
    assert torch.equal(model.a.weight, clean["a.weight"])
    with phase("eval"):
        injection.rewrite()
        assert torch.equal(model.a.weight, 2 * clean["a.weight"])
    injection.rewrite()
    assert torch.equal(model.a.weight, clean["a.weight"])
    assert injection.ledger.sites[0].by("phase") == {"eval": {"forward": 2, "backward": 0}}
    injection.close()


def test_an_injection_that_is_closed_is_forgotten_by_the_weights_of_the_other(model, clean):
    first, second = put_on(model), put_on(model, "gain:2@module.linear,point=weight")
    assert torch.equal(model.a.weight, 6 * clean["a.weight"])
    weights = written(second)._weights
    assert [len(w.taps) for w in weights] == [2, 2] and weights == written(first)._weights
    first.close()
    assert torch.equal(model.a.weight, 3 * clean["a.weight"]) and [len(w.taps) for w in weights] == [1, 1]
    second.close()
    assert [len(w.taps) for w in weights] == [0, 0] and torch.equal(model.a.weight, clean["a.weight"])


def test_the_other_injection_decides_for_itself_whether_it_acts(model, clean):
    first, second = put_on(model, f"{GAIN},phase=eval"), put_on(model, "gain:2@module.linear,point=weight,phase=rollout")
    assert torch.equal(model.a.weight, 3 * clean["a.weight"])
    first.phase = "eval"
    assert torch.equal(model.a.weight, 6 * clean["a.weight"])
    second.phase = "eval"
    assert torch.equal(model.a.weight, 2 * clean["a.weight"])
    first.close()
    second.close()
    assert torch.equal(model.a.weight, clean["a.weight"])


def test_a_model_is_not_kept_alive_by_what_is_known_of_its_weights():
    model = Model()
    put_on(model).close()
    seen = weakref.ref(model.a)
    assert model.a in weights_in_place._known
    del model
    gc.collect()
    assert seen() is None


class Experts(nn.Module):
    """Two stacked weights in one module."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.eye(4)[None] + i) for i in range(2))

    def forward(self, x):
        return x @ self.up[0] @ self.down[0]


def test_weights_of_one_module_are_told_apart_by_their_names():
    model = Experts()
    up, down = model.up.detach().clone(), model.down.detach().clone()
    injection = put_on(model)
    assert sorted(w.name for w in written(injection).faulty()) == ["down", "up"]
    assert torch.equal(model.up, 2 * up) and torch.equal(model.down, 2 * down)
    injection.close()
    assert torch.equal(model.up, up) and torch.equal(model.down, down)


def test_weights_of_no_model_are_nothing_to_do():
    found = Written([])
    found.update()
    found.put_back()
    assert found.faulty() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_weights_of_any_type_come_back_bit_for_bit(dtype):
    model = Model().to(dtype)
    with torch.no_grad():
        model.a.weight[0, 0], model.a.weight[0, 1], model.a.weight[1, 1] = float("nan"), -0.0, float("inf")
    bits = model.a.weight.detach().clone().view(weights_in_place._BITS[model.a.weight.element_size()])
    injection = put_on(model, "relative_gaussian:0.1@module.linear,point=weight")
    for step in (1, 2):
        injection.step = step
    assert not torch.equal(model.a.weight.detach().view(bits.dtype), bits)
    injection.close()
    assert torch.equal(model.a.weight.detach().view(bits.dtype), bits)


# ---- checksums


def test_a_checksum_is_that_of_the_values_in_their_order_however_they_lie_in_memory():
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert checksum(x.t()) == checksum(x.t().contiguous()) != checksum(x)
    assert checksum(x[:, ::2]) == checksum(x[:, ::2].clone()) and checksum(x.view(7, 5)) == checksum(x)


@pytest.mark.parametrize("chunk", [1, 3, 5, 6])
def test_a_checksum_does_not_depend_on_how_much_is_added_at_a_time(monkeypatch, chunk):
    x = torch.randn(6, generator=torch.Generator().manual_seed(0))
    whole, swapped = checksum(x), checksum(x[[3, 4, 5, 0, 1, 2]])
    monkeypatch.setattr(weights_in_place, "_CHUNK", chunk)
    assert checksum(x) == whole and checksum(x[[3, 4, 5, 0, 1, 2]]) == swapped != whole


def test_a_checksum_weights_every_word_by_an_odd_number():
    """Of an even place the highest bit of a 64-bit word would be lost, and with it a sign."""
    for place in range(4):
        x = torch.ones(4, dtype=torch.float64)
        before = checksum(x)
        x[place] = -1.0
        assert checksum(x) != before
