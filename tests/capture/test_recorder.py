"""What the recorder sees of a call, and what it leaves behind."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shaketable as st
from shaketable.capture.recorder import Recorder, same
from shaketable.sites.nested_tensors import tensors_of
from tests.locate.architectures import build, tokens
from tests.tensors import draw


def is_leaf(path, module):
    return isinstance(module, nn.Linear | nn.SiLU)


def record(root, *args, leaf=is_leaf, **kwargs):
    recorder = Recorder(root, leaf)
    with recorder.watching() as recording:
        root(*args, **kwargs)
    return recording


def names(recording):
    return [(r.path, r.function) for r in recording.records]


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 4)

    def forward(self, hidden):
        return self.down(self.act(self.up(hidden)) * 2)


class Layer(nn.Module):
    """A residual addition around a container of leaves."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x, extra=None):
        return x + self.mlp(x if extra is None else extra)


class Stack(nn.Module):
    """Containers in a container, called by name only."""

    def __init__(self):
        super().__init__()
        self.inner = Layer()
        self.last = nn.Linear(4, 4)

    def forward(self, *, x):
        return self.last(self.inner(x=x, extra=x * 3))


def made(module, seed=0):
    torch.manual_seed(seed)
    return module().eval()


# ---- operators


def test_leaves_and_functions_in_their_order():
    layer, x = made(Layer), draw(3, 4)
    recording = record(layer, x)
    assert names(recording) == [("mlp.up", None), ("mlp.act", None), ("mlp", "mul"), ("mlp.down", None), ("", "add")]
    up, act, double, down, add = recording.records
    assert up.args[0] is x and act.args[0] is up.output and double.args == (act.output, 2)
    assert down.args[0] is double.output and add.args[1] is down.output
    assert torch.equal(add.output, layer(x)) and recording.output is add.output
    assert not recording.breaks


def test_a_call_with_names_only_and_containers_in_containers():
    stack, x = made(Stack), draw(3, 4)
    recording = record(stack, x=x)
    assert names(recording) == [
        ("", "mul"), ("inner.mlp.up", None), ("inner.mlp.act", None), ("inner.mlp", "mul"), ("inner.mlp.down", None),
        ("inner", "add"), ("last", None),
    ]  # fmt: skip
    assert torch.equal(recording.records[1].args[0], x * 3)
    assert not recording.breaks
    assert recording.leaf("last") is recording.records[-1] and recording.leaf("inner") is None and recording.leaf("") is None


def test_a_leaf_is_seen_from_outside_of_other_peoples_hooks():
    layer, x = made(Layer), draw(3, 4)
    layer.mlp.up.register_forward_pre_hook(lambda m, args: (args[0] * 10,))
    layer.mlp.up.register_forward_hook(lambda m, args, out: out + 1)
    recording = record(layer, x)
    up = recording.leaf("mlp.up")
    assert torch.equal(up.args[0], x)
    assert torch.equal(up.output, F.linear(x * 10, layer.mlp.up.weight, layer.mlp.up.bias) + 1)
    assert names(recording) == names(record(made(Layer), x)), "what hooks compute is not the layer's"


def test_strangers_are_tensors_nobody_made():
    constant = draw(3, 4, seed=9)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return torch.add(x * self.scale, other=constant) + self.scale[:4]

    recording = record(Odd(), draw(3, 4))
    assert [(r.function, r.external) for r in recording.records] == [
        ("mul", ()), ("add", ("other",)), ("__getitem__", ()), ("add", ()),
    ]  # fmt: skip


# ---- memory that is overwritten


def mul_(y):
    y.mul_(3)


def imul(y):
    y *= 3


def isub(y):
    y -= -2 * y


def setitem(y):
    y[:] = y * 3


def view(y):
    y.view(-1).mul_(3)


def out(y):
    torch.mul(y, 3, out=y)


@pytest.mark.parametrize("overwrite", [mul_, imul, isub, setitem, view, out])
def test_earlier_records_keep_the_values_they_had(overwrite):
    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            z = y + 1
            overwrite(y)
            return y + z

    root, x = made(Overwriting), draw(3, 4)
    recording = record(root, x)
    y = F.linear(x, root.linear.weight, root.linear.bias).detach()
    linear, plus = recording.records[:2]
    assert torch.equal(linear.output, y)
    assert torch.equal(plus.args[0], y) and torch.equal(plus.output, y + 1)
    change = next(
        r
        for r in recording.records[2:]
        if "add" not in r.function and torch.equal(next(tensors_of(r.output)).view(3, 4), y * 3)
    )
    assert torch.equal(next(tensors_of(change.args)).view(3, 4), y), "the operator's own argument is the old value"
    assert "out" not in change.kwargs
    assert torch.equal(recording.records[-1].output, y * 3 + (y + 1))
    assert not recording.breaks


def test_what_is_overwritten_inside_of_a_mapping():
    class Cache(nn.Module):
        def forward(self, x, *, cache):
            y = cache["k"][0] + x
            cache["k"][0].zero_()
            return y

    past = draw(3, seed=4)
    recording = record(Cache(), draw(3), cache={"k": [past.clone()]})
    assert torch.equal(recording.records[0].args[0], past)


# ---- doors


def silent(change):
    """A hook that changes values as a faulty device does: no torch function is seen."""

    def hook(module, args, *rest):
        with torch._C.DisableTorchFunction():
            return change(args, *rest)

    return hook


def test_a_hook_that_computes_in_the_open_is_an_operator():
    layer, x = made(Layer), draw(3, 4)
    layer.mlp.register_forward_hook(lambda m, args, out: out + 1)
    recording = record(layer, x)
    assert names(recording)[-2:] == [("mlp", "add"), ("", "add")] and not recording.breaks


@pytest.mark.parametrize("path", ["mlp", "inner", "inner.mlp"])
def test_other_values_behind_a_module_are_a_break_at_its_output(path):
    root, x = (made(Layer), draw(3, 4)) if path == "mlp" else (made(Stack), draw(3, 4))
    root.get_submodule(path).register_forward_hook(silent(lambda args, out: out + 1))
    recording = record(root, x=x)
    (found,) = recording.breaks
    assert (found.path, found.side) == (path, "output")
    assert torch.equal(found.got, found.expected + 1)
    assert found.expected is recording.records[found.after - 1].output


@pytest.mark.parametrize("path", ["mlp", "inner", "inner.mlp"])
def test_other_values_before_a_module_are_a_break_at_its_input(path):
    root, x = (made(Layer), draw(3, 4)) if path == "mlp" else (made(Stack), draw(3, 4))
    change = silent(lambda args, kwargs: (tuple(a + 1 for a in args), {k: v + 1 for k, v in kwargs.items()}))
    root.get_submodule(path).register_forward_pre_hook(change, with_kwargs=True)
    recording = record(root, x=x)
    assert {(b.path, b.side) for b in recording.breaks} == {(path, "input")}
    assert len(recording.breaks) == (2 if path == "inner" else 1), "every argument is looked at"
    assert all(torch.equal(b.got, b.expected + 1) for b in recording.breaks)
    assert recording.breaks[0].after == (0 if path == "mlp" else 1)


@pytest.mark.parametrize("copy", [torch.clone, lambda t: t + 0, lambda t: t.view_as(t)])
def test_equal_copies_are_no_break(copy):
    root = made(Stack)
    for path in ("inner", "inner.mlp"):
        root.get_submodule(path).register_forward_hook(silent(lambda args, out: copy(out)))
        enter = silent(lambda args, kwargs: (tuple(map(copy, args)), {k: copy(v) for k, v in kwargs.items()}))
        root.get_submodule(path).register_forward_pre_hook(enter, with_kwargs=True)
    assert not record(root, x=draw(3, 4)).breaks


def test_what_the_layer_returns_stands_for_its_last_operator():
    layer, x = made(Layer), draw(3, 4)
    healthy = layer(x)
    layer.register_forward_hook(silent(lambda args, out: out * 2))
    recording = record(layer, x)
    assert torch.equal(recording.output, healthy * 2)
    assert recording.records[-1].output is recording.output
    assert not recording.breaks


# ---- planted faults


@pytest.fixture(scope="module")
def llama():
    return build("llama")


def layer_inputs(model):
    """What the first decoder layer was given."""
    kept = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda m, a, k: kept.append((a, k)), with_kwargs=True)
    with torch.no_grad():
        model(tokens(), use_cache=False)
    hook.remove()
    return kept[0]


def llama_leaf(path, module):
    return isinstance(module, nn.Linear) or "Norm" in type(module).__name__ or "SiLU" in type(module).__name__


@pytest.mark.parametrize(
    ("plan", "hit"),
    [
        ("gain:0.5@module.mlp.up_proj", "mlp.up_proj"),
        ("gain:0.5@module.mlp.up_proj,point=input", "mlp.up_proj"),
        ("gain:0.5@module.mlp.up_proj,point=weight", "mlp.up_proj"),
        ("gain:0.5@module.input_layernorm", "input_layernorm"),
        ("gain:0.5@op.silu", "mlp.act_fn"),
        ("gain:0.5@op.sdpa", "scaled_dot_product_attention"),
        ("relative_gaussian:0.5@op.matmul", "self_attn.q_proj"),
        ("gain:0.5@layer.0", ""),
    ],
)
def test_planted_faults_are_not_seen_as_operators(llama, plan, hit):
    layer = llama.model.layers[0]
    args, kwargs = layer_inputs(llama)
    healthy = record(layer, *args, leaf=llama_leaf, **kwargs)
    with st.inject(llama, plan, seed=0) as ledger:
        faulty = record(layer, *args, leaf=llama_leaf, **kwargs)
    assert ledger.changed
    assert names(faulty) == names(healthy) and not faulty.breaks
    pairs = zip(healthy.records, faulty.records, strict=True)
    first = next(b for a, b in pairs if not same(next(tensors_of(a.output)), next(tensors_of(b.output))))
    assert hit in (first.path, first.function)


@pytest.mark.parametrize(
    ("plan", "side"), [("gain:0.5@module.self_attn", "output"), ("gain:0.5@module.mlp,point=input", "input")]
)
def test_planted_faults_at_doors_are_breaks(llama, plan, side):
    args, kwargs = layer_inputs(llama)
    with st.inject(llama, plan, seed=0):
        recording = record(llama.model.layers[0], *args, leaf=llama_leaf, **kwargs)
    assert [(b.path, b.side) for b in recording.breaks] == [(plan.split("module.")[1].split(",")[0], side)]


# ---- what is left behind


def hooks(root):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in root.modules())


@pytest.mark.parametrize("where", ["", "inner", "inner.mlp", "inner.mlp.act", "last"])
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_no_hook_and_no_mode_is_left_by_an_exception(where, moment, monkeypatch):
    root, x = made(Stack), draw(3, 4)

    def fail(*args, **kwargs):
        raise RuntimeError("broken")

    module = root.get_submodule(where)
    recorder = Recorder(root, is_leaf)
    with monkeypatch.context() as patch:
        if moment == "during":
            patch.setattr(module, "forward", fail)
        own = {"before": module.register_forward_pre_hook, "after": module.register_forward_hook}.get(moment)
        handle = own(fail) if own else None
        with pytest.raises(RuntimeError, match="broken"), recorder.watching():
            root(x=x)
        if handle:
            handle.remove()
    assert hooks(root) == 0
    before = len(recorder.recording.records)
    root(x=x)
    _ = x * 2
    assert len(recorder.recording.records) == before
    assert len(record(root, x=x).records) == 7, "the next recording is whole"


# ---- nests of tensors
