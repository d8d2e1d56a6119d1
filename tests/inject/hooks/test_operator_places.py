"""Which taps an operator has: by family, model, layer and weight, in a frame and in a graph that is being traced."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.inject.compile import custom_ops
from shaketable.inject.hooks import operator_taps
from shaketable.inject.hooks.operator_taps import ExcludedWeights, Here, Traced, families
from shaketable.inject.injection import Injection
from shaketable.inject.pass_context import Entry, Frame, Pass
from shaketable.plan import OPS, Plan
from tests.inject.code_paths import Body

A = torch.linspace(-1, 1, 16).view(4, 4)


def made(plan, layers=2, owner=0, prefix=""):
    injection = Injection(Plan.parse(plan, seed=0), rank=0, allow_inert=True)
    injection.enabled = True
    injection.operators.make(owner, prefix, range(layers))
    return injection


def here(injection, layer=None, excluded=None, owner=0, **options):
    current = Pass(injection, "train", 1, (True,) * len(injection.faults), tuple(injection.faults), **options)
    entry = Entry(1, nn.Identity(), layer, owner, excluded)
    return Here(injection.operators, Frame(entry, current, layer, excluded, recomputing=False))


def names(taps):
    return [(tap.clause, tap.name) for tap in taps]


# ---- taps by place


def test_all_means_every_family_and_names_mean_themselves():
    assert families(("all",)) == OPS == families(("silu", "all")) and families(("silu", "matmul")) == ("silu", "matmul")


def test_a_tap_is_found_by_model_layer_family_and_reason():
    injection = made("gain:1@op.matmul;gain:1@op.matmul+silu,layers=1,include=lora+router;gain:1@module.linear")
    taps = injection.operators
    assert names(taps.tapped("matmul", 0, None, None)) == [(0, "matmul")]
    assert names(taps.tapped("matmul", 0, 0, None)) == [(0, "layer.0.matmul")]
    assert names(taps.tapped("matmul", 0, 1, None)) == [(0, "layer.1.matmul"), (1, "layer.1.matmul")]
    assert names(taps.tapped("silu", 0, 1, None)) == [(1, "layer.1.silu")] and taps.tapped("silu", 0, None, None) == []
    for reason in ("lora", "router"):
        assert names(taps.tapped("matmul", 0, 1, reason)) == [(1, "layer.1.matmul")]
        assert taps.tapped("matmul", 0, 0, reason) == []
    assert taps.tapped("matmul", 0, 1, "lm_head") == [] and taps.tapped("matmul", 1, 1, None) == []
    assert taps.tapped("matmul", 0, 2, None) == [] and len(injection.taps) == 5
    assert [tap.spot.layer for tap in injection.taps] == [None, 0, 1, 1, 1] and {tap.point for tap in injection.taps} == {
        "output"
    }


def test_layer_0_is_a_layer_and_operators_outside_of_layers_are_left_out_where_layers_are_named():
    injection = made("gain:1@op.matmul,layers=0")
    assert [tap.name for tap in injection.taps] == ["layer.0.matmul"]
    assert injection.operators.tapped("matmul", 0, None, None) == []


def test_a_second_model_has_taps_under_its_own_prefix():
    injection = made("gain:1@op.matmul", layers=1)
    injection.operators.make(1, "model1.", range(1))
    assert names(injection.operators.tapped("matmul", 1, 0, None)) == [(0, "model1.layer.0.matmul")]
    assert names(injection.operators.tapped("matmul", 1, None, None)) == [(0, "model1.matmul")]
    assert names(injection.operators.tapped("matmul", 0, 0, None)) == [(0, "layer.0.matmul")]


def test_a_module_that_is_an_operator_has_the_taps_of_its_own_place():
    injection = made("gain:1@op.silu,include=lora")
    of = injection.operators.of
    assert names(of("silu", Entry(1, nn.Identity(), 1))) == [(0, "layer.1.silu")]
    assert names(of("silu", Entry(1, nn.Identity(), 1, excluded="lora"))) == [(0, "layer.1.silu")]
    assert of("silu", Entry(1, nn.Identity(), 1, excluded="lm_head")) == [] == of("gelu", Entry(1, nn.Identity(), 1))
    assert of("silu", Entry(1, nn.Identity(), 1, owner=1)) == []


def test_who_calls_an_operator_of_a_graph_is_the_innermost_module_or_whoever_was_named():
    injection = made("gain:1@op.silu")
    tracing, operators = custom_ops.traces[injection.handle], injection.operators
    assert operators.tracing_entry() is None
    loose, outer, inner = (Entry(i, nn.Identity(), None) for i in range(3))
    operators.loose = loose
    assert operators.tracing_entry() is loose
    tracing.entries[:] = [outer, inner]
    assert operators.tracing_entry() is inner
    tracing.forget()


# ---- in a frame


def test_an_operator_in_a_frame_has_the_taps_of_its_layer_unless_it_is_left_out():
    injection = made("gain:1@op.matmul,include=lora")
    assert names(here(injection, 1).at("matmul", [A])) == [(0, "layer.1.matmul")]
    assert names(here(injection, 1, "lora").at("matmul", [A])) == [(0, "layer.1.matmul")]
    assert here(injection, 1, "router").at("matmul", [A]) == [] and here(injection, owner=1).at("matmul", [A]) == []


def test_the_reason_of_the_frame_comes_before_that_of_a_weight():
    injection = made("gain:1@op.matmul,include=lora")
    head = nn.Linear(4, 4)
    injection.operators.weights.add(head, "lm_head")
    injection.operators.weights.refresh()
    assert here(injection).at("matmul", [A, head.weight]) == []
    assert names(here(injection, excluded="lora").at("matmul", [A, head.weight])) == [(0, "matmul")]


def test_a_family_is_reached_where_a_tap_of_it_acts():
    injection = made("gain:1@op.matmul;gain:1@op.softmax")
    where = here(injection)
    where.frame.current.acts = (True, False)
    assert where.reaches("matmul", [A]) is True
    assert where.reaches("softmax", [A]) is False and where.reaches("silu", [A]) is False
    injection.enabled = False
    assert where.reaches("matmul", [A]) is False


def test_operators_are_numbered_by_layer_and_family():
    injection = made("gain:1@op.matmul")
    where = here(injection, 1)
    assert [where.number("matmul"), where.number("matmul"), where.number("silu"), where.number("matmul")] == [0, 1, 0, 2]
    inner = Here(injection.operators, Frame(where.frame.entry, where.frame.current, 0, None, False, outer=where.frame))
    assert inner.number("matmul") == 0 and where.number("matmul") == 3


def test_gradients_of_an_operator_are_told_their_argument_and_number():
    injection = made("gain:1@op.matmul")
    where, told = here(injection), []
    tap = SimpleNamespace(gradient=lambda *how: told.append(how), forward=lambda *how: told.append(how))
    where.gradient(tap, A, 2, 5)
    where.forward(tap, A)
    assert told == [(A, where.frame, 2, 5), (A, where.frame)]


# ---- hidden by attention


def test_each_clause_that_attention_hides_something_of_is_counted_once_where_it_acts():
    injection = made("gain:1@op.matmul+softmax;gain:1@op.softmax;gain:1@op.matmul;gain:1@op.sdpa")
    where = here(injection, 1)
    where.frame.current.acts = (True, True, False, True)
    where.note_fused([A])
    assert [site.fused for site in injection.sites] == [1, 1, 0, 0]
    where.frame.recomputing = True
    where.note_fused([A])
    assert [site.fused for site in injection.sites] == [1, 1, 0, 0]


# ---- autograd functions that somebody wrote by hand


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g @ b.T, a.T @ g


def multiply(a, b):
    return Multiply.apply(a, b)


def notes(plan, function, grad=True, **options):
    model, a = Body(function), A.clone().requires_grad_()
    with torch.set_grad_enabled(grad), st.inject(model, plan, allow_inert=True, **options) as ledger:
        model(a, A)
        model(a, A)
    return [site.notes for site in ledger.sites], ledger.forward


SAID = "an operator ({}) inside of Multiply, a hand-written autograd function: what its backward computes is not covered"


def test_an_operator_inside_of_a_function_by_hand_is_named_once():
    found, fires = notes("gain:1@op.matmul", multiply)
    assert found == [[SAID.format("lm_head")]] and fires == 2


@pytest.mark.parametrize(
    ("plan", "function", "grad"),
    [
        ("gain:1@op.matmul", torch.mm, True),
        ("gain:1@op.matmul", multiply, False),
        ("gain:1@op.silu", multiply, True),
        ("gain:1@op.matmul,phase=rollout", multiply, True),
        ("gain:0@op.matmul", multiply, True),
    ],
)
def test_nothing_is_said_where_there_is_none_or_no_gradient_or_no_fault(plan, function, grad):
    assert notes(plan, function, grad)[0] == [[]]


def test_each_clause_is_told_of_its_own():
    assert [len(n) for n in notes("gain:1@op.silu;gain:1@op.matmul;gain:0@op.matmul", multiply)[0]] == [0, 1, 0]


def test_an_operator_without_gradients_that_is_in_no_function_is_not_named():
    def quietly(a, b):
        with torch.no_grad():
            return a @ b

    assert notes("gain:1@op.matmul", quietly)[0] == [[]]


def test_the_layer_of_such_an_operator_is_said():
    model, a = nn.Module(), A.clone().requires_grad_()
    model.layers = nn.ModuleList(nn.Sequential(Body(lambda x: Multiply.apply(x, x))) for _ in range(2))
    model.forward = lambda x: model.layers[1](x)
    with st.inject(model, "gain:1@op.matmul", allow_inert=True) as ledger:
        model(a)
    assert ledger.sites[0].notes == [SAID.format("layer 1")]


def test_a_forward_with_something_else_called_ctx_is_no_function_by_hand():
    class Module(nn.Module):
        def forward(self, x, ctx=None):
            with torch.no_grad():
                return x @ x

    model = Module()
    with st.inject(model, "gain:1@op.matmul", allow_inert=True) as ledger:
        model(A.clone().requires_grad_(), ctx="text")
    assert ledger.sites[0].notes == []


# ---- weights that are left out


def known(*modules):
    weights = ExcludedWeights()
    for module, reason in modules:
        weights.add(module, reason)
    weights.refresh()
    return weights


def test_a_weight_is_known_by_its_memory_and_so_are_its_views():
    head, gate, other = nn.Linear(4, 6), nn.Linear(4, 2, bias=False), nn.Linear(4, 4)
    weights = known((head, "lm_head"), (gate, "router"))
    for x in (head.weight, head.weight.T, head.weight[2:4], head.weight.detach(), head.bias):
        assert weights.owner([A, x]) == "lm_head" == weights.owner([x, A])
    assert weights.owner([gate.weight.t()]) == "router"
    assert weights.owner([other.weight, A]) is None and weights.owner([]) is None and weights.owner([None, 3, "x"]) is None


def test_the_first_that_is_left_out_among_the_arguments_gives_the_reason():
    head, gate = nn.Linear(4, 6), nn.Linear(4, 2)
    weights = known((head, "lm_head"), (gate, "router"))
    assert weights.owner([gate.weight, head.weight]) == "router" and weights.owner([head.weight, gate.weight]) == "lm_head"


def test_a_copy_of_a_weight_is_another_one_but_for_what_was_cast_last():
    head = nn.Linear(4, 6)
    weights = known((head, "lm_head"))
    first, second = head.weight.double(), head.weight.half()
    assert weights.owner([first]) is None
    assert weights.cast(head.weight, first) is first and weights.owner([A, first.T]) == "lm_head"
    assert weights.cast(first, second) is second, "a cast of what was cast"
    assert weights.owner([second]) == "lm_head" and weights.owner([first]) is None, "the last one"
    plain = A.double()
    assert weights.cast(A, plain) is plain and weights.owner([plain]) is None and weights.owner([second]) == "lm_head"


def test_what_was_cast_is_forgotten_when_a_pass_begins():
    head = nn.Linear(4, 6)
    weights = known((head, "lm_head"))
    found = weights.cast(head.weight, head.weight.double())
    weights.refresh()
    assert weights.owner([found]) is None and weights.owner([head.weight]) == "lm_head"


def test_a_cast_that_is_no_plain_tensor_and_one_without_exclusions_are_nobodys():
    head = nn.Linear(4, 6)
    weights = known((head, "lm_head"))
    assert weights.cast(head.weight, "text") == "text" and weights._cast is None
    strange = head.weight.double().as_subclass(type("Strange", (torch.Tensor,), {}))
    weights.cast(head.weight, strange)
    assert weights._cast is None and weights.owner([strange]) is None
    assert ExcludedWeights().cast(head.weight, A) is A


def test_weights_that_were_moved_are_found_where_they_are_now():
    head, gate = nn.Linear(4, 6), nn.Linear(4, 2)
    weights, old = known((head, "lm_head"), (gate, "router")), head.weight.data
    head.weight.data, gate.weight.data = head.weight.data.clone(), gate.weight.data.clone()
    assert weights.owner([head.weight]) is None
    weights.refresh()
    assert (
        weights.owner([head.weight]) == "lm_head" and weights.owner([gate.weight]) == "router" and weights.owner([old]) is None
    )


def test_only_the_own_parameters_of_a_module_are_left_out():
    outer = nn.Sequential(nn.Linear(4, 4))
    outer.scale = nn.Parameter(torch.ones(3))
    weights = known((outer, "lora"))
    assert weights.owner([outer.scale]) == "lora" and weights.owner([outer[0].weight]) is None


def test_without_exclusions_nothing_is_looked_up():
    weights = ExcludedWeights()
    weights.refresh()
    assert weights.owner([A]) is None and weights.has_head is False and weights.traced_owner([A]) is None


@pytest.mark.parametrize(
    ("module", "reason", "head"),
    [(nn.Linear(2, 2), "lm_head", True), (nn.Linear(2, 2), "router", False), (nn.Embedding(2, 2), "lm_head", True)],
)
def test_a_linear_or_an_embedding_that_is_a_head_is_one_while_a_graph_is_traced(module, reason, head):
    weights = known((module, reason))
    assert weights.has_head is head
    assert weights.traced_owner([A, module.weight]) == ("lm_head" if head else None)
    assert weights.traced_owner([A, module.weight.detach()]) is None and weights.traced_owner([]) is None


# ---- in a graph that is being traced


@pytest.fixture
def traced(monkeypatch):
    """An injection with a head and layers, and a graph that is being traced of it."""
    injection = made("gain:1@op.matmul+softmax,include=lm_head;gain:1@op.matmul")
    head = nn.Linear(4, 4)
    injection.operators.weights.add(head, "lm_head")
    tracing = custom_ops.traces[injection.handle]
    monkeypatch.setattr(tracing, "ticket", lambda x: torch.zeros(5, dtype=torch.int64))
    return injection, head, tracing


def test_an_operator_of_a_graph_has_the_taps_of_the_module_that_calls_it(traced):
    injection, head, _ = traced
    where = Traced(injection.operators, Entry(1, nn.Identity(), 1))
    assert names(where.at("matmul", [A])) == [(0, "layer.1.matmul"), (1, "layer.1.matmul")]
    assert names(where.at("matmul", [A, head.weight])) == [(0, "layer.1.matmul")], "its own head is left out by the second"
    assert where.reaches("softmax", [A]) is True and where.reaches("silu", [A]) is False
    lora = Traced(injection.operators, Entry(1, nn.Identity(), 1, excluded="lora"))
    assert lora.at("matmul", [A]) == [] and lora.at("matmul", [head.weight]) == []
    assert Traced(injection.operators, Entry(1, nn.Identity(), 1, owner=1)).at("matmul", [A]) == []


@pytest.mark.parametrize(
    ("root", "with_gradients", "grad", "left_out"),
    [(True, True, False, True), (False, True, False, False), (True, False, False, False), (True, True, True, False)],
)
def test_a_product_by_hand_of_the_model_itself_is_that_of_its_head(traced, root, with_gradients, grad, left_out):
    injection, _, tracing = traced
    tracing.with_gradients = with_gradients
    where = Traced(injection.operators, Entry(1, nn.Identity(), None, is_root=root))
    with torch.set_grad_enabled(grad):
        assert names(where.at("matmul", [A])) == ([(0, "matmul")] if left_out else [(0, "matmul"), (1, "matmul")])
    injection.operators.weights._heads.clear()
    with torch.set_grad_enabled(grad):
        assert len(where.at("matmul", [A])) == 2, "a model without a head has none"


def test_operators_of_a_graph_are_numbered_by_layer_and_family(traced):
    injection, _, _ = traced
    one, other = (Traced(injection.operators, Entry(i, nn.Identity(), i)) for i in (0, 1))
    assert [one.number("matmul"), one.number("matmul"), one.number("softmax"), other.number("matmul")] == [0, 1, 0, 0]


def test_an_operator_of_a_graph_by_hand_is_noted_with_its_layer(traced):
    injection, _, tracing = traced
    tracing.with_gradients = True
    said = "an operator ({}) inside of a hand-written autograd function: what its backward computes is not covered"
    where, root = (Traced(injection.operators, Entry(1, nn.Identity(), layer)) for layer in (0, None))
    where.note_by_hand(injection.taps)
    assert [site.notes for site in injection.sites] == [[], []]
    with torch.no_grad():
        where.note_by_hand([])
        assert [site.notes for site in injection.sites] == [[], []]
        where.note_by_hand(injection.taps)
        root.note_by_hand(injection.taps)
    assert injection.sites[0].notes == [said.format("layer 0"), said.format("lm_head")]


def test_what_a_graph_places_is_told_its_tap_argument_and_number(traced, monkeypatch):
    injection, _, _ = traced
    where, told, tap = Traced(injection.operators, Entry(1, nn.Identity(), 0)), [], injection.taps[0]
    monkeypatch.setattr(custom_ops, "trace_forward", lambda *how: told.append(how))
    monkeypatch.setattr(custom_ops, "trace_gradient", lambda *how: told.append(how))
    where.forward(tap, A)
    where.gradient(tap, A, 2, 7)
    assert told == [(A, tap.handle), (A, tap.handle, 2, 7, False)]


def test_attention_that_a_graph_hides_is_counted_when_it_runs(traced):
    injection, _, tracing = traced
    injection.begin_compiled_pass(1)
    moment = injection.compiled_pass.moment
    signed = moment - (1 << 64) if moment >= 1 << 63 else moment
    tracing.ticket = lambda x: torch.tensor([signed, 1, 0, 1, 1])
    Traced(injection.operators, Entry(1, nn.Identity(), 0)).note_fused([A])
    assert [site.fused for site in injection.sites] == [1, 1]


def test_the_name_of_a_function_is_that_of_its_class():
    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            found.append((lambda: operator_taps._function_by_hand())())
            return x.clone()

    found = []
    Named.apply(A)
    assert found == ["Named"] and (lambda: operator_taps._function_by_hand())() is None
