"""Attacks on locate at its surface: healthy models are never blamed, broken ones are never HEALTHY in silence.

Every case is a few lines that somebody could have in a program of their own. A healthy case must be HEALTHY. A broken one must
be FAULT or INCONCLUSIVE, or, where no arithmetic can tell, be named in the sentence.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shaketable as st
from tests.locate.architectures import build, tokens
from tests.locate.wrong_device import Wrong

pytestmark = pytest.mark.attack("locate")
aten = torch.ops.aten


def located(model, **options):
    return st.locate(model, **({"input_ids": tokens(), "mode": "host"} | options))


@pytest.fixture
def folder(tmp_path):
    """A saved llama, and its path."""
    build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def loaded(folder, **options):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


class Block(nn.Module):
    """A block whose step in the middle is given."""

    def __init__(self, step):
        super().__init__()
        self.norm, self.up, self.down, self.step = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32), step

    def forward(self, x):
        return x + self.down(self.step(self.up(self.norm(x))))


class GPT(nn.Module):
    """A model without a config."""

    def __init__(self, step=F.gelu, block=Block):
        super().__init__()
        self.wte, self.h = nn.Embedding(100, 32), nn.ModuleList([block(step) for _ in range(3)])
        self.head = nn.Linear(32, 100, bias=False)

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return self.head(x)


def gpt(step=F.gelu, block=Block, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(step, block).eval()


# ---- a device that selects, moves and views wrongly


def shifted_index(result, args):
    return (result[0], (result[1] + 1) % args[0].shape[-1])


SELECTING = {
    "topk": (aten.topk, shifted_index, lambda u: u * torch.zeros_like(u).scatter(-1, u.topk(4).indices, 1.0)),
    "sort": (aten.sort, shifted_index, lambda u: u.gather(-1, u.sort(-1).indices)),
    "argmax": (aten.argmax, lambda y, args: (y + 1) % 64, lambda u: u + u.argmax(-1, keepdim=True)),
    "max": (aten.max, shifted_index, lambda u: u + u.max(-1, keepdim=True).indices),
    "greater": (aten.gt, lambda y, args: ~y, lambda u: u * (u > 0)),
    "nonzero": (aten.nonzero, lambda y, args: y.flip(0), lambda u: u + u.nonzero()[:, -1].sum()),
}


@pytest.mark.parametrize("name", SELECTING)
def test_a_device_that_selects_wrongly(name):
    operator, wrong, step = SELECTING[name]
    model = gpt(step)
    assert located(model).verdict == "HEALTHY", located(model).sentence
    with Wrong(operator, wrong) as mode:
        diagnosis = located(model)
    assert mode.count
    assert diagnosis.verdict == "FAULT", diagnosis.sentence


def moved(result, args):
    """A view of the same shape that starts elsewhere."""
    x = args[0]
    return x.as_strided(result.shape, result.stride(), 0 if result.storage_offset() else x.stride(-1))


def test_a_slice_that_reads_the_wrong_half():
    model = build("llama")
    is_half = lambda args: args[0].dim() == 4 and args[1] == 3 and args[2] > 0  # noqa: E731
    with Wrong(aten.slice, moved, is_half) as mode:
        diagnosis = located(model)
    assert mode.count
    assert diagnosis.verdict == "FAULT"


def test_routing_to_the_next_expert():
    model = build("mixtral")
    wrong = lambda y, args: (y[0], (y[1] + 1) % 4)  # noqa: E731
    with Wrong(aten.topk, wrong) as mode:
        diagnosis = located(model)
    assert mode.count
    assert (diagnosis.verdict, diagnosis.layer) == ("FAULT", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [8, 1024])
def test_rows_added_to_one_place(rows, dtype):
    def step(u):
        index = torch.arange(rows) % 4
        source = u.flatten(0, -2)[:1].expand(rows, -1)
        return u + torch.zeros(4, u.shape[-1], dtype=u.dtype).index_add_(0, index, source).sum(0)

    model = gpt(step).to(dtype)
    assert located(model).verdict != "FAULT"
    with Wrong(aten.index_add_, lambda y, args: y.zero_()) as mode:
        assert located(model).verdict != "HEALTHY"
    assert mode.count


class Recurrent(Block):
    def __init__(self, step):
        super().__init__(step)
        self.lstm = nn.LSTM(32, 32, batch_first=True)

    def forward(self, x):
        return super().forward(x) + self.lstm(x)[0]


def test_a_wrong_lstm_which_nobody_has_defined_is_not_healthy():
    model = gpt(block=Recurrent)
    assert located(model).verdict == "HEALTHY"
    louder = lambda y, args: (y[0] * 1.05, *y[1:]) if isinstance(y, tuple) else y * 1.05  # noqa: E731
    with Wrong((aten.mkldnn_rnn_layer, aten.mul), louder) as mode:
        assert located(model).verdict == "INCONCLUSIVE"
    assert mode.count


# ---- attributes, config, buffers, dtypes


ATTRIBUTES = {
    "is_causal": ("llama", "model.layers.1.self_attn", False),
    "top_k": ("mixtral", "model.layers.1.mlp.gate", 1),
    "sliding_window": ("gemma3", "model.layers.1.self_attn", 3),
}


@pytest.mark.parametrize("mode", ["host", "all"])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_the_config_does_not_give(name, mode):
    architecture, path, value = ATTRIBUTES[name]
    model = build(architecture)
    setattr(model.get_submodule(path), name, value)
    diagnosis = located(model, mode=mode)
    assert (diagnosis.verdict, diagnosis.layer) == ("FAULT", 1), diagnosis.sentence
    assert name in diagnosis.sentence


CONFIG = {"rms_norm_eps": 1e-3, "hidden_act": "gelu", "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}


@pytest.mark.parametrize("key", CONFIG)
def test_a_model_with_another_config_than_its_source(folder, key):
    import transformers

    assert located(loaded(folder), source=str(folder)).verdict == "HEALTHY"
    config = transformers.AutoConfig.from_pretrained(folder)
    setattr(config, key, CONFIG[key])
    diagnosis = located(loaded(folder, config=config), source=str(folder))
    assert diagnosis.verdict == "FAULT", diagnosis.sentence


def test_a_config_key_that_only_the_forward_reads(tmp_path):
    import transformers

    build("gemma2", attention="eager").save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert located(loaded(tmp_path), source=str(tmp_path)).verdict == "HEALTHY"
    config.final_logit_softcapping = 1.0
    diagnosis = located(loaded(tmp_path, config=config), source=str(tmp_path))
    assert diagnosis.verdict != "HEALTHY"
    assert "final_logit_softcapping" in diagnosis.sentence


def test_a_norm_weight_held_in_bfloat16(folder):
    for source in (str(folder), None):
        model = loaded(folder)
        norm = model.model.layers[1].input_layernorm
        norm.weight.data = norm.weight.data.bfloat16()
        diagnosis = located(model, source=source)
        assert diagnosis.verdict != "HEALTHY" or "bfloat16" in diagnosis.sentence, diagnosis.sentence


def test_frequencies_of_a_rotation_that_follows_the_length():
    import transformers

    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = build("llama").config
    config.rope_parameters = rope
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert located(model).verdict == "HEALTHY"
    with torch.no_grad():
        model(tokens(n=200))
    assert located(model).verdict == "HEALTHY"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.model.rotary_emb.inv_freq *= 1.1
    assert located(model).verdict != "HEALTHY"


def test_frequencies_that_were_rounded_with_the_model_are_its_own():
    import transformers

    config = build("llama").config
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, **factors}
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()
    with torch.no_grad():
        model(tokens())
    assert located(model).verdict == "HEALTHY", located(model).sentence
    model.model.rotary_emb.original_inv_freq *= 1.1
    assert located(model).verdict != "HEALTHY"


def test_a_buffer_of_a_reduced_dtype_that_is_nearly_the_config_s():
    model = build("llama", torch.bfloat16)
    assert located(model).verdict == "HEALTHY"
    model.model.rotary_emb.inv_freq *= 1 + 2.0**-6
    diagnosis = located(model)
    assert (diagnosis.verdict, "inv_freq" in diagnosis.sentence) == ("INCONCLUSIVE", True), diagnosis.sentence


# ---- code that is not the model's


class CallableSoftmax:
    def __call__(self, *args, **kwargs):
        return ORIGINAL(*args, **kwargs)


ORIGINAL = F.softmax
REPLACED = {
    "object": CallableSoftmax(),
    "partial": functools.partial(lambda scale, *a, **k: ORIGINAL(*a, **k) * scale, 1.05),
}


@pytest.mark.parametrize("kind", REPLACED)
def test_a_replaced_function_is_named(kind, monkeypatch):
    monkeypatch.setattr(F, "softmax", REPLACED[kind])
    diagnosis = located(build("llama", attention="eager"))
    assert any("torch.nn.functional.softmax" in name for name in diagnosis.foreign), diagnosis.sentence
    assert located(build("llama", attention="eager"), strict=True).verdict == "INCONCLUSIVE"


def test_a_swapped_class_is_named_as_a_class(monkeypatch):
    from transformers.models.llama import modeling_llama

    class Quiet(modeling_llama.LlamaMLP):
        def forward(self, x):
            return super().forward(x) * 0.9

    monkeypatch.setattr(modeling_llama, "LlamaMLP", Quiet)
    diagnosis = located(build("llama"))
    assert [name for name in diagnosis.foreign if "modeling_llama.LlamaMLP" in name], diagnosis.sentence
    assert not [name for name in diagnosis.foreign if "pytest" in name or ".build" in name]


def test_a_method_of_tensors_that_was_patched_does_not_make_forwards_differ(monkeypatch):
    real = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda self, *a, **k: real(self, *a, **k) * 1.05)
    step = lambda u: u + u.softmax(-1)  # noqa: E731
    diagnosis = located(gpt(step))
    assert "three forwards" not in diagnosis.sentence
    assert any("torch.Tensor.softmax" in name for name in diagnosis.foreign)


# ---- how a model is used


def test_the_sentence_says_what_never_ran():
    sentence = located(build("llama")).sentence
    for words in ("compiled graphs", "autocast", "training mode", "backward", "padding", "other tokens, lengths"):
        assert words in sentence
    assert "cached decoding" not in sentence.partition("Not run")[2]
    sentence = located(gpt()).sentence
    assert "cached decoding" in sentence.partition("Not run")[2]


SHAPES = {"decode": lambda args: args[-2].shape[0] <= 2, "batch": lambda args: args[-2].shape[0] > 24}


@pytest.mark.parametrize("probe", SHAPES)
def test_products_that_are_wrong_for_one_token_or_in_a_batch(probe):
    def last_row_louder(y, args):
        y[-1] *= 1.05
        return y

    with Wrong((aten.mm, aten.addmm), last_row_louder, SHAPES[probe]) as mode:
        diagnosis = located(build("llama"))
    assert mode.count
    assert (diagnosis.verdict, diagnosis.layer, diagnosis.evidence[0].probe) == ("FAULT", 0, probe), diagnosis.sentence
    assert ("in cached decoding" in diagnosis.sentence) == (probe == "decode")


# ---- healthy models that look odd


class Autocast(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(32), nn.Linear(32, 32)
        with torch.no_grad():
            self.norm.weight.add_(torch.randn(32) * 0.1)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x + self.up(self.norm(self.up(x)))


def test_autocast_of_the_model_s_own():
    diagnosis = located(gpt(block=Autocast))
    assert diagnosis.verdict == "HEALTHY", diagnosis.sentence


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_autocast_around_the_layers(name):
    model = build(name)

    class Lowered(type(model)):
        def forward(self, *args, **kwargs):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(*args, **kwargs)

    model.__class__ = Lowered
    diagnosis = located(model, mode="all")
    assert diagnosis.verdict == "HEALTHY", diagnosis.sentence


@pytest.mark.parametrize("mode", ["host", "all"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_cache_that_the_caller_asks_for(name, mode):
    diagnosis = located(build(name), arguments={"use_cache": True}, mode=mode)
    assert diagnosis.verdict == "HEALTHY", diagnosis.sentence


def test_a_static_cache_that_is_given():
    import transformers

    model = build("llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    diagnosis = located(model, arguments={"past_key_values": cache, "use_cache": True})
    assert diagnosis.verdict != "FAULT", diagnosis.sentence


@pytest.mark.parametrize(("mode", "strict"), [("host", False), ("all", True)])
def test_prefix_tuning(mode, strict):
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama"), config).eval()
    diagnosis = located(model, mode=mode, strict=strict)
    assert diagnosis.verdict == "HEALTHY", diagnosis.sentence


class ALiBi(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        n = x.shape[1]
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        distance = torch.arange(n)[:, None] - torch.arange(n)
        slopes = 2.0 ** -torch.arange(0, 8, 2.0)
        mask = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf).to(x.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_float_mask_with_large_numbers(dtype):
    model = gpt(block=ALiBi).to(dtype)
    for p in model.parameters():
        p.data *= 4
    diagnosis = located(model, input_ids=tokens(n=512))
    assert diagnosis.verdict == "HEALTHY", diagnosis.sentence


def test_a_softmax_of_many_equal_scores_with_a_sink():
    def step(u):
        scores = torch.zeros(*u.shape[:-1], 4000)
        p = torch.cat([scores, u[..., :1] * 0.01], -1).softmax(-1)[..., :-1]
        return u * p.sum(-1, keepdim=True) + p[..., : u.shape[-1]]

    diagnosis = located(gpt(step))
    assert diagnosis.verdict == "HEALTHY", diagnosis.sentence


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_strided_addition_with_a_factor(dtype):
    def step(u):
        y = u.clone()
        y.transpose(-1, -2)[..., ::2].add_(u.flip(-1).transpose(-1, -2)[..., ::2], alpha=0.3)
        y[..., ::2].add_(u.flip(-1)[..., 1::2], alpha=0.7)
        return torch.add(y, u.transpose(-1, -2).contiguous().transpose(-1, -2), alpha=0.1)

    diagnosis = located(gpt(step).to(dtype))
    assert diagnosis.verdict == "HEALTHY", diagnosis.sentence


class Functional(nn.Module):
    """A model that is called with other weights than it holds."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, idx):
        weights = {name: p * 1.5 for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, weights, (idx,))


def test_functional_call():
    with pytest.raises(st.ModelError, match=r"is called with other tensors than its parameters \(functional_call\)[^\n]+\Z"):
        located(Functional(gpt()))


class Dicts(Block):
    """A layer that returns a mapping with a number in front."""

    def forward(self, x):
        x = x["x"] if isinstance(x, dict) else x
        y = super().forward(x)
        return {"loss": y.square().mean(), "x": y}


class GPTOfDicts(GPT):
    def forward(self, idx):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return self.head(x["x"])


@pytest.mark.parametrize("mode", ["host", "all"])
def test_layers_that_return_a_mapping_with_a_number_first(mode):
    diagnosis = located(GPTOfDicts(block=Dicts).eval(), mode=mode)
    assert diagnosis.verdict == "HEALTHY", diagnosis.sentence


# ---- one line instead of a traceback


def quantized(folder):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = build("llama")
    quantize_(model, Int8WeightOnlyConfig())
    return model, None


def peft_with_the_base_as_source(folder):
    import peft

    return peft.get_peft_model(loaded(folder), peft.LoraConfig(target_modules=["q_proj"])).eval(), str(folder)


def compiled(folder):
    return torch.compile(loaded(folder)), str(folder)


def compiled_layer(folder):
    model = loaded(folder)
    model.model.layers[1] = torch.compile(model.model.layers[1])
    return model, str(folder)


def resized(folder):
    model = loaded(folder)
    model.resize_token_embeddings(128)
    return model, str(folder)


def another_model(folder):
    return build("qwen2"), str(folder)


HEALTHY = [peft_with_the_base_as_source, compiled, compiled_layer]
REFUSED = [quantized, resized, another_model]


@pytest.mark.parametrize("make", HEALTHY + REFUSED, ids=lambda f: f.__name__)
def test_an_odd_model_is_judged_or_refused_in_one_line(make, folder):
    if make is quantized:
        pytest.importorskip("torchao")
    model, source = make(folder)
    if make in HEALTHY:
        diagnosis = located(model, source=source)
        assert diagnosis.verdict == "HEALTHY", diagnosis.sentence
    else:
        with pytest.raises(st.ModelError, match=r"\A[^\n]+\Z"):
            located(model, source=source)


def test_a_layer_that_cannot_be_looked_into_is_named_in_one_line():
    model = gpt()
    model.h[1] = torch.jit.trace(model.h[1], torch.zeros(1, 24, 32))
    with pytest.raises(st.ModelError, match=r"\Ah\.1 is scripted[^\n]+\Z"):
        located(model)


def with_lora(model):
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"])).eval()


def with_lora_inside(model):
    import peft

    return peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj", "v_proj"]), model).eval()


@pytest.mark.parametrize("adapt", [with_lora, with_lora_inside], ids=lambda f: f.__name__)
def test_adapters_do_not_keep_a_model_from_being_compared_with_its_config(adapt):
    pytest.importorskip("peft")
    healthy = located(adapt(build("llama")), strict=True)
    assert healthy.verdict == "HEALTHY" and "against the config (" not in healthy.sentence, healthy.sentence
    model = build("llama")
    adapted = adapt(model)
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.5
    wrong = located(adapted)
    assert (wrong.verdict, wrong.layer, wrong.op) == ("FAULT", 1, "post_attention_layernorm"), wrong.sentence
    assert "variance_epsilon" in wrong.sentence


# ---- changes between two loads of a model that only a name, a config or an attribute shows


def partial_of_its_own(monkeypatch):
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "repeat_kv", functools.partial(modeling_llama.repeat_kv))


def from_another_model(monkeypatch):
    from transformers.models.cohere import modeling_cohere
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "rotate_half", modeling_cohere.rotate_half)


def mask_that_shows_the_next_token(monkeypatch):
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "causal_mask_function", lambda batch, head, q, kv: kv <= q + 1)


def cache_that_is_off_by_one(monkeypatch):
    from transformers.cache_utils import DynamicLayer

    real = DynamicLayer.update
    rolled = lambda *args, **kwargs: tuple(t.roll(1, 2) for t in real(*args, **kwargs))  # noqa: E731
    monkeypatch.setattr(DynamicLayer, "update", rolled)


def method_of_another_model(monkeypatch):
    from transformers.models.gemma import modeling_gemma
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", modeling_gemma.GemmaMLP.forward)


def parameters_are_read_otherwise(monkeypatch):
    real = nn.Module.__getattr__
    monkeypatch.setattr(nn.Module, "__getattr__", lambda self, name: real(self, name))


ELSEWHERE = {
    "LlamaMLP.forward": method_of_another_model,
    "torch.nn.Module.__getattr__": parameters_are_read_otherwise,
    "torch.Tensor.mT": lambda monkeypatch: monkeypatch.setattr(
        torch.Tensor, "mT", property(lambda x: x.transpose(-2, -1)), raising=False
    ),
    "modeling_llama.repeat_kv": partial_of_its_own,
    "modeling_llama.rotate_half": from_another_model,
    "masking_utils.causal_mask_function": mask_that_shows_the_next_token,
    "DynamicLayer.update": cache_that_is_off_by_one,
    "torch.nn.functional.silu": lambda monkeypatch: monkeypatch.setattr(F, "silu", F.gelu),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_code_of_the_same_package_in_another_place_is_named(name, monkeypatch):
    model = build("llama", attention="eager")
    assert located(model, strict=True).verdict == "HEALTHY"
    ELSEWHERE[name](monkeypatch)
    diagnosis = located(model)
    assert "Code that is not the model's was trusted" in diagnosis.sentence
    assert any(code.startswith(f"{name}, which is") for code in diagnosis.foreign), diagnosis.sentence
    assert located(model, strict=True).verdict != "HEALTHY"


def scale_in_a_tensor(model):
    model.model.layers[1].self_attn.scaling = torch.tensor(0.2)


def buffer_made_an_attribute(model):
    rotation = model.model.rotary_emb
    del rotation.inv_freq
    rotation.inv_freq = torch.full((4,), 0.1)


def config_of_one_layer(model):
    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa"
    model.model.layers[1].self_attn.config = config


@pytest.mark.parametrize("has_source", [False, True])
@pytest.mark.parametrize("change", [scale_in_a_tensor, buffer_made_an_attribute, config_of_one_layer], ids=lambda f: f.__name__)
def test_a_number_kept_in_another_way_than_the_config_makes_it(folder, change, has_source):
    model = loaded(folder, attn_implementation="eager")
    change(model)
    diagnosis = located(model, source=str(folder) if has_source else None)
    assert diagnosis.verdict == "FAULT", diagnosis.sentence


def test_the_sentence_says_that_nothing_was_compared_with_a_file_or_a_config(folder):
    model = loaded(folder)
    assert "Not checked" not in located(model, source=str(folder)).sentence
    assert "the weights and the config against a file" in located(model).sentence
    model.model.layers[1].extra = nn.Identity()
    sentence = located(model, source=str(folder)).sentence
    assert "model.layers.1.extra is not what it gives" in sentence
    assert "the model cannot be built from one" in located(gpt()).sentence


def test_the_default_dtype_of_the_caller_does_not_matter():
    model = build("gemma3")
    torch.set_default_dtype(torch.bfloat16)
    try:
        diagnosis = located(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert diagnosis.verdict == "HEALTHY", diagnosis.sentence


def bits_changed(u):
    y = (u > 0).long()
    before = y + 1
    y &= 1
    y |= 4
    y ^= 1
    y <<= 1
    y >>= 1
    return u * (before + y)


def overwritten(u):
    y = u + 0
    z = y + 1
    y.mul_(3)
    y -= -2 * y
    y[:] = y * 0.5
    y.view(-1).mul_(3)
    torch.mul(y, 3, out=y)
    F.relu(y, inplace=True)
    F.relu(z, True)
    return y + z


@pytest.mark.parametrize("step", [bits_changed, overwritten], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operators_that_overwrite_are_judged_by_what_they_found(step, dtype):
    diagnosis = located(gpt(step).to(dtype), strict=True)
    assert diagnosis.verdict == "HEALTHY", diagnosis.sentence
    with Wrong(aten.mul_, lambda y, args: y.add_(1.0)) as mode:
        assert located(gpt(overwritten).to(dtype)).verdict == "FAULT"
    assert mode.count


@pytest.mark.parametrize("path", ["self_attn", "mlp", "mlp.down_proj"])
@pytest.mark.parametrize("point", ["input", "output"])
def test_what_changes_between_modules_is_found_at_the_module(path, point):
    diagnosis = located(build("llama"), plan=f"gain:0.5@module.model.layers.1.{path},point={point}")
    assert (diagnosis.verdict, diagnosis.layer, diagnosis.op) == ("FAULT", 1, path), diagnosis.sentence


def test_a_layer_that_is_called_twice_or_never_is_named_in_one_line():
    short, twice = build("llama"), build("llama")
    short.model.config.num_hidden_layers = 2
    with pytest.raises(st.ModelError, match=r"^model\.layers\.2 was not called in a forward$"):
        located(short)
    forward = twice.model.forward
    twice.model.forward = lambda *args, **kwargs: (forward(*args, **kwargs), forward(*args, **kwargs))[1]
    with pytest.raises(st.ModelError, match=r"^model\.layers\.0 is called more than once in a forward"):
        located(twice)
