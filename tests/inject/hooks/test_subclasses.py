"""Frames that a layer opens in its forward, as on a GPU, and the classes that modules are given for it and lose again."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.inject import attach
from shaketable.inject.hooks import subclasses
from shaketable.inject.hooks.subclasses import LayerFrame, exchanged, framed, lookalike, on_gpu, reaches_gpu
from shaketable.inject.injection import Injection
from shaketable.inject.pass_context import Entry
from shaketable.plan import Plan
from tests.tensors import draw

X = draw(2, 4)


class Layer(nn.Module):
    """A product, and how often it was called."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x, *, scale=1.0):
        """Its own words."""
        return torch.tanh(self.proj(x)) * scale


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=2.0)
        return x


@pytest.fixture
def gpu(monkeypatch):
    """Every module is on a GPU, as far as its frames are concerned."""
    monkeypatch.setattr(attach, "reaches_gpu", lambda module: True)


def made(plan="gain:1@module.linear"):
    return Injection(Plan.parse(plan, seed=0), rank=0, allow_inert=True)


class Noting:
    """Stands for an injection: notes who is entered and left."""

    def __init__(self, has_operators=False, raises=False):
        self.has_operators, self.raises, self.said = has_operators, raises, []

    def enter(self, entry, args, kwargs, lazily=False):
        self.said.append(("enter", entry.index, len(args), sorted(kwargs), lazily))
        if self.raises:
            raise KeyError

    def leave(self, entry):
        self.said.append(("leave", entry.index))


def frame_on(module, index=1, is_root=False, **options):
    injection = Noting(**options)
    return injection, LayerFrame(module, injection, Entry(index, module, None, is_root=is_root))


# ---- the results are those of hooks


@pytest.mark.parametrize(
    "plan",
    [
        "relative_gaussian:0.5@module.linear",
        "relative_gaussian:0.5@layer.1,direction=both",
        "relative_gaussian:0.5@module.linear,point=weight",
        "relative_gaussian:0.5@op.matmul",
        "relative_gaussian:0.5@module.linear;relative_gaussian:0.5@op.matmul,layers=1",
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_a_layer_that_opens_its_frames_itself_computes_what_one_with_hooks_does(monkeypatch, plan, grad):
    found = []
    for quick in (False, True):
        monkeypatch.setattr(attach, "reaches_gpu", lambda module, quick=quick: quick)
        model = Stack().train(grad)
        with torch.set_grad_enabled(grad), st.inject(model, plan, seed=3) as ledger:
            ours = [m for m in model.modules() if "_shaketable_frames" in vars(m)]
            assert bool(ours) is quick
            results = [model(X), model(X)]
            if grad:
                sum(results).square().sum().backward()
                results += [p.grad for p in model.parameters()]
        found.append((results, ledger.sites[0].by("layer"), ledger.sites[0].by("phase")))
        assert [type(m) for m in model.modules()] == [type(m) for m in Stack().modules()]
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True)) and found[0][1:] == found[1][1:]


def test_a_layer_that_others_compute_again_has_its_noise_of_the_first_time(gpu):
    from tests.inject.test_passes import Again

    class Checkpointed(Stack):
        again = False

        def forward(self, x):
            for layer in self.layers:
                x = Again.apply(x, layer) if self.again else layer(x)
            return x

    grads = []
    for again in (False, True):
        model, x = Checkpointed(), X.clone().requires_grad_()
        model.again = again
        with st.inject(model, "relative_gaussian:0.5@module.linear", seed=1) as ledger:
            model(x).square().sum().backward()
        assert ledger.forward == 2 and ledger.to_dict()["sites"][0]["recomputed"] == 2 * again
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_forward_that_raises_leaves_no_frame_open(gpu):
    model = Stack()
    injection = st.inject(model, "gain:1@module.linear").enable()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert injection.calls.stack == []
    model(X)
    injection.close()


# ---- when frames are opened


@pytest.mark.parametrize(
    ("training", "grad", "operators", "root", "opened"),
    [
        (True, True, False, False, True), (True, False, False, False, True), (False, True, False, False, True),
        (False, False, False, False, False), (False, False, True, False, True), (False, False, False, True, True),
    ],
)  # fmt: skip
def test_a_frame_is_opened_where_it_may_be_needed(training, grad, operators, root, opened):
    layer = Layer().train(training)
    injection, handle = frame_on(layer, has_operators=operators, is_root=root)
    with torch.set_grad_enabled(grad):
        found = layer(X, scale=3.0)
    assert torch.equal(found, torch.tanh(layer.proj(X)) * 3.0)
    assert injection.said == ([("enter", 1, 1, ["scale"], False), ("leave", 1)] if opened else [])
    handle.remove()
    assert type(layer) is Layer and not any("shaketable" in name for name in vars(layer))


def test_a_frame_is_left_when_the_layer_or_another_plan_raises():
    layer = Layer()
    injection, _ = frame_on(layer)
    with pytest.raises(RuntimeError):
        layer(torch.ones(2, 5))
    assert [word for word, *_ in injection.said] == ["enter", "leave"]
    broken = Layer()
    injection, _ = frame_on(broken, raises=True)
    with pytest.raises(KeyError):
        broken(X)
    assert [word for word, *_ in injection.said] == ["enter", "leave"]


def test_the_frames_of_two_plans_are_opened_in_their_order_and_the_last_gives_the_class_back():
    layer, said = Layer(), []
    (one, first), (two, second) = frame_on(layer, 1), frame_on(layer, 2, has_operators=True)
    one.said = two.said = said
    kind = type(layer)
    layer(X)
    assert [entry[:2] for entry in said] == [("enter", 1), ("enter", 2), ("leave", 1), ("leave", 2)]
    first.remove()
    first.remove()
    assert type(layer) is kind and issubclass(kind, Layer) and kind is not Layer
    said.clear()
    with torch.no_grad():
        layer.eval()(X)
    assert [entry[:2] for entry in said] == [("enter", 2), ("leave", 2)]
    second.remove()
    second.remove()
    assert type(layer) is Layer and not any("shaketable" in name for name in vars(layer))


def test_a_frame_that_is_not_always_opened_leaves_those_that_are(gpu):
    layer = Layer()
    (one, first), (two, second) = frame_on(layer, 1, has_operators=True), frame_on(layer, 2)
    second.remove()
    with torch.no_grad():
        layer.eval()(X)
    assert [entry[0] for entry in one.said] == ["enter", "leave"] and two.said == []
    first.remove()
    assert type(layer) is Layer


@pytest.mark.parametrize("apart", [False, True])
def test_while_a_graph_is_traced_it_is_broken_around_a_pass_whose_head_is_apart(monkeypatch, apart):
    layer, said = Layer(), []
    injection, handle = frame_on(layer, is_root=True)
    injection.said, injection.is_traced_apart = said, lambda entry: apart and entry.is_root
    monkeypatch.setitem(torch.__dict__, "_dynamo", type("Dynamo", (), {"graph_break": lambda: said.append("break")}))
    found = subclasses._traced(Layer, layer, [handle], (X,), {"scale": 2.0})
    assert torch.equal(found, torch.tanh(layer.proj(X)) * 2.0)
    entered = ("enter", 1, 1, ["scale"], not apart)
    assert said == ([entered, "break", "break", ("leave", 1)] if apart else [entered, ("leave", 1)])
    handle.remove()


# ---- classes


def test_the_class_of_a_layer_looks_like_its_own_and_is_made_once():
    kind = framed(Layer)
    assert kind is framed(Layer) and issubclass(kind, Layer) and kind is not Layer
    assert (kind.__name__, kind.__qualname__, kind.__module__, kind.__doc__) == (
        Layer.__name__,
        Layer.__qualname__,
        Layer.__module__,
        Layer.__doc__,
    )
    assert kind.forward.__doc__ == "Its own words." and list(inspect.signature(kind.forward).parameters) == [
        "self",
        "x",
        "scale",
    ]


def test_the_class_of_a_layer_that_is_defined_inside_of_something_says_where():
    class Inner(Layer):
        pass

    assert framed(Inner).__qualname__ == Inner.__qualname__ != "Inner"


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_of_a_layer_are_of_its_own_class_and_clean(copied):
    layer = Layer()
    _, handle = frame_on(layer, has_operators=True)
    layer.own = 7
    twin = copied(layer)
    assert type(twin) is Layer and not any("shaketable" in name for name in vars(twin)) and twin.own == 7
    assert torch.equal(twin(X), layer(X)) and b"shaketable" not in pickle.dumps(layer)
    handle.remove()


def test_a_lookalike_of_a_lookalike_is_copied_as_what_both_are_of():
    first = lookalike(Layer, "_shaketable_a", {"extra": 1})
    second = lookalike(first, "_shaketable_b", {"more": 2})
    layer = Layer()
    layer.__class__ = second
    layer.__dict__.update(_shaketable_a=1, _shaketable_b_more=2, kept=3)
    twin = copy.deepcopy(layer)
    assert type(twin) is Layer and twin.kept == 3 and not any("shaketable" in name for name in vars(twin))
    assert (second.extra, second.more) == (1, 2)


class Base(nn.Module):
    pass


class Ours(Base):
    word = "ours"


class Mixin:
    pass


def test_a_class_is_taken_out_from_under_one_that_somebody_made_of_it():
    assert exchanged(Ours, Ours, Base) is Base
    theirs = type("Theirs", (Mixin, Ours), {"own": 5})
    found = exchanged(theirs, Ours, Base)
    assert found.__bases__ == (Mixin, Base) and found.__name__ == "Theirs" and found.own == 5 and not hasattr(found, "word")
    assert exchanged(theirs, Ours, Base) is found, "made once"
    deeper = type("Deeper", (theirs,), {})
    again = exchanged(deeper, Ours, Base)
    assert again.__name__ == "Deeper" and Ours not in again.__mro__ and again.__bases__ == (found,)


def test_a_layer_that_somebody_gave_another_class_meanwhile_keeps_that_without_ours():
    layer = Layer()
    _, handle = frame_on(layer)
    layer.__class__ = type("Sharded", (Mixin, type(layer)), {})
    layer(X)
    handle.remove()
    assert type(layer).__name__ == "Sharded" and type(layer).__bases__ == (Mixin, Layer)
    layer(X)


# ---- where modules are


class OnGpu(nn.Parameter):
    """A parameter that says where it is."""

    is_cuda = True


def test_a_module_is_on_a_gpu_by_its_own_parameters_and_reaches_one_by_those_inside():
    outer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not on_gpu(outer) and not reaches_gpu(outer) and not on_gpu(outer[1])
    outer[1]._parameters["bias"] = OnGpu(torch.zeros(2))
    assert on_gpu(outer[1]) and reaches_gpu(outer[1]) and not on_gpu(outer[0])
    assert not on_gpu(outer) and reaches_gpu(outer)
