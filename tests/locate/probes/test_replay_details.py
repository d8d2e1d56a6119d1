"""Replay record by record: what is judged, from which values, what is counted, and what nobody can say."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shaketable.locate.capture.recorder import Record, Recording
from shaketable.locate.probes import replay
from shaketable.locate.probes.replay import Host, Judgement, Violation, judge, rows_of
from shaketable.locate.probes.rounding import Precision
from tests.locate.probes.replayed_functions import judged

EXACT = Precision()
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Reference:
    """Leaves by their paths, weights by their names, and what parameters should hold."""

    def __init__(self, leaves=None, weights=None, parameters=()):
        self.leaves, self.weights, self.parameters, self.asked = leaves or {}, weights or {}, list(parameters), []

    def leaf(self, path):
        self.asked.append(path)
        return self.leaves.get(path)

    def weight(self, name):
        return self.weights[name]

    def wide(self, tensor):
        return tensor.detach().double()

    def like(self, tensor):
        return next((whole for own, whole in self.parameters if own is tensor), None)


def judged_record(record, reference=None, prefix="", precision=EXACT, **options):
    records = record if isinstance(record, list) else [record]
    return judge(Recording(records), reference or Reference(), prefix, precision, **options)


def called(func, *args, path="mlp", output=None, **kwargs):
    """A record of a function with what it really makes, or with something else."""
    made = func(*args, **kwargs) if output is None else output
    return Record(path, func, args, kwargs, made)


def a_leaf(kind="linear", bias=False, fails=None):
    """A leaf that allows its own input."""

    def allowed(call, weight):
        if fails is not None:
            raise fails
        return replay.RoundingInterval.exactly(next(a for a in (*call.args, *call.kwargs.values())))

    return SimpleNamespace(kind=kind, module=nn.Linear(2, 2, bias=bias), allowed=allowed)


# ---- what a violation says


@pytest.mark.parametrize(
    ("outside", "share", "lanes"),
    [
        ([[True, False, False], [True, False, True]], 0.5, [0, 2]),
        ([False, True], 0.5, [1]),
        (True, 1.0, [0]),
        (False, 0.0, []),
        ([[[False, True]], [[False, False]]], 0.25, [1]),
    ],
)
def test_share_and_lanes_of_a_violation(outside, share, lanes):
    where = torch.tensor(outside)
    found = Violation("a", None, 0, where, where.float(), torch.zeros(1), torch.zeros(1))
    assert (found.share, found.lanes, found.tokens) == (share, lanes, None)


def test_nothing_has_no_share():
    where = torch.zeros(0, 3, dtype=torch.bool)
    assert Violation("a", None, 0, where, where.float(), torch.zeros(0), torch.zeros(0)).share == 0.0


@pytest.mark.parametrize(
    ("shape", "rows"), [((), 1), ((5,), 1), ((2, 5), 2), ((2, 3, 5), 6), ((0, 5), 0), ((3, 0), 0), ((0,), 0)]
)
def test_rows_are_all_but_the_last_dimension(shape, rows):
    assert rows_of(torch.zeros(shape)) == rows


# ---- coverage


def test_rows_are_counted_over_calls_of_one_operator():
    found = Judgement()
    found.cover("a", 10, 4, True)
    found.cover("a", 3, 3, True)
    found.cover("b", 5, 5, False)
    found.cover("b", 2, 2, False)
    assert found.coverage == {
        "a": {"rows": 13, "replayed": 7, "checksums": 6},
        "b": {"rows": 7, "replayed": 0, "checksums": 0, "agreed": 7},
    }


def test_every_result_of_a_judged_operator_is_counted_under_its_label():
    found = judged_record([called(torch.add, X, X), called(torch.add, X[:1], X[:1]), called(torch.neg, X, path="")])
    usual = {"checksums": 0}
    assert found.coverage == {"mlp:add": {"rows": 5, "replayed": 5} | usual, "neg": {"rows": 4, "replayed": 4} | usual}
    assert found.judged == 3 and not found.violations and not found.unknown


def test_what_was_wrong_is_counted_too():
    found = judged_record(called(torch.add, X, X, output=X + 1))
    assert found.coverage["mlp:add"]["replayed"] == 4 and len(found.violations) == 1


def test_a_function_without_definition_is_counted_as_agreed_where_it_agrees():
    found = judged_record(called(torch.cumsum, X, 1))
    assert found.coverage == {"mlp:cumsum": {"rows": 4, "replayed": 0, "checksums": 0, "agreed": 4}} and found.judged == 1
    found = judged_record(called(torch.cumsum, X, 1, output=X + 1))
    assert found.coverage == {} and found.judged == 1
    assert found.unknown == {"mlp:cumsum": "no host definition of cumsum, and host and device differ"}


# ---- what nobody can judge


@pytest.mark.parametrize(
    "error", [NotImplementedError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, StopIteration]
)
def test_a_definition_that_does_not_fit_is_unknown_in_one_line(error):
    reference = Reference({"norm": a_leaf("rmsnorm", fails=error("first line\nsecond line"))})
    found = judged_record(Record("norm", None, (X,), {}, X), reference)
    (reason,) = found.unknown.values()
    assert reason.startswith(f"{error.__name__}: ") and "first line" in reason and "\n" not in reason
    assert list(found.unknown) == ["norm"] and (found.judged, found.coverage, found.violations) == (0, {}, [])


def test_an_error_without_words_has_no_message():
    reference = Reference({"norm": a_leaf("rmsnorm", fails=RuntimeError())})
    assert judged_record(Record("norm", None, (X,), {}, X), reference).unknown == {"norm": "RuntimeError: no message"}


def test_an_error_of_the_judge_is_not_swallowed():
    reference = Reference({"norm": a_leaf("rmsnorm", fails=ZeroDivisionError("ours"))})
    with pytest.raises(ZeroDivisionError):
        judged_record(Record("norm", None, (X,), {}, X), reference)


def test_the_first_reason_is_kept_and_what_follows_is_judged():
    fails = iter([RuntimeError("one"), RuntimeError("two")])

    def raising(*args):
        raise next(fails)

    records = [
        Record("mlp", raising, (X,), {}, X + 1),
        Record("mlp", raising, (X,), {}, X + 1),
        called(torch.neg, X, output=X + 1),
    ]
    found = judged_record(records)
    assert found.unknown == {"mlp:raising": "RuntimeError: one"}
    assert [(v.function, v.order) for v in found.violations] == [("neg", 2)]


# ---- leaves


@pytest.mark.parametrize(("prefix", "full"), [("model.layers.1", "model.layers.1.norm"), ("", "norm")])
def test_a_leaf_is_looked_up_by_its_full_path(prefix, full):
    reference = Reference({full: a_leaf("rmsnorm")})
    found = judged_record(Record("norm", None, (X,), {}, X), reference, prefix)
    assert reference.asked == [full] and found.coverage == {"norm": {"rows": 4, "replayed": 4, "checksums": 0}}


def test_a_leaf_that_makes_other_values_is_a_violation_without_function():
    wrong = X.clone()
    wrong[2, 3] += 1
    [found] = judged_record(Record("norm", None, (X,), {}, (wrong, None)), Reference({"norm": a_leaf("rmsnorm")})).violations
    assert (found.path, found.function, found.order, found.lanes, found.tokens) == ("norm", None, 0, [3], None)
    assert found.low.tolist() == found.high.tolist() == [X[2, 3].item()] and torch.equal(found.got, wrong)


def test_leaves_that_are_skipped_are_skipped_and_functions_of_that_path_are_not():
    reference = Reference({"norm": a_leaf("rmsnorm")})
    records = [Record("norm", None, (X,), {}, X + 1), called(torch.neg, X, path="norm", output=X + 1)]
    found = judged_record(records, reference, skip={"norm"})
    assert [(v.function, v.order) for v in found.violations] == [("neg", 1)] and found.judged == 1
    for skip in (None, set(), {"other"}):
        assert [v.order for v in judged_record(records, reference, skip=skip).violations] == [0, 1]


# ---- long products


class Product(nn.Module):
    def __init__(self, kind, bias, dtype=torch.float32):
        super().__init__()
        chance = torch.Generator().manual_seed(3)
        w = torch.randn(5, 6, generator=chance).to(dtype)
        self.linear = nn.Linear(6, 5, bias=bias, dtype=dtype)
        self.linear.weight.data.copy_(w)
        self.stored = (w if kind == "linear" else w.T.contiguous()).detach()


def long_product(monkeypatch, kind="linear", bias=True, dtype=torch.float32, batch=1, rows=3, tokens=13, named=False):
    """Thirteen tokens, of which three or so are replayed; every fourth is one of them."""
    from shaketable.locate.capture import leaf_modules

    monkeypatch.setattr(replay, "ROWS", rows)
    module = Product(kind, bias, dtype)
    x = torch.randn(batch, tokens, 6, generator=torch.Generator().manual_seed(4)).to(dtype)
    weights = {"p.weight": module.stored} | ({"p.bias": module.linear.bias.detach()} if bias else {})
    owner = module.linear if kind == "linear" else SimpleNamespace(_parameters=module.linear._parameters)
    reference = Reference({"p": leaf_modules.Leaf(kind, owner)}, weights)
    y = module.linear(x).detach()
    return reference, Record("p", None, () if named else (x,), {"input": x} if named else {}, y)


KINDS = [(kind, bias) for kind in ("linear", "conv1d") for bias in (True, False)]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("kind", "bias"), KINDS)
def test_of_a_long_product_every_so_many_tokens_and_the_last_are_replayed(monkeypatch, kind, bias, named):
    reference, record = long_product(monkeypatch, kind, bias, named=named)
    found = judged_record(record, reference)
    assert found.coverage == {"p": {"rows": 13, "replayed": 4, "checksums": 9}} and not found.violations and not found.unknown


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("kind", "bias"), KINDS)
@pytest.mark.parametrize("token", [4, 6, 12])
def test_any_token_of_a_long_product_that_is_wrong_is_found_by_its_own_number(monkeypatch, kind, bias, token, named):
    reference, record = long_product(monkeypatch, kind, bias, named=named)
    record.output[0, token, 2] += 1
    [found] = judged_record(record, reference).violations
    kept = sorted({0, 4, 8, 12, token})
    assert found.tokens == kept and found.outside.nonzero().tolist() == [[0, kept.index(token), 2]]
    assert found.got.shape == (1, len(kept), 5)


@pytest.mark.parametrize(
    ("options", "replayed"),
    [
        ({"tokens": 5}, 5),
        ({"tokens": 6}, 4),
        ({"batch": 2}, 26),
        ({"dtype": torch.bfloat16}, 13),
        ({"dtype": torch.float16}, 13),
        ({"rows": 13}, 13),
        ({"rows": 7}, 13),
        ({"rows": 6}, 7),
    ],
)
def test_short_batched_and_reduced_products_are_replayed_as_a_whole(monkeypatch, options, replayed):
    """A step of one is none; of six tokens and a step of two the first, third and fifth are replayed, and the last."""
    reference, record = long_product(monkeypatch, **options)
    found = judged_record(record, reference)
    rows = rows_of(record.output)
    assert found.coverage == {"p": {"rows": rows, "replayed": replayed, "checksums": rows - replayed}}
    record.output[-1, 1, 0] += 1
    [wrong] = judged_record(record, reference).violations
    assert (wrong.tokens is None) == (replayed == rows)


def test_a_product_without_a_batch_is_replayed_as_a_whole(monkeypatch):
    reference, record = long_product(monkeypatch)
    record.args, record.output = (record.args[0][0],), record.output[0]
    assert judged_record(record, reference).coverage["p"] == {"rows": 13, "replayed": 13, "checksums": 0}


def test_documented_rounding_of_factors_reaches_the_checksums(monkeypatch):
    reference, record = long_product(monkeypatch)
    record.output[0, 6] *= 1 + 2.0**-14
    assert judged_record(record, reference).violations
    found = judged_record(record, reference, precision=Precision(product_input=2.0**-10))
    assert not found.violations and found.coverage["p"]["replayed"] == 4


# ---- functions


def test_parameters_come_from_the_file():
    """A linear function with the device's weight, which is wrong, or with a good one whose product is wrong."""
    device, file = torch.randn(3, 6), torch.randn(3, 6)
    reference = Reference(parameters=[(device, file)])
    assert judged_record(called(F.linear, X, device), reference).violations
    assert not judged_record(called(F.linear, X, device, output=F.linear(X, file)), reference).violations
    assert not judged_record(called(F.linear, X, weight=device, output=F.linear(X, file)), reference).violations


def test_arguments_of_an_operator_in_place_are_what_they_were():
    x = X.clone()
    record = Record("mlp", torch.Tensor.add_, (x, X), {}, X + X)
    for _ in range(2):
        assert not judged_record(record).violations
    assert torch.equal(x, X)


def test_a_file_is_not_overwritten_by_an_operator_in_place():
    device, file = X.clone(), X.clone()
    reference = Reference(parameters=[(device, file)])
    assert not judged_record(Record("mlp", torch.Tensor.mul_, (device, 2.0), {}, 2 * X), reference).violations
    assert torch.equal(file, X)


@pytest.mark.parametrize("func", [torch.zeros, torch.ones, torch.empty])
def test_a_device_is_the_hosts(func):
    """Another device cannot be reached from here: replay must ask the host."""
    found = judged_record(Record("mlp", func, (2, 3), {"device": "cuda:7"}, torch.full((2, 3), float(func is torch.ones))))
    assert not found.unknown and not found.violations


def test_no_device_stays_none():
    assert not judged_record(called(torch.zeros, 2, 3, device=None)).unknown


@pytest.mark.parametrize("func", [torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.empty_strided, torch.argsort])
def test_memory_without_values_and_the_order_of_ties_are_not_judged(func):
    found = judged_record(Record("mlp", func, (X,), {}, torch.full((4, 6), 7.0)))
    assert not found.violations and not found.unknown and found.coverage == {} and found.judged == 1


ORDERED = {
    "topk": lambda x: x.topk(2),
    "sort": lambda x: x.sort(),
    "max": lambda x: x.max(-1),
    "min": lambda x: x.min(-1),
    "mode": lambda x: x.mode(-1),
    "kthvalue": lambda x: x.kthvalue(2, -1),
}


@pytest.mark.parametrize("name", ORDERED)
def test_values_in_order_are_judged_and_their_indices_are_not(name):
    healthy = judged(ORDERED[name])
    assert not healthy.violations and not healthy.unknown
    assert not judged(ORDERED[name], tamper=lambda y: (y[0], y[1] + 1)).violations
    wrong = judged(ORDERED[name], tamper=lambda y: (y[0] + 1, y[1]))
    assert wrong.violations or list(wrong.unknown) == [name]


def test_several_results_that_are_not_in_order_are_all_judged():
    found = judged(lambda x: torch.frexp(x), tamper=lambda y: (y[0], y[1] + 1))
    assert list(found.unknown) == ["frexp"], "the exponents are whole numbers"
    counts = called(torch.unique_consecutive, torch.tensor([1, 1, 2]), return_counts=True)
    assert not judged_record(counts).violations
    counts.output = (counts.output[0], counts.output[1] + 1)
    assert [v.function for v in judged_record(counts).violations] == ["unique_consecutive"]


def test_a_bounded_function_of_whole_numbers_is_exact():
    assert not judged(lambda x: (x > 0).sum()).violations
    assert judged(lambda x: (x > 0).sum(), tamper=lambda y: y + 1).violations


@pytest.mark.parametrize(
    "record",
    [
        called(torch.pow, torch.tensor([2, 3]), 2),
        called(torch.index_add, torch.zeros(2, 1).long(), 0, torch.tensor([1, 1]), torch.tensor([[3], [4]])),
        called(torch.matmul, torch.tensor([[2**53 + 1, 0]]), torch.tensor([[1], [0]])),
    ],
    ids=lambda record: record.function,
)
def test_whole_numbers_have_no_rounding(record):
    healthy = judged_record(record)
    assert not healthy.violations and not healthy.unknown and healthy.judged == 1
    wrong = Record(record.path, record.func, record.args, record.kwargs, record.output - 1)
    assert len(judged_record(wrong).violations) == 1


def minus(x):
    y = x * 1
    y -= x + 1
    return y


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (minus, "sub_"),
        (lambda x: (x + 0).sub_(x * 2), "sub_"),
        (lambda x: (x + 0).clamp_(0), "clamp_"),
        (lambda x: (x + 0).div_(3.0), "div_"),
        (lambda x: (x + 0).zero_(), "zero_"),
    ],
)
def test_what_is_written_in_place_is_no_view(function, name):
    healthy = judged(function)
    assert not healthy.violations and not healthy.unknown
    wrong = judged(function, tamper=lambda y: y + 1)
    assert [v.function for v in wrong.violations] == [name] or list(wrong.unknown) == [name]


@pytest.mark.parametrize(
    ("args", "output", "views"),
    [
        ((X,), X.view(-1), True),
        ((X,), (X[0], X[1]), True),
        ((X, X + 1), X[0], True),
        ((X,), (X[0], X[1].clone()), False),
        ((X,), X.clone(), False),
        ((), X, False),
        ((torch.empty(0),), torch.empty(0), False),
    ],
)
def test_a_view_is_the_memory_of_an_argument(args, output, views):
    assert replay._is_view(Record("mlp", torch.Tensor.view, args, {}, output)) is views
    assert replay._is_view(Record("mlp", torch.Tensor.view, (), dict(enumerate(args)), output)) is views


@pytest.mark.parametrize("name", ["mul_", "copy_", "__setitem__", "__iadd__", "__imul__", "__itruediv__"])
def test_what_writes_is_no_view_even_where_the_memory_is_the_same(name):
    assert not replay._is_view(Record("mlp", SimpleNamespace(__name__=name), (X,), {}, X))
    assert replay._is_view(Record("mlp", SimpleNamespace(__name__="view"), (X,), {}, X))


COMPLEX = torch.view_as_complex(X.view(4, 3, 2))


@pytest.mark.parametrize(
    ("record", "defined"),
    [
        (called(torch.add, X, X), True),
        (called(torch.softmax, X, -1), True),
        (called(torch.cumsum, X, 1), False),
        (called(torch.cumsum, X.long(), 1), True),
        (called(torch.mul, COMPLEX, COMPLEX), True),
        (called(torch.div, COMPLEX, COMPLEX), False),
        (called(torch.abs, COMPLEX), False),
        (called(torch.view_as_real, COMPLEX), False),
        (called(torch.polar, X.abs(), X), True),
    ],
    ids=lambda r: r.function if isinstance(r, Record) else str(r),
)
def test_which_functions_have_a_definition(record, defined):
    assert replay._is_defined(record) is defined


def test_a_complex_result_has_twice_as_many_lanes():
    wrong = (COMPLEX * COMPLEX).clone()
    wrong[1, 2] += 1j
    [found] = judged_record(called(torch.mul, COMPLEX, COMPLEX, output=wrong)).violations
    assert found.outside.shape == (4, 6) and found.lanes == [5] and found.got.dtype == torch.float32
    wrong = (COMPLEX + COMPLEX).clone()
    wrong[1, 2] += 1
    assert judged_record(called(torch.add, COMPLEX, COMPLEX, output=wrong)).violations[0].lanes == [4]


# ---- the host


def test_a_tensor_of_the_host_is_itself():
    x = X.clone().requires_grad_()
    near = Host(Reference()).near(x)
    assert near.data_ptr() == x.data_ptr() and not near.requires_grad


def test_a_tensor_of_a_device_is_brought_once():
    brought = []

    class Far:
        device = SimpleNamespace(type="npu")

        def detach(self):
            return self

        def cpu(self):
            brought.append(self)
            return torch.tensor(len(brought))

    host, one, two = Host(Reference()), Far(), Far()
    assert [int(host.near(t)) for t in (one, two, one, two)] == [1, 2, 1, 2] and brought == [one, two]


def test_judging_builds_no_graph_and_needs_none():
    x = X.clone().requires_grad_()
    found = judged_record(Record("mlp", torch.Tensor.add, (x, x), {}, (x + x) * math.pi))
    assert not found.violations[0].got.requires_grad and not found.violations[0].low.requires_grad
    assert torch.is_grad_enabled()
