"""The probes that call a layer again: with what they call it, how often, and every field of what they say."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shaketable.locate.capture.recorder import Record, Recording
from shaketable.locate.capture.reference import Reference
from shaketable.locate.capture.trace import LayerCall, record_layer
from shaketable.locate.diagnosis import Evidence, Result
from shaketable.locate.probes import layer_probes, twins
from shaketable.locate.probes.layer_probes import Bench, by_checksums, by_permutation, by_twin, checksum, links, repeat, replay
from shaketable.locate.probes.replay import Judgement, Violation
from shaketable.locate.probes.rounding import Precision
from shaketable.locate.probes.twins import TwinDifference
from shaketable.locate.probes.wiring import Circuit, Map, Norm

NAN, INF = math.nan, math.inf


# ---- a layer of four channels, with a mean over the tokens so far


class Norming(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 0.5, 3.0]))
        self.variance_epsilon = 1e-6


class RMSNorm(Norming):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


class Mixing(nn.Module):
    """Every token gets the mean of those so far; `leaks` adds a bit of the last one."""

    def __init__(self):
        super().__init__()
        self.v = nn.Linear(4, 4, bias=False)
        self.o = nn.Linear(4, 4, bias=False)
        self.leaks = 0.0

    def forward(self, x):
        v = self.v(x)
        mixed = torch.stack([v[:, : t + 1].mean(1) for t in range(v.shape[1])], 1)
        return self.o(mixed + self.leaks * v[:, -1:])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln = RMSNorm()
        self.attn = Mixing()

    def forward(self, x):
        return x + self.attn(self.ln(x))


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layer = Layer()
        self.to(dtype)


CIRCUIT = Circuit(
    {"stream": 4, "n1": 4, "v": 4, "k": 4, "q": 4, "mixed": 4},
    (Map("attn.v.weight", "n1", ("v",)), Map("attn.o.weight", "mixed", ("stream",))),
    (Norm("ln", "stream", "n1", "rmsnorm"),),
    2,
    1,
    0,
    causal=True,
)


def prepared(dtype=torch.float32, tokens=6, index=3, scale=1.0, seed=2):
    model = Model(dtype)
    reference = Reference(model)
    x = (scale * torch.randn(1, tokens, 4, generator=torch.Generator().manual_seed(1))).to(dtype)
    with torch.no_grad():
        y = model.layer(x)
    call = LayerCall(index, "layer", model.layer, (x,), {}, y)
    return call, record_layer(call, reference), Bench(reference, Precision(), seed)


@pytest.fixture
def calls(monkeypatch):
    """Every call that a probe makes: its input, and the weights at that time."""
    made = []
    real = layer_probes.record_layer

    def watched(call, reference, x=None):
        weights = {path: p.detach().clone() for path, p in call.module.named_parameters()}
        made.append((None if x is None else x.clone(), weights))
        return real(call, reference) if x is None else real(call, reference, x)

    monkeypatch.setattr(layer_probes, "record_layer", watched)
    return made


def add_to(module, by, channel=None):
    """A fault: something is added to a module's results."""

    def hook(m, args, y):
        y = y.clone()
        y[..., slice(None) if channel is None else channel] += by
        return y

    return module.register_forward_hook(hook)


# ---- twins in another gauge


@pytest.mark.parametrize(("dtype", "powers"), [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)])
def test_a_healthy_layer_passes_in_another_gauge(calls, dtype, powers):
    call, recording, bench = prepared(dtype)
    assert layer_probes.twin(call, recording, CIRCUIT, bench) == ((Result("pass", 0.0), []), powers)
    [(x, weights)] = calls
    gauge = twins.draw_gauge(CIRCUIT, 2003, powers)
    assert torch.equal(x, call.x * gauge.spaces["stream"].to(dtype)), "the seed times a thousand, and the layer's index"
    assert torch.equal(weights["ln.weight"], (Norming().weight * gauge.weights["ln.weight"]).to(dtype))
    assert torch.equal(call.module.ln.weight, Norming().weight.to(dtype))


def test_a_twin_that_differs_is_a_fault_of_the_leaf_with_its_lanes():
    call, _, bench = prepared()
    with add_to(call.module.attn.v, 0.5, 2):
        found, powers = layer_probes.twin(call, record_layer(call, bench.reference), CIRCUIT, bench)
    text = "a twin in another gauge differs in 25.0% of the values"
    assert powers and found == (
        Result("fail", 0.25, "attn.v", text),
        [Evidence(3, "attn.v", None, "twin", text, "asymmetric", [2], None)],
    )


def test_a_twin_whose_addition_differs_says_after_which_part_and_of_how_many_channels():
    call, _, bench = prepared()
    with add_to(call.module, 0.5, 1):
        (result, [found]), _ = layer_probes.twin(call, record_layer(call, bench.reference), CIRCUIT, bench)
    assert (result.status, result.op) == ("fail", None)
    assert (found.op, found.lanes, found.lanes_of, found.after) == (None, [1], 4, "attn")


def gauges(monkeypatch, *found):
    """What comparing gives, gauge by gauge; also who was asked for powers of two, and what recording was made."""
    asked, answers = [], iter(found)

    def in_gauge(call, recording, circuit, bench, powers):
        asked.append(powers)
        return next(answers), f"recording {len(asked)}"

    monkeypatch.setattr(layer_probes, "_in_gauge", in_gauge)
    return asked


DIFFERS, OTHER = TwinDifference("attn.v", 0.5, [1]), TwinDifference("attn.o", 0.25, [2])


@pytest.mark.parametrize(("normal", "twin_normal"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_difference_where_values_leave_the_normal_range_is_asked_again_with_signs_alone(monkeypatch, normal, twin_normal):
    call, recording, bench = prepared()
    asked = gauges(monkeypatch, DIFFERS, OTHER)
    rooms = {id(recording): normal}
    monkeypatch.setattr(twins, "stays_normal", lambda r: rooms.get(id(r), twin_normal))
    (result, _), powers = layer_probes.twin(call, recording, CIRCUIT, bench)
    if normal and twin_normal:
        assert (result.op, powers, asked) == ("attn.v", True, [True])
    else:
        assert (result.op, powers, asked) == ("attn.o", False, [True, False])


def test_a_difference_that_signs_do_not_show_is_none(monkeypatch):
    call, recording, bench = prepared()
    gauges(monkeypatch, DIFFERS, None)
    monkeypatch.setattr(twins, "stays_normal", lambda r: False)
    assert layer_probes.twin(call, recording, CIRCUIT, bench) == ((Result("pass", 0.0), []), False)


def test_no_difference_is_not_asked_again_and_half_precision_is_asked_once(monkeypatch):
    call, recording, bench = prepared()
    monkeypatch.setattr(twins, "stays_normal", lambda r: False)
    asked = gauges(monkeypatch, None)
    assert layer_probes.twin(call, recording, CIRCUIT, bench)[1] is True and asked == [True]
    call, recording, bench = prepared(torch.float16)
    asked = gauges(monkeypatch, DIFFERS)
    (result, _), powers = layer_probes.twin(call, recording, CIRCUIT, bench)
    assert (result.status, powers, asked) == ("fail", False, [False])


def test_the_weights_come_back_when_a_gauged_call_fails(monkeypatch):
    call, recording, bench = prepared()
    before = dict(call.module.named_parameters())
    monkeypatch.setattr(layer_probes, "record_layer", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    for probe in (layer_probes.twin, layer_probes.permutation):
        with pytest.raises(RuntimeError, match="no memory"):
            probe(call, recording, CIRCUIT, bench)
        assert all(p is before[path] for path, p in call.module.named_parameters())
        assert call.module.ln.variance_epsilon == 1e-6


# ---- causality


@pytest.mark.parametrize(("tokens", "middle"), [(6, 3), (7, 3), (2, 1)])
def test_one_token_in_the_middle_changes_its_sign_and_no_other(calls, tokens, middle):
    call, recording, bench = prepared(tokens=tokens)
    kept = call.x.clone()
    assert layer_probes.causal(call, recording, CIRCUIT, bench) == (Result("pass", 0.0), [])
    [(x, weights)] = calls
    assert torch.equal(call.x, kept), "the call's own input is left alone"
    changed = (x != kept).any(-1)[0].nonzero().flatten().tolist()
    assert changed == [middle] and torch.equal(x[:, middle], -kept[:, middle])
    assert torch.equal(weights["ln.weight"], Norming().weight)


def test_tokens_that_see_a_later_one_are_a_leak():
    call, _, bench = prepared(tokens=5)
    real = call.module.attn.forward
    call.module.attn.forward = lambda x: real(x) + 0.1 * x[:, 2:3]
    result, [found] = layer_probes.causal(call, record_layer(call, bench.reference), CIRCUIT, bench)
    text = "tokens before 2 change when token 2 does, which they must not see"
    assert (result.status, result.op, result.reason) == ("fail", None, text)
    assert (found.layer, found.op, found.function, found.probe, found.text, found.fault_class) == (
        *(3, None, None, "causal", text, "leak"),
    )
    assert found.lanes == [0, 1, 2, 3] and found.after == "attn" and found.lanes_of is None and result.score == 1.0


def test_a_leak_inside_of_attention_is_told_of_it():
    call, _, bench = prepared(tokens=5)
    real = call.module.attn.forward

    def leaking(x):
        v = call.module.attn.v(x)
        return call.module.attn.o(v + v[:, 2:3])

    call.module.attn.forward = leaking
    result, [found] = layer_probes.causal(call, record_layer(call, bench.reference), CIRCUIT, bench)
    assert (result.status, result.op, found.op, found.after) == ("fail", "attn", "attn", None)
    call.module.attn.forward = real
    assert layer_probes.causal(call, record_layer(call, bench.reference), CIRCUIT, bench)[0].status == "pass"


# ---- permutations


def test_channels_are_permuted_beside_a_larger_companion(calls):
    call, recording, bench = prepared()
    result = layer_probes.permutation(call, recording, CIRCUIT, bench)
    assert result.status == "pass" and 0 <= result.score < 1 and result.op is None and result.reason == ""
    [(x, weights)] = calls
    order = twins.draw_shuffle(CIRCUIT, 2003).spaces["stream"]
    assert torch.equal(x, torch.cat([call.x[..., order], 64 * call.x[..., order]]))
    assert torch.equal(weights["ln.weight"], Norming().weight[order])
    assert torch.equal(call.module.ln.weight, Norming().weight)


def scored(monkeypatch, *scores):
    monkeypatch.setattr(layer_probes, "_moved_scores", lambda *_: iter(scores))
    call, recording, bench = prepared()
    return layer_probes.permutation(call, recording, CIRCUIT, bench)


@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_the_worst_operator_within_its_tolerance_is_a_pass(monkeypatch, score):
    assert scored(monkeypatch, (0.0, "a"), (score, "b"), (0.0, None)) == Result("pass", score)


@pytest.mark.parametrize(("score", "shown"), [(1.001, "1"), (12.345, "12.3"), (INF, "inf")])
def test_the_worst_operator_beyond_its_tolerance_is_a_suspicion(monkeypatch, score, shown):
    reason = f"permuted channels give other results, {shown} times the tolerance"
    assert scored(monkeypatch, (0.9, "a"), (score, "b"), (1.0005, None)) == Result("suspect", score, "b", reason)
    assert scored(monkeypatch, (score, None), (0.5, "b")).op is None


def test_one_faulty_channel_is_suspected_where_it_is():
    call, _, bench = prepared()
    with add_to(call.module.attn.v, 0.5, 2):
        found = layer_probes.permutation(call, record_layer(call, bench.reference), CIRCUIT, bench)
    assert (found.status, found.op) == ("suspect", "attn.v") and found.score > 10


@pytest.mark.parametrize(
    ("dtype", "largest", "factor"),
    [
        (torch.float32, 1.0, 64.0),
        (torch.bfloat16, 1e30, 64.0),
        (torch.float16, 1.0, 64.0),
        (torch.float16, 63.5, 64.0),
        (torch.float16, 64.5, 32.0),
        (torch.float16, -129.0, 16.0),
        (torch.float16, 3000.0, 1.0),
        (torch.float16, 60000.0, 1.0),
        (torch.float16, 0.0, 64.0),
    ],
)
def test_a_companion_leaves_a_factor_of_sixteen_before_it_overflows(dtype, largest, factor):
    """65504 / 16 is 4094: 64 times 63.5 is less, 64 times 64.5 is more."""
    assert layer_probes._companion(torch.tensor([0.0, largest, 0.0], dtype=dtype)) == factor


def test_a_permuted_result_that_is_no_number_is_infinitely_far(monkeypatch):
    y = torch.ones(1, 3, 4)
    wrong = y.clone()
    wrong[0, 1, 2] = NAN
    monkeypatch.setattr(twins, "moved_pairs", lambda *_: [("a", y, wrong), ("b", y, y)])
    found = list(layer_probes._moved_scores(CIRCUIT, None, None, None, Precision()))
    assert found == [(INF, "a"), (0.0, "b")]


def test_a_lane_that_is_a_little_larger_everywhere_is_worse_than_its_worst_value(monkeypatch):
    """Of 400 tokens each is off by half of what one value may be: together they are off by far more than a lane may be."""
    y = torch.ones(1, 400, 4)
    off = y.clone()
    off[..., 2] += 1.0
    monkeypatch.setattr(layer_probes, "moved_tolerance", lambda *_: (1.0, 1.0, 1.0))
    monkeypatch.setattr(twins, "moved_pairs", lambda *_: [("a", y, off)])
    [(score, _)] = layer_probes._moved_scores(CIRCUIT, None, None, None, Precision())
    assert score == pytest.approx(400 / (2 * math.sqrt(400)), rel=1e-5)


def test_errors_of_either_sign_cancel_in_a_lane(monkeypatch):
    """Every value is off by half of what is allowed, every second one the other way: no lane is larger or smaller."""
    y, off = torch.ones(1, 400, 4), torch.ones(1, 400, 4)
    off[:, ::2, 2] += 1.0
    off[:, 1::2, 2] -= 1.0
    monkeypatch.setattr(layer_probes, "moved_tolerance", lambda *_: (1.0, 1.0, 1.0))
    monkeypatch.setattr(twins, "moved_pairs", lambda *_: [("a", y, off)])
    [(score, _)] = layer_probes._moved_scores(CIRCUIT, None, None, None, Precision())
    assert score == pytest.approx(0.5)


def test_reduced_dtypes_are_compared_in_float32(monkeypatch):
    y = torch.full((1, 2, 4), 256.0, dtype=torch.bfloat16)
    off = y.clone()
    off[0, 0, 0] = 258.0
    monkeypatch.setattr(layer_probes, "moved_tolerance", lambda *_: (1.0, 1e9, 1.0))
    monkeypatch.setattr(twins, "moved_pairs", lambda *_: [("a", y, off)])
    [(score, _)] = layer_probes._moved_scores(CIRCUIT, None, None, None, Precision())
    assert score == pytest.approx(2 / 512)


# ---- repeats


@dataclass
class Op:
    path: str
    output: object
    function: str | None = None


def again(monkeypatch, *recordings):
    """What recording gives, call by call; the last one from then on."""
    made = []

    def record(*_):
        made.append(1)
        return SimpleNamespace(records=recordings[min(len(made), len(recordings)) - 1])

    monkeypatch.setattr(layer_probes, "record_layer", record)
    return made


def repeated(records, output=None, first=None):
    first = torch.zeros(1, 2, 4) if first is None else first
    call = SimpleNamespace(y=first, x=first, index=5)
    made = SimpleNamespace(
        output=torch.ones(1, 2, 4) if output is None else output, records=records, part_before=lambda order: f"part {order}"
    )
    return repeat(call, made, SimpleNamespace(reference=None))


def test_results_that_are_no_numbers_twice_are_the_same():
    y = torch.zeros(1, 2, 4)
    y[0, 0, 0] = NAN
    assert repeated([], y.clone(), y) == (Result("pass", 0.0), [])


def test_a_rare_change_is_waited_for_and_no_longer_than_needed(monkeypatch):
    same_as_before, changed = [Op("a", torch.zeros(1, 3))], [Op("a", torch.ones(1, 3))]
    made = again(monkeypatch, *[same_as_before] * 23, changed)
    result, _ = repeated(same_as_before)
    assert result.op == "a" and len(made) == 24
    made = again(monkeypatch, *[same_as_before] * 24, changed)
    assert repeated(same_as_before)[0].op is None and len(made) == 24
    made = again(monkeypatch, changed, same_as_before)
    assert repeated(same_as_before)[0].op == "a" and len(made) == 1


def test_what_changes_its_shape_is_passed_over_and_what_is_no_number_is_the_same(monkeypatch):
    one = [Op("a", torch.zeros(1, 3)), Op("b", torch.tensor([NAN])), Op("c", (torch.zeros(3), torch.zeros(3)))]
    two = [Op("a", torch.ones(1, 4)), Op("b", torch.tensor([NAN])), Op("c", (torch.zeros(3), torch.tensor([0.0, 2.0, 0.0])))]
    again(monkeypatch, two)
    result, [found] = repeated(one)
    assert (result.op, found.lanes, found.lanes_of) == ("c", [1], 3)


def test_a_recording_that_is_longer_or_shorter_is_compared_as_far_as_both_go(monkeypatch):
    one = [Op("a", torch.zeros(3)), Op("b", torch.zeros(3))]
    again(monkeypatch, [Op("a", torch.zeros(3))], [Op("a", torch.zeros(3)), Op("b", torch.ones(3)), Op("c", torch.ones(3))])
    assert repeated(one)[0].op == "b"


@pytest.mark.parametrize(
    "name", ["index_add_", "index_add", "scatter_add", "scatter_add_", "index_put_", "histc", "bincount", "cumsum"]
)
def test_functions_that_add_in_any_order_are_excused(monkeypatch, name):
    again(monkeypatch, [Op("mlp", torch.ones(1, 3), name)])
    text = f"100.0% of the layer's results change from call to call: {name} adds in any order, by design"
    assert repeated([Op("mlp", torch.zeros(1, 3), name)]) == (Result("inconclusive", 1.0, "mlp", text), [])
    again(monkeypatch, [Op("", torch.ones(1, 3), name)])
    assert repeated([Op("", torch.zeros(1, 3), name)])[0].op is None


@pytest.mark.parametrize(("path", "after"), [("", "part 1"), ("mlp", None)])
def test_a_function_that_changes_is_named_and_the_layers_own_by_the_part_before(monkeypatch, path, after):
    one = [Op("a", torch.zeros(1, 3)), Op(path, torch.zeros(2, 3), "add")]
    changed = torch.zeros(2, 3)
    changed[0, 2] = 1.0
    again(monkeypatch, [one[0], Op(path, changed, "add")])
    result, [found] = repeated(one)
    assert found == Evidence(5, path or None, "add", "repeat", result.reason, "noise", [2], 3, after=after)


def test_a_change_that_does_not_come_again_has_the_lanes_of_the_layers_results(monkeypatch):
    again(monkeypatch, [Op("a", torch.zeros(3))])
    first, second = torch.zeros(1, 50, 4), torch.zeros(1, 50, 4)
    second[0, 7, 3] = 1.0
    result, [found] = repeated([Op("a", torch.zeros(3))], second, first)
    text = "0.5% of the layer's results change from call to call"
    assert result == Result("fail", pytest.approx(1 / 200), None, text)
    assert found == Evidence(5, None, None, "repeat", text, "spike", [3], 4)


@pytest.mark.parametrize(("share", "within"), [(0.99, True), (1.0, True), (1.01, False)])
def test_results_of_another_order_of_summation_are_within_their_tolerance(share, within):
    """1 and a layer that adds nothing: 128 · 2⁻²⁴ · (1 + 1 + 0) is allowed."""
    x, y = torch.ones(1, 2, 4), torch.ones(1, 2, 4)
    z = y.clone()
    z[0, 1, 2] += round(share * 256) * 2.0**-24 if share != 1.01 else 258 * 2.0**-24
    call, recording = SimpleNamespace(x=x, y=y), SimpleNamespace(output=z)
    assert layer_probes.is_within_summation(call, recording, SimpleNamespace(precision=Precision())) is within


def test_the_worst_value_decides_and_its_size_and_that_of_the_change_count(monkeypatch):
    monkeypatch.setattr(layer_probes, "tolerance", lambda precision, dtype: (1.0, 1.0))
    x = torch.tensor([[[0.0, 0.0], [8.0, 0.0]]])
    y = torch.tensor([[[3.0, 3.0], [8.0, 0.0]]])
    z = y + torch.tensor([[[3.0, 0.0], [0.0, 0.0]]])
    assert layer_probes._beyond(y, z, x, None) == pytest.approx(3 / (0 + 3 + 4 * 3))
    z = y + torch.tensor([[[0.0, 0.0], [8.0, 0.0]]])
    assert layer_probes._beyond(y, z, x, None) == pytest.approx(8 / 16), "this token has no change of its own"
    assert layer_probes._beyond(y, y, x, None) == 0.0


# ---- links


def broken(expected, got, path="mlp", door="output"):
    return SimpleNamespace(path=path, door=door, expected=expected, got=got)


@pytest.mark.parametrize(("door", "layer"), [("input", 0), ("output", None)])
def test_the_first_break_is_told_with_what_was_made_and_what_came(door, layer):
    expected = torch.randn(1, 30, 4, generator=torch.Generator().manual_seed(0))
    got = expected * 1.5
    got[..., 0] = expected[..., 0]
    second = broken(expected, expected + 1, "late")
    text = f"the {door} of mlp is not what was made for it"
    assert links(layer, SimpleNamespace(breaks=[broken(expected, got, "mlp", door), second])) == (
        Result("fail", 0.75, "mlp", text),
        [Evidence(layer, "mlp", None, "links", text, "gain", [1, 2, 3], 4)],
    )


# ---- weights


def bench_with(file, has_file=True):
    return Bench(SimpleNamespace(has_file=has_file, weight=file.__getitem__), Precision(), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weights_of_any_width_are_compared_bit_by_bit(dtype):
    file = torch.arange(12.0).view(3, 4).to(dtype)
    here = file.clone()
    here[2, 1] = torch.nextafter(here[2, 1].float(), torch.tensor(INF)).to(dtype) if dtype == torch.float32 else 9.5
    model = SimpleNamespace(get_submodule=lambda path: torch.nn.Identity(), get_parameter={"l.a.weight": here}.__getitem__)
    result, [found] = layer_probes.weights(["l.a.weight"], model, bench_with({"l.a.weight": file}), 0, "l")
    assert (result.status, result.score, found.lanes, found.lanes_of) == ("fail", pytest.approx(1 / 12), [2], 3)
    assert found.examples[0]["index"] == "(2, 1)" and found.examples[0]["low"] == found.examples[0]["high"] == 9.0
    healthy = SimpleNamespace(
        get_submodule=lambda path: torch.nn.Identity(), get_parameter={"l.a.weight": file.clone()}.__getitem__
    )
    assert layer_probes.weights(["l.a.weight"], healthy, bench_with({"l.a.weight": file}), 0, "l")[0].status == "pass"


def test_weights_that_do_not_lie_in_one_piece_are_compared_too():
    file = torch.arange(12.0).view(3, 4)
    here = file.t().contiguous().t()
    model = SimpleNamespace(get_submodule=lambda path: torch.nn.Identity(), get_parameter={"a.weight": here}.__getitem__)
    assert layer_probes.weights(["a.weight"], model, bench_with({"a.weight": file}), 0, "")[0] == Result("pass", 0.0)


def test_six_examples_of_a_weight_and_large_counts_with_commas():
    file = torch.zeros(60, 100)
    model = SimpleNamespace(get_submodule=lambda path: torch.nn.Identity(), get_parameter={"m.a.weight": file + 1}.__getitem__)
    result, [found] = layer_probes.weights(["m.a.weight"], model, bench_with({"m.a.weight": file}), None, "m")
    assert result.reason == "6,000 of 6,000 values of its weight are not those of the file"
    assert [e["index"] for e in found.examples] == [f"(0, {i})" for i in range(6)] and found.layer is None


def test_a_stack_of_matrices_has_its_experts_as_rows_and_a_name_without_prefix_stays():
    file = torch.zeros(4, 2, 3)
    here = file.clone()
    here[1, 1, 2] = here[3, 0, 0] = 1.0
    model = SimpleNamespace(
        get_submodule=lambda path: torch.nn.Identity(), get_parameter={"other.experts.down": here}.__getitem__
    )
    _, [found] = layer_probes.weights(["other.experts.down"], model, bench_with({"other.experts.down": file}), 1, "layers.1")
    assert (found.lanes, found.lanes_of, found.op) == ([1, 3], 4, "other.experts")
    assert found.text.startswith("2 of 24 values of its down ")


def test_the_first_weight_that_differs_is_told_and_the_largest_share_is_the_score():
    file = {"l.a.weight": torch.zeros(4, 2), "l.b.weight": torch.zeros(4, 2), "l.c.weight": torch.zeros(4, 2)}
    here = {name: w.clone() for name, w in file.items()}
    for name, count in (("l.a.weight", 1), ("l.b.weight", 6), ("l.c.weight", 2)):
        here[name].view(-1)[:count] = 1.0
    model = SimpleNamespace(get_submodule=lambda path: torch.nn.Identity(), get_parameter=here.__getitem__)
    result, found = layer_probes.weights(list(file), model, bench_with(file), 0, "l")
    assert (result.score, result.op, result.reason) == (0.75, "a", "1 of 8 values of its weight are not those of the file")
    assert [e.op for e in found] == ["a", "b", "c"]


@pytest.mark.parametrize(("path", "op"), [("mlp", "mlp"), ("", None)])
def test_a_number_of_the_layer_itself_has_no_operator(path, op):
    bench = Bench(SimpleNamespace(other_numbers=lambda *_: iter([(path, "its eps is 2"), ("x", "more")])), Precision(), 0)
    result, [found] = layer_probes.attributes(Result("skipped"), None, "", bench, 2)
    assert result == Result("fail", 1.0, op, "its eps is 2")
    assert found == Evidence(2, op, None, "weights", "its eps is 2", "attribute")


# ---- what replay found


def violation(got, outside, low, high, tokens=None, path="mlp"):
    return Violation(path, None, 0, torch.tensor(outside), torch.tensor(got), torch.tensor(low), torch.tensor(high), tokens)


NOWHERE = SimpleNamespace(part_before=lambda order: None)


def examples_of(v):
    return replay(Judgement([v]), NOWHERE, 0)[1][0].examples


def test_a_single_number_has_token_and_channel_zero():
    result, [found] = replay(Judgement([violation(3.0, True, [1.0], [2.0])]), NOWHERE, 0)
    assert found.examples == [{"token": 0, "channel": 0, "got": 3.0, "low": 1.0, "high": 2.0}]
    assert (found.lanes, found.lanes_of, result.score) == ([0], 1, 1.0)
    assert found.text == "1 of 1 values lie outside of their rounding interval"


def test_the_place_of_an_example_is_its_last_two_dimensions():
    got = torch.zeros(2, 3, 4)
    got[1, 2, 3] = 9.0
    outside = got != 0
    found = examples_of(Violation("a", None, 0, outside, got, torch.zeros(1), torch.zeros(1)))
    assert [(e["token"], e["channel"]) for e in found] == [(2, 3)]
    assert [(e["token"], e["channel"]) for e in examples_of(violation([0.0, 7.0], [False, True], [0.0], [0.0]))] == [(0, 1)]


def test_the_worst_examples_come_first_whichever_side_they_are_on_and_no_number_before_all():
    v = violation([[5.0, -9.0, NAN, 2.5]], [[True] * 4], [1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0])
    assert [e["channel"] for e in examples_of(v)] == [2, 1, 0, 3]


def test_how_far_a_value_is_outside_counts_from_the_nearer_end():
    """−11 is one below the lowest, 5 is three above the highest."""
    v = violation([[-11.0, 5.0]], [[True, True]], [-10.0, -10.0], [2.0, 2.0])
    assert [e["channel"] for e in examples_of(v)] == [1, 0]
    v = violation([[-14.0, 5.0]], [[True, True]], [-10.0, -10.0], [2.0, 2.0])
    assert [e["channel"] for e in examples_of(v)] == [0, 1]


def test_values_of_reduced_dtypes_are_told_as_they_are():
    v = Violation("a", None, 0, torch.tensor([[True]]), *(torch.tensor(x).bfloat16() for x in ([[0.1]], [0.2], [0.3])))
    [found] = examples_of(v)
    assert found["got"] == 0.10009765625 and found["low"] == 0.2001953125 and found["high"] == 0.30078125


def test_a_violation_has_the_class_of_its_fault_and_large_counts_have_commas():
    clean = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    v = Violation("a", None, 0, torch.ones(40, 50, dtype=torch.bool), clean * 0, clean.flatten(), clean.flatten())
    _, [found] = replay(Judgement([v]), NOWHERE, 0)
    assert found.fault_class == "dead_zone" and found.text.startswith("2,000 of 2,000 values")


# ---- checksums and coverage


def test_the_worst_checksum_is_told():
    assert checksum({"a": 3.0, "b": 17.125, "c": 2.0}) == Result(
        "suspect", 17.125, "b", "a checksum is off by 17.1 times its threshold"
    )
    assert checksum({"a": INF}).reason == "a checksum is off by inf times its threshold"
    assert checksum({"a": 0.25, "b": 0.75}) == Result("pass", 0.75)


def recorded(path, rows, func=None):
    return Record(path, func, (), {}, (torch.zeros(1, rows, 4), None))


def test_operators_that_made_nothing_are_not_counted():
    found = Recording([recorded("q", 0), recorded("v", 5), recorded("v", 9, torch.add)])
    assert by_checksums(found, ["q", "v"]) == {"v": {"rows": 5, "replayed": 0, "checksums": 5}}
    assert by_twin(found, SimpleNamespace(outputs=lambda: {"q": (), "v": ()})) == {"v": {"rows": 5, "twin": 5}}
    assert by_checksums(found, []) == {} and by_twin(found, SimpleNamespace(outputs=dict)) == {}


@pytest.mark.parametrize(("rows", "permuted"), [(1, 1), (32, 32), (63, 63), (64, 32), (65, 33), (100, 34)])
def test_permuted_rows_are_those_of_every_so_many_tokens(rows, permuted):
    coverage = {"a": {"rows": rows, "twin": rows}}
    assert by_permutation(coverage) is None
    assert coverage == {"a": {"rows": rows, "twin": rows, "permuted": permuted}}
