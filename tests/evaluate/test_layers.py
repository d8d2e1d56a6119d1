"""Readings inside of a model: the numbers of an independent count, and the model left as it was."""

import copy

import numpy as np
import pytest
import torch
from scipy.stats import kurtosis

import shaketable as st
from shaketable.errors import InertError, NoMatchError, ShaketableError
from shaketable.evaluate.decoding import Decoder
from shaketable.evaluate.layers import mechanism, skip_layers, without
from shaketable.models import load_model
from shaketable.plan import Plan
from shaketable.sites.phases import phase

PAD = 0
LENGTHS = [(3, 4), (1, 1), (6, 2), (2, 9), (4, 0), (5, 5), (1, 3), (8, 1), (2, 2)]
ZONE = "dead_zone:0.05,scope=token@layer.3"


def pairs(vocabulary, lengths=LENGTHS):
    draw = np.random.default_rng(7)
    return [tuple(draw.integers(1, vocabulary, n).tolist() for n in pair) for pair in lengths]


PAIRS = pairs(64)


def read(model, plan=None, sequences=PAIRS, seed=0):
    return mechanism(model, sequences, plan and Plan.parse(plan, seed=seed), pad=PAD)


def mean_loss(model, sequences):
    """One pair at a time, so without padding."""
    total, count = 0.0, 0
    for prompt, completion in sequences:
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0]
        chosen = logits.double().log_softmax(-1)[len(prompt) - 1 : -1]
        total = total - chosen[torch.arange(len(completion)), completion].sum() if completion else total
        count += len(completion)
    return total / count, count


def norm_of(parameters):
    return float(torch.cat([p.grad.double().flatten() for p in parameters if p.grad is not None]).norm())


def outputs(model, layers, sequences):
    """What each layer returned, one pair at a time: a list of (tokens, channels) per layer."""
    seen = [[] for _ in layers]

    def keep(to):
        return lambda module, args, out: to.append((out[0] if isinstance(out, tuple) else out).detach()[0].double().numpy())

    hooks = [layer.register_forward_hook(keep(to)) for layer, to in zip(layers, seen, strict=True)]
    with torch.no_grad():
        for prompt, completion in sequences:
            model(input_ids=torch.tensor([[*prompt, *completion]]))
    for hook in hooks:
        hook.remove()
    return seen


def test_loss_and_gradient_norms_are_those_of_a_plain_backward(tiny_llama):
    found = read(tiny_llama)
    other = copy.deepcopy(tiny_llama)
    loss, tokens = mean_loss(other, PAIRS)
    loss.backward()
    assert (found.loss, found.tokens) == (pytest.approx(loss.item(), rel=1e-5), tokens)
    assert [r.layer for r in found.layers] == [0, 1, 2, 3]
    norms = [norm_of(layer.parameters()) for layer in other.model.layers]
    assert [r.grad_norm for r in found.layers] == pytest.approx(norms, rel=1e-4)
    assert found.ledger is None


@pytest.fixture(scope="module")
def nano():
    return load_model("nano")[0].eval()


def test_a_dead_zone_leaves_the_zeros_that_its_formula_says(nano):
    sequences = pairs(nano.config.vocab_size)
    clean, found = read(nano, sequences=sequences), read(nano, ZONE, sequences)
    y = np.concatenate(outputs(nano, nano.model.layers, sequences)[3])
    dead = np.abs(y) < 0.05 * np.abs(y).max(-1, keepdims=True)
    assert 0.02 < dead.mean() < 0.9
    hit = found.layers[3]
    assert hit.zeros == pytest.approx(dead.mean(), abs=2 / dead.size)
    assert hit.survival == pytest.approx(1 - dead.mean(), abs=2 / dead.size)
    assert hit.rms == pytest.approx(np.sqrt(np.mean(np.where(dead, 0, y) ** 2)), rel=1e-4)
    assert hit.kurtosis == pytest.approx(kurtosis(np.where(dead, 0, y).ravel()), rel=1e-2)
    assert 0 < hit.survival_inside < 1
    for i, (before, after) in enumerate(zip(clean.layers, found.layers, strict=True)):
        if i != 3:
            assert (after.zeros, after.survival, after.survival_inside) == (0, 1, None)
        assert (before.rms == after.rms) is (i < 3)
        assert before.grad_norm != after.grad_norm
    assert found.loss != clean.loss and found.ledger["sites"][0]["forward"] == 1


@pytest.mark.parametrize("plan", ["relative_gaussian:0.3@op.matmul", "relative_gaussian:0.3@op.matmul,direction=backward"])
def test_a_plan_acts_forward_and_backward_as_it_does_in_a_backward_of_the_users_own(tiny_llama, plan):
    sequences = [p for p in PAIRS if len(p[0]) + len(p[1]) == 7][:1] * 3
    clean, found = read(tiny_llama, sequences=sequences), read(tiny_llama, f"{plan},phase=rollout", sequences, seed=5)
    other = copy.deepcopy(tiny_llama)
    ids = torch.tensor([[*p, *c] for p, c in sequences])
    labels = torch.tensor([[-100] * len(p) + c for p, c in sequences])
    with st.inject(other, plan, seed=5) as ledger:
        loss = other(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        loss.backward()
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    norms = [norm_of(layer.parameters()) for layer in other.model.layers]
    assert [r.grad_norm for r in found.layers] == pytest.approx(norms, rel=1e-4)
    assert any(abs(r.grad_norm / c.grad_norm - 1) > 1e-3 for r, c in zip(found.layers, clean.layers, strict=True))
    assert (found.ledger["forward"], found.ledger["backward"]) == (ledger.forward, ledger.backward)
    assert set(found.ledger["sites"][0]["phases"]) == {"eval"}
    if "direction=backward" in plan:
        assert (found.loss, {r.survival_inside for r in found.layers}) == (clean.loss, {None}), "nothing is hit forward"


def state(model):
    """Everything about a model that a reading could disturb."""
    hooks = [[len(getattr(m, name)) for name in vars(m) if name.endswith("_hooks")] for m in model.modules()]
    flags = [m.training for m in model.modules()]
    gradients = [None if p.grad is None else (id(p.grad), p.grad.clone().numpy().tobytes()) for p in model.parameters()]
    weights = [(id(p), p.requires_grad, p.detach().numpy().tobytes()) for p in model.parameters()]
    buffers = [b.numpy().tobytes() for b in model.buffers()]
    return hooks, flags, gradients, weights, buffers, [type(m) for m in model.modules()], torch.get_rng_state().tolist()


def test_the_model_is_left_as_it_was_on_every_way_out(tiny_llama):
    model = tiny_llama
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    model.model.norm.weight.grad = torch.full((32,), 3.0)
    before = state(model)
    every = "relative_gaussian:0.1@op.matmul;mxfp4@module.linear,point=weight+input"
    for plan in (None, ZONE, every):
        with torch.no_grad(), phase("rollout"):
            assert read(model, plan).layers[0].grad_norm > 0
        assert state(model) == before
    for plan, error in (("saturation:1e9,scope=absolute@layer.3", InertError), ("gain:0.1@layer.99", NoMatchError)):
        with pytest.raises(error):
            read(model, plan)
        assert state(model) == before
    fail = model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    for plan in (None, every):
        with pytest.raises(ZeroDivisionError):
            read(model, plan)
    fail.remove()
    assert state(model) == before


# ---- skipped layers


def test_a_skipped_layer_hands_on_what_it_is_given():
    model, tokenizer = load_model("nano")
    ids = torch.tensor([tokenizer("512+134=")["input_ids"]])
    skip_layers(model, [3])
    with torch.no_grad():
        seen = model(ids, output_hidden_states=True).hidden_states
        found = Decoder.of(model, tokenizer, 4).decode(model, ids.tolist())[0].tokens
        assert torch.equal(seen[3], seen[4]) and not torch.equal(seen[4], seen[5])
        for token in found:  # without a cache
            assert int(model(ids).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], 1)


def test_what_cannot_be_skipped_is_refused(nano):
    for layers, words in (([8], "has layers 0-7"), ([0], "layer 0 cannot be skipped")):
        with pytest.raises(ShaketableError, match=words):
            skip_layers(nano, layers)


def test_clauses_of_skipped_layers_are_left_out_and_of_some_of_them_refused(nano):
    kept = without(Plan.parse("gain:0.1@layer.3;gain:0.1@op.matmul,layers=3;gain:0.1@op.matmul"), [3], nano)
    assert kept.text() == "gain:0.1@op.matmul"
    assert without(Plan.parse("gain:0.1@module.linear,layers=3"), [3], nano) is None
    with pytest.raises(ShaketableError, match="names skipped layers and others"):
        without(Plan.parse("gain:0.1@layer.2-4"), [3], nano)
