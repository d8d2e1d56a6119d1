"""Several plans at once, and models that move: injected on the device, moved to it, moved away and back."""

import copy

import pytest
import torch

import shaketable as st
from tests.gpu.shaken_device import DEVICE, NOISE, every_level, ids, on_device, same, settle, step

pytestmark = on_device


def test_two_plans_at_once_are_both_proven_and_both_removed(tiny_llama):
    model = tiny_llama.to(DEVICE)
    clean = step(model)
    with st.inject(model, f"{NOISE}@op.matmul", seed=1) as outer:
        with st.inject(model, "dead_zone:0.05,scope=token@layer.1-2", seed=2) as inner:
            both = step(model)
        alone = step(model)
    settle()
    assert (inner.forward, inner.backward) == (2, 0)
    assert outer.forward == 2 * 28
    assert outer.to_dict()["sites"][0]["measured_magnitude"] == pytest.approx(0.05, rel=0.05)
    assert not same(both, alone)
    assert same(step(model), clean)


def test_a_plan_does_not_change_the_noise_of_another(tiny_llama):
    """The second plan is of magnitude 0 on other sites: the first draws as if it were not there."""
    model = tiny_llama.to(DEVICE)
    with st.inject(model, f"{NOISE}@module.linear", seed=1):
        alone = step(model)
    with st.inject(model, f"{NOISE}@module.linear", seed=1), st.inject(model, "gain:0@op.all", allow_inert=True):
        assert same(step(model), alone)


def test_clauses_act_in_the_order_of_the_plan():
    layer, x = torch.nn.Linear(16, 16).to(DEVICE), torch.randn(4, 16, device=DEVICE)
    clean = layer(x)
    with st.inject(layer, "gain:1@module.linear;saturation:0.5,scope=absolute@module.linear"):
        torch.testing.assert_close(layer(x), (2 * clean).clamp(-0.5, 0.5))
    with st.inject(layer, "saturation:0.5,scope=absolute@module.linear;gain:1@module.linear"):
        torch.testing.assert_close(layer(x), 2 * clean.clamp(-0.5, 0.5))


@every_level
def test_injected_before_or_after_the_move_is_the_same(tiny_llama, plan):
    after = copy.deepcopy(tiny_llama).to(DEVICE)
    with st.inject(after, plan, seed=1):
        expected = step(after)
    before = tiny_llama
    injection = st.inject(before, plan, seed=1).enable()
    before.to(DEVICE)
    assert same(step(before), expected)
    injection.close()


@every_level
def test_a_model_moves_away_and_back_while_it_is_shaken(tiny_llama, plan):
    model, tokens = tiny_llama.to(DEVICE), ids()
    with torch.no_grad():
        clean = model(tokens).logits
        with st.inject(model, plan, seed=1) as ledger:
            first = model(tokens).logits
            away = model.to("cpu")(tokens.cpu()).logits
            back = model.to(DEVICE)(tokens).logits
        settle()
        assert away.device.type == "cpu" and back.device.type == DEVICE
        assert not any(torch.equal(y.to(DEVICE), clean) for y in (first, away, back))
        assert ledger.forward % 3 == 0 < ledger.forward
        assert torch.equal(model(tokens).logits, clean)


def test_a_model_changes_its_type_while_it_is_shaken(tiny_llama):
    model = tiny_llama.to(DEVICE)
    with torch.no_grad(), st.inject(model, "relative_gaussian:0.05,sparsity=0.5@module.linear", seed=1) as ledger:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert model.to(dtype)(ids()).logits.isfinite().all()
    settle()
    assert ledger.forward == 3 * 28
    assert ledger.to_dict()["sites"][0]["measured_magnitude"] == pytest.approx(0.05, rel=0.1)


def test_a_copy_on_the_device_is_clean(tiny_llama):
    model = tiny_llama.to(DEVICE)
    clean = model(ids()).logits
    with st.inject(model, f"{NOISE}@module.linear"):
        assert torch.equal(copy.deepcopy(model)(ids()).logits, clean)
        assert not torch.equal(model(ids()).logits, clean)
