"""Gauges on a layer of a few channels: every factor, every parameter that it changes, and what comes back."""

import pytest
import torch
from torch import nn

from shaketable.locate.probes.gauge import Gauge, free_spaces, gauge_of, gauged, paired, rescaled, swapped
from shaketable.locate.probes.wiring import Circuit, Map, Norm


def circuit(norms=(), maps=(), head_norms=(), groups=2, sizes=None, **more):
    """Two key/value heads of two channels, four query heads, a stream of three channels."""
    spaces = {"stream": 3, "q": 8, "k": 4, "v": 4, "mixed": 8, "n1": 3, "gate": 2, "up": 2, "hidden": 2} | (sizes or {})
    return Circuit(spaces, tuple(maps), tuple(norms), 2, groups, 2, head_norms, **more)


def t(*values):
    return torch.tensor(values, dtype=torch.float32)


RMS = Norm("ln", "stream", "n1", "rmsnorm")


# ---- what may be scaled


@pytest.mark.parametrize("kind", ["rmsnorm", "rmsnorm_late", "layernorm"])
def test_the_output_of_a_norm_with_a_weight_is_free(kind):
    assert free_spaces(circuit([Norm("ln", "stream", "n1", kind)])) == ["n1", "v", "k", "up"]


def test_a_norm_of_one_plus_a_weight_or_into_the_stream_is_not_free():
    assert free_spaces(circuit([Norm("ln", "stream", "n1", "rmsnorm_one")])) == ["v", "k", "up"]
    assert free_spaces(circuit([Norm("post", "attended", "stream", "rmsnorm")])) == ["v", "k", "up"]


def test_keys_with_a_norm_of_their_own_are_not_free():
    assert free_spaces(circuit(head_norms=("q_norm", "k_norm"))) == ["v", "up"]
    assert free_spaces(circuit(head_norms=("k_norm",))) == ["v", "up"]


def test_a_layer_without_a_gate_has_no_free_hidden_channels_and_one_with_shared_experts_has_more():
    plain = circuit()
    without = Circuit({n: s for n, s in plain.sizes.items() if n != "up"}, (), (), 2, 2, 2)
    assert free_spaces(without) == ["v", "k"]
    assert free_spaces(circuit(sizes={"shared up": 2, "shared hidden": 2})) == ["v", "k", "up", "shared up"]


# ---- what follows from it


def test_each_query_head_has_the_factors_of_its_group():
    found = gauge_of(circuit(), {"v": t(1, 2, 4, 8), "k": t(1, 2, 4, 8)})
    assert found.spaces["mixed"].tolist() == [1, 2, 1, 2, 4, 8, 4, 8]
    assert found.spaces["q"].tolist() == [1, 0.5, 1, 0.5, 0.25, 0.125, 0.25, 0.125]
    assert found.spaces["v"].tolist() == found.spaces["k"].tolist() == [1, 2, 4, 8]


def test_heads_without_groups_have_their_own_factors():
    found = gauge_of(circuit(groups=1, sizes={"q": 4, "mixed": 4}), {"v": t(1, 2, 4, 8), "k": t(1, 2, 4, 8)})
    assert found.spaces["mixed"].tolist() == [1, 2, 4, 8] and found.spaces["q"].tolist() == [1, 0.5, 0.25, 0.125]


def test_hidden_channels_follow_those_of_up_and_the_gate_has_none():
    some = circuit(sizes={"shared up": 2, "shared gate": 2, "shared hidden": 2})
    found = gauge_of(some, {"up": t(2, -4), "shared up": t(8, 0.5)})
    assert found.spaces["hidden"].tolist() == [2, -4] and found.spaces["shared hidden"].tolist() == [8, 0.5]
    assert found.spaces["gate"].tolist() == found.spaces["shared gate"].tolist() == [1, 1]


def test_what_is_added_to_the_stream_has_its_factors():
    found = gauge_of(circuit(sizes={"attended": 3, "fed": 3}), {}, t(2, -2, 2))
    assert all(found.spaces[name].tolist() == [2, -2, 2] for name in ("stream", "attended", "fed"))
    assert "attended" not in gauge_of(circuit(), {}, t(2, -2, 2)).spaces


def test_the_stream_may_come_with_the_factors_or_beside_them():
    assert gauge_of(circuit([RMS]), {"stream": t(-1, 1, 1)}).spaces["stream"].tolist() == [-1, 1, 1]
    assert gauge_of(circuit([RMS]), {"stream": t(-1, 1, 1)}, t(4, 4, -4)).spaces["stream"].tolist() == [4, 4, -4]
    assert gauge_of(circuit([RMS]), {"stream": t(-1, 1, 1)}).weights["ln.weight"].tolist() == [-1, 1, 1]


def test_a_norm_undoes_the_streams_signs_and_scales_its_output():
    found = gauge_of(circuit([RMS]), {"n1": t(2, 4, -8)}, t(4, -4, -4))
    assert found.weights == {"ln.weight": pytest.approx(t(2, -4, 8))}
    assert found.spaces["n1"].tolist() == [2, 4, -8]
    assert found.attributes == {("ln", "variance_epsilon"): 16.0}


@pytest.mark.parametrize(("size", "factor"), [(8.0, 64.0), (0.5, 0.25), (1.0, None)])
def test_eps_goes_with_the_square_of_the_stream(size, factor):
    norm = Norm("ln", "stream", "n1", "layernorm", "eps")
    found = gauge_of(circuit([norm]), {}, -size * torch.ones(3))
    assert found.attributes == ({} if factor is None else {("ln", "eps"): factor})


def test_the_bias_of_a_mean_is_scaled_without_the_signs():
    found = gauge_of(circuit([Norm("ln", "stream", "n1", "layernorm", "eps")]), {"n1": t(2, 4, -8)}, -torch.ones(3))
    assert found.weights["ln.weight"].tolist() == [-2, -4, 8] and found.weights["ln.bias"].tolist() == [2, 4, -8]


def test_one_plus_a_weight_keeps_the_streams_signs_alone():
    found = gauge_of(circuit([Norm("ln", "stream", "n1", "rmsnorm_one", "eps")]), {}, t(4, -4, 4))
    assert found.spaces["n1"].tolist() == [1, -1, 1] and found.weights == {}
    assert found.attributes == {("ln", "eps"): 16.0}


@pytest.mark.parametrize(("rotary", "expected"), [(0, [1, 2, 3, 4]), (1, [1, 2, 3, 4]), (2, [1, 1, 3, 4]), (4, [1, 2, 1, 2])])
def test_rotated_pairs_are_alike_and_the_rest_is_left(rotary, expected):
    assert paired(t(1, 2, 3, 4), rotary).tolist() == expected


# ---- parameters


class Layer(nn.Module):
    """A norm, a map of two spaces side by side, one the other way round, experts, and a map without bias."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.ln = nn.LayerNorm(3)
        self.up = nn.Linear(3, 4)
        self.turned = nn.Module()
        self.turned.weight = nn.Parameter(torch.ones(2, 3))
        self.turned.bias = nn.Parameter(torch.ones(3))
        self.experts = nn.Module()
        self.experts.down = nn.Parameter(torch.ones(2, 3, 2))
        self.inner = nn.ModuleDict({"plain": nn.Linear(3, 2, bias=False)})
        self.scale = nn.Parameter(torch.ones(3))
        for parameter in self.parameters():
            parameter.data.fill_(1.0)
        self.to(dtype)


MAPS = [
    Map("up.weight", "n1", ("gate", "up"), "up.bias"),
    Map("turned.weight", "hidden", ("stream",), "turned.bias", "in,out"),
    Map("experts.down", "hidden", ("stream",), None, "expert,out,in"),
    Map("inner.plain.weight", "n1", ("gate",)),
]
NORMS = [Norm("ln", "stream", "n1", "layernorm", "eps")]
WIRED = circuit(NORMS, MAPS)


def drawn():
    return gauge_of(WIRED, {"n1": t(2, 4, 8), "up": t(16, -32)}, -2 * torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_scaled_by_what_is_written_and_columns_by_the_inverse_of_what_is_read(dtype):
    found = rescaled(Layer(dtype), WIRED, drawn())
    assert {path: values.tolist() for path, values in found.items()} == {
        "up.weight": [[0.5, 0.25, 0.125]] * 2 + [[8, 4, 2], [-16, -8, -4]],
        "up.bias": [1, 1, 16, -32],
        "turned.weight": [[-2 / 16] * 3, [2 / 32] * 3],
        "turned.bias": [-2, -2, -2],
        "experts.down": [[[-2 / 16, 2 / 32]] * 3] * 2,
        "inner.plain.weight": [[0.5, 0.25, 0.125]] * 2,
        "ln.weight": [-2, -4, -8],
        "ln.bias": [2, 4, 8],
    }
    assert all(values.dtype == dtype and not values.requires_grad for values in found.values())


def test_rescaling_leaves_the_layer_alone():
    layer = Layer()
    rescaled(layer, WIRED, drawn())
    assert all(bool((p == 1).all()) for p in layer.parameters())


@pytest.mark.parametrize("without", ["weight", "bias"])
def test_a_norm_without_a_weight_or_a_bias_has_nothing_to_scale(without):
    layer = Layer()
    layer.ln.register_parameter(without, None)
    found = rescaled(layer, WIRED, drawn())
    assert f"ln.{without}" not in found and f"ln.{'bias' if without == 'weight' else 'weight'}" in found


def test_a_gauged_layer_has_the_scaled_weights_and_then_its_own():
    layer = Layer()
    before, eps = dict(layer.named_parameters()), layer.ln.eps
    expected = rescaled(layer, WIRED, drawn())
    with gauged(layer, WIRED, drawn()):
        now = dict(layer.named_parameters())
        assert all(torch.equal(now[path], values) for path, values in expected.items())
        assert now["scale"] is before["scale"] and layer.ln.eps == pytest.approx(4 * eps)
        assert all(not now[path].requires_grad for path in expected)
        assert isinstance(layer.up.weight, nn.Parameter)
    after = dict(layer.named_parameters())
    assert list(after) == list(before) and all(after[path] is before[path] for path in before) and layer.ln.eps == eps


# ---- swapping


def test_parameters_of_the_layer_itself_and_of_its_parts_can_be_swapped():
    layer = Layer()
    own = layer.scale
    with swapped(layer, {"scale": t(7, 8, 9), "inner.plain.weight": 5 * torch.ones(2, 3)}, {}):
        assert layer.scale.tolist() == [7, 8, 9] and layer.inner["plain"].weight[0, 0] == 5
        assert layer.up.weight[0, 0] == 1
    assert layer.scale is own and layer.inner["plain"].weight[0, 0] == 1


def test_numbers_are_multiplied_and_come_back():
    layer = Layer()
    layer.inner.factor, layer.ln.eps = 3.0, 0.25
    with swapped(layer, {}, {("inner", "factor"): 2.0, ("ln", "eps"): 4.0}):
        assert (layer.inner.factor, layer.ln.eps) == (6.0, 1.0)
    assert (layer.inner.factor, layer.ln.eps) == (3.0, 0.25)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_everything_comes_back_after_an_exception(error):
    layer = Layer()
    before, eps = dict(layer.named_parameters()), layer.ln.eps
    with pytest.raises(error), swapped(layer, {"scale": t(7, 8, 9), "up.bias": torch.zeros(4)}, {("ln", "eps"): 4.0}):
        raise error
    assert all(p is before[path] for path, p in layer.named_parameters()) and layer.ln.eps == eps


def test_what_was_swapped_comes_back_when_the_rest_cannot_be():
    """A number that cannot be set: the parameters that were swapped before it are put back."""

    class Stubborn(nn.Module):
        factor = property(lambda self: 2.0)

    layer = Layer()
    layer.stubborn = Stubborn()
    own = layer.scale
    with pytest.raises(AttributeError), swapped(layer, {"scale": t(7, 8, 9)}, {("stubborn", "factor"): 2.0}):
        raise AssertionError("never entered")
    assert layer.scale is own


def test_two_paths_that_do_not_exist_are_an_error_before_anything_is_swapped():
    layer = Layer()
    own = layer.scale
    for changed, attributes in (
        ({"scale": own * 2, "nothing.weight": own}, {}),
        ({"scale": own * 2}, {("ln", "nothing"): 2.0}),
    ):
        with pytest.raises(AttributeError), swapped(layer, changed, attributes):
            raise AssertionError("never entered")
        assert layer.scale is own


def test_a_gauge_has_its_own_tables():
    one, two = Gauge({}), Gauge({})
    one.weights["a"] = t(1)
    one.attributes["a", "b"] = 1.0
    assert two.weights == {} and two.attributes == {}
