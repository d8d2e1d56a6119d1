"""Twins piece by piece: what is drawn, how weights move, and who is named when two recordings disagree."""

import math

import pytest
import torch
from torch import nn

from shaketable.locate.capture.recorder import Record, Recording
from shaketable.locate.capture.reference import Reference
from shaketable.locate.capture.trace import record_layer, trace
from shaketable.locate.probes import twins
from shaketable.locate.probes.gauge import Gauge
from shaketable.locate.probes.twins import Shuffle, TwinDifference, first_difference, moved_pairs, stays_normal, until
from shaketable.locate.probes.wiring import Circuit, Map, Norm, circuit_of
from shaketable.sites.nested_tensors import tensors_of
from tests.locate.architectures import ROUTED, build, tokens

NAN, INF = math.nan, math.inf
POWERS = {s * 2.0**n for s in (1, -1) for n in range(-3, 4)}


def sized(norm="rmsnorm", head_norms=(), rotary=4, writes="n1", **more):
    """Three key heads of four channels, two query heads each."""
    sizes = {"stream": 60, "q": 24, "k": 12, "v": 12, "mixed": 24, "n1": 60, "gate": 40, "up": 40, "hidden": 40} | more
    return Circuit(sizes, (), (Norm("ln", "stream", writes, norm),), 4, 2, rotary, head_norms)


# ---- gauges that are drawn


@pytest.mark.parametrize(("powers", "allowed"), [(True, {8.0, -8.0}), (False, {1.0, -1.0})])
def test_the_stream_has_a_sign_per_channel_and_one_power_for_all(powers, allowed):
    found = twins.draw_gauge(sized(), 0, powers).spaces["stream"]
    assert set(found.tolist()) == allowed and 15 < int((found > 0).sum()) < 45


@pytest.mark.parametrize(("powers", "factor"), [(True, -8.0), (False, -1.0)])
def test_a_stream_whose_mean_counts_has_one_sign(powers, factor):
    assert set(twins.draw_gauge(sized("layernorm"), 0, powers).spaces["stream"].tolist()) == {factor}


def test_a_stream_that_a_norm_writes_has_signs_alone():
    found = twins.draw_gauge(sized(writes="stream"), 0, True)
    assert set(found.spaces["stream"].tolist()) == {1.0, -1.0} and found.attributes == {}


@pytest.mark.parametrize("space", ["n1", "v", "k", "up"])
def test_free_spaces_have_signs_and_every_power_up_to_three(space):
    many = sized(stream=600, n1=600, v=1200, k=1200, up=600, hidden=600, q=2400, mixed=2400)
    assert set(twins.draw_gauge(many, 1, True).spaces[space].tolist()) == POWERS
    assert set(twins.draw_gauge(many, 1, False).spaces[space].tolist()) == {1.0, -1.0}


@pytest.mark.parametrize("powers", [True, False])
def test_keys_that_pass_a_norm_of_their_own_have_signs_alone(powers):
    found = twins.draw_gauge(sized(head_norms=("k_norm",)), 2, powers)
    assert set(found.spaces["k"].tolist()) == {1.0, -1.0}
    assert (set(found.spaces["v"].tolist()) <= {1.0, -1.0}) == (not powers)


@pytest.mark.parametrize(("rotary", "pairs"), [(4, ((0, 2), (1, 3))), (2, ((0, 1),)), (0, ())])
def test_rotated_channels_of_a_key_head_are_alike_and_heads_are_not(rotary, pairs):
    heads = twins.draw_gauge(sized(rotary=rotary), 3, True).spaces["k"].view(3, 4)
    assert all(torch.equal(heads[:, a], heads[:, b]) for a, b in pairs)
    assert not torch.equal(heads[0], heads[1])
    alike = {(a, b) for a in range(4) for b in range(a + 1, 4) if torch.equal(heads[:, a], heads[:, b])}
    assert alike == set(pairs), "seed 3 makes no others alike by chance"


def test_the_gate_has_no_gauge():
    assert set(twins.draw_gauge(sized(), 0, True).spaces["gate"].tolist()) == {1.0}


@pytest.mark.parametrize("powers", [True, False])
def test_a_gauge_follows_from_its_seed_alone(powers):
    state = torch.random.get_rng_state()
    one, again, other = (twins.draw_gauge(sized(), seed, powers).spaces for seed in (4, 4, 5))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(one[s], again[s]) for s in one)
    assert not any(torch.equal(one[s], other[s]) for s in ("stream", "n1", "v", "k", "up"))


# ---- permutations


@pytest.mark.parametrize("n", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_cycle_goes_through_all_and_back(n, seed):
    order = twins._cycle(n, torch.Generator().manual_seed(seed)).tolist()
    at, seen = 0, []
    for _ in range(n):
        seen.append(at)
        at = order[at]
    assert at == 0 and sorted(seen) == list(range(n))


@pytest.fixture
def shuffle():
    return twins.draw_shuffle(sized(n2=60, attended=60, fed=60, choice=5, **{"shared hidden": 7}), 0).spaces


def test_all_that_has_the_streams_channels_is_ordered_alike(shuffle):
    assert all(torch.equal(shuffle[s], shuffle["stream"]) for s in ("n1", "n2", "attended", "fed"))
    assert torch.equal(shuffle["gate"], shuffle["hidden"]) and torch.equal(shuffle["up"], shuffle["hidden"])
    assert torch.equal(shuffle["shared up"], shuffle["shared hidden"]) and len(shuffle["shared gate"]) == 7
    assert shuffle["choice"].tolist() == [0, 1, 2, 3, 4], "experts stay where they are"


def test_heads_move_with_their_keys_and_channels_of_values_move_inside(shuffle):
    """Which head moves where is read off the keys, whose channels keep their order."""
    keys = shuffle["k"].view(3, 4)
    heads = (keys[:, 0] // 4).tolist()
    assert sorted(heads) == [0, 1, 2] and all(heads[i] != i for i in range(3))
    assert keys.tolist() == [[4 * h + c for c in range(4)] for h in heads]
    queries = shuffle["q"].view(3, 2, 4)
    assert queries.tolist() == [[[4 * (2 * h + g) + c for c in range(4)] for g in range(2)] for h in heads]
    values = shuffle["v"].view(3, 4)
    assert (values // 4).tolist() == [[h] * 4 for h in heads]
    inside = values % 4
    assert all(sorted(row) == [0, 1, 2, 3] and all(row[i] != i for i in range(4)) for row in inside.tolist())
    mixed = shuffle["mixed"].view(3, 2, 4)
    assert mixed.tolist() == [
        [[4 * (2 * h + g) + c for c in row] for g in range(2)] for h, row in zip(heads, inside.tolist(), strict=True)
    ]


def test_a_shuffle_follows_from_its_seed_alone():
    one, again, other = (twins.draw_shuffle(sized(), seed).spaces for seed in (4, 4, 5))
    assert all(torch.equal(one[s], again[s]) for s in one)
    assert not any(torch.equal(one[s], other[s]) for s in ("stream", "hidden", "v", "mixed"))
    assert not torch.equal(one["stream"][:40], one["hidden"])


@pytest.mark.parametrize("name", [*ROUTED, "gpt2", "phi3"])
def test_a_shuffled_layer_computes_the_same_function(name):
    """Experts too: their choice does not change with the order of summation here."""
    model = build(name, torch.float32, "eager")
    reference = Reference(model)
    call = trace(model, tokens(n=9), reference).calls[0]
    circuit = circuit_of(reference.skeleton.get_submodule(call.name), model.config)
    original = record_layer(call, reference)
    shuffle = twins.draw_shuffle(circuit, 5)
    before = dict(call.module.named_parameters())
    with twins.shuffled(call.module, circuit, shuffle):
        assert all(not torch.equal(call.module.get_parameter(m.parameter), before[m.parameter]) for m in circuit.maps)
        twin = record_layer(call, reference, call.x[..., shuffle.spaces["stream"]])
    assert all(p is before[path] for path, p in call.module.named_parameters())
    pairs = list(moved_pairs(circuit, shuffle, original, twin))
    for path, a, b in pairs:
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max())), path
    inner = {path for path, _, _ in pairs}
    assert None in inner and "attn" in {str(path)[-4:] for path in inner}
    assert ("mlp" in inner) == (name not in ROUTED)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(3)
        self.bare = nn.LayerNorm(3, bias=False)
        self.up = nn.Linear(3, 4)
        self.turned = nn.Module()
        self.turned.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.experts = nn.Module()
        self.experts.down = nn.Parameter(torch.arange(12.0).view(2, 3, 2))
        self.ln.weight.data, self.ln.bias.data = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
        self.bare.weight.data = torch.tensor([7.0, 8.0, 9.0])
        self.up.weight.data, self.up.bias.data = torch.arange(12.0).view(4, 3), torch.arange(4.0)


SMALL = Circuit(
    {"stream": 3, "n1": 3, "n2": 3, "gate": 2, "up": 2, "hidden": 2},
    (
        Map("up.weight", "n1", ("gate", "up"), "up.bias"),
        Map("turned.weight", "hidden", ("stream",), None, "in,out"),
        Map("experts.down", "hidden", ("stream",), None, "expert,out,in"),
    ),
    (Norm("ln", "stream", "n1", "layernorm", "eps"), Norm("bare", "stream", "n2", "layernorm", "eps")),
    1,
    1,
    0,
)
STREAM, HIDDEN = torch.tensor([2, 0, 1]), torch.tensor([1, 0])
ORDER = Shuffle(dict.fromkeys(("stream", "n1", "n2"), STREAM) | dict.fromkeys(("gate", "up", "hidden"), HIDDEN))


def test_rows_and_columns_and_norms_are_permuted():
    layer = Small()
    with twins.shuffled(layer, SMALL, ORDER):
        assert layer.up.weight.tolist() == [[5, 3, 4], [2, 0, 1], [11, 9, 10], [8, 6, 7]]
        assert layer.up.bias.tolist() == [1, 0, 3, 2]
        assert layer.turned.weight.tolist() == [[5, 3, 4], [2, 0, 1]]
        assert layer.experts.down.tolist() == [[[5, 4], [1, 0], [3, 2]], [[11, 10], [7, 6], [9, 8]]]
        assert (layer.ln.weight.tolist(), layer.ln.bias.tolist()) == ([3, 1, 2], [6, 4, 5])
        assert layer.bare.weight.tolist() == [9, 7, 8] and layer.bare.bias is None
    assert layer.up.bias.tolist() == [0, 1, 2, 3] and layer.ln.weight.tolist() == [1, 2, 3]


def test_a_shuffled_layer_is_itself_again_after_an_exception():
    layer = Small()
    before = dict(layer.named_parameters())
    with pytest.raises(RuntimeError), twins.shuffled(layer, SMALL, ORDER):
        raise RuntimeError
    assert all(p is before[path] for path, p in layer.named_parameters())


# ---- comparing


WIRED = Circuit(
    {"stream": 2, "n1": 2, "q": 2, "k": 2, "mixed": 2, "n2": 2, "hidden": 2},
    (
        Map("attn.qk.weight", "n1", ("q", "k")),
        Map("attn.o.weight", "mixed", ("stream",)),
        Map("mlp.down.weight", "hidden", ("stream",)),
    ),
    (Norm("ln1", "stream", "n1", "rmsnorm"), Norm("ln2", "stream", "n2", "rmsnorm")),
    1,
    1,
    0,
)
GAUGE = Gauge(
    {s: torch.tensor([2.0, -4.0]) for s in ("stream", "n1", "n2", "mixed", "hidden")}
    | {"q": torch.tensor([1.0, 8.0]), "k": torch.tensor([-1.0, 0.5])}
)
FACTORS = {"attn.qk": torch.tensor([1.0, 8.0, -1.0, 0.5])}
LEAVES = ["ln1", "attn.qk", "attn.o", "ln2", "mlp.down"]


def made(twin, dtype=torch.float32, kwargs=False):
    """A recording of five leaves and the functions between; a twin's has the gauge's factors."""
    usual = torch.tensor([2.0, -4.0]) if twin else torch.ones(2)
    records = []
    for i, path in enumerate(LEAVES):
        own = FACTORS.get(path, usual) if twin else torch.ones(4 if path == "attn.qk" else 2)
        x, y = torch.full((1, 3, 2), 1.0 + i) * usual, torch.full((1, 3, len(own)), 3.0 + i) * own
        records.append(Record(path.rpartition(".")[0], torch.add, (x,), {}, x * 5))
        given = ((), {"x": x.to(dtype)}) if kwargs else ((x.to(dtype),), {})
        records.append(Record(path, None, *given, (y.to(dtype), None)))
    return Recording(records, [], (torch.full((1, 3, 2), 9.0) * usual).to(dtype))


def leaf(recording, path):
    return recording.leaf(path)


def spoil(tensor, channel=1, by=1.0):
    tensor[:, 1:, channel] += by


@pytest.mark.parametrize("kwargs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_twin_that_is_the_original_in_its_gauge_has_no_difference(dtype, kwargs):
    assert first_difference(WIRED, GAUGE, made(False, dtype, kwargs), made(True, dtype, kwargs)) is None


@pytest.mark.parametrize("kwargs", [False, True])
@pytest.mark.parametrize("path", LEAVES)
def test_a_leaf_that_makes_other_values_of_the_same_input_is_named(path, kwargs):
    twin = made(True, kwargs=kwargs)
    spoil(leaf(twin, path).output[0])
    share = 2 / 12 if path == "attn.qk" else 2 / 6
    assert first_difference(WIRED, GAUGE, made(False, kwargs=kwargs), twin) == TwinDifference(path, pytest.approx(share), [1])


def test_lanes_of_spaces_side_by_side_are_counted_through():
    twin = made(True)
    spoil(leaf(twin, "attn.qk").output[0], 3)
    leaf(twin, "attn.qk").output[0][:, 0, 0] += 1
    found = first_difference(WIRED, GAUGE, made(False), twin)
    assert (found.lanes, found.share) == ([0, 3], pytest.approx(3 / 12))


@pytest.mark.parametrize("kwargs", [False, True])
@pytest.mark.parametrize(("path", "named"), [("attn.o", "attn"), ("attn.qk", "attn"), ("mlp.down", "mlp")])
def test_a_leaf_whose_input_differs_already_is_not_to_blame(path, named, kwargs):
    """What lies between is: the share and the lanes are those of the input."""
    twin = made(True, kwargs=kwargs)
    record = leaf(twin, path)
    spoil(next(tensors_of((record.args, record.kwargs))), 0)
    spoil(record.output[0], 1)
    found = first_difference(WIRED, GAUGE, made(False, kwargs=kwargs), twin)
    assert found == TwinDifference(named, pytest.approx(2 / 6), [0], None)


@pytest.mark.parametrize(("path", "after"), [("ln1", None), ("ln2", "attn")])
def test_the_layers_own_addition_is_told_by_the_part_before_it(path, after):
    twin = made(True)
    spoil(leaf(twin, path).args[0], 0)
    spoil(leaf(twin, path).output[0], 1)
    assert first_difference(WIRED, GAUGE, made(False), twin) == TwinDifference(None, pytest.approx(2 / 6), [0], after)


def test_the_layers_result_is_compared_last():
    twin = made(True)
    spoil(twin.output, 0)
    assert first_difference(WIRED, GAUGE, made(False), twin) == TwinDifference(None, pytest.approx(2 / 6), [0], "mlp")
    spoil(leaf(twin, "mlp.down").output[0])
    assert first_difference(WIRED, GAUGE, made(False), twin).path == "mlp.down"


def test_the_first_in_the_order_of_computation_is_named():
    twin = made(True)
    for path in ("mlp.down", "attn.o", "ln2"):
        spoil(leaf(twin, path).output[0])
    assert first_difference(WIRED, GAUGE, made(False), twin).path == "attn.o"


def test_an_input_that_differs_without_consequence_is_passed_over():
    twin = made(True)
    spoil(leaf(twin, "attn.o").args[0])
    assert first_difference(WIRED, GAUGE, made(False), twin) is None


def test_functions_and_leaves_without_a_partner_or_a_wiring_are_passed_over():
    original, twin = made(False), made(True)
    for record in twin.records:
        if record.func is not None:
            spoil(record.output)
    original.records.append(Record("mlp.act", None, (torch.ones(1, 3, 2),), {}, torch.ones(1, 3, 2)))
    twin.records.append(Record("mlp.act", None, (torch.ones(1, 3, 2),), {}, torch.zeros(1, 3, 2)))
    twin.records.remove(leaf(twin, "attn.o"))
    assert first_difference(WIRED, GAUGE, original, twin) is None


def test_what_is_no_number_in_both_is_the_same():
    original, twin = made(False), made(True)
    for recording in (original, twin):
        leaf(recording, "attn.o").output[0][0, 0, 0] = NAN
    leaf(original, "attn.o").output[0][0, 1, 1], leaf(twin, "attn.o").output[0][0, 1, 1] = INF, -INF
    assert first_difference(WIRED, GAUGE, original, twin) is None, "infinity times −4"
    spoil(leaf(twin, "attn.o").output[0], 0)
    assert first_difference(WIRED, GAUGE, original, twin) == TwinDifference("attn.o", pytest.approx(2 / 6), [0])


# ---- tokens before one


def test_until_keeps_the_tokens_before_one_of_the_leaves():
    original = made(False)
    leaf(original, "ln1").kwargs["position"] = torch.arange(3)
    leaf(original, "ln2").args = (torch.arange(6.0).view(1, 3, 2), torch.arange(3), 7)
    original.breaks.append("something")
    found = until(original, 2)
    assert [r.path for r in found.records] == LEAVES and all(r.func is None for r in found.records)
    assert found.breaks == [] and found.output.shape == (1, 2, 2)
    first, norm = found.records[0], found.records[3]
    assert first.kwargs == {} and first.output[0].shape == (1, 2, 2) and first.output[1] is None
    assert norm.args[0].tolist() == [[[0, 1], [2, 3]]] and norm.args[1].tolist() == [0, 1, 2] and norm.args[2] == 7
    assert leaf(original, "ln2").args[0].shape == (1, 3, 2), "the original keeps its tokens"


# ---- permuted pairs


@pytest.mark.parametrize(("count", "step"), [(0, 1), (1, 1), (31, 1), (32, 1), (63, 1), (64, 2), (95, 2), (96, 3), (1024, 32)])
def test_of_long_sequences_about_32_tokens_are_compared(count, step):
    assert twins.compared_step(count) == step


def permuted(recording):
    """The twin of a recording under a swap of the two channels of every space, with a companion in the batch."""
    records = []
    for r in recording.records:
        swap = [1, 0, 3, 2] if r.path == "attn.qk" else [1, 0]
        x, y = r.args[0][..., [1, 0]], next(tensors_of(r.output))[..., swap]
        records.append(Record(r.path, r.func, (torch.cat([x, 64 * x]),), {}, torch.cat([y, 64 * y])))
    y = recording.output[..., [1, 0]]
    return Recording(records, [], torch.cat([y, 64 * y]))


SWAP = Shuffle({s: torch.tensor([1, 0]) for s in WIRED.sizes})


def counted(tokens=3):
    """A recording whose values are all different."""
    recording, value = made(False), 0
    for record in recording.records:
        wide = 4 if record.path == "attn.qk" and record.func is None else 2
        x = torch.arange(value, value + 2.0 * tokens).view(1, tokens, 2)
        y = torch.arange(value + 100, value + 100 + float(wide * tokens)).view(1, tokens, wide)
        record.args, record.output, value = (x,), y, value + 1000
    recording.output = torch.arange(value, value + 2.0 * tokens).view(1, tokens, 2)
    return recording


@pytest.mark.parametrize(("count", "kept"), [(3, 3), (64, 32), (100, 34)])
def test_permuted_results_come_back_in_the_original_order(count, kept):
    original = counted(count)
    pairs = list(moved_pairs(WIRED, SWAP, original, permuted(original)))
    names = ["ln1", "attn.qk", "attn.o", "attn", "ln2", "mlp.down", "mlp", None]
    assert [path for path, _, _ in pairs] == names
    for _, a, b in pairs:
        assert torch.equal(a, b) and a.shape[:2] == (1, kept)
    by_name = {path: a for path, a, _ in pairs}
    step = max(1, count // 32)
    assert torch.equal(by_name["attn"], leaf(original, "attn.o").args[0][:, ::step])
    assert torch.equal(by_name["mlp"], leaf(original, "mlp.down").args[0][:, ::step])
    assert torch.equal(by_name[None], original.output[:, ::step])


def test_an_order_is_undone_and_not_done_twice():
    """A cycle of three is not its own inverse."""
    order = Shuffle({"stream": STREAM})
    circuit = Circuit({"stream": 3}, (), (), 1, 1, 0)
    y = torch.tensor([[[1.0, 2.0, 3.0]]])
    [(path, a, b)] = moved_pairs(circuit, order, Recording([], [], y), Recording([], [], y[..., STREAM]))
    assert path is None and torch.equal(a, b)


def test_results_without_a_batch_are_compared_as_a_whole():
    circuit = Circuit({"stream": 2}, (), (), 1, 1, 0)
    y = torch.arange(128.0).view(64, 2)
    [(_, a, b)] = moved_pairs(circuit, SWAP, Recording([], [], y), Recording([], [], torch.cat([y, y])[:, [1, 0]]))
    assert torch.equal(a, b) and a.shape == (64, 2)


def test_operators_that_only_one_recording_has_are_left_out():
    original = counted()
    twin = permuted(original)
    twin.records.remove(leaf(twin, "attn.o"))
    assert [p for p, _, _ in moved_pairs(WIRED, SWAP, original, twin)] == ["ln1", "attn.qk", "ln2", "mlp.down", "mlp", None]


# ---- room for powers of two


def holding(*tensors, func=None, output=None, kwargs=None):
    return Recording([Record("a", func, tensors, kwargs or {}, torch.ones(1) if output is None else output)])


LIMITS = [
    (dtype, torch.finfo(dtype).tiny * 2.0**12, torch.finfo(dtype).max / 2.0**12) for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("dtype", "low", "high"), LIMITS, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_twelve_powers_of_two_are_left_on_both_sides(dtype, low, high, sign):
    def room(value):
        return stays_normal(holding(torch.tensor([1.0, sign * value], dtype=dtype)))

    assert room(low) and room(high * 0.99) and room(1.0)
    assert not room(low * 0.9) and not room(high * 1.1)
    assert stays_normal(holding(torch.tensor([1.0, 0.0, -0.0], dtype=dtype))), "zero stays zero"


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_no_number_has_no_room(bad):
    assert not stays_normal(holding(torch.tensor([1.0, bad])))


def test_arguments_keywords_and_results_of_leaves_count_and_nothing_else():
    small = torch.tensor([1e-37])
    assert not stays_normal(holding(small))
    assert not stays_normal(holding(torch.ones(1), small))
    assert not stays_normal(holding(torch.ones(1), kwargs={"x": small}))
    assert not stays_normal(holding(torch.ones(1), output=(torch.ones(1), small)))
    assert stays_normal(holding(small, func=torch.add))
    assert stays_normal(holding(torch.tensor([10**9]), torch.tensor([True])))
    assert stays_normal(Recording([*holding(torch.ones(1)).records, *holding(small, func=torch.add).records]))
    assert not stays_normal(Recording([*holding(torch.ones(1)).records, *holding(small).records]))
