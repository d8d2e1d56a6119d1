"""Faults planted where the plan language does not reach: below torch's functions, in modules' own methods, in memory.

Each is put in as an attacker or a broken device would, with nothing of ours, into several architectures. A fault of an operator
must be found with its layer and its name; one that comes and goes must at least spoil HEALTHY.
"""

from __future__ import annotations

import types

import pytest
import torch

import shaketable as st
from tests.locate.architectures import build, tokens
from tests.locate.wrong_device import Wrong

pytestmark = pytest.mark.attack("faults below the plan language")
ATEN = torch.ops.aten
LEAVES = {
    "llama": "model.layers.1.mlp.down_proj",
    "gemma3": "model.layers.1.self_attn.v_proj",
    "gpt2": "transformer.h.1.mlp.c_fc",
    "qwen3_moe": "model.layers.1.self_attn.o_proj",
}
EVERYWHERE = pytest.mark.parametrize("name", LEAVES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def found(model, mode="host", **options):
    return st.locate(model, mode=mode, input_ids=tokens(), **options)


def assert_found(diagnosis, path):
    """FAULT, with the layer and the operator of a module's path."""
    op = path.split(".1.")[1]
    assert (diagnosis.verdict, diagnosis.layer, diagnosis.op) == ("FAULT", 1, op), diagnosis.sentence


# ---- what is done to a result


def louder(y):
    return y * 1.05


def first_louder(y):
    return (y[0] * 1.05, *y[1:]) if isinstance(y, tuple) else y * 1.05


def one_channel(y):
    return y.index_fill(-1, torch.tensor([3]), 0.0)


def last_token(y):
    y = y.clone()
    y.view(-1, y.shape[-1])[-1] *= 1.05
    return y


def two_tokens_swapped(y):
    y = y.clone()
    rows = y.view(-1, y.shape[-1])
    rows[[4, 9]] = rows[[9, 4]]
    return y


CHANGES = [
    louder,
    one_channel,
    last_token,
    two_tokens_swapped,
]
CHANGED = pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)


def wrong_product(weight, change):
    """A device whose product with one weight is wrong."""
    place = weight.data_ptr()
    return Wrong((ATEN.mm, ATEN.addmm), lambda y, args: change(y), lambda args: any(a.data_ptr() == place for a in args))


@EVERYWHERE
@CHANGED
def test_a_dispatch_mode_with_a_wrong_product_is_found(name, change):
    model = build(name)
    with wrong_product(model.get_submodule(LEAVES[name]).weight, change):
        assert_found(found(model), LEAVES[name])


FUNCTIONS = [
    ("llama", ATEN.silu, "mlp.act_fn"),
    ("llama", ATEN.rsqrt, "input_layernorm"),
    ("llama", ATEN._scaled_dot_product_flash_attention_for_cpu, "self_attn"),
    ("llama", ATEN.neg, "self_attn"),
    ("gemma2", ATEN.gelu, "mlp.act_fn"),
    ("gemma2", ATEN.tanh, "self_attn"),
    ("gpt2", ATEN.native_layer_norm, "ln_1"),
    ("qwen3_moe", ATEN.topk, "mlp.gate"),
]


@pytest.mark.parametrize(("name", "wrong", "op"), FUNCTIONS, ids=[f"{n}-{o}" for n, _, o in FUNCTIONS])
def test_a_function_that_the_device_computes_wrongly_is_found(name, wrong, op):
    with Wrong(wrong, lambda y, args: first_louder(y)):
        diagnosis = found(build(name, attention="eager" if name == "gemma2" else "sdpa"))
    assert (diagnosis.verdict, diagnosis.layer) == ("FAULT", 0), diagnosis.sentence
    assert diagnosis.op.startswith(op), diagnosis.sentence


# ---- methods and hooks


def replaced(module, change):
    own = type(module).forward
    module.forward = types.MethodType(lambda self, *a, **k: change(own(self, *a, **k)), module)


def hooked(module, change):
    module.register_forward_hook(lambda m, a, y: change(y))


def hooked_before(module, change):
    module.register_forward_pre_hook(lambda m, a: (change(a[0]), *a[1:]))


def another_class(module, change):
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, *a, **k: change(kind.forward(self, *a, **k))})


@pytest.mark.parametrize("way", [replaced, hooked, hooked_before, another_class])
@EVERYWHERE
@DTYPES
def test_a_leaf_that_does_something_else_is_found(name, dtype, way):
    model = build(name, dtype)
    way(model.get_submodule(LEAVES[name]), louder)
    assert_found(found(model), LEAVES[name])


def test_a_hook_of_all_modules_is_found_or_named():
    def everywhere(module, args, y):
        return y * 1.05 if type(module).__name__ == "LlamaMLP" else None

    handle = torch.nn.modules.module.register_module_forward_hook(everywhere)
    try:
        diagnosis = found(build("llama"), strict=True)
    finally:
        handle.remove()
    assert diagnosis.verdict == "FAULT" or "the hook everywhere of all modules" in diagnosis.foreign, diagnosis.sentence
    assert diagnosis.verdict != "HEALTHY"


# ---- memory


def flipped(tensor, place, bit):
    tensor.view(-1).view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(1 << 31)


@pytest.mark.parametrize("bit", [4, 12, 23, 31])
@pytest.mark.parametrize(
    ("name", "path"),
    [("llama", "model.rotary_emb.inv_freq"), ("qwen3_moe", "model.rotary_emb.inv_freq"),
     ("gemma3", "model.embed_tokens.embed_scale")],
)  # fmt: skip
def test_one_bit_of_a_buffer_is_found(name, path, bit):
    """The last three bits are left to the rounding of whoever computed it: a config gives a formula and not its bits."""
    model = build(name)
    flipped(model.get_buffer(path), 0 if "scale" in path else 2, bit)
    diagnosis = found(model)
    assert (diagnosis.verdict, diagnosis.layer) == ("FAULT", None), diagnosis.sentence
    assert path.rsplit(".", 1)[1] in diagnosis.sentence


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folders = {}
    for name in LEAVES:
        folders[name] = tmp_path_factory.mktemp(name)
        build(name).save_pretrained(folders[name])
    return folders


def weights_of(model):
    """One weight of every kind of module: the embedding, a norm, linears, experts, the head."""
    kinds = {}
    for key, parameter in model.named_parameters():
        kinds.setdefault(
            key.rpartition(".1.")[2] if ".1." in key else key if ".layers." not in key and ".h." not in key else "",
            (key, parameter),
        )
    return [pair for kind, pair in kinds.items() if kind]


@pytest.mark.parametrize("bit", [0, 22, 31])
@EVERYWHERE
def test_one_bit_of_any_weight_is_found_against_the_file(saved, name, bit):
    model = build(name)
    for key, parameter in weights_of(model):
        place = parameter.numel() // 2
        with torch.no_grad():
            flipped(parameter, place, bit)
            diagnosis = found(model, source=str(saved[name]))
            flipped(parameter, place, bit)
        assert (diagnosis.verdict, diagnosis.fault_class) == ("FAULT", "weight"), (key, diagnosis.sentence)
        assert diagnosis.layer == (1 if ".1." in key else None), (key, diagnosis.sentence)


# ---- faults that come and go


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
@EVERYWHERE
def test_a_product_that_is_wrong_once_in_the_calls_that_are_judged_spoils_healthy(name, call):
    """The two plain forwards, the traced one, a batch, a decoding step, and the recorded one."""
    model = build(name)
    calls = []

    def once(y):
        calls.append(1)
        return louder(y) if len(calls) == call else y

    with wrong_product(model.get_submodule(LEAVES[name]).weight, once):
        assert found(model).verdict != "HEALTHY"


@pytest.mark.parametrize("share", [0.5, 0.1])
@EVERYWHERE
def test_a_product_that_is_wrong_at_random_spoils_healthy(name, share):
    model, chance = build(name), torch.Generator().manual_seed(1)

    def sometimes(y):
        return torch.where(torch.rand(y.shape[:-1], generator=chance)[..., None] < share, y * 1.05, y)

    with wrong_product(model.get_submodule(LEAVES[name]).weight, sometimes):
        assert_found(found(model, "all"), LEAVES[name])
