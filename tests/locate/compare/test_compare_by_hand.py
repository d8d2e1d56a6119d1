"""A replayed fingerprint piece by piece: what is noted, cast, named, followed through a layer and counted on either side."""

from types import SimpleNamespace

import pytest
import torch

import shaketable as st
from shaketable.locate.capture.model_identity import describe
from shaketable.locate.capture.recorder import Break, Record, Recording
from shaketable.locate.compare import compare as module
from shaketable.locate.compare.compare import SHOWN, _Between, _Replay, closeness, compare
from shaketable.locate.compare.fingerprint import Fingerprint, make_fingerprint
from shaketable.locate.compare.fit import Fit
from shaketable.locate.compare.result import ComparisonRow, DeviceComparison, Difference, LayerRow
from shaketable.locate.probes.rounding import Precision
from tests.locate.architectures import build, tokens
from tests.tensors import draw

IDS = tokens(n=10)


@pytest.fixture(scope="module")
def model():
    return build("llama", attention="eager")


@pytest.fixture(scope="module")
def good(model):
    return make_fingerprint(model, IDS, name="tiny")


def with_facts(good, tensors=None, **facts):
    """The same fingerprint with other metadata, or with other values in some of its tensors."""
    changed = {good.about.aliases.get(n, n): t for n, t in (tensors or {}).items()}
    return Fingerprint(good.about.model_copy(update=facts), good.tensors | changed)


def notes(good, model, here=None, **facts):
    replay = _Replay(with_facts(good, **facts), model)
    replay._note_conditions(describe(model) | {"model": "tiny", "tokens": 10} | (here or {}))
    return replay.notes


# ---- what is noted


@pytest.mark.parametrize(
    ("facts", "here", "said"),
    [
        ({}, {}, []),
        ({"attention": "sdpa"}, {}, ["attention is eager here and was sdpa in the fingerprint"]),
        ({"unsteady": ["mask", "scale"]}, {},
         ["layers are given mask, scale, made from hidden states: layers as a whole are not purely teacher-forced"]),
        ({"product_input": 2.0**-10}, {}, ["fingerprint: factors of float32 products may be rounded to 9.8e-04"]),
        ({"device": "elsewhere", "date": "yesterday"}, {}, []),
        ({"dtype": "bfloat16"}, {}, ["the fingerprint is bfloat16 and was cast to float32: only this device is judged by its dtype"]),
    ],
)  # fmt: skip
def test_conditions_that_differ_are_noted(good, model, facts, here, said):
    assert notes(good, model, here, **facts) == said


@pytest.mark.parametrize("name", ["torch", "transformers", "python", "shaketable"])
def test_other_versions_of_torch_and_transformers_are_noted(good, model, name):
    now = good.about.versions
    found = notes(good, model, versions=now | {name: "0.1"})
    assert found == ([f"{name} is {now[name]} here and was 0.1"] if name in ("torch", "transformers") else [])
    without = notes(good, model, versions={k: v for k, v in now.items() if k != name})
    assert without == ([f"{name} is {now[name]} here and was None"] if name in ("torch", "transformers") else [])


def test_what_this_device_does_to_products_is_noted(good, model):
    replay = _Replay(good, model)
    replay.precision = Precision(2.0**-8, 0.0, "they are short")
    replay._note_conditions(describe(model))
    assert replay.notes == ["here: they are short"]


@pytest.mark.parametrize(("stored", "here", "rounds"), [(0.0, 0.0, False), (2.0**-10, 0.0, True), (0.0, 2.0**-8, True)])
def test_a_comparison_knows_whether_a_device_rounds_its_factors(good, model, stored, here, rounds):
    replay = _Replay(with_facts(good, product_input=stored), model)
    assert replay.stored_precision.product_input == stored
    replay.precision = Precision(here)
    assert replay.run(None).rounds_factors is rounds


def test_both_sides_show_the_same_fields_and_the_model_is_called_as_in_the_file(good, model):
    found = compare(with_facts(good, device="good device", date="then"), model)
    assert tuple(found.stored) == tuple(found.here) == SHOWN
    assert (found.stored["device"], found.here["device"], found.stored["date"]) == ("good device", "cpu", "then")
    assert (found.here["model"], found.here["tokens"], found.stored["model"]) == ("tiny", 10, "tiny")


def test_progress_is_told_before_each_layer(good, model):
    told = []
    found = compare(good, model, progress=lambda *facts: told.append(facts))
    assert told == [(0, 3, "layer 0"), (1, 3, "layer 1"), (2, 3, "layer 2")]
    assert [(layer.layer, layer.name) for layer in found.layers] == [(i, f"model.layers.{i}") for i in range(3)]


def test_rows_are_in_the_order_of_computation(good, model):
    found = compare(good, model)
    assert [r.op for r in found.before] == ["model.embed_tokens"] and [r.op for r in found.after] == ["model.norm", "lm_head"]
    assert all((r.layer, r.point) == (None, "output") for r in [*found.before, *found.after])
    for i, layer in enumerate(found.layers):
        assert [(r.layer, r.op, r.point) for r in layer.rows] == [(i, op, "output") for op in [*good.about.layers[i], None]]
        assert (layer.rows[-1].site, layer.rows[-1].difference.values) == (f"layer.{i}", 320)


# ---- tensors of another dtype, and names of places


@pytest.mark.parametrize(
    ("stored", "given", "brought"),
    [
        ("float32", torch.float32, torch.bfloat16), ("float32", torch.int64, torch.int64), ("float32", torch.float64, torch.float64),
        ("bfloat16", torch.bfloat16, torch.bfloat16), ("bfloat16", torch.float32, torch.float32), ("float32", torch.bool, torch.bool),
    ],
)  # fmt: skip
def test_a_tensor_is_cast_where_it_had_the_dtype_of_the_other_model(good, stored, given, brought):
    replay = _Replay(with_facts(good, dtype=stored), build("llama", torch.bfloat16))
    assert replay.bring(torch.ones(2).to(given)).dtype == brought and replay.casts is (stored == "float32")


@pytest.mark.parametrize(
    ("path", "point", "site"),
    [
        ("model.layers.1.mlp.up_proj", "output", "module.model.layers.1.mlp.up_proj"),
        ("model.layers.1.mlp.up_proj", "input", "module.model.layers.1.mlp.up_proj,point=input"),
        ("lm_head", "output", "module.lm_head,include=lm_head"), ("lm_head", "input", "module.lm_head,point=input,include=lm_head"),
        ("model.embed_tokens", "output", "module.model.embed_tokens,include=embedding"), ("model.norm", "output", "module.model.norm"),
    ],
)  # fmt: skip
def test_a_place_is_named_as_a_plan_would_name_it(good, model, path, point, site):
    assert _Replay(good, model).site(path, point) == site


def test_the_router_of_experts_is_named_with_its_role():
    made = build("qwen2_moe")
    replay = _Replay(make_fingerprint(made, IDS), made)
    assert replay.site("model.layers.0.mlp.gate", "output") == "module.model.layers.0.mlp.gate,include=router"


# ---- operators


def operator(good, model, change_here=0, change_stored=0, path="model.layers.1.mlp.up_proj"):
    replay = _Replay(good, model)
    x = draw(1, 5, 32)
    y = model.get_submodule(path)(x).detach()
    stored, made = y.clone(), y.clone()
    stored[0, 0, :change_stored] += 1
    made[0, 1, :change_here] += 1
    return replay._operator(1, "mlp.up_proj", path, x, stored, made)


@pytest.mark.parametrize(("here", "stored", "beyond"), [(3, 0, "here"), (0, 2, "stored"), (3, 2, "both"), (0, 0, "")])
def test_each_side_of_an_operator_is_counted_by_itself(good, model, here, stored, beyond):
    row = operator(good, model, here, stored)
    assert (row.here, row.stored, row.beyond, row.difference.differing) == (here, stored, beyond, here + stored)
    assert bool(row.fits) is bool(here + stored) and (row.layer, row.op, row.point) == (1, "mlp.up_proj", "output")
    assert row.site == "module.model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("side", ["here", "stored"])
def test_each_side_is_judged_by_what_its_own_device_does_to_factors(good, model, side):
    replay, x = _Replay(good, model), draw(1, 4, 32)
    weight = model.model.layers[1].mlp.up_proj.weight.detach()
    exact, short = (x.double() @ weight.double().T).float(), x.bfloat16().float() @ weight.bfloat16().float().T
    replay.precision, replay.stored_precision = Precision(2.0**-8 * (side == "here")), Precision(2.0**-8 * (side == "stored"))
    name, pair = "model.layers.1.mlp.up_proj", (exact, short) if side == "here" else (short, exact)
    row = replay._operator(1, "mlp.up_proj", name, x, *pair)
    assert (row.here, row.stored, row.difference.differing > 100) == (0, 0, True)
    other = replay._operator(1, "mlp.up_proj", name, x, *pair[::-1])
    assert (other.stored if side == "here" else other.here) > 100


def test_a_second_call_is_an_operator_of_the_same_module(good, model):
    replay, x = _Replay(good, model), draw(1, 2, 32)
    y = model.model.norm(x).detach()
    row = replay._operator(None, "model.norm#2", "model.norm#2", x, y, y + 1)
    assert (row.op, row.site, row.here, row.stored) == ("model.norm#2", "module.model.norm", 64, 0)


def test_only_this_device_is_judged_when_the_file_was_cast(good):
    narrow = build("llama", torch.bfloat16, "eager")
    replay, x = _Replay(good, narrow), draw(1, 2, 32)
    made = narrow.model.norm(x.bfloat16()).detach()
    row = replay._operator(None, "model.norm", "model.norm", x, made.float() + 1, made)
    assert (row.here, row.stored) == (0, None)


def test_nobody_can_tell_of_a_module_without_a_definition(good, model):
    replay, x = _Replay(good, model), draw(1, 2, 32)
    assert replay._outside_of_interval("model.layers.0.mlp", x, x, Precision()) is None
    y = model.model.norm(x).detach()
    assert replay._outside_of_interval("model.norm", x, y, Precision()) == 0
    assert replay._outside_of_interval("model.norm", x, y * 2, Precision()) == 64


def test_a_file_that_knows_a_call_which_is_not_made_here_is_noted(good, model, monkeypatch):
    seen = []

    class Spy(_Between):
        def __init__(self, replay, call, recording, forced):
            seen.append(forced)
            super().__init__(replay, call, recording, forced)

    monkeypatch.setattr(module, "_Between", Spy)
    more = [[*labels[:4], "mlp.up_proj#2", *labels[4:]] if i == 1 else labels for i, labels in enumerate(good.about.layers)]
    aliases = good.about.aliases | {
        f"layer.1.op.mlp.up_proj#2.{end}": f"layer.1.op.mlp.up_proj.{end}" for end in ("input", "output")
    }
    aliases = {k: aliases.get(v, v) for k, v in aliases.items()}
    found = compare(with_facts(good, layers=more, aliases=aliases), model)
    assert found.notes == ["model.layers.1.mlp.up_proj#2 was not called here"] and found.exit_code == 0
    assert [len(layer.rows) for layer in found.layers] == [11, 11, 11]
    assert seen == [set(labels) for labels in good.about.layers], "modules are forced, and not their calls"


@pytest.mark.parametrize(
    ("name", "layer", "op", "point"),
    [
        ("layer.1.op.mlp.up_proj.output", 1, "mlp.up_proj", "output"), ("layer.2.op.self_attn.o_proj.input", 2, "self_attn.o_proj", "input"),
        ("layer.2.output", 2, None, "output"), ("outside.op.lm_head.output", None, "lm_head", "output"),
    ],
)  # fmt: skip
def test_a_wrong_value_in_the_file_is_found_at_its_place_and_on_its_side(good, model, name, layer, op, point):
    tensor = good.tensor(name).clone()
    tensor.view(-1)[3] += 1
    found = compare(with_facts(good, {name: tensor}), model)
    row = found.first
    assert (row.layer, row.op, row.point, row.beyond, row.here) == (layer, op, point, "stored", 0)
    assert row.stored >= 1 and row.remark == ""


def test_an_error_here_reaches_the_layer_as_a_whole_and_its_operator_alone(good, model):
    with st.inject(model, "gain:0.1@module.mlp.gate_proj,layers=1"):
        found = compare(good, model)
    assert [layer.whole.differing > 0 for layer in found.layers] == [False, True, False]
    assert [(r.layer, r.op) for r in found.rows if r.difference.differing] == [(1, "mlp.gate_proj")]


def test_layers_behind_a_wrong_one_in_the_file_are_given_what_the_file_holds(model):
    with st.inject(model, "gain:0.5@layer.0"):
        bad = make_fingerprint(model, IDS)
    found = compare(bad, model)
    assert [layer.whole.differing > 0 for layer in found.layers] == [True, False, False]
    assert [(r.layer, r.op, r.beyond) for r in found.rows if r.difference.differing] == [(0, None, "stored")]


def test_weights_are_forgotten_after_every_layer_and_no_gradient_is_kept(good, model):
    replay, forgotten = _Replay(good, model), []
    replay.reference.forget = lambda: forgotten.append(torch.is_grad_enabled())
    replay.run(None)
    assert forgotten == [False] * 3


# ---- between operators


A, B, C, D, E, F = (draw(2, 3, seed=i) for i in range(6))


def rec(path, output, *args, func=torch.add, **kwargs):
    return Record(path, func, args, kwargs, output)


def between(records, breaks=(), violations=(), forced=(), casts=False, tokens=10, precision=0.0, stored=0.0):
    replay = SimpleNamespace(
        casts=casts, precision=Precision(precision), stored_precision=Precision(stored), bring=lambda t: t,
        site=lambda path, point: f"{path}@{point}", file=SimpleNamespace(about=SimpleNamespace(tokens=tokens)), reference=None,
    )  # fmt: skip
    call = SimpleNamespace(index=4, name="layers.4")
    found = _Between(replay, call, Recording(list(records), list(breaks)), set(forced))
    found._judgement = SimpleNamespace(violations=list(violations))
    return found


def violation(order, path="attn", function="softmax", got=None):
    return SimpleNamespace(order=order, path=path, function=function, got=torch.ones(1) if got is None else got)


CHAIN = [rec("attn", A, F), rec("attn", B, A), rec("up", C, B, func=None), rec("", D, C, B), rec("", E, F)]


@pytest.mark.parametrize(
    ("order", "forced", "reached"),
    [
        (0, ("up",), {"A", "B", "D"}), (0, (), {"A", "B", "C", "D"}), (1, ("up",), {"B", "D"}), (3, ("up",), {"D"}), (4, ("up",), {"E"}),
        (2, ("up",), set()), (2, (), {"C", "D"}),
    ],
)  # fmt: skip
def test_an_error_reaches_what_is_made_from_it_and_ends_at_forced_operators(order, forced, reached):
    found = between(CHAIN, violations=[violation(order)], forced=forced)
    tensors = {"A": A, "B": B, "C": C, "D": D, "E": E}
    assert {name for name, t in tensors.items() if found._wrong_here(t)} == reached


def test_a_function_beside_a_forced_operator_of_its_name_is_followed():
    found = between([rec("up", A, F), rec("up", B, A, func=None)], violations=[violation(0, "up", "mul")], forced=("up",))
    assert found._wrong_here(A) == "up:mul" and found._wrong_here(B) == ""


def test_what_reaches_by_name_or_inside_of_a_list_is_followed():
    found = between([rec("a", A, F), rec("b", [B], [A]), rec("c", C, other=B)], violations=[violation(0)])
    assert found._wrong_here(C) == "attn:softmax"


def test_the_first_violation_that_reaches_a_tensor_is_named_and_sorted_indices_are_none():
    records = [rec("attn", A, F), rec("attn", B, A), rec("", E, F)]
    sorts = violation(0, "attn", "sort", torch.ones(1, dtype=torch.long))
    assert between(records, violations=[sorts])._wrong_here(B) == ""
    assert between(records, violations=[sorts, violation(1, "", "add"), violation(0)])._wrong_here(B) == "the layer:add"
    assert between(records, violations=[violation(2), violation(0)])._wrong_here(B) == "attn:softmax"


@pytest.mark.parametrize(("path", "words"), [("mlp", "changed at the input of mlp"), ("", "changed at the input of the layer")])
def test_a_change_at_a_door_is_followed_too(path, words):
    gap = Break(path, "input", 1, A, E)
    records = [rec("attn", A, F), rec("mlp", B, E), rec("", C, A)]
    found = between(records, breaks=[gap])
    assert (found._wrong_here(B), found._wrong_here(E), found._wrong_here(C)) == (words, words, "")


def test_only_a_chain_of_ieee_operations_makes_the_same_bits():
    records = [
        rec("", A, F),
        rec("", B, A, func=torch.mul),
        rec("attn", C, B, func=torch.softmax),
        rec("", D, C),
        rec("up", E, D, func=None),
    ]
    found = between(records, forced=("up",))
    assert {id(t) for t in (C, D)} == found.inexact
    assert id(E) in between(records).inexact


@pytest.mark.parametrize(("inexact", "counted"), [(False, 2), (True, 1)])
def test_the_file_must_hold_the_same_bits_or_values_that_are_close(inexact, counted):
    arrived = torch.ones(2, 4)
    stored = arrived.clone()
    stored[0, 1] += 1e-6
    stored[1, 2] += 1e-2
    found = between([rec("attn", arrived, F, func=torch.softmax if inexact else torch.add)])
    assert found._wrong_in_file(stored, arrived) == counted


def test_a_value_in_the_file_that_is_no_number_is_wrong():
    arrived = torch.ones(1, 3)
    stored = torch.tensor([[1.0, float("nan"), 1.0]])
    assert between([rec("attn", arrived, F, func=torch.softmax)])._wrong_in_file(stored, arrived) >= 1


@pytest.mark.parametrize(("here", "there", "counted"), [(0.0, 0.0, 1), (2.0**-8, 0.0, 0), (0.0, 2.0**-8, 0)])
def test_rounded_factors_of_either_device_make_values_close(here, there, counted):
    arrived = torch.ones(1, 3)
    stored = torch.tensor([[1.0, 1.01, 1.0]])
    found = between([rec("attn", arrived, F, func=torch.softmax)], precision=here, stored=there)
    assert found._wrong_in_file(stored, arrived) == counted


@pytest.mark.parametrize(
    ("tokens", "roundoff", "factor"),
    [
        (0, 0.0, 1024 * 2.0**-24),
        (10, 0.0, 1664 * 2.0**-24),
        (0, 2.0**-8, 2.0**-4 + 1024 * 2.0**-24),
        (256, 2.0**-24, 17424 * 2.0**-24),
    ],
)
def test_how_far_attention_may_be_off_follows_the_largest_value_of_its_token(tokens, roundoff, factor):
    stored = torch.tensor([[[1.0, -4.0], [0.5, 0.25]]])
    found = closeness(stored, tokens, roundoff)
    assert found.dtype == torch.float64 and found.flatten().tolist() == pytest.approx([4 * factor, 0.5 * factor], rel=1e-12)
    assert float(closeness(torch.zeros(1, 2), tokens, roundoff)) == 2.0**-125


@pytest.mark.parametrize("label", ["up#2", None])
@pytest.mark.parametrize("side", ["here", "stored", "cast", "same"])
def test_a_row_between_operators_says_where_and_on_which_side(label, side):
    stored = draw(2, 3, seed=9)
    arrived = stored.clone() if side == "same" else stored + 1
    found = between([rec("attn", arrived, F)], violations=[violation(0)] if side == "here" else [], casts=side == "cast")
    row = found.row(label, stored, arrived)
    if side == "same":
        assert row is None
        return
    assert (row.layer, row.op, row.point) == (4, label, "output" if label is None else "input")
    assert row.site == ("layer.4" if label is None else "layers.4.up@input")
    expected = {"here": (6, 0, "attn:softmax"), "stored": (0, 6, ""), "cast": (0, None, "")}[side]
    assert (row.here, row.stored, row.remark) == expected and row.difference.differing == 6 and row.fits


def test_a_row_is_compared_with_the_file_as_it_is_cast():
    arrived = draw(2, 3).bfloat16()
    stored = arrived.float() * (1 + 2.0**-14)
    found = between([rec("attn", arrived, F)], casts=True)
    found.replay.bring = lambda t: t.bfloat16()
    assert found.row(None, stored, arrived) is None


def test_the_functions_of_a_call_are_replayed_once_and_forced_operators_are_not(good, model):
    replay = _Replay(good, model)
    call = SimpleNamespace(index=0, name="model.layers.0")
    found = _Between(replay, call, Recording([rec("mlp", A + F, A, F)]), {"up"})
    assert found._judgement is None
    first = found.judgement
    assert found.judgement is first and first.violations == []


# ---- the plan of measured errors


def found_fit(kind="gain", magnitude=0.25, **more):
    return Fit(
        kind, magnitude, **{"params": {}, "values": 64, "log_gain": 9.0, "bic": 1.0, "explained": 0.9, "ks": 0.05} | more
    )


def measured(op, fits, here=1, relative=0.25):
    return ComparisonRow(1, op, "output", f"module.{op}", Difference(8, 3, 0.5, relative, 0), here=here, fits=fits)


def test_a_plan_says_of_every_clause_how_well_it_fits_and_of_the_next_best_that_it_is():
    sides = (
        {"model": "m", "dtype": "float32", "device": "cpu", "date": "then"},
        {"model": "m", "dtype": "bfloat16", "device": "npu", "date": "now"},
    )
    rows = [
        measured("a", [found_fit()]), measured("b", [found_fit(magnitude=-0.12345), found_fit("bias", 0.5, explained=0.7)], relative=1e-3),
        measured("c", [found_fit("rounding", 0.0)]), measured("d", [found_fit()], here=0), measured("e", []),
    ]  # fmt: skip
    found = DeviceComparison(*sides, [], [LayerRow(1, "layers.1", rows[0].difference, rows)], [])
    assert found.plan_text().splitlines() == [
        "# Errors measured by shaketable compare, one clause per site.", "# good: m, float32 on cpu, then", "# here: m, bfloat16 on npu, now",
        "seed: 0", "plan:",
        "  # measured relative error 2.500e-01; 90.0% of the error's variance explained, log-likelihood +9 over rounding, 64 values",
        '  - "gain:0.25@module.a"',
        "  # measured relative error 1.000e-03; 70.0% of the error's variance explained, log-likelihood +9 over rounding, 64 values, a poor fit",
        "  # next best: gain:-0.1235 fits better, and no plan can say it",
        '  - "bias:0.5@module.b"',
    ]  # fmt: skip
    assert found.to_dict()["plan"] == ["gain:0.25@module.a", "bias:0.5@module.b"]


def test_the_difference_of_a_whole_layer_goes_by_what_was_stored(good, model):
    found = compare(good, model)
    stored = good.tensor("layer.1.output")
    doubled = compare(with_facts(good, {"layer.1.output": stored * 2}), model)
    assert found.layers[1].whole.relative == 0.0
    assert doubled.layers[1].whole.relative == pytest.approx(0.5, rel=1e-6), "the gap is half of what is in the file"
