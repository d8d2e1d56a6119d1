"""The bound of every function as its table says, its arguments by position and by name, and the freedom of numbers."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import special

from shaketable.numerics.intervals import Precision, summation
from shaketable.numerics.operators import BOUNDED, Call, gelu, product, rounded_once, silu

UA, TINY = 2.0**-24, 2.0**-125
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = list(UNIT)
REDUCED = DTYPES[1:]
EXACT = Precision()
INF, NAN = math.inf, math.nan


def draw(*shape, seed=0, scale=1.0, dtype=torch.float32):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def call_of(func, *args, dtype=torch.float32, precision=EXACT, **kwargs):
    return Call(func, args, kwargs, dtype, precision, lambda t: t.double())


def bound(name, *args, dtype=torch.float32, precision=EXACT, **kwargs):
    return BOUNDED[name](call_of(None, *args, dtype=dtype, precision=precision, **kwargs))


def close(found, expected, rel=1e-9):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    found = torch.as_tensor(found, dtype=torch.float64).expand(expected.shape)
    return torch.allclose(found, expected, rtol=rel, atol=2.0**-124)


def s(k):
    return UA * min(k, 5 * math.sqrt(k) + k / 16)


# ---- a call


def test_an_argument_is_taken_by_position_then_by_name_then_by_default():
    call = call_of(None, 1, 2, third=3, first=9)
    assert [call.get(0, "first"), call.get(1, "x", 7), call.get(2, "third"), call.get(2, "x"), call.get(2, "x", 7)] == (
        [1, 2, 3, None, 7]
    )
    assert call_of(None, None).get(0, "x", 7) is None, "a position that holds None is given"


# ---- products


@pytest.mark.parametrize("k", [1, 16, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_of_a_product(dtype, k):
    x, w = draw(2, 3, k), draw(2, k, 5, seed=1)
    found = bound("matmul", x, w, dtype=dtype)
    norms = x.double().norm(dim=-1, keepdim=True) * w.double().norm(dim=-2, keepdim=True)
    assert close(found.value, x.double() @ w.double()) and close(found.slack, s(k) * norms + TINY)
    assert found.dtype == dtype
    assert close(product(call_of(None), x.double(), w.double()).slack, s(k) * norms + TINY)


@pytest.mark.parametrize(
    ("dtype", "precision", "documented"),
    [
        (torch.float32, Precision(product_input=2.0**-10), 2.0**-10),
        (torch.float32, Precision(partial_sum=2.0**-8), 0.0),
        (torch.bfloat16, Precision(partial_sum=2.0**-8), 2.0**-8),
        (torch.bfloat16, Precision(product_input=2.0**-10), 0.0),
    ],
)
@pytest.mark.parametrize("name", ["matmul", "addmm"])
def test_documented_rounding_is_twice_itself_times_the_sizes(name, dtype, precision, documented):
    x, w = draw(3, 20), draw(20, 5, seed=1)
    args, more = ((x, w), {}) if name == "matmul" else ((torch.zeros(5), x, w), {"beta": 0})
    wide, narrow = (bound(name, *args, dtype=dtype, precision=p, **more).slack for p in (precision, EXACT))
    assert close(wide - narrow, 2 * documented * (x.double().abs() @ w.double().abs()), rel=1e-6)


@pytest.mark.parametrize("name", ["matmul", "__matmul__", "mm", "bmm"])
def test_the_second_factor_has_any_of_its_names(name):
    x, w = draw(1, 3, 4), draw(1, 4, 2, seed=1)
    true = x.double() @ w.double()
    assert all(close(bound(name, *a, **k).value, true) for a, k in (((x, w), {}), ((x,), {"other": w}), ((x,), {"mat2": w})))


@pytest.mark.parametrize(("x", "w"), [((4,), (4, 2)), ((3, 4), (4,)), ((4,), (4,))])
def test_a_vector_is_a_matrix_of_one_row_or_column(x, w):
    x, w = draw(*x), draw(*w, seed=1)
    found = bound("matmul", x, w)
    assert close(found.value, x.double() @ w.double()) and found.slack.shape == found.value.shape
    assert not found.outside(x @ w).any() and found.outside((x @ w) * 1.001).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 2.0), (-2.0, -3.0), (0, 0.25)])
def test_the_bound_of_a_product_with_an_addition(beta, alpha, name, dtype):
    batch = (2,) if name == "baddbmm" else ()
    added, x, w = draw(*batch, 3, 5), draw(*batch, 3, 20, seed=1), draw(*batch, 20, 5, seed=2)
    found = bound(name, added, x, w, dtype=dtype, beta=beta, alpha=alpha)
    total = alpha * (x.double() @ w.double())
    slack = abs(alpha) * (s(20) * x.double().norm(dim=-1, keepdim=True) * w.double().norm(dim=-2, keepdim=True) + TINY)
    value = total + beta * added.double()
    slack = slack + 4 * UNIT[dtype] * (beta * added.double()).abs() + 4 * UA * value.abs()
    assert close(found.value, value) and close(found.slack, slack)


def test_an_addition_has_one_and_one_unless_said_and_its_names():
    added, x, w = draw(3, 5), draw(3, 20, seed=1), draw(20, 5, seed=2)
    true = added.double() + x.double() @ w.double()
    assert close(bound("addmm", added, x, w).value, true)
    assert close(bound("addmm", input=added, mat1=x, mat2=w).value, true)
    assert close(bound("baddbmm", added[None], batch1=x[None], batch2=w[None]).value, true[None])


def test_what_is_multiplied_by_zero_may_be_no_number():
    found = bound("addmm", torch.full((3, 5), NAN), draw(3, 4), draw(4, 5), beta=0)
    assert bool(found.value.isfinite().all()) and bool(found.slack.isfinite().all())


@pytest.mark.parametrize("kind", ["positional", "named"])
def test_a_linear_function_has_its_weight_and_bias_by_position_and_name(kind):
    x, w, b = draw(3, 4), draw(5, 4, seed=1), draw(5, seed=2)
    found = bound("linear", x, w, b) if kind == "positional" else bound("linear", input=x, weight=w, bias=b)
    got = F.linear(x, w, b)
    assert not found.outside(got).any() and found.outside(got + 1e-3).all()
    plain = bound("linear", x, w) if kind == "positional" else bound("linear", x, weight=w)
    assert plain.outside(got).any() and not plain.outside(F.linear(x, w)).any()


@pytest.mark.parametrize("name", ["grouped_mm", "_grouped_mm", "grouped_mm_fallback"])
@pytest.mark.parametrize("kind", ["positional", "named"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_group_of_rows_meets_its_own_matrix(name, kind, dtype):
    x, w, ends = draw(6, 8, dtype=dtype), draw(4, 8, 3, seed=1, dtype=dtype), torch.tensor([1, 1, 4, 6])
    args, more = ((x, w, ends), {}) if kind == "positional" else ((x, w), {"offs": ends})
    found = bound(name, *args, dtype=dtype, **more)
    starts = [(0, 1, 0), (1, 4, 2), (4, 6, 3)]
    right = torch.cat([(x[a:b].double() @ w[e].double()) for a, b, e in starts]).to(dtype)
    ends = found.interval()
    assert ends.low.dtype == ends.high.dtype == dtype and ends.low.shape == (6, 3)
    assert not found.outside(right).any()
    assert bool((ends.low <= right).all()) and bool((ends.high >= right).all())
    assert bool(((ends.high.double() - ends.low.double()).abs() <= 8 * UNIT[dtype] * 30).all())
    assert found.outside(right * 1.1).all()


# ---- softmax and attention


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [-1, 2, 1, 0, -2])
def test_the_bound_of_a_softmax(dtype, dim):
    x = draw(3, 4, 5, scale=3.0)
    for found in (bound("softmax", x, dim, dtype=dtype), bound("_softmax", x, dim=dim, dtype=dtype)):
        p = special.softmax(x.double().numpy(), axis=dim)
        far = np.abs(x.double().numpy() - x.double().numpy().max(dim, keepdims=True))
        slack = (UA * (16 + 2 * far) + summation(x.shape[dim])) * p + TINY
        if dim not in (-1, 2) and dtype != torch.float32:
            slack = slack + 4 * UNIT[dtype] * p
        assert close(found.value, p) and close(found.slack, slack)


def test_a_softmax_is_of_the_last_dimension_unless_said():
    x = draw(3, 4)
    assert close(bound("softmax", x).value, special.softmax(x.double().numpy(), axis=-1))


def test_what_is_hidden_from_a_softmax_has_no_slack_but_the_smallest():
    found = bound("softmax", torch.tensor([[0.0, -INF, 0.0]]), -1)
    assert found.value.tolist() == [[0.5, 0.0, 0.5]] and found.slack[0, 1] == TINY and bool(found.slack.isfinite().all())


def test_a_softmax_may_be_asked_for_in_another_dtype():
    """In bfloat16 the scores are rounded before; in float32 they are what they are."""
    x = torch.tensor([[1.00390625, 0.0]])
    wide, short = bound("softmax", x, -1, dtype=torch.float32), bound("softmax", x, -1, dtype=torch.bfloat16)
    cast = BOUNDED["softmax"](Call(None, (x, -1), {"dtype": torch.bfloat16}, torch.bfloat16, EXACT, lambda t: t.double()))
    same = BOUNDED["softmax"](Call(None, (x, -1), {"dtype": torch.float32}, torch.float32, EXACT, lambda t: t.double()))
    assert torch.equal(wide.value, short.value) and torch.equal(wide.value, same.value)
    assert close(cast.value, special.softmax([[1.0, 0.0]], axis=-1)) and not torch.equal(cast.value, wide.value)


def one_query(dtype=torch.float32, precision=EXACT, **more):
    """One query of length 2 that meets keys of lengths 1 and 3, and values 1 and −1: the shares are a half each."""
    q = torch.tensor([0.0, 2.0]).view(1, 1, 1, 2)
    k = torch.tensor([[1.0, 0.0], [3.0, 0.0]]).view(1, 1, 2, 2)
    v = torch.tensor([[3.0], [-1.0]]).view(1, 1, 2, 1)
    return BOUNDED["scaled_dot_product_attention"](Call(None, (q, k, v), more, dtype, precision, lambda t: t.double()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 0.5, -2.0])
def test_the_bound_of_attention_by_hand(dtype, scale):
    """o = 1, p|v| = 2, ‖q‖ = 2, max‖k‖ = 3."""
    found = one_query(dtype, scale=scale)
    reach = 2 * 3 * abs(1 / math.sqrt(2) if scale is None else scale)
    u = UNIT[dtype]
    assert close(found.value, [[[[1.0]]]], 1e-6)
    assert close(found.slack, [[[[u * 1 + (2 * u + 16 * UA * (4 + reach)) * 2 + TINY]]]], 1e-6)
    assert found.free is None


def test_documented_rounding_of_factors_goes_with_the_reach_of_attention():
    reach, documented = 6.0, 2.0**-10
    wide = one_query(precision=Precision(product_input=documented), scale=1.0).slack
    narrow = one_query(scale=1.0).slack
    assert close(wide - narrow, [[[[2 * documented * (1 + 2 * reach) * 2]]]], 1e-6)
    reduced = [one_query(torch.bfloat16, p, scale=1.0).slack for p in (EXACT, Precision(product_input=documented))]
    assert torch.equal(*reduced)


def attended(q, k, v, *args, **more):
    return BOUNDED["scaled_dot_product_attention"](call_of(None, q, k, v, *args, **more))


def test_query_heads_that_share_a_key_meet_their_own():
    """Three query heads for each of two keys; every key has a single position, so its value is the answer."""
    q, k = draw(1, 6, 1, 4), draw(1, 2, 1, 4, seed=1)
    v = torch.tensor([[7.0], [9.0]]).view(1, 2, 1, 1)
    assert attended(q, k, v).value.flatten().tolist() == [7, 7, 7, 9, 9, 9]


def test_the_longest_key_is_that_of_the_heads_own_group():
    q = torch.ones(1, 2, 1, 1)
    k = torch.tensor([1.0, 100.0]).view(1, 2, 1, 1)
    v = torch.ones(1, 2, 1, 1)
    slack = attended(q, k, v, scale=1.0).slack.flatten().tolist()
    near, far = UA + 2 * UA + 16 * UA * 5, UA + 2 * UA + 16 * UA * 104
    assert slack == pytest.approx([near, far])
    shared = attended(q.repeat(1, 2, 1, 1), k, v, scale=1.0).slack.flatten().tolist()
    assert shared == pytest.approx([near, near, far, far]), "two query heads for each key"


@pytest.mark.parametrize("kind", ["positional", "named"])
def test_a_causal_query_sees_itself_and_those_before(kind):
    q, k, v = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.tensor([[2.0], [4.0], [9.0]]).view(1, 1, 3, 1)
    found = attended(q, k, v, None, 0.0, True) if kind == "positional" else attended(q, k, v, is_causal=True)
    assert close(found.value.flatten(), [2.0, 3.0, 5.0], 1e-6)
    assert close(attended(q, k, v).value.flatten(), [5.0, 5.0, 5.0], 1e-6)


@pytest.mark.parametrize("kind", ["positional", "named"])
@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_mask_shows_what_is_true_or_adds_to_the_scores(kind, form):
    q, k, v = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), torch.tensor([[2.0], [4.0]]).view(1, 1, 2, 1)
    mask = torch.tensor([[True, False], [True, True]])
    if form == "float":
        mask = torch.tensor([[0.0, -INF], [math.log(3.0), 0.0]])
    found = attended(q, k, v, mask) if kind == "positional" else attended(q, k, v, attn_mask=mask)
    assert close(found.value.flatten(), [2.0, 3.0 if form == "bool" else 2.5], 1e-6) and found.free is None


@pytest.mark.parametrize(
    ("mask", "blind"),
    [
        (torch.tensor([[False, False], [True, False]]), [True, False]),
        (torch.tensor([[-INF, -INF], [0.0, -INF]]), [True, False]),
        (torch.full((2, 2), torch.finfo(torch.float32).min), [True, True]),
        (torch.tensor([[-3e38, -3e38], [-1e38, -3e38]]), [True, False]),
        (torch.tensor([[-1e9, -1e9], [0.0, 0.0]]), [False, False]),
    ],
)
def test_a_query_that_may_look_at_nothing_is_nobodys_business(mask, blind):
    q, k, v = draw(1, 1, 2, 2), draw(1, 1, 2, 2, seed=1), draw(1, 1, 2, 3, seed=2)
    found = attended(q, k, v, attn_mask=mask)
    if any(blind):
        assert found.free.expand(1, 1, 2, 3).tolist() == [[[[b] * 3 for b in blind]]]
    else:
        assert found.free is None


# ---- functions of one value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_of_silu(dtype):
    x = draw(50, scale=3.0)
    y = x.double().numpy() * special.expit(x.double().numpy())
    for found in (bound("silu", x, dtype=dtype), silu(x.double(), dtype)):
        assert close(found.value, y) and close(found.slack, 20 * UA * np.abs(y) + TINY) and found.dtype == dtype


def test_far_below_zero_silu_may_be_zero_and_elsewhere_not():
    found = silu(torch.tensor([-90.0, -81.0, -79.0, 5.0]).double(), torch.float32)
    assert found.outside(torch.zeros(4)).tolist() == [False, False, True, True]
    assert found.slack[3] == pytest.approx(20 * UA * float(F.silu(torch.tensor(5.0).double())))
    assert found.outside(torch.full((4,), 1e-3)).tolist() == [True] * 4


@pytest.mark.parametrize("approximate", [None, "none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_of_gelu(dtype, approximate):
    x = draw(50, scale=2.0).clamp(-3, 3)
    wide = x.double().numpy()
    y = wide * special.ndtr(wide)
    if approximate == "tanh":
        y = 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    more = {} if approximate is None else {"approximate": approximate}
    for found in (bound("gelu", x, dtype=dtype, **more), gelu(x.double(), dtype, approximate or "none")):
        assert close(found.value, y, 1e-7)
        assert close(found.slack, 12 * UA * np.abs(y) + 8 * UA * np.abs(wide) + TINY, 1e-6) and found.dtype == dtype


UNITS = {
    "tanh": (np.tanh, 12, 0),
    "sigmoid": (special.expit, 16, 0),
    "sqrt": (np.sqrt, 4, 0),
    "reciprocal": (np.reciprocal, 4, 0),
    "cos": (np.cos, 4, 4),
    "sin": (np.sin, 4, 4),
    "log": (np.log, 8, 4),
    "square": (np.square, 4, 0),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 8, 0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNITS)
def test_functions_are_right_to_so_many_units_of_float32(name, dtype):
    function, units, absolute = UNITS[name]
    x = draw(60).abs() + 0.1
    y = function(x.double().numpy())
    slack = units * UA * np.abs(y) + absolute * UA + TINY
    if name == "rsqrt" and dtype in REDUCED:
        slack = slack + 2 * UNIT[dtype] * np.abs(y)
    found = bound(name, x, dtype=dtype)
    assert close(found.value, y) and close(found.slack, slack) and found.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_of_exp_grows_with_its_argument_up_to_a_point(dtype):
    x = torch.tensor([0.0, 1.0, -3.0, 20.0, -INF])
    y = np.exp(x.double().numpy())
    found = bound("exp", x, dtype=dtype)
    assert close(found.value, y)
    assert close(found.slack, UA * (8 + 2 * np.abs(x.double().numpy()).clip(max=1e4)) * y + TINY)
    assert bool(found.slack.isfinite().all())


def test_the_bound_of_erf_is_wide_where_devices_round_on_the_way():
    x = torch.tensor([-2.0, 0.5, 1e-4, 0.0])
    y = special.erf(x.double().numpy())
    assert close(bound("erf", x).slack, 8 * UA * np.abs(y) + TINY)
    for dtype in REDUCED:
        u = UNIT[dtype]
        small = (np.abs(y) < u).astype(float)
        found = bound("erf", x, dtype=dtype)
        assert close(found.value, y) and close(found.slack, 8 * UA * np.abs(y) + np.abs(y) * (8 * u + small) + TINY)


@pytest.mark.parametrize("name", ["pow", "__pow__"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["number", "tensor", "number to tensor"])
def test_the_bound_of_a_power(name, dtype, kind):
    x, e = draw(20).abs() + 0.1, draw(20, seed=1)
    args = {"number": (x, 2.5), "tensor": (x, e), "number to tensor": (3.0, e)}[kind]
    wide = [a.double().numpy() if isinstance(a, torch.Tensor) else a for a in args]
    y = np.power(*wide)
    slack = (8 * UA if dtype in (torch.float32, torch.float64) else 2 * UNIT[dtype]) * np.abs(y) + TINY
    found = bound(name, *args, dtype=dtype)
    assert close(found.value, y) and close(found.slack, slack)


def test_a_whole_power_of_a_negative_number():
    assert bound("pow", torch.tensor([-2.0, 3.0]), 3).value.tolist() == [-8.0, 27.0]


# ---- sums


@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize(
    ("args", "kwargs", "axes", "keep", "n"),
    [
        ((), {}, (0, 1, 2), False, 24),
        ((None,), {}, (0, 1, 2), False, 24),
        ((-1,), {}, (2,), False, 4),
        ((1,), {}, (1,), False, 3),
        ((1, True), {}, (1,), True, 3),
        (((0, 2),), {"keepdim": True}, (0, 2), True, 8),
        ((), {"dim": [0, 1]}, (0, 1), False, 6),
        ((), {"dim": 0, "keepdim": True}, (0,), True, 2),
    ],
)
def test_the_bound_of_a_sum_goes_with_its_length_and_its_sizes(mean, args, kwargs, axes, keep, n):
    x = draw(2, 3, 4)
    wide = x.double().numpy()
    total, size = wide.sum(axes, keepdims=keep), np.abs(wide).sum(axes, keepdims=keep)
    found = bound("mean" if mean else "sum", x, *args, **kwargs)
    over = n if mean else 1
    assert found.value.shape == total.shape and close(found.value, total / over)
    assert close(found.slack, s(n) * size / over + TINY)


def test_the_mean_of_much_has_the_bound_of_a_long_sum():
    x = torch.ones(1024)
    assert float(bound("mean", x).slack) == pytest.approx(224 * UA)
    assert float(bound("sum", x).slack) == pytest.approx(224 * 1024 * UA)


# ---- rows that are added


@pytest.mark.parametrize("name", ["index_add", "index_add_"])
@pytest.mark.parametrize("kind", ["positional", "named"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_meet_may_be_added_in_any_order(name, kind, dtype):
    base, rows, index = draw(3, 2), draw(4, 2, seed=1), torch.tensor([0, 2, 0, 0])
    args, more = ((base, 0, index, rows), {}) if kind == "positional" else ((base, 0, index), {"source": rows})
    found = bound(name, *args, dtype=dtype, **more)
    value, size = base.double().numpy().copy(), base.double().abs().numpy().copy()
    for i, row in zip(index.tolist(), rows.double().numpy(), strict=True):
        value[i] += row
        size[i] += np.abs(row)
    terms = np.array([[3], [0], [0]])  # a row that takes one value is right to the last bit
    assert close(found.value, value) and close(found.slack, 1.5 * terms * UNIT[dtype] * size)


@pytest.mark.parametrize("alpha", [1, 0.5, -2.0])
def test_added_rows_have_a_factor_and_rows_that_do_not_meet_no_slack(alpha):
    base, rows, index = draw(3, 2), draw(2, 2, seed=1), torch.tensor([2, 0])
    found = bound("index_add", base, 0, index, rows, alpha=alpha)
    value = base.double().clone()
    value[2] += alpha * rows[0].double()
    value[0] += alpha * rows[1].double()
    assert close(found.value, value) and (alpha != 1 or not found.slack.any())
    again = bound("index_add", base, 0, torch.tensor([1, 1]), rows, alpha=alpha)
    sizes = base.double().abs()
    sizes[1] += abs(alpha) * rows.double().abs().sum(0)
    assert close(again.slack[1], (3 + 2 * (alpha != 1)) * UA * sizes[1])


def test_columns_are_added_along_their_dimension():
    base = torch.zeros(2, 3)
    found = bound("index_add_", base, 1, torch.tensor([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert found.value.tolist() == [[2, 0, 1], [4, 0, 3]] and base.tolist() == [[0, 0, 0], [0, 0, 0]]


# ---- rounded once


def once(func, *args, dtype=None, **kwargs):
    name = func.__name__
    given = next(a for a in args if isinstance(a, torch.Tensor))
    return rounded_once(call_of(func, *args, dtype=dtype or given.dtype, **kwargs), name)


@pytest.mark.parametrize(
    ("args", "kwargs", "judged"),
    [
        ((), {}, False),
        ((0.5,), {}, False),
        ((0.5, True), {}, False),
        ((0.5, False), {}, True),
        ((0.0, True), {}, True),
        ((0.0,), {}, True),
        ((), {"p": 0.5}, False),
        ((), {"p": 0.0}, True),
        ((), {"training": False}, True),
        ((0.5,), {"training": False}, True),
        ((), {"p": 0.1, "training": True}, False),
    ],
)
def test_dropout_is_judged_where_it_drops_nothing(args, kwargs, judged):
    x = draw(4, 4)
    call = call_of(F.dropout, x, *args, **kwargs)
    if judged:
        assert torch.equal(rounded_once(call, "dropout").low, x)
    else:
        with pytest.raises(NotImplementedError, match="dropout that is on is random"):
            rounded_once(call, "dropout")


def test_the_first_argument_is_left_alone_and_others_are_what_was_given():
    x, y = draw(4), draw(4, seed=1)
    kept = x.clone()
    assert torch.equal(once(torch.Tensor.add_, x, y).low, kept + y) and torch.equal(x, kept)
    found = once(torch.Tensor.__setitem__, x, 1, 5.0)
    assert found.low.tolist() == [kept[0].item(), 5.0, *kept[2:].tolist()] and torch.equal(x, kept)


def ends(found):
    return found.low.double().tolist(), found.high.double().tolist()


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
@pytest.mark.parametrize(
    ("func", "formula"),
    [
        (torch.mul, lambda x, n: x * n),
        (torch.add, lambda x, n: x + n),
        (torch.sub, lambda x, n: x - n),
        (torch.rsub, lambda x, n: n - x),
        (torch.Tensor.mul_, lambda x, n: x * n),
    ],
)
def test_a_number_may_be_rounded_to_a_reduced_dtype_first_or_not(func, formula, dtype):
    """From the product with the number as it is to the product with the number rounded, and nothing beyond."""
    x, number = draw(400, scale=3.0, dtype=dtype), 0.1
    short = float(torch.tensor(number, dtype=dtype))
    one, two = (formula(x.double(), n).to(dtype) for n in (number, short))
    host = func(x.clone(), number)
    low, high = torch.minimum(one, two).minimum(host), torch.maximum(one, two).maximum(host)
    found = once(func, x, number)
    assert (one != two).any() and torch.equal(found.low, low) and torch.equal(found.high, high)


def test_a_number_meets_double_precision_and_float32_as_it_is():
    for dtype in (torch.float32, torch.float64):
        found = once(torch.mul, draw(9, dtype=dtype), 0.1)
        assert torch.equal(found.low, found.high)


@pytest.mark.parametrize("func", [torch.div, torch.true_divide, torch.divide, torch.Tensor.div_, torch.Tensor.__truediv__])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_division_by_a_number_may_be_a_product_with_its_inverse(func, dtype):
    name = {"__div__": "__truediv__"}.get(func.__name__, func.__name__)
    x = draw(3000, dtype=dtype)
    found = rounded_once(call_of(func, x, 3.0, dtype=dtype), name)
    inverse = (x.double() * float(torch.tensor(1.0) / 3.0)).to(dtype)
    assert not found.outside(inverse).any() and not found.outside(x / 3.0).any()
    assert found.outside((x.double() / 3 * (1 + 6 * UNIT[dtype])).to(dtype)).double().mean() > 0.9


def test_only_a_division_of_a_tensor_by_a_number_has_an_inverse():
    x = draw(3000)
    product, by_tensor = once(torch.mul, x, 3.0), once(torch.div, x, torch.full((3000,), 3.0))
    of_number = rounded_once(call_of(torch.Tensor.__rtruediv__, x, 3.0), "__rtruediv__")
    assert all(torch.equal(found.low, found.high) for found in (product, by_tensor, of_number))
    first = rounded_once(call_of(torch.div, 3.0, x), "div")
    assert torch.equal(first.low, first.high) and torch.equal(first.low, torch.div(3.0, x))


def test_a_division_by_zero_is_what_the_host_says():
    found = once(torch.div, torch.tensor([1.0, -1.0, 0.0]), 0)
    assert not found.outside(torch.tensor([INF, -INF, NAN])).any()
    assert found.outside(torch.tensor([1.0, 1.0, 1.0])).all()


def test_true_is_no_number():
    found = once(torch.add, draw(5, dtype=torch.bfloat16), True)
    assert found.low is found.high


@pytest.mark.parametrize("func", [torch.masked_fill, torch.clamp])
def test_a_number_that_is_not_computed_with_has_no_freedom(func):
    x = draw(40, dtype=torch.bfloat16)
    args = (x, x > 0, 0.1) if func is torch.masked_fill else (x, 0.1)
    found = once(func, *args)
    assert found.low is found.high and not found.outside(func(*args)).any()


def test_whole_numbers_have_no_freedom():
    found = rounded_once(call_of(torch.mul, torch.tensor([3, 5]), 2, dtype=torch.int64), "mul")
    assert found.low is found.high and found.low.tolist() == [6, 10]
