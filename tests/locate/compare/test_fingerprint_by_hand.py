"""Fingerprints of small models: names, labels and copies of what is stored, files that are refused, and operators that are forced."""

import errno
import json
import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn

from shaketable.errors import ModelError
from shaketable.locate.capture.recorder import Record, Recording
from shaketable.locate.capture.reference import Reference
from shaketable.locate.capture.trace import LayerCall, trace
from shaketable.locate.compare import fingerprint as module
from shaketable.locate.compare import fingerprint_file
from shaketable.locate.compare.fingerprint import (
    Fingerprint,
    FingerprintError,
    Metadata,
    _arguments,
    _equal,
    _store_outside,
    _Tensors,
    _unsteady,
    first_tensor,
    is_routed,
    labelled,
    make_fingerprint,
    op_name,
)
from shaketable.locate.compare.fingerprint_file import _names, check_same_model, read_fingerprint, write_fingerprint
from shaketable.locate.compare.teacher_forcing import Forcing, laid_out_like
from shaketable.records.weight_hash import digest
from tests.tensors import draw

IDS = torch.arange(12)[None] % 5
FACTS = {
    "model": "m", "model_class": "M", "num_layers": 2, "hidden_size": 4, "config_sha256": "c", "weights_sha256": "w", "dtype": "float32",
    "device": "cpu", "attention": "eager", "tokens": 3, "prompts": None, "versions": {"torch": "2"}, "date": "today",
    "switches": {"cuda_tf32": False}, "product_input": 0.0, "layers": [["up", "up#2"], ["down"]], "before": ["embed"], "after": ["head"],
    "aliases": {},
}  # fmt: skip


def about(**more):
    return Metadata.model_validate(FACTS | more)


# ---- metadata and names


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_the_dtype_is_known_by_its_name(name):
    assert about(dtype=name).torch_dtype is getattr(torch, name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "int8"},
        {"more": 1},
        {"format": "another"},
        {"layers": [["up"], "x"]},
        {"num_layers": "many"},
        {"tokens": None},
    ],
)
def test_metadata_that_says_anything_else_is_refused(wrong):
    with pytest.raises(ValidationError):
        about(**wrong)


def test_metadata_has_its_schema_and_cannot_be_changed():
    made = about()
    assert (made.schema_number, made.format, made.unsteady) == (1, "shaketable-fingerprint", [])
    assert json.loads(made.model_dump_json(by_alias=True))["schema"] == 1
    with pytest.raises(ValidationError):
        made.model = "other"


def test_a_tensor_has_several_names_and_an_operator_two_tensors():
    a, b = torch.ones(2, 3), torch.zeros(4, dtype=torch.bfloat16)
    found = Fingerprint(about(aliases={"layer.1.op.up.input": "a", "outside.op.head.output": "b"}), {
        "a": a, "b": b, "layer.1.op.up.output": b, "outside.op.head.input": a,
    })  # fmt: skip
    assert found.tensor("a") is a is found.tensor("layer.1.op.up.input")
    assert found.op(1, "up") == (a, b) and found.op(None, "head") == (a, b)
    assert found.bytes == 6 * 4 + 4 * 2 + 4 * 2 + 6 * 4
    with pytest.raises(KeyError):
        found.op(0, "up")


@pytest.mark.parametrize(("layer", "name"), [(None, "outside.op.x"), (0, "layer.0.op.x"), (12, "layer.12.op.x")])
def test_operators_are_called_by_their_layer_or_outside_of_it(layer, name):
    assert op_name(layer, "x") == name


def test_every_name_that_the_metadata_promises():
    ends = [
        f"{place}.{end}"
        for place in (
            "layer.0.op.up",
            "layer.0.op.up#2",
            "layer.0",
            "layer.1.op.down",
            "layer.1",
            "outside.op.embed",
            "outside.op.head",
        )
        for end in ("input", "output")
    ]
    assert sorted(_names(about())) == sorted(["ids", *ends])


# ---- what is stored


def test_a_tensor_is_stored_once_as_a_copy_of_its_own():
    store, x = _Tensors(), draw(3, 4).requires_grad_()
    turned = x.T
    store.put("one", x)
    store.put("two", x)
    store.put("turned", turned)
    store.put("three", x)
    assert store.aliases == {"two": "one", "three": "one"} and set(store.tensors) == {"one", "turned"}
    assert store.tensors["turned"].is_contiguous() and torch.equal(store.tensors["turned"], x.T)
    assert not store.tensors["one"].requires_grad
    before = x.detach().clone()
    with torch.no_grad():
        x.zero_()
    assert torch.equal(store.tensors["one"], before)


def test_what_belongs_to_operators_is_let_go_after_a_layer_and_layers_stay_known():
    store, x, y = _Tensors(), draw(2), draw(2, seed=1)
    store.put("layer.0.output", x)
    store.put("layer.0.op.up.input", y)
    store.release()
    store.put("layer.1.op.up.input", x)
    store.put("layer.1.op.up.output", y)
    assert store.aliases == {"layer.1.op.up.input": "layer.0.output"}
    assert torch.equal(store.tensors["layer.1.op.up.output"], y) and len(store.tensors) == 3


def entry(path, func=None, *args, **kwargs):
    return Record(path, func, args, kwargs, draw(2))


def test_calls_of_one_module_are_numbered_and_functions_are_left_out():
    records = [entry("a"), entry("a", torch.add), entry("b"), entry("a"), entry("a"), entry("b")]
    found = list(labelled(Recording(records)))
    assert [label for label, _ in found] == ["a", "b", "a#2", "a#3", "b#2"]
    assert [record for _, record in found] == [r for r in records if r.func is None]


def test_what_an_operator_read_is_its_first_tensor():
    x, y = draw(2), draw(2, seed=1)
    assert first_tensor(entry("a", None, None, x, y)) is x and first_tensor(entry("a", None, flag=1, input=y)) is y
    assert first_tensor(entry("a", None, x, input=y)) is x and first_tensor(entry("a", None, [3, {"k": y}], x)) is y


class Experts(nn.Module):
    def __init__(self, dims=3):
        super().__init__()
        self.weight, self.act, self.deep = nn.Parameter(torch.zeros((1,) * dims)), nn.SiLU(), nn.Sequential(nn.SiLU())


@pytest.mark.parametrize(
    ("path", "routed"),
    [
        ("moe.experts.act", True), ("moe.experts.deep.0", True), ("moe.flat.act", False), ("moe.experts", False), ("moe", False), ("lone", False),
        ("moe.lone", False), ("top.act", True),
    ],
)  # fmt: skip
def test_what_lies_inside_of_stacked_experts_cannot_be_forced(path, routed):
    layer = nn.Module()
    layer.moe, layer.lone, layer.top = nn.Module(), nn.SiLU(), Experts()
    layer.moe.experts, layer.moe.flat, layer.moe.lone = Experts(), Experts(2), nn.SiLU()
    assert is_routed(layer, path) is routed


def test_the_weight_of_an_operator_itself_makes_it_no_expert():
    layer = nn.Module()
    layer.conv = nn.Conv1d(2, 2, 3)
    assert not is_routed(layer, "conv")


# ---- arguments besides hidden states


def test_every_argument_but_the_hidden_states_is_looked_at():
    x, mask = draw(2), draw(2, seed=1)
    positional = LayerCall(0, "", nn.Identity(), (x, mask, 3), {"cache": None}, x)
    assert [(name, value) for name, value in _arguments(positional)] == [("1", mask), ("2", 3), ("cache", None)]
    named = LayerCall(0, "", nn.Identity(), (), {"hidden_states": x, "mask": mask}, x)
    assert [name for name, _ in _arguments(named)] == ["mask"]


X, Y = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (X, X.clone(), True), (X, Y, False), ((X, [Y]), (X, {"k": Y}), True), ((X, Y), (X,), False), (None, 3, True), (X, None, False),
        ((Y, X), (X, Y), False), ((X, Y), (X, X), False),
    ],
)  # fmt: skip
def test_arguments_are_equal_by_their_tensors(a, b, equal):
    assert _equal(a, b) is equal


# ---- a model whose layers are given what depends on hidden states


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, hidden_states, scale=None, bias=None):
        return hidden_states + self.up(self.up(hidden_states)) * scale + bias


class Model(nn.Module):
    """Two norms before and behind its layers, and two Linears outside of them."""

    def __init__(self, steady=True, fails=()):
        super().__init__()
        self.embed, self.mix = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 5)
        self.steady, self.fails, self.calls = steady, fails, 0

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, use_cache):
        self.calls += 1
        if self.calls in self.fails:
            raise RuntimeError("broken")
        x = self.mix(self.embed(input_ids))
        scale = torch.full((), 0.5) if self.steady is True else x.abs().mean()
        bias = input_ids[..., None] * 0.1 if self.steady != "nothing" else x.mean()
        for layer in self.layers:
            x = layer(x, scale=scale, bias=bias)
        return SimpleNamespace(logits=self.head(self.norm(x)))


def model(**given):
    torch.manual_seed(0)
    return Model(**given).eval()


@pytest.mark.parametrize(("steady", "names"), [(True, []), (False, ["scale"]), ("nothing", ["bias", "scale"])])
def test_arguments_that_follow_the_hidden_states_are_named(steady, names):
    made = model(steady=steady)
    reference = Reference(made)
    with torch.no_grad():
        assert _unsteady(trace(made, IDS, reference), made, IDS, reference) == names
    assert not made.embed._forward_hooks


def test_the_stretched_embeddings_are_set_right_again_when_a_forward_fails():
    made = model(fails=(2,))
    reference = Reference(made)
    traced = trace(made, IDS, reference)
    with pytest.raises(RuntimeError, match="broken"):
        _unsteady(traced, made, IDS, reference)
    assert not made.embed._forward_hooks


def test_linears_outside_of_the_layers_are_called_again_on_the_last_tokens():
    made = model()
    reference, store = Reference(made), _Tensors()
    with torch.no_grad():
        before, after = _store_outside(store, trace(made, IDS, reference), made, reference)
        whole = made.embed(IDS)
        assert (before, after) == (["embed", "mix"], ["norm", "head"])
        assert torch.equal(store.tensors["outside.op.mix.input"], whole[:, -8:])
        assert torch.equal(store.tensors["outside.op.mix.output"], made.mix(whole[:, -8:]))
        assert store.tensors["outside.op.norm.input"].shape == (1, 12, 4) and store.tensors["outside.op.head.output"].shape == (
            1,
            8,
            5,
        )
        head = store.tensors["outside.op.head.input"]
        assert torch.equal(head, store.tensors["outside.op.norm.output"][:, -8:]) and head.is_contiguous()
        assert torch.equal(store.tensors["outside.op.head.output"], made.head(head))
    assert torch.equal(store.tensors["outside.op.embed.input"], IDS)


def test_the_head_is_called_once_more_on_the_tokens_that_are_stored():
    made = model()
    own = made.head.forward
    made.head.forward = lambda x: own(x) * x.shape[-2]
    reference, store = Reference(made), _Tensors()
    with torch.no_grad():
        _store_outside(store, trace(made, IDS, reference), made, reference)
        assert torch.equal(store.tensors["outside.op.head.output"], own(store.tensors["outside.op.head.input"]) * 8)


@pytest.fixture
def described(monkeypatch):
    """What transformers would say of a model that is none of its own."""
    facts = {k: FACTS[k] for k in (
        "model_class", "num_layers", "hidden_size", "config_sha256", "weights_sha256", "dtype", "device", "attention", "versions", "date",
        "switches", "product_input",
    )}  # fmt: skip
    monkeypatch.setattr(module, "describe", lambda made: dict(facts))
    monkeypatch.setattr(fingerprint_file, "describe", lambda made: dict(facts))
    return facts


def test_a_fingerprint_holds_every_layer_and_every_call_of_its_operators(described):
    made, told = model(), []
    found = make_fingerprint(made, IDS, progress=lambda *facts: told.append(facts))
    assert told == [(0, 2, "layer 0"), (1, 2, "layer 1")]
    assert found.about.layers == [["up", "up#2"]] * 2 and found.about.unsteady == []
    assert (found.about.model, found.about.tokens, found.about.prompts) == ("Model", 12, None)
    assert torch.equal(found.tensor("ids"), IDS)
    for i, layer in enumerate(made.layers):
        x = found.tensor(f"layer.{i}.input")
        first, second = found.op(i, "up"), found.op(i, "up#2")
        assert torch.equal(first[0], x) and torch.equal(layer.up(x), first[1])
        assert torch.equal(second[0], first[1]) and torch.equal(layer.up(second[0]), second[1])
    assert (
        found.about.aliases["layer.1.input"] == "layer.0.output"
        and found.about.aliases["layer.0.op.up.input"] == "layer.0.input"
    )
    assert found.about.aliases["layer.1.op.up#2.input"] == "layer.1.op.up.output"
    assert not any(t.requires_grad for t in found.tensors.values()) and torch.is_grad_enabled()
    assert set(_names(found.about)) == set(found.tensors) | set(found.about.aliases)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.modules())


def test_a_fingerprint_says_its_name_and_its_prompts(described):
    found = make_fingerprint(model(), IDS, name="mine", prompts=["a"])
    assert (found.about.model, found.about.prompts) == ("mine", ["a"])


# ---- files


def stored(**more):
    made = about(layers=[[], []], before=[], after=[], **more)
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(_names(made))}
    return Fingerprint(made, tensors)


def test_a_file_is_what_was_written(tmp_path):
    path, made = tmp_path / "f", stored(prompts=["ä"], unsteady=["mask"], product_input=2.0**-10)
    write_fingerprint(made, path)
    found = read_fingerprint(path)
    assert found.about == made.about and {n: t.tolist() for n, t in found.tensors.items()} == {
        n: t.tolist() for n, t in made.tensors.items()
    }
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_file_is_written_over_an_older_one_and_through_a_link(tmp_path):
    path, link = tmp_path / "f", tmp_path / "link"
    write_fingerprint(stored(), path)
    link.symlink_to(path)
    write_fingerprint(stored(model="newer"), link)
    assert link.is_symlink() and read_fingerprint(path).about.model == "newer"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o027, 0o002, 0o000])
def test_a_file_has_the_rights_that_the_user_gives_and_the_mask_stays(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_fingerprint(stored(), tmp_path / "f")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_file_that_cannot_be_written_is_told_in_one_line(tmp_path):
    with pytest.raises(FingerprintError) as refused:
        write_fingerprint(stored(), tmp_path)
    assert str(refused.value) == f"cannot write {tmp_path}: {os.strerror(errno.EISDIR)}" and list(tmp_path.iterdir()) == []


def put(path, text, made=None, sha=None):
    made = made or stored()
    save_file(made.tensors, path, metadata={"shaketable": text, "sha256": sha or digest(text, made.tensors)})


def refusal(path):
    with pytest.raises(FingerprintError) as refused:
        read_fingerprint(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda facts: "no json", "is damaged: its metadata is no JSON"), (lambda facts: "[1]", "is not a file of shaketable fingerprint"),
        (lambda facts: json.dumps({}), "is not a file of shaketable fingerprint"),
        (lambda facts: json.dumps(facts | {"format": "x"}), "is not a file of shaketable fingerprint"),
        (lambda facts: json.dumps(facts | {"schema": 7}), "has schema 7; this version of shaketable reads schema 1"),
        (lambda facts: json.dumps({k: v for k, v in facts.items() if k != "schema"}), "has schema None; this version of shaketable reads schema 1"),
        (lambda facts: json.dumps(facts | {"tokens": "x"}), "is damaged: its metadata says nothing valid for tokens (Input should be a valid integer"),
        (lambda facts: json.dumps(facts | {"layers": [["a"], [3]]}), "is damaged: its metadata says nothing valid for layers.1.0 (Input should be"),
        (lambda facts: json.dumps(facts | {"more": 3}), "is damaged: its metadata says nothing valid for more (Extra inputs"),
        (lambda facts: json.dumps(facts | {"before": ["embed"]}), "is damaged: the tensor outside.op.embed.input is missing"),
        (lambda facts: json.dumps(facts | {"aliases": {"ids": "x"}}), "is damaged: the tensor ids is missing"),
    ],
)  # fmt: skip
def test_metadata_that_is_not_a_fingerprints_is_refused(tmp_path, change, said):
    path = tmp_path / "f"
    put(path, change(json.loads(stored().about.model_dump_json(by_alias=True))))
    assert refusal(path).startswith(f"{path} {said}")


def test_another_sha_is_refused_and_so_is_none(tmp_path):
    path, text = tmp_path / "f", stored().about.model_dump_json(by_alias=True)
    put(path, text)
    assert read_fingerprint(path).about.tokens == 3
    put(path, text, sha="0" * 64)
    assert refusal(path) == f"{path} is damaged: its contents do not have the sha256 that is written in it"
    save_file(stored().tensors, path, metadata={"shaketable": text})
    assert "sha256" in refusal(path)


def test_a_tensor_more_than_was_written_is_refused(tmp_path):
    path = tmp_path / "f"
    write_fingerprint(stored(), path)
    with_more = load_file(path) | {"more": torch.ones(1)}
    text = stored().about.model_dump_json(by_alias=True)
    save_file(with_more, path, metadata={"shaketable": text, "sha256": digest(text, stored().tensors)})
    assert "sha256" in refusal(path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_of_every_protocol_is_named(tmp_path, protocol):
    path = tmp_path / "f"
    path.write_bytes(pickle.dumps({"x": list(range(99))}, protocol=protocol))
    assert "is a pickle or an archive of torch.save, which is never loaded; a fingerprint is a safetensors file" in refusal(
        path
    )


@pytest.mark.parametrize("start", [b"", b"P", b"PX", b"\x80", b"\x80\x06", b"\x81\x04", b"KP"])
def test_what_only_begins_like_a_pickle_is_none(tmp_path, start):
    path = tmp_path / "f"
    path.write_bytes(start)
    assert refusal(path).startswith(f"{path} is truncated, damaged or no safetensors file: ")


def test_a_folder_is_no_file_and_the_command_is_told(tmp_path):
    said = f"{tmp_path} does not exist or is no file; make one with: shaketable fingerprint MODEL -o {tmp_path}"
    assert refusal(tmp_path) == said


# ---- the same model


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, None), ({"model_class": "N"}, "its class is N, not M"), ({"num_layers": 3}, "its number of layers is 3, not 2"),
        ({"hidden_size": 8}, "its hidden size is 8, not 4"), ({"config_sha256": "x"}, "the config of m was not the same"),
        ({"weights_sha256": "x"}, "the weights of m were not the same"), ({"weights_sha256": "x", "dtype": "bfloat16"}, None),
        ({"config_sha256": "x", "dtype": "bfloat16"}, "the config of m was not the same"), ({"device": "x", "attention": "y", "date": "z"}, None),
        ({"model_class": "N", "config_sha256": "x"}, "its class is N, not M"),
    ],
)  # fmt: skip
def test_a_fingerprint_of_another_model_says_what_is_other(described, more, said):
    if said is None:
        assert check_same_model(about(**more), model()) is None
        return
    with pytest.raises(FingerprintError) as refused:
        check_same_model(about(**more), model())
    assert str(refused.value) == f"the fingerprint is of another model: {said}"


def test_a_model_that_cannot_be_judged_is_refused_first(described):
    with pytest.raises(ModelError, match="no list of decoder layers"):
        check_same_model(about(model_class="N"), nn.Linear(2, 2))


# ---- forcing


class Takes(nn.Module):
    """An operator with a second argument, called by name."""

    def forward(self, input, times=1.0, other=None):
        return input * times + (0 if other is None else other)


class Root(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.part, self.act, self.work = Takes(), nn.ReLU(inplace=True), work

    def forward(self, x):
        return self.work(self, x)


def forced(work, ops, x=None, before=lambda root: None):
    root = Root(work)
    before(root)
    forcing = Forcing(root, ops)
    with torch.no_grad(), forcing.active():
        result = root(torch.ones(2) if x is None else x)
    return forcing, result


IN, OUT = torch.tensor([3.0, -4.0]), torch.tensor([-5.0, 6.0])


def test_only_the_first_tensor_is_forced_and_other_arguments_stay():
    forcing, result = forced(lambda m, x: m.part(input=x, times=2.0, other=x * 10), {"part": (IN, OUT)})
    assert forcing.made["part"].tolist() == [16.0, 2.0] and result.tolist() == OUT.tolist()
    assert forcing.arrived["part"].tolist() == [1.0, 1.0]


def test_what_is_overwritten_does_not_reach_the_file():
    forcing, result = forced(lambda m, x: m.act(m.part(x)).mul_(2), {"part": (IN, OUT), "act": (IN, OUT)})
    assert (IN.tolist(), OUT.tolist(), result.tolist()) == ([3.0, -4.0], [-5.0, 6.0], [-10.0, 12.0])
    assert forcing.arrived["act"].tolist() == [-5.0, 6.0] and forcing.made["act"].tolist() == [3.0, 0.0]


def test_other_hooks_see_the_forced_input_and_change_what_is_made():
    seen = []

    def hooks(root):
        root.part.register_forward_pre_hook(lambda m, args: seen.append(args[0].tolist()))
        root.part.register_forward_hook(lambda m, args, out: out * 100)

    forcing, result = forced(lambda m, x: m.part(x), {"part": (IN, OUT)}, before=hooks)
    assert seen == [[3.0, -4.0]] and forcing.made["part"].tolist() == [300.0, -400.0] and result.tolist() == OUT.tolist()


def test_of_several_calls_only_those_of_the_file_are_forced():
    forcing, result = forced(lambda m, x: m.part(m.part(m.part(x)), times=2.0), {"part#2": (IN, OUT)})
    assert list(forcing.made) == list(forcing.arrived) == ["part#2"]
    assert forcing.arrived["part#2"].tolist() == [1.0, 1.0] and result.tolist() == [-10.0, 12.0]


def test_a_forcing_counts_on_from_call_to_call_and_leaves_no_hook_when_a_call_fails():
    def fails(m, x):
        m.part(x)
        raise KeyError("no")

    root = Root(fails)
    with pytest.raises(KeyError), Forcing(root, {"part": (IN, OUT), "part#2": (IN, OUT)}).active():
        root(torch.ones(2))
    assert not root.part._forward_hooks and not root.part._forward_pre_hooks


def test_an_input_is_laid_out_as_the_one_that_arrived():
    stored, strides = torch.arange(6.0).view(2, 3), []

    def hooks(root):
        root.part.register_forward_pre_hook(lambda m, args: strides.append(args[0].stride()))

    forcing, _ = forced(lambda m, x: m.part(x), {"part": (stored, stored)}, torch.zeros(3, 2).T, hooks)
    assert strides == [(1, 2)] and torch.equal(forcing.made["part"], stored)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (torch.zeros(2, 3), True), (torch.zeros(1, 3).expand(2, 3), True), (torch.zeros(3).expand(2, 3), True), (torch.zeros(2, 6)[:, ::2], False),
        (torch.zeros(3, 2).T, False), (torch.zeros(3, 2), True), (torch.zeros(2, 3, 1), True),
    ],
)  # fmt: skip
def test_strides_are_taken_over_where_they_can_be(other, same):
    x = torch.arange(6.0).view(2, 3)
    found = laid_out_like(x, other)
    assert (
        torch.equal(found, x)
        and found.dtype == x.dtype
        and (found is x) is same
        and found.stride() == (x if same else other).stride()
    )


def test_one_value_is_no_overlap_whatever_its_stride():
    x, other = torch.tensor([[1.0], [2.0]]), torch.zeros(2, 4).as_strided((2, 1), (4, 0))
    assert laid_out_like(x, other).stride() == (4, 0) and torch.equal(laid_out_like(x, other), x)
