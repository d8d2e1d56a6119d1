"""Rare calls that the recorder must get right: shared memory, siblings of like names, containers, and tensors from nowhere."""

import numpy as np
import pytest
import torch
from torch import nn

from shaketable.locate.capture.recorder import Record, Recorder, Recording, function_name, same, snapshot
from shaketable.sites.nested_tensors import tensors_of
from tests.tensors import draw

NAN = float("nan")


def is_linear(path, module):
    return isinstance(module, nn.Linear)


class Calls(nn.Module):
    """A root that runs a function of itself and its arguments, with the parts it is given."""

    def __init__(self, work, **parts):
        super().__init__()
        self.work = work
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args, **kwargs):
        return self.work(self, *args, **kwargs)


def record(root, *args, leaf=is_linear, **kwargs):
    with Recorder(root, leaf).watching() as recording:
        root(*args, **kwargs)
    return recording


def recorded(work, *args, leaf=is_linear, **parts):
    return record(Calls(work, **parts), *args, leaf=leaf)


def told(recording):
    return [(r.path, r.function) for r in recording.records]


def silent(value):
    """The same values in a tensor that no torch function made."""
    with torch._C.DisableTorchFunction():
        return value.clone()


# ---- which part of a layer came before a function

A, B, C, D = (torch.full((2,), float(i)) for i in range(4))


def entry(path, output, *args, func=torch.add, **kwargs):
    return Record(path, func, args, kwargs, output)


@pytest.mark.parametrize(
    ("records", "order", "part"),
    [
        ([entry("attn.o", A), entry("mlp.down", B), entry("", C, D, A)], 2, "attn"),
        ([entry("attn.o", A), entry("mlp.down", B), entry("", C, D, B)], 2, "mlp"),
        ([entry("attn.o", A), entry("mlp.down", B), entry("", C, A, B)], 2, "mlp"),
        ([entry("attn.o", A), entry("mlp.down", B), entry("", C, D, other=A)], 2, "attn"),
        ([entry("attn.o", A), entry("mlp.down", B), entry("", C, D, [D, {"k": A}])], 2, "attn"),
        ([entry("attn.o", (D, [A])), entry("mlp.down", B), entry("", C, A)], 2, "attn"),
        ([entry("attn.o", A), entry("mlp.down", B), entry("", C, D)], 2, "mlp"),
        ([entry("attn.o", A), entry("", C, D), entry("mlp.down", B)], 1, "attn"),
        ([entry("", C, D), entry("mlp.down", D)], 0, None),
        ([entry("", A), entry("", C, A)], 1, None),
        ([entry("norm", A), entry("", B, A), entry("", C, B)], 2, "norm"),
        ([entry("mlp.deep.down", A), entry("", C, A)], 1, "mlp"),
    ],
)
def test_the_part_before_a_function_is_the_last_one_that_made_what_it_takes(records, order, part):
    assert Recording(records).part_before(order) == part


def test_a_leaf_is_asked_for_by_its_path_and_the_first_call_is_given():
    function, first, second, other = (
        entry("up", A),
        entry("up", B, func=None),
        entry("up", C, func=None),
        entry("a", D, func=None),
    )
    found = Recording([function, other, first, second])
    assert found.leaf("up") is first and found.leaf("a") is other and found.leaf("u") is None and Recording().leaf("up") is None
    assert first.function is None and function.function == "add"


# ---- which modules are looked into


def test_a_leaf_does_not_hide_a_sibling_whose_name_begins_like_its_own():
    parts = {"act": nn.Linear(4, 4), "act_fn": nn.Linear(4, 4), "acts": nn.Sequential(nn.Linear(4, 4))}
    recording = recorded(lambda m, x: m.acts(m.act_fn(m.act(x))), draw(2, 4), **parts)
    assert told(recording) == [("act", None), ("act_fn", None), ("acts.0", None)]


def test_what_a_container_of_functions_makes_has_its_path():
    inner = Calls(lambda m, x: x * 2)
    recording = recorded(lambda m, x: m.outer(x) + 1, draw(2, 4), outer=Calls(lambda m, x: m.inner(x) - 3, inner=inner))
    assert told(recording) == [("outer.inner", "mul"), ("outer", "sub"), ("", "add")]


def test_what_has_no_tensor_in_it_is_no_operator():
    def work(m, x):
        assert x.dim() == 2 and x.size(0) == 2 and x.is_floating_point() and float(x.sum().item()) == 0.0
        return x + 1

    assert told(recorded(work, torch.zeros(2, 4))) == [("", "sum"), ("", "add")]


def test_a_function_with_several_results_is_one_record():
    recording = recorded(lambda m, x: torch.topk(x, 2, -1).values, draw(3, 4))
    assert [r.function for r in recording.records] == ["topk"]
    assert [t.shape for t in tensors_of(recording.records[0].output)] == [(3, 2), (3, 2)]


def test_the_result_of_the_root_is_kept_whole():
    recording = recorded(lambda m, x: (x + 1, {"more": x * 2}), draw(2, 4))
    assert recording.output[0] is recording.records[0].output and recording.output[1]["more"] is recording.records[1].output


def test_a_part_is_not_taken_for_the_root():
    recording = recorded(lambda m, x: m.part(x) * 2, draw(2, 4), part=Calls(lambda m, x: x + 1))
    assert recording.output is recording.records[-1].output is not recording.records[0].output


@pytest.mark.parametrize("kind", ["a leaf", "a container"])
def test_what_a_leaf_calls_elsewhere_in_the_layer_is_its_own_business(kind):
    class Calls2(nn.Module):
        def forward(self, x, other):
            return other(x) + 1

    other = nn.Linear(4, 4) if kind == "a leaf" else Calls(lambda m, x: x * 3)
    recording = recorded(
        lambda m, x: m.part(x, m.other) * 2,
        draw(2, 4),
        part=Calls2(),
        other=other,
        leaf=lambda path, m: path == "part" or is_linear(path, m),
    )
    assert told(recording) == [("part", None), ("", "mul")] and recording.breaks == []


def test_hooks_are_there_while_it_watches_and_functions_are_seen_again_afterwards():
    root = Calls(lambda m, x: m.part(x) + 1, part=nn.Linear(4, 4))
    recorder = Recorder(root, is_linear)
    for count in (2, 4):
        with recorder.watching() as recording:
            root(draw(2, 4))
        assert len(recording.records) == count and not root._forward_hooks and not root.part._forward_pre_hooks


# ---- strangers


def test_strangers_are_named_by_their_place_or_by_their_name_wherever_they_lie():
    unknown = torch.ones(2, 4)

    def work(m, x):
        y = torch.cat([x, unknown])
        y = torch.add(y[:2], unknown)
        y = torch.where(condition=x > 0, input=y, other=unknown)
        return torch.stack([y, x])

    found = [(r.function, r.strangers) for r in recorded(work, draw(2, 4)).records]
    assert found == [
        ("cat", ("0",)), ("__getitem__", ()), ("add", ("1",)), ("gt", ()), ("where", ("other",)), ("stack", ()),
    ]  # fmt: skip


def test_every_stranger_among_the_arguments_is_named_in_order():
    unknown = torch.ones(2, 4)
    (found,) = recorded(lambda m, x: torch.addcmul(unknown, x, tensor2=unknown), draw(2, 4)).records
    assert found.strangers == ("0", "tensor2")


def test_a_stranger_is_told_by_who_computes_with_it_and_not_by_who_hands_it_on():
    unknown = torch.ones(2, 4)
    part = Calls(lambda m, x, y: m.deep(x, other=y), deep=Calls(lambda m, x, other: x + other))
    recording = recorded(lambda m, x: m.part(x, unknown) * 2, draw(2, 4), part=part)
    assert [(r.path, r.strangers) for r in recording.records] == [("part.deep", ("1",)), ("", ())] and recording.breaks == []


def test_buffers_and_parts_of_parameters_belong_to_the_layer():
    root = Calls(lambda m, x: x * m.scale + m.part.weight[0] + m.part.weight.data.view(-1)[:4], part=nn.Linear(4, 4))
    root.register_buffer("scale", torch.ones(4))
    assert not any(r.strangers for r in record(root, draw(2, 4)).records)


def test_a_leaf_is_told_with_its_strangers():
    unknown = torch.ones(2, 4)
    recording = recorded(lambda m, x: m.part(unknown) + m.part(input=unknown * 1) + m.part(x), draw(2, 4), part=nn.Linear(4, 4))
    leaves = [r.strangers for r in recording.records if r.func is None]
    assert leaves == [("0",), (), ()]
    by_name = recorded(lambda m, x: m.part(input=unknown), draw(2, 4), part=nn.Linear(4, 4))
    assert [r.strangers for r in by_name.records] == [("input",)]


def test_what_a_leaf_writes_into_a_container_is_known_afterwards():
    class Writes(nn.Module):
        def forward(self, x, cache):
            cache["k"] = x * 2
            return x + 1

    def work(m, x):
        cache = {}
        return m.part(x, cache) + cache["k"]

    recording = recorded(work, draw(2, 4), part=Writes(), leaf=lambda path, module: path == "part")
    assert told(recording) == [("part", None), ("", "add")]
    assert recording.records[1].strangers == () and recording.records[0].args[1] == {}, "as it was when the leaf was called"


def test_what_is_given_to_the_root_is_known_in_any_container():
    recording = record(
        Calls(lambda m, x, *, more: x + more["a"] + more["b"][0]), draw(4), more={"a": draw(4, seed=1), "b": [draw(4, seed=2)]}
    )
    assert [r.strangers for r in recording.records] == [(), ()]


# ---- memory that is overwritten


def iadd(y):
    y += 1


def isub(y):
    y -= 1


def imul(y):
    y *= 2


def itruediv(y):
    y /= 2


def ifloordiv(y):
    y //= 2


def ipow(y):
    y **= 2


def setitem(y):
    y[0] = 5


def method(y):
    y.clamp_(min=3)


def into(y):
    torch.neg(y, out=y)


CHANGES = [iadd, isub, imul, itruediv, ifloordiv, ipow, setitem, method, into]


@pytest.mark.parametrize("change", CHANGES)
def test_every_way_to_overwrite_leaves_earlier_records_alone(change):
    x = torch.tensor([1.0, 4.0, 9.0])
    expected = x.clone()
    change(expected)

    def work(m, x):
        y = x.clone()
        change(y)
        return y.abs()

    first, *_, last = recorded(work, x).records
    assert torch.equal(first.output, x) and torch.equal(last.args[0], expected)


def test_an_operator_that_returns_nothing_has_made_what_it_was_given():
    def work(m, x):
        y = x.clone()
        y[0] = 5.0
        return y

    copied, change = recorded(work, torch.tensor([1.0, 2.0])).records
    assert change.function == "__setitem__" and change.output.tolist() == [5.0, 2.0]
    assert change.args[0].tolist() == [1.0, 2.0] and change.args[1:] == (0, 5.0)
    assert copied.output.tolist() == [1.0, 2.0]


def test_an_operator_that_writes_elsewhere_spares_what_it_reads():
    kept = {}

    def work(m, x):
        a, b, target = x + 1, x + 2, x + 3
        kept.update(a=a, target=target)
        torch.add(a, b, out=target)
        return target * 1

    one, two, three, write, _ = recorded(work, torch.tensor([1.0, 2.0])).records
    assert one.output is kept["a"] and write.args[0] is one.output and write.args[1] is two.output, (
        "nothing of it was overwritten"
    )
    assert three.output is not kept["target"] and three.output.tolist() == [4.0, 5.0]
    assert write.output.tolist() == [5.0, 7.0] and "out" not in write.kwargs


def test_several_targets_are_all_kept():
    def work(m, x):
        values, indices = x[:, 0] * 1, x[:, 0].long()
        torch.max(x, 1, out=(values, indices))
        return values + indices

    records = recorded(work, torch.tensor([[1.0, 7.0], [6.0, 2.0]])).records
    assert [r.function for r in records[:4]] == ["__getitem__", "mul", "__getitem__", "long"]
    assert records[1].output.tolist() == [1.0, 6.0] and records[3].output.tolist() == [1, 6]


def test_what_was_one_tensor_stays_one_tensor_in_the_records_before():
    def work(m, x):
        y = x + 0
        z = torch.add(x, other=y)
        y.zero_()
        return z

    made, read, _ = recorded(work, torch.tensor([1.0, 2.0])).records
    assert read.kwargs["other"] is made.output and made.output.tolist() == [1.0, 2.0]


def test_an_argument_that_is_overwritten_later_is_kept_in_its_list():
    def work(m, x):
        y = x + 0
        z = torch.cat([x, y])
        y.zero_()
        return z

    records = recorded(work, torch.tensor([1.0, 2.0])).records
    assert [t.tolist() for t in records[1].args[0]] == [[1.0, 2.0]] * 2


def test_a_leaf_that_overwrites_its_input_keeps_what_it_was_given():
    x = torch.tensor([-1.0, 2.0])
    recording = recorded(lambda m, x: m.act(x + 0) * 1, x, act=nn.ReLU(inplace=True), leaf=lambda path, module: path == "act")
    act = recording.leaf("act")
    assert act.args[0].tolist() == [-1.0, 2.0] and act.output.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("inplace", [False, None, "no"])
def test_a_leaf_that_does_not_overwrite_is_given_the_very_tensor(inplace):
    act, x = nn.ReLU(), draw(3)
    act.inplace = inplace
    act.forward = torch.relu
    recording = recorded(lambda m, x: m.act(x), x, act=act, leaf=lambda path, module: path == "act")
    assert recording.records[0].args[0] is x


def test_what_leaves_the_layer_under_its_last_operator_is_not_a_copy():
    recording = recorded(lambda m, x: x.clone().mul_(2), torch.tensor([1.0]))
    assert recording.output is recording.records[-1].output and recording.output.item() == 2


# ---- doors


def test_an_unmade_result_is_not_blamed_on_a_sibling_of_a_like_name():
    """`mlp` makes its result beside torch, and made nothing itself; `mlp_b` made the last tensor of that shape."""
    recording = recorded(
        lambda m, x: m.mlp(m.mlp_b(x)) + 1, draw(2, 4), mlp=Calls(lambda m, x: silent(x)), mlp_b=nn.Sequential(nn.Linear(4, 4))
    )
    assert recording.breaks == []
    assert told(recording) == [("mlp_b.0", None), ("", "add")] and recording.unmade == ["mlp"]


def test_what_a_hook_returns_is_compared_with_the_last_of_its_shape_and_dtype():
    def work(m, x):
        wide = x * 2
        _ = x * 3
        _ = (x * 4).double()
        _ = x[:1] * 5
        return wide

    part = Calls(work)
    part.register_forward_hook(lambda m, args, wide: silent(wide))
    recording = recorded(lambda m, x: m.part(x) + 0, torch.ones(2, 4), part=part)
    (gap,) = recording.breaks
    assert (gap.path, gap.door, gap.after) == ("part", "output", 6)
    assert float(gap.expected.mean()) == 4.0 and float(gap.got.mean()) == 2.0 and gap.expected.dtype == torch.float32


def test_what_a_part_s_own_code_made_beside_torch_is_no_break_and_is_told():
    """A scripted function or a kernel is not seen, and is the model's own code."""
    scripted = torch.jit.script(_twice)
    recording = recorded(lambda m, x: m.part(x) + 0, torch.ones(2, 4), part=Calls(lambda m, x: scripted(x - 3)))
    assert recording.breaks == [] and recording.unmade == ["part"] and told(recording)[-1] == ("", "add")


def test_what_the_layer_s_own_code_made_beside_torch_is_nobody_s_result():
    scripted = torch.jit.script(_twice)
    recording = recorded(lambda m, x: scripted(x + 1), torch.ones(2, 4))
    (add,) = recording.records
    assert float(add.output.mean()) == 2.0 and float(recording.output.mean()) == 4.0 and recording.unmade == [""]


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_result_like_what_was_made_is_no_break_and_known_from_then_on():
    recording = recorded(lambda m, x: m.part(x) + 0, torch.ones(2, 4), part=Calls(lambda m, x: silent(x * 2)))
    assert recording.breaks == [] and recording.records[-1].strangers == ()


def handed(change):
    """A part that adds two tensors, and a hook that puts other tensors in their places."""
    part = Calls(lambda m, x, y: x + y)
    part.register_forward_pre_hook(lambda m, args: (args[0], change(args[1])))
    return recorded(lambda m, x: m.part(x, x * 2), torch.ones(3), part=part)


def test_the_same_values_in_another_argument_are_no_break():
    recording = handed(silent)
    assert recording.breaks == [] and recording.records[-1].strangers == ()


def test_a_changed_argument_is_told_with_what_it_was():
    (gap,) = handed(lambda y: torch.from_numpy(y.numpy() * 4)).breaks
    assert (gap.path, gap.door, gap.after) == ("part", "input", 1)
    assert gap.expected.tolist() == [2.0] * 3 and gap.got.tolist() == [8.0] * 3


def test_the_result_of_the_layer_stands_in_the_place_of_its_last_operator_of_that_shape():
    def work(m, x):
        y = x + 1
        _ = x[:1] * 9
        return y

    root = Calls(work)
    root.register_forward_hook(lambda m, args, y: silent(y))
    recording = record(root, torch.ones(2, 4))
    add, _, times = recording.records
    assert add.output is recording.output and times.output.tolist() == [[9.0] * 4] and recording.breaks == []


def test_a_result_of_another_shape_than_anything_made_changes_no_record():
    def work(m, x):
        _ = x + 1
        return torch.from_numpy(np.ones((7, 9)))

    recording = recorded(work, torch.ones(2))
    assert recording.output.shape == (7, 9) and recording.records[0].output.tolist() == [2.0, 2.0] and recording.breaks == []


def test_a_part_that_fails_and_is_forgiven_does_not_shift_the_paths():
    def fails(m, x):
        raise ValueError("no")

    def work(m, x):
        try:
            m.bad(x)
        except ValueError:
            x = x + 1
        return m.good(x) * 2

    recording = recorded(work, torch.ones(2), bad=Calls(fails), good=Calls(lambda m, x: x - 1))
    assert told(recording) == [("", "add"), ("good", "sub"), ("", "mul")] and recording.breaks == []


def test_a_part_that_is_stopped_before_it_is_entered_is_not_left():
    def stops(m, args):
        raise ValueError("not now")

    def work(m, x):
        try:
            m.bad(x)
        except ValueError:
            x = x + 1
        return m.good(x) * 2

    root = Calls(work, bad=Calls(lambda m, x: x), good=Calls(lambda m, x: x - 1))
    with Recorder(root, is_linear).watching() as recording:
        root.bad.register_forward_pre_hook(stops, prepend=True)
        root(torch.ones(2))
    assert told(recording) == [("", "add"), ("good", "sub"), ("", "mul")] and recording.output is recording.records[-1].output


def test_a_recorder_sees_a_second_call_of_its_root_as_well():
    root = Calls(lambda m, x: x + 1)
    with Recorder(root, is_linear).watching() as recording:
        root(torch.ones(2))
        second = root(torch.zeros(2))
    assert len(recording.records) == 2 and recording.output is second
    assert [r.strangers for r in recording.records] == [(), ()]


# ---- small helpers


@pytest.mark.parametrize(
    ("a", "b", "alike"),
    [
        ([1.0, NAN], [1.0, NAN], True), ([NAN, 1.0], [1.0, NAN], False), ([1.0], [1.0, 1.0], False), ([[1.0]], [1.0], False),
        ([0.0], [-0.0], True), ([1.0, NAN], [1.0, 1.0], False), ([1.0, 1.0], [1.0, NAN], False), ([NAN, 2.0], [NAN, 3.0], False),
        ([float("inf")], [float("inf")], True), ([float("inf")], [-float("inf")], False), ([], [], True),
    ],
)  # fmt: skip
def test_same_is_every_value_and_the_shape(a, b, alike):
    assert same(torch.tensor(a), torch.tensor(b)) is alike


def test_a_snapshot_has_containers_of_its_own_and_the_same_tensors():
    x, y = torch.ones(1), torch.zeros(1)
    nest = ([x], {"k": [y]})
    kept = snapshot(nest)
    nest[0].append(y)
    nest[1]["k"].clear()
    nest[1]["new"] = x
    assert kept[0][0] is x and len(kept[0]) == 1 and kept[1]["k"][0] is y and set(kept[1]) == {"k"}


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (torch.add, "add"),
        (torch.Tensor.add_, "add_"),
        (torch.Tensor.mT.__get__, "mT"),
        (torch.Tensor.__add__, "__add__"),
        ("text", "text"),
    ],
)
def test_functions_have_short_names(func, name):
    assert function_name(func) == name
