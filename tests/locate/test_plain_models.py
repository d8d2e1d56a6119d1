"""Models in plain PyTorch, as people write them: located, compared and shaken as those of transformers are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shaketable as st
from shaketable.capture.trace import call_with_tokens, logits_of
from shaketable.compare.compare import compare
from shaketable.compare.fingerprint import fingerprint
from shaketable.sites.structure import find_layers
from tests.locate.plain_models import LAYERS, MODELS, build, tokens

pytestmark = pytest.mark.attack("models of one's own")
LAYERED = [name for name in MODELS if name != "numbered"]
EVERY = pytest.mark.parametrize("name", LAYERED)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ATEN = torch.ops.aten
PRODUCTS = {ATEN.mm, ATEN.addmm, ATEN.bmm, ATEN.linear, ATEN.matmul}
ATTENTION = {ATEN._softmax, ATEN.softmax, ATEN._scaled_dot_product_flash_attention_for_cpu}


def located(model, mode="host", **options):
    return st.locate(model, mode=mode, input_ids=tokens(), **options)


def logits(model):
    with torch.no_grad():
        return logits_of(call_with_tokens(model, tokens()), model).clone()


# ---- healthy


@DTYPES
@EVERY
def test_a_healthy_model_is_healthy_on_the_host_and_nobody_s_gauge_is_known(name, dtype):
    model = build(name, dtype)
    for mode in ("host", "all"):
        found = located(model, mode)
        assert (found.verdict, found.num_layers, found.foreign) == ("HEALTHY", LAYERS, []), found.sentence
        assert "Not checked: the weights and the config against a file" in found.sentence
        assert "the model cannot be built from one" in found.sentence
    found = located(model, "device")
    assert found.verdict == "INCONCLUSIVE"
    assert found.sentence.startswith("INCONCLUSIVE: layer 0, twin: no symmetries are known for the architecture")


def test_blocks_that_are_numbered_attributes_are_layers():
    found = located(build("numbered"))
    assert (found.verdict, found.num_layers) == ("HEALTHY", LAYERS), found.sentence


def test_what_forward_needs_and_was_not_given_is_told_in_one_line():
    model = build("nanogpt")
    model.forward = lambda idx, positions: None
    with pytest.raises(st.ModelError, match=r"a plain forward of NanoGPT fails on these tokens: .*'positions'$"):
        st.locate(model, input_ids=tokens())


def test_the_fast_path_of_torch_s_layers_is_off_while_they_are_judged_and_that_is_said():
    model = build("encoder")
    assert torch.backends.mha.get_fastpath_enabled()
    found = located(model)
    assert torch.backends.mha.get_fastpath_enabled()
    assert "fast path" in found.sentence.partition("Not run")[2]
    assert "fast path" not in located(build("nanogpt")).sentence


# ---- faulty


def one_channel_dead(module):
    """A forward of its own that loses a channel."""
    plain = module.forward
    module.forward = lambda x: plain(x).index_fill(-1, torch.tensor([3]), 0.0)


class OneWrongValue(TorchDispatchMode):
    """Below torch's functions: in one layer, the first call of some operators makes its largest value too large."""

    def __init__(self, layer, operators):
        super().__init__()
        self.operators, self.calls = operators, None
        layer.register_forward_pre_hook(lambda *given: self.count(0))
        layer.register_forward_hook(lambda *given: self.count(None))

    def count(self, calls):
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if self.calls is not None and func.overloadpacket in self.operators:
            self.calls += 1
            if self.calls == 1:
                made = result[0] if isinstance(result, tuple) else result
                at = (made.abs() == made.abs().max()).nonzero()[0].tolist()
                made[tuple(at)] *= 1.5
        return result


@DTYPES
@EVERY
def test_a_linear_that_loses_a_channel_is_found_with_its_layer(name, dtype):
    model = build(name, dtype)
    path, linear = [(p, m) for p, m in find_layers(model)[0][1].named_modules() if type(m) is nn.Linear][-1]
    one_channel_dead(linear)
    found = located(model)
    assert (found.verdict, found.layer, found.op, found.lanes) == ("FAULT", 1, path, [3]), found.sentence


@DTYPES
@pytest.mark.parametrize(
    ("name", "operators"),
    [*((name, PRODUCTS) for name in LAYERED), *((name, ATTENTION) for name in LAYERED), ("nanogpt", {ATEN.native_layer_norm})],
)
def test_one_wrong_value_below_torch_s_functions_is_found_with_its_layer(name, operators, dtype):
    model = build(name, dtype)
    with OneWrongValue(find_layers(model)[0][1], operators):
        found = located(model)
    assert (found.verdict, found.layer) == ("FAULT", 1), found.sentence


# ---- compared


@EVERY
def test_a_model_is_like_its_own_fingerprint_and_a_layer_that_is_not_is_named(name):
    model = build(name)
    taken = fingerprint(model, input_ids=tokens())
    assert not any(row.difference.differing for row in compare(taken, model).rows)
    with st.inject(model, "relative_gaussian:0.05@layer.1"):
        found = compare(taken, model)
    assert {row.layer for row in found.rows if row.difference.differing} == {1} and found.exit_code == 1


# ---- shaken


@EVERY
def test_layers_and_operators_are_shaken_and_off_is_off(name):
    model = build(name)
    torch.backends.mha.set_fastpath_enabled(False)  # with a hook on a module torch's layers leave it, whatever the hook does
    try:
        clean = logits(model)
        for plan in ("relative_gaussian:0.05@layer.1", "relative_gaussian:0.05@op.all,layers=1"):
            injection = st.inject(model, plan, seed=1)
            with injection as ledger:
                assert not torch.equal(logits(model), clean)
                injection.disable()
                assert torch.equal(logits(model), clean)
            assert ledger.sites[0].by("layer").keys() == {"1"}
            assert torch.equal(logits(model), clean)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
