"""What a module gives to be copied or pickled while a plan is on it: as if we had never been there."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.inject.hooks import base
from shaketable.inject.hooks.base import Hook, do_nothing

X = torch.ones(1, 4)


class Ours(Hook):
    def __call__(self, *args):
        raise AssertionError("never called")


def theirs(module, args, output=None):
    return None


@pytest.fixture
def watched():
    """As while one plan is on some model."""
    base.keep_copies_clean()
    yield
    base.end_clean_copies()


@pytest.fixture
def no_plan():
    """As if no other test had left a plan on its model."""
    plans, state = base._plans, nn.Module.__getstate__
    base._plans = 0
    type.__setattr__(nn.Module, "__getstate__", base._state)
    yield
    base._plans = plans
    type.__setattr__(nn.Module, "__getstate__", state)


def test_only_our_hooks_are_left_behind_with_all_that_torch_notes_of_them(watched):
    module = nn.Linear(4, 4)
    module.register_forward_hook(Ours(), with_kwargs=True, always_call=True)
    kept = module.register_forward_hook(theirs, always_call=True)
    module.register_forward_pre_hook(Ours(), with_kwargs=True)
    before = module.register_forward_pre_hook(theirs)
    state = module.__getstate__()
    assert list(state["_forward_hooks"]) == [kept.id] and list(state["_forward_pre_hooks"]) == [before.id]
    assert list(state["_forward_hooks_always_called"]) == [kept.id]
    assert not state["_forward_hooks_with_kwargs"] and not state["_forward_pre_hooks_with_kwargs"]
    assert isinstance(state["_forward_hooks"], OrderedDict)
    assert len(module._forward_hooks) == 2 == len(module._forward_pre_hooks), "the module itself keeps them"
    assert len(module._forward_hooks_always_called) == 2 and len(module._forward_hooks_with_kwargs) == 1


def test_hooks_of_others_that_take_keywords_are_copied_as_such(watched):
    module = nn.Linear(4, 4)
    module.register_forward_hook(Ours(), with_kwargs=True)
    kept = module.register_forward_pre_hook(theirs, with_kwargs=True)
    module.register_forward_pre_hook(Ours())
    state = module.__getstate__()
    assert list(state["_forward_pre_hooks_with_kwargs"]) == [kept.id] == list(state["_forward_pre_hooks"])


def test_where_there_is_no_hook_of_ours_the_dictionaries_are_those_of_the_module(watched):
    module = nn.Linear(4, 4)
    module.register_forward_hook(theirs)
    state = module.__getstate__()
    assert state["_forward_hooks"] is module._forward_hooks and state["_forward_pre_hooks"] is module._forward_pre_hooks


def test_marks_of_ours_are_left_behind_and_what_only_sounds_alike_is_not(watched):
    module = nn.Linear(4, 4)
    module.__dict__.update(_shaketable_seen=1, _shaketable=2, shaketable=3, _shake=4)
    assert {k: v for k, v in module.__getstate__().items() if "shake" in k} == {"shaketable": 3, "_shake": 4}
    assert module._shaketable_seen == 1


def test_without_a_plan_torch_does_what_it_did(no_plan):
    module = nn.Linear(4, 4)
    module.__dict__["_shaketable_seen"] = 1
    assert nn.Module.__getstate__ is base._state and module.__getstate__()["_shaketable_seen"] == 1


def test_plans_are_counted_and_the_last_one_ends_it(no_plan):
    base.keep_copies_clean()
    base.keep_copies_clean()
    base.end_clean_copies()
    assert nn.Module.__getstate__ is base._clean_state and base._plans == 1
    base.end_clean_copies()
    assert nn.Module.__getstate__ is base._state and base._plans == 0


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
        assert all(hook is do_nothing for hook in twin[0]._forward_hooks.values())
    assert ledger.forward == 1


def test_a_hook_that_is_left_behind_takes_anything_and_returns_nothing():
    hook = Ours()
    for twin in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook)), copy.deepcopy([hook])[0]):
        assert twin is do_nothing and twin(1, 2, output=3) is None


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
