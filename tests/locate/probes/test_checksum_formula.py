"""Checksums against their formula, summed value by value, and what each of the two kinds of sum sees alone."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shaketable.locate.capture.recorder import Record, Recording
from shaketable.locate.probes import checksums
from shaketable.locate.probes.checksums import _columns, _random, check_products, row_scores
from shaketable.locate.probes.rounding import Precision

UA = 2.0**-24
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
EXACT = Precision()


def drawn(tokens, channels, k=6, dtype=torch.float32, seed=0, bias=False):
    """Factors, and a product with errors of the size of its rounding, so that every score is a number to compare."""
    chance = torch.Generator().manual_seed(seed)
    x, w = torch.randn(tokens, k, generator=chance), torch.randn(channels, k, generator=chance)
    b = torch.randn(channels, generator=chance) if bias else None
    y = x.double() @ w.double().T + (0 if b is None else b.double())
    y = y * (1 + 3 * UNITS[dtype] * torch.randn(y.shape, generator=chance, dtype=torch.float64))
    return x, w.double(), b, y.to(dtype)


def one_sum(errors, weights, values, norms, unit, documented):
    """|Σ r·error| over six standard deviations: u|y|/√3 for the result, (3ua + 2·documented)‖x‖‖w‖ for the summation."""
    off = abs(sum(r * e for r, e in zip(weights, errors, strict=True)))
    variance = sum(
        r * r * ((unit * v) ** 2 / 3 + ((3 * UA + 2 * documented) * n) ** 2)
        for r, v, n in zip(weights, values, norms, strict=True)
    )
    return off / (6 * math.sqrt(variance))


def by_hand(x, w, b, y, documented=0.0):
    """The scores of every token (the worst of its blocks of sixteen) and of every channel."""
    unit = UNITS[y.dtype]
    errors = (y.double() - x.double() @ w.T - (0 if b is None else b.double())).tolist()
    values = y.double().tolist()
    norms = (x.double().norm(dim=1)[:, None] * w.norm(dim=1)).tolist()
    tokens, channels = y.shape
    r, s = _random(channels).tolist(), _random(tokens).tolist()
    rows = [
        max(
            one_sum(*(part[at : at + 16] for part in (errors[t], r, values[t], norms[t])), unit, documented)
            for at in range(0, channels, 16)
        )
        for t in range(tokens)
    ]
    columns = [
        one_sum(*([row[c] for row in part] if part is not s else s for part in (errors, s, values, norms)), unit, documented)
        for c in range(channels)
    ]
    return rows, columns


@pytest.mark.parametrize("documented", [0.0, 2.0**-10])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("channels", [1, 15, 16, 17, 40])
def test_row_and_column_scores_are_the_formulas(channels, dtype, bias, documented):
    x, w, b, y = drawn(5, channels, dtype=dtype, bias=bias, seed=channels)
    rows, columns = by_hand(x, w, b, y, documented)
    precision = Precision(product_input=documented)
    assert row_scores(x, y, w, b, precision).tolist() == pytest.approx(rows, rel=1e-6)
    assert _columns(x, y, w, b, precision).tolist() == pytest.approx(columns, rel=1e-6)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("chunk", [16, 32, 48])
def test_many_channels_are_looked_at_in_parts_with_the_same_answer(monkeypatch, chunk, bias):
    x, w, b, y = drawn(7, 80, bias=bias)
    whole = row_scores(x, y, w, b, EXACT)
    monkeypatch.setattr(checksums, "CHUNK", chunk)
    assert torch.allclose(row_scores(x, y, w, b, EXACT), whole, rtol=1e-9)
    y[3, 70] += 1
    assert (row_scores(x, y, w, b, EXACT) > 1).tolist() == [t == 3 for t in range(7)], "the last part counts too"


def test_a_batch_of_sequences_is_one_list_of_rows():
    x, w, b, y = drawn(6, 20, bias=True)
    assert torch.equal(row_scores(x.view(2, 3, 6), y.view(2, 3, 20), w, b, EXACT), row_scores(x, y, w, b, EXACT))
    assert torch.equal(_columns(x.view(2, 3, 6), y.view(2, 3, 20), w, b, EXACT), _columns(x, y, w, b, EXACT))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_infinitely_wrong_in_its_row_and_its_column(bad):
    x, w, b, y = drawn(5, 20)
    y[2, 17] = bad
    assert row_scores(x, y, w, b, EXACT).isinf().tolist() == [t == 2 for t in range(5)]
    assert _columns(x, y, w, b, EXACT).isinf().tolist() == [c == 17 for c in range(20)]


def test_a_product_of_zeros_is_right_and_anything_else_in_its_place_is_wrong():
    x, w, y = torch.zeros(3, 6), torch.ones(4, 6).double(), torch.zeros(3, 4)
    assert row_scores(x, y, w, None, EXACT).tolist() == [0.0] * 3 and _columns(x, y, w, None, EXACT).tolist() == [0.0] * 4
    y[1, 2] = 1e-3
    assert (row_scores(x, y, w, None, EXACT) > 1).tolist() == [False, True, False]


def test_the_factors_are_not_changed():
    x, w, b, y = drawn(5, 20, bias=True)
    kept = [t.clone() for t in (x, w, b, y)]
    row_scores(x, y, w, b, EXACT)
    _columns(x, y, w, b, EXACT)
    assert all(torch.equal(a, k) for a, k in zip((x, w, b, y), kept, strict=True))


@pytest.mark.parametrize("n", [1, 2, 50, 1000])
def test_the_weights_of_a_sum_are_between_1_and_1_5_of_either_sign(n):
    found = _random(n)
    assert found.dtype == torch.float64 and found.shape == (n,) and torch.equal(found, _random(n))
    assert bool((found.abs() >= 1).all()) and bool((found.abs() < 1.5).all())
    if n >= 50:
        assert 0.3 < float((found > 0).double().mean()) < 0.7
        assert found.abs().unique().numel() == n and 1.2 < float(found.abs().mean()) < 1.3


def test_the_weights_leave_torchs_own_generator_alone():
    before = torch.random.get_rng_state()
    _random(9)
    assert torch.equal(torch.random.get_rng_state(), before)


# ---- which operators are summed, and with what


class Reference:
    """Weights by their full names, and which paths are what."""

    def __init__(self, kinds, **modules):
        self.modules = modules
        self.leaves = {
            path: SimpleNamespace(kind=kind, module=modules.get(path.replace(".", "_"))) for path, kind in kinds.items()
        }
        self.asked = []

    def leaf(self, path):
        return self.leaves.get(path)

    def weight(self, name):
        self.asked.append(name)
        path, _, own = name.rpartition(".")
        return self.modules[path.replace(".", "_")]._parameters[own].detach()

    def wide(self, tensor):
        return tensor.double()


class Columns(nn.Module):
    """A product with its weight the other way round, as GPT-2 has it."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)


def recorded(path, x, y, func=None, named=False):
    return Record(path, func, () if named else (x,), {"input": x} if named else {}, y)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_is_summed_with_its_own_weights(bias, named):
    torch.manual_seed(0)
    linear = nn.Linear(6, 20, bias=bias)
    x = torch.randn(1, 5, 6)
    y = linear(x).detach()
    reference = Reference({"layers.2.q": "linear"}, layers_2_q=linear)
    healthy = check_products(Recording([recorded("q", x, y, named=named)]), reference, "layers.2", EXACT)
    assert list(healthy) == ["q"] and 0 < healthy["q"] < 1
    assert set(reference.asked) == {"layers.2.q.weight"} | ({"layers.2.q.bias"} if bias else set())
    wrong = y.clone()
    wrong[0, 2, 19] += 0.01
    assert check_products(Recording([recorded("q", x, wrong)]), reference, "layers.2", EXACT)["q"] > 1


def test_a_weight_that_lies_the_other_way_round_is_turned():
    torch.manual_seed(0)
    x, w = torch.randn(1, 5, 6), torch.randn(6, 6)
    reference = Reference({"l.c": "conv1d"}, l_c=Columns(w))
    assert check_products(Recording([recorded("c", x, x @ w)]), reference, "l", EXACT)["c"] < 1
    assert check_products(Recording([recorded("c", x, x @ w.T)]), reference, "l", EXACT)["c"] > 1


def test_only_products_of_leaves_are_summed():
    torch.manual_seed(0)
    linear = nn.Linear(6, 6, bias=False)
    x = torch.randn(1, 5, 6)
    y = linear(x).detach()
    reference = Reference({"l.q": "linear", "l.norm": "rmsnorm"}, l_q=linear)
    records = [recorded("norm", x, x), recorded("q", x, y, func=torch.add), recorded("other", x, y), recorded("q", x, y)]
    assert list(check_products(Recording(records), reference, "l", EXACT)) == ["q"]
    assert check_products(Recording(records[:3]), reference, "l", EXACT) == {}


@pytest.mark.parametrize("by", ["rows", "columns"])
def test_the_worst_of_rows_and_columns_is_the_score(by):
    """An error that one kind of sum sees best: of many channels of a token, or of many tokens of a channel."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 64, bias=False)
    x = torch.randn(1, 64, 8)
    y = linear(x).detach()
    size = 4e-7
    if by == "rows":
        y[0, 5] += size * _random(64).sign().float()
    else:
        y[0, :, 5] += size * _random(64).sign().float()
    w = linear.weight.detach().double()
    rows, columns = float(row_scores(x, y, w, None, EXACT).max()), float(_columns(x, y, w, None, EXACT).max())
    assert (rows > columns) == (by == "rows")
    found = check_products(Recording([recorded("q", x, y)]), Reference({"l.q": "linear"}, l_q=linear), "l", EXACT)
    assert found["q"] == pytest.approx(max(rows, columns), rel=1e-9)


def test_a_call_that_needs_gradients_is_summed_without():
    linear = nn.Linear(6, 6)
    x = torch.randn(1, 5, 6, requires_grad=True)
    found = check_products(Recording([recorded("q", x, linear(x))]), Reference({"l.q": "linear"}, l_q=linear), "l", EXACT)
    assert isinstance(found["q"], float) and found["q"] < 1
