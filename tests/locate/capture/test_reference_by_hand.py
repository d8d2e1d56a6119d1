"""A reference of models of a few numbers: what is built anew, what is read again, and what is told to differ."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shaketable import models
from shaketable.errors import ModelError
from shaketable.locate.capture.reference import Reference, _agree, _index, _open, _unlike, check_model, rebuilt

NAN = float("nan")


class Rope(nn.Module):
    """Made of a config: a buffer, numbers, and a parameter that is not trained."""

    def __init__(self, config):
        super().__init__()
        self.register_buffer("freq", torch.arange(1.0, 1.0 + config.size), persistent=False)
        self.register_buffer("steps", torch.arange(config.size), persistent=False)
        self.register_buffer("trained", torch.zeros(2))
        self.grown = 0.0
        self.register_buffer("none", None)
        self.scale, self.size, self.attention_dropout = config.scale, config.size, 0.1
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)
        self.register_parameter("missing", None)
        self.drop = nn.Dropout(0.25)
        self.rope_type = "default"

    def grow(self):
        self.grown = 1.0


class Small(nn.Module):
    """A model that transformers could have made."""

    def __init__(self, config):
        super().__init__()
        if config.scale < 0:
            raise ValueError("no such scale")
        self.config = config
        self.rope, self.linear = Rope(config), nn.Linear(3, 2)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), Rope(config)) for _ in range(2))

    @classmethod
    def _from_config(cls, config):
        return cls(config)


def config(scale=0.5, size=4):
    return SimpleNamespace(scale=scale, size=size)


def small(**given):
    return Small(config(**given))


# ---- built anew


def test_a_skeleton_has_real_buffers_and_parameters_without_values():
    skeleton = rebuilt(small())
    assert {p.device.type for p in skeleton.parameters()} == {"meta"} and len(list(skeleton.parameters())) == 9
    assert skeleton.rope.freq.tolist() == [1.0, 2.0, 3.0, 4.0] and skeleton.rope.none is None and skeleton.rope.missing is None
    assert skeleton.linear.weight.shape == (2, 3) and type(skeleton.linear.weight) is nn.Parameter


def test_what_is_not_trained_is_not_trained_in_the_skeleton():
    skeleton = rebuilt(small())
    assert not skeleton.rope.frozen.requires_grad and skeleton.linear.weight.requires_grad


def test_a_model_is_rebuilt_from_another_config_where_one_is_given():
    assert rebuilt(small()).rope.scale == 0.5 and rebuilt(small(), config(scale=0.75, size=2)).rope.scale == 0.75
    assert rebuilt(small(), config(size=2)).rope.freq.tolist() == [1.0, 2.0]


def test_buffers_are_real_under_any_default_device():
    made = small()
    with torch.device("meta"):
        skeleton = rebuilt(made)
    assert skeleton.rope.freq.device.type == "cpu" and skeleton.linear.weight.device.type == "meta"


def test_what_has_no_config_or_cannot_be_built_from_one_is_not_rebuilt():
    plain = nn.Linear(2, 2)
    assert rebuilt(plain) is None
    plain.config = config()
    assert rebuilt(plain) is None, "it has a config, and nothing that makes it of one"
    made = small()
    del made.config
    assert rebuilt(made) is None and rebuilt(made, config()) is not None


@pytest.mark.parametrize("scale", [0.5, -1.0])
def test_rebuilding_leaves_torch_as_it_was_whether_it_fails_or_not(scale):
    made, register = small(), nn.Module.register_parameter
    made.config.scale = scale
    state = torch.random.get_rng_state()
    if scale < 0:
        with pytest.raises(ValueError, match="no such scale"):
            rebuilt(made)
    else:
        rebuilt(made)
    assert nn.Module.register_parameter is register and torch.equal(state, torch.random.get_rng_state())
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_a_reference_is_in_eval_mode_and_the_model_stays_in_its_own():
    made = small().train()
    reference = Reference(made)
    assert reference.is_rebuilt and reference.skeleton is not made
    assert not any(m.training for m in reference.skeleton.modules()) and made.training and made.rope.training


def test_a_model_that_lost_or_gained_a_module_defines_itself_and_nothing_of_it_is_compared():
    gained, lost = small(), small()
    gained.extra, lost.layers = nn.Linear(1, 1), lost.layers[:1]
    for made in (gained, lost):
        made.rope.scale = 9.0
        reference = Reference(made)
        assert reference.skeleton is made and not reference.is_rebuilt and list(reference.other_numbers(made, "")) == []


def test_leaves_are_those_of_the_skeleton():
    made = small()
    reference = Reference(made)
    assert set(reference.leaves) == {"linear", "rope.drop", "layers.0.0", "layers.1.0", "layers.0.1.drop", "layers.1.1.drop"}
    assert reference.leaf("linear").module is reference.skeleton.linear and reference.leaf("rope") is None


# ---- numbers and buffers


def trained(made):
    made.rope.trained.fill_(3.0)


def grown(made):
    made.rope.grow()


@pytest.mark.parametrize("change", [trained, grown])
def test_what_is_saved_with_the_weights_or_written_by_own_code_may_be_right(change):
    made = small()
    reference = Reference(made)
    change(made)
    assert list(reference.other_numbers(made, "")) == [] and [path for path, _ in reference.own_numbers(made, "")] == ["rope"]


def test_a_buffer_that_own_code_overwrites_may_be_right():
    made = small()
    reference = Reference(made)
    made.rope.freq.mul_(2)
    reference.written = {made.rope.freq.untyped_storage().data_ptr()}
    assert list(reference.other_numbers(made, "")) == [] and len(list(reference.own_numbers(made, ""))) == 1


def test_what_is_wrong_only_after_a_forward_is_not_wrong():
    made = small()
    reference = Reference(made)
    made.rope.scale = 2.0
    reference.note_numbers(made)
    made.rope.freq.mul_(2)
    assert [text for _, text in reference.other_numbers(made, "")] == ["its scale is 2 where the config says 0.5"]


def test_a_saved_buffer_is_compared_with_the_file_s(tmp_path):
    made = small()
    made.rope.trained.fill_(3.0)
    save_file({k: v.clone() for k, v in made.state_dict().items() if k != "layers.1.1.trained"}, tmp_path / "model.safetensors")
    reference = Reference(made, str(tmp_path))
    assert list(reference.other_numbers(made, "")) == [] == list(reference.own_numbers(made, ""))
    made.rope.trained[1] = 4.0
    made.layers[1][1].trained[0] = 5.0
    assert [path for path, _ in reference.other_numbers(made, "")] == ["rope", "layers.1.1"]


def test_a_model_whose_constructor_wants_more_than_a_config_is_its_own_reference():
    made = small()
    made.config.scale = -1.0
    reference = Reference(made)
    assert reference.skeleton is made and not reference.is_rebuilt


def others(change, path="", skip=()):
    made = small()
    reference = Reference(made)
    change(made)
    return list(reference.other_numbers(made.get_submodule(path), path, skip))


def wrong_scale(made):
    made.rope.scale = 2.0


def wrong_inner_scale(made):
    made.layers[1][1].scale = 1e-7


def wrong_buffer(made):
    made.rope.freq[2] = 7.0
    made.rope.freq[3] = 8.0


def wrong_steps(made):
    made.rope.steps[0] = 5


def all_wrong(made):
    wrong_scale(made)
    wrong_buffer(made)
    wrong_inner_scale(made)


SCALE = ("rope", "its scale is 2 where the config says 0.5")
FREQ = ("rope", "2 of 4 values of its freq are not what the config gives, the first is 7 and should be 3")
INNER = "its scale is 1e-07 where the config says 0.5"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda made: None, []), (wrong_scale, [SCALE]), (wrong_buffer, [FREQ]), (wrong_inner_scale, [("layers.1.1", INNER)]),
        (wrong_steps, [("rope", "1 of 4 values of its steps are not what the config gives, the first is 5 and should be 0")]),
        (all_wrong, [SCALE, FREQ, ("layers.1.1", INNER)]),
        (lambda made: setattr(made.rope, "attention_dropout", 0.7), []), (lambda made: setattr(made.rope.drop, "p", 0.7), []),
        (lambda made: setattr(made.rope, "more", 0.7), []), (lambda made: setattr(made.rope, "size", 9), []),
        (lambda made: setattr(made.rope, "scale", 2), []), (lambda made: setattr(made.rope, "none", torch.ones(2)), []),
        (lambda made: setattr(made.rope, "freq", None), []),
    ],
)  # fmt: skip
def test_numbers_and_buffers_that_are_not_the_configs_are_told(change, found):
    assert others(change) == found


@pytest.mark.parametrize(
    ("skip", "found"),
    [
        ((), ["rope", "rope", "layers.1.1"]), (("rope",), ["layers.1.1"]), (("rop",), ["rope", "rope", "layers.1.1"]),
        (("layers",), ["rope", "rope"]), (("layers.1",), ["rope", "rope"]), (("layers.1.1",), ["rope", "rope"]),
        (("layers.0",), ["rope", "rope", "layers.1.1"]), (("rope", "layers"), []),
    ],
)  # fmt: skip
def test_parts_that_are_looked_at_elsewhere_are_skipped(skip, found):
    assert [path for path, _ in others(all_wrong, skip=skip)] == found


def test_a_part_is_compared_with_the_part_at_its_place():
    assert others(all_wrong, "layers.1") == [("1", INNER)] and others(all_wrong, "layers.0") == []
    assert [path for path, _ in others(all_wrong, "rope")] == ["", ""]


@pytest.mark.parametrize(
    ("kind", "compared"), [("default", True), ("llama3", True), ("dynamic", False), ("longrope", False), (None, True)]
)
def test_buffers_that_follow_the_length_are_not_compared_and_numbers_are(kind, compared):
    def change(made):
        made.rope.rope_type = kind
        all_wrong(made)

    assert (FREQ in others(change)) is compared and SCALE in others(change)


@pytest.mark.parametrize(
    ("dtype", "by", "agree"),
    [
        (torch.float32, 2.0**-22, True), (torch.float32, 2.0**-20, False), (torch.float64, 2.0**-51, True), (torch.float64, 2.0**-49, False),
        (torch.bfloat16, 2.0**-6, True), (torch.bfloat16, 2.0**-4, False), (torch.float16, 2.0**-9, True), (torch.float16, 2.0**-7, False),
    ],
)  # fmt: skip
def test_eight_units_of_the_buffers_own_dtype_are_allowed(dtype, by, agree):
    given = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert _agree((given * (1 + by)).to(dtype), given) is agree


@pytest.mark.parametrize(
    ("buffer", "given", "agree"),
    [
        (torch.tensor([NAN]), torch.tensor([1.0]), False), (torch.tensor([1.0]), torch.tensor([NAN]), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False), (torch.tensor([1]), torch.tensor([1.0]), True),
        (torch.tensor([True]), torch.tensor([False]), False), (torch.tensor([100001]), torch.tensor([100002]), False),
        (torch.tensor([-1.0]), torch.tensor([1.0]), False),
    ],
)  # fmt: skip
def test_buffers_that_are_no_floats_agree_exactly_or_not(buffer, given, agree):
    assert _agree(buffer, given) is agree


def test_a_difference_in_a_table_is_told_by_its_first_place():
    given = torch.zeros(2, 600)
    buffer = given.clone()
    buffer[1, 2:] = 0.25
    told = "598 of 1,200 values of its table are not what the config gives, the first is 0.25 and should be 0"
    assert _unlike("table", buffer, given) == told
    assert _unlike("table", torch.zeros(2, 3), torch.zeros(6)) == "its table has the shape (2, 3) where the config gives (6,)"


# ---- weights


def test_without_a_file_a_weight_is_what_the_model_holds():
    made = small()
    reference = Reference(made)
    assert not reference.has_file and torch.equal(reference.weight("linear.weight"), made.linear.weight)
    assert not reference.weight("linear.weight").requires_grad
    with pytest.raises(KeyError):
        reference.weight("linear.none")


def test_every_tensor_is_widened_once_and_forgotten_with_the_layer():
    reference = Reference(small())
    one, two = torch.ones(2, requires_grad=True), torch.full((2,), 0.1)
    assert torch.equal(reference.wide(one), torch.ones(2, dtype=torch.float64)) and not reference.wide(one).requires_grad
    assert reference.wide(two).tolist() == [float(two[0])] * 2 and reference.wide(one) is reference.wide(one)
    before = reference.wide(two)
    reference.forget()
    assert reference.wide(two) is not before and reference._recent == {}


def test_a_weight_is_kept_for_a_layer_and_read_again_for_the_next_one():
    made = small()
    reference = Reference(made)
    kept = reference.weight("linear.weight")
    assert reference.weight("linear.weight") is kept
    reference.forget()
    made.linear.weight = nn.Parameter(torch.full((2, 3), 9.0))
    assert reference.weight("linear.weight") is not kept and torch.equal(reference.weight("linear.weight"), kept)


def test_a_parameter_that_shares_its_memory_is_found_itself_and_its_parts_are_not():
    memory = torch.arange(12.0)
    made = nn.Linear(3, 2, bias=False)
    made.weight = nn.Parameter(memory[6:].view(2, 3))
    reference = Reference(made)
    assert torch.equal(reference.like(made.weight), memory[6:].view(2, 3)) and reference.like(made.weight[0]) is None


def test_a_part_of_a_parameter_that_is_laid_out_otherwise_is_not_found():
    made = nn.Linear(3, 2, bias=False)
    made.weight = nn.Parameter(torch.arange(6.0).view(3, 2).T)
    reference = Reference(made)
    assert torch.equal(reference.like(made.weight), made.weight) and reference.like(made.weight[0]) is None


def test_a_part_in_another_dtype_is_not_found():
    made = nn.Linear(4, 2, bias=False)
    assert Reference(made).like(made.weight.detach().view(torch.int32)) is None
    assert torch.equal(Reference(made).like(made.weight.detach()[1, 1:3]), made.weight.detach()[1, 1:3])


def test_a_shared_parameter_is_found_under_each_of_its_names(tmp_path):
    made = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    made[1].weight = made[0].weight
    save_file({"0.weight": torch.full((2, 2), 7.0)}, tmp_path / "model.safetensors")
    reference = Reference(made, str(tmp_path))
    assert reference.has_file and reference.source == str(tmp_path)
    for name in ("0.weight", "1.weight"):
        assert reference.weight(name).tolist() == [[7.0, 7.0]] * 2
    assert reference.like(made[1].weight).tolist() == [[7.0, 7.0]] * 2 and reference.like(made[0].weight[1]).tolist() == [
        7.0,
        7.0,
    ]


def test_a_file_that_says_both_names_is_read_by_each(tmp_path):
    made = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    made[1].weight = made[0].weight
    save_file({"0.weight": torch.full((1, 1), 7.0), "1.weight": torch.full((1, 1), 8.0)}, tmp_path / "model.safetensors")
    reference = Reference(made, str(tmp_path))
    assert (float(reference.weight("0.weight")), float(reference.weight("1.weight"))) == (7.0, 8.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_from_a_file_has_the_models_dtype(tmp_path, dtype):
    save_file({"weight": torch.full((1, 1), 1 / 3)}, tmp_path / "model.safetensors")
    made = nn.Linear(1, 1, bias=False).to(dtype)
    found = Reference(made, str(tmp_path)).weight("weight")
    assert found.dtype == dtype and torch.equal(found, torch.full((1, 1), 1 / 3).to(dtype))


class Loads:
    """In the place of `load_model`: says what was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, source):
        self.asked.append(source)
        made = nn.Linear(2, 1)
        nn.init.constant_(made.weight, 3.0)
        return made, None


@pytest.fixture
def loads(monkeypatch):
    made = Loads()
    monkeypatch.setattr(models, "load_model", made)
    return made


def test_a_name_that_is_no_folder_is_loaded_as_a_second_model(loads, tmp_path):
    found = Reference(nn.Linear(2, 1), "some/model")
    assert loads.asked == ["some/model"] and found.has_file and found.weight("weight").tolist() == [[3.0, 3.0]]
    assert not found.weight("weight").requires_grad


def test_a_folder_that_lacks_a_parameter_is_loaded_as_a_second_model(loads, tmp_path):
    save_file({"weight": torch.ones(1, 2)}, tmp_path / "model.safetensors")
    found = Reference(nn.Linear(2, 1), str(tmp_path))
    assert loads.asked == [str(tmp_path)] and found.weight("weight").tolist() == [[3.0, 3.0]]
    assert Reference(nn.Linear(2, 1, bias=False), str(tmp_path)).weight("weight").tolist() == [[1.0, 1.0]]
    assert len(loads.asked) == 1


def test_the_home_folder_may_be_abbreviated(loads, tmp_path, monkeypatch):
    (tmp_path / "kept").mkdir()
    save_file({"weight": torch.full((1, 2), 5.0)}, tmp_path / "kept" / "model.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Reference(nn.Linear(2, 1, bias=False), "~/kept").weight("weight").tolist() == [[5.0, 5.0]] and loads.asked == []


def test_a_built_in_model_is_read_from_its_folder(loads, tmp_path, monkeypatch):
    save_file({"weight": torch.full((1, 2), 6.0)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(models, "built_in_path", lambda name: {"nano": tmp_path}[name])
    assert Reference(nn.Linear(2, 1, bias=False), "nano").weight("weight").tolist() == [[6.0, 6.0]] and loads.asked == []


def test_an_index_says_which_file_holds_which_tensor(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(1), "a": torch.zeros(1)}, tmp_path / "two.safetensors")
    assert _index(tmp_path) == {"a": tmp_path / "two.safetensors", "b": tmp_path / "two.safetensors"}, "the last one in order"
    table = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
    assert _index(tmp_path) == {"a": tmp_path / "one.safetensors", "b": tmp_path / "two.safetensors"}
    found = _open(str(tmp_path), {"a": object(), "b": object()})
    assert (float(found.read("a")), float(found.read("b"))) == (1.0, 1.0)


def test_a_folder_without_weights_holds_none(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"anything")
    assert _index(tmp_path) == {}


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map"', "no"])
def test_an_index_that_says_nothing_is_told(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError) as refused:
        _index(tmp_path)
    assert str(refused.value).startswith(f"the weights in {tmp_path} cannot be read again: ")


# ---- refusals


class Layered(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2, dtype=dtype)) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_without_a_config_is_judged_in_three_dtypes(dtype):
    assert check_model(Layered(dtype)) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.complex64])
def test_other_dtypes_are_refused_by_name(dtype):
    made = Layered()
    made.layers[1][0].weight = nn.Parameter(torch.zeros(2, 2).to(dtype), requires_grad=False)
    with pytest.raises(ModelError) as refused:
        check_model(made)
    assert str(refused.value) == f"layers.1.0.weight is {dtype}; locate judges float32, bfloat16 and float16"


def test_one_value_of_the_last_parameter_is_enough():
    made = Layered()
    with torch.no_grad():
        made.layers[1][0].bias[1] = -float("inf")
    with pytest.raises(ModelError, match=r"^layers\.1\.0\.bias holds 1 of 2 values that are NaN or infinite$"):
        check_model(made)


def test_a_config_that_says_nothing_of_packing_is_no_reason():
    made = Layered()
    made.config = SimpleNamespace(quantization_config=None)
    check_model(made)
    made.config.quantization_config = SimpleNamespace()
    with pytest.raises(ModelError, match=r"quantized \(unknown method\)"):
        check_model(made)
