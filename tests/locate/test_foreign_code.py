"""Code that is not the model's: it is named in the verdict, and with `strict` it is no longer believed."""

from __future__ import annotations

import functools
import types

import numpy as np
import pytest
import torch

import shaketable as st
from tests.locate.architectures import ARCHITECTURES, build, tokens

pytestmark = pytest.mark.attack("foreign code in a model")


def found(model, mode="all", **options):
    return st.locate(model, mode=mode, input_ids=tokens(), **options)


def louder(module, args, output):
    return (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5


def quieter(module, args):
    return (args[0] * 0.5, *args[1:])


def hooked():
    model = build("llama")
    model.model.layers[1].self_attn.register_forward_hook(louder)
    return model


def hooked_before():
    model = build("llama")
    model.model.layers[1].mlp.register_forward_pre_hook(quieter)
    return model


def another_class():
    from transformers.models.llama.modeling_llama import LlamaMLP

    class Tampered(LlamaMLP):
        def forward(self, x):
            return super().forward(x) * 1.5

    model = build("llama")
    model.model.layers[1].mlp.__class__ = Tampered
    return model


def values_from_nowhere():
    """What numpy makes is no operator's result, and nothing of its shape is made by one."""
    model = build("llama")
    model.model.layers[1].mlp.forward = lambda x: torch.from_numpy(np.tanh(x.numpy()))
    return model


CASES = {
    hooked: "the hook louder of model.layers.1.self_attn",
    hooked_before: "the hook quieter of model.layers.1.mlp",
    another_class: "model.layers.1.mlp is a Tampered where the config makes a LlamaMLP",
    values_from_nowhere: "a forward of its own in model.layers.1.mlp",
}


@pytest.mark.parametrize("mode", ["host", "device", "all"])
@pytest.mark.parametrize("case", CASES)
def test_foreign_code_is_named(case, mode):
    diagnosis = found(case(), mode)
    assert CASES[case] in diagnosis.foreign
    assert CASES[case] in diagnosis.as_dict()["foreign"]
    if diagnosis.verdict == "HEALTHY":
        assert diagnosis.foreign[0] in diagnosis.sentence
        assert "was trusted" in diagnosis.sentence
    strict = found(case(), mode, strict=True)
    assert strict.verdict in ("INCONCLUSIVE", "FAULT")
    assert strict.verdict == "FAULT" or mode == "device" or CASES[case] in strict.sentence


def times(own, by=1.5):
    """A function whose result is another one, and which looks like its own."""

    @functools.wraps(own)
    def wrapped(*given, **named):
        y = own(*given, **named)
        return (y[0] * by, *y[1:]) if isinstance(y, tuple) else y * by

    return wrapped


def patched_rotation(patch):
    from transformers.models.llama import modeling_llama

    patch.setattr(modeling_llama, "apply_rotary_pos_emb", times(modeling_llama.apply_rotary_pos_emb))


def patched_attention(patch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", times(ALL_ATTENTION_FUNCTIONS["sdpa"]))


def patched_call(patch):
    from transformers.models.llama.modeling_llama import GradientCheckpointingLayer

    patch.setattr(GradientCheckpointingLayer, "__call__", times(GradientCheckpointingLayer.__call__))


FUNCTIONS = {
    "modeling_llama.apply_rotary_pos_emb": patched_rotation,
    "attention.sdpa": patched_attention,
    "GradientCheckpointingLayer.__call__": patched_call,
    "torch.Tensor.transpose": lambda patch: patch.setattr(torch.Tensor, "transpose", times(torch.Tensor.transpose)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_the_model_calls_by_name_is_named_when_it_was_replaced(monkeypatch, name):
    model = build("llama")
    FUNCTIONS[name](monkeypatch)
    diagnosis = found(model, "host", strict=True)
    assert f"{name}, which is from {__name__}" in diagnosis.foreign
    assert diagnosis.verdict != "HEALTHY"


def test_what_is_put_around_the_call_of_one_module_is_named():
    model, path = build("llama"), "model.layers.1.mlp"
    module = model.get_submodule(path)
    module._call_impl = times(module._call_impl)
    diagnosis = found(model, "host", strict=True)
    assert diagnosis.foreign == [f"a _call_impl of its own in {path}"]
    assert diagnosis.verdict == "INCONCLUSIVE"


def test_a_hook_that_says_it_is_from_transformers_is_named():
    model = build("llama")
    hook = types.FunctionType(louder.__code__, louder.__globals__)
    hook.__module__ = "transformers.utils.output_capturing"
    model.model.layers[1].mlp.register_forward_hook(hook)
    assert found(model, "host").foreign == ["the hook louder of model.layers.1.mlp"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_fresh_model_has_no_foreign_code(name):
    from shaketable.capture.reference import Reference
    from shaketable.locate.foreign_code import foreign_code

    model = build(name, attention="eager")
    assert foreign_code(model, Reference(model)) == []


def test_a_planted_plan_is_not_foreign():
    diagnosis = found(build("llama"), "host", plan="gain:0.1@layer.1", strict=True)
    assert (diagnosis.verdict, diagnosis.layer, diagnosis.foreign) == ("FAULT", 1, [])


def test_a_plan_that_is_open_on_another_model_is_not_foreign():
    with st.inject(build("llama"), "gain:0.1@layer.1", allow_inert=True):
        diagnosis = found(build("llama"), "host", strict=True)
    assert (diagnosis.verdict, diagnosis.foreign) == ("HEALTHY", [])


def test_a_decorator_of_transformers_around_its_own_function_is_not_foreign(monkeypatch):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.utils.deprecation import deprecate_kwarg

    decorated = deprecate_kwarg("old_name", version="99.0")(ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", decorated)
    diagnosis = found(build("llama"), "host", strict=True)
    assert (diagnosis.verdict, diagnosis.foreign) == ("HEALTHY", [])
