"""What the probes of a layer hand on: every field of a result and of its evidence, from findings made up for it."""

from types import SimpleNamespace

import pytest
import torch

from shaketable.locate import layer_probes
from shaketable.locate.diagnosis import Result
from shaketable.locate.layer_probes import EXAMPLES, by_checksums, by_twin, checksum, replay
from shaketable.locate.replay import Judgement, Violation

BEFORE = SimpleNamespace(part_before=lambda order: f"the part before {order}")


def violation(path="mlp.up_proj", function=None, order=4, tokens=None):
    """Two tokens of three channels, each wrong value wrong by another amount."""
    got = torch.tensor([[1.0, 20.0, 3.0], [4.0, 5.0, -60.0]])
    outside = torch.tensor([[False, True, False], [False, False, True]])
    return Violation(path, function, order, outside, got, torch.tensor([2.0, -3.0]), torch.tensor([2.5, -2.5]), tokens)


@pytest.mark.parametrize("layer", [None, 0, 2])
@pytest.mark.parametrize(("path", "function"), [("mlp.up_proj", None), ("", "add")])
def test_a_violation_becomes_evidence_field_by_field(layer, path, function):
    result, [found] = replay(Judgement([violation(path, function)]), BEFORE, layer)
    text = "2 of 6 values lie outside of their rounding interval"
    assert (result.status, result.score, result.op, result.reason) == ("fail", pytest.approx(1 / 3), path or None, text)
    assert (found.layer, found.op, found.function, found.probe, found.text) == (layer, path or None, function, "replay", text)
    assert (found.lanes, found.lanes_of) == ([1, 2], 3)
    assert found.after == ("the part before 4" if layer is not None and not path else None)
    assert found.examples == [
        {"token": 1, "channel": 2, "got": -60.0, "low": -3.0, "high": -2.5},
        {"token": 0, "channel": 1, "got": 20.0, "low": 2.0, "high": 2.5},
    ], "the worst first"


def test_the_first_violation_is_told_and_the_largest_share_is_the_score():
    small = violation("late")
    small.outside = torch.tensor([[True, False, False], [False, False, False]])
    small.low, small.high = torch.tensor([2.0]), torch.tensor([2.5])
    result, found = replay(Judgement([small, violation("later")]), BEFORE, 1)
    assert (result.op, result.score) == ("late", pytest.approx(1 / 3)) and [e.op for e in found] == ["late", "later"]
    assert found[0].text.startswith("1 of 6")


def test_tokens_that_were_chosen_are_named_by_their_own_numbers():
    _, [found] = replay(Judgement([violation(tokens=[7, 31])]), BEFORE, 1)
    assert [e["token"] for e in found.examples] == [31, 7]


@pytest.mark.parametrize("count", [EXAMPLES - 1, EXAMPLES, EXAMPLES + 3])
def test_so_many_examples_and_no_more(count):
    got = torch.arange(1.0, count + 1)
    v = Violation("x", None, 0, torch.ones(count, dtype=torch.bool), got, torch.zeros(count), torch.zeros(count))
    _, [found] = replay(Judgement([v]), BEFORE, 1)
    assert [e["got"] for e in found.examples] == list(range(count, max(0, count - EXAMPLES), -1))
    assert (found.lanes_of, found.lanes) == (count, list(range(count)))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_nobody_can_judge_is_counted(count):
    unknown = {f"op{i}": f"reason {i}" for i in range(count)}
    result, found = replay(Judgement(unknown=unknown), BEFORE, 1)
    more = f" and {count - 1} more" if count > 1 else ""
    assert (result.status, result.reason, found) == ("inconclusive", f"op0{more}: reason 0", [])
    assert replay(Judgement(), BEFORE, 1) == (Result("pass", 0.0), [])
    assert replay(Judgement([violation()], unknown), BEFORE, 1)[0].status == "fail", "what is wrong is said first"


@pytest.mark.parametrize(("worst", "status"), [(0.5, "pass"), (1.0, "pass"), (1.01, "suspect"), (7.0, "suspect")])
def test_a_checksum_is_a_suspicion_above_its_threshold(worst, status):
    result = checksum({"a": 0.3, "b": worst, "c": 0.4})
    assert (result.status, result.score) == (status, worst)
    if status == "suspect":
        assert (result.op, result.reason) == ("b", f"a checksum is off by {worst:.3g} times its threshold")
    assert checksum({}) == Result("pass", 0.0)


def recording(**rows):
    """Records of operators by the rows that they made; `f_` ones are functions."""
    made = [
        SimpleNamespace(path=path.removeprefix("f_"), func="f" if path.startswith("f_") else None, output=torch.zeros(1, n, 4))
        for path, n in rows.items()
    ]
    return SimpleNamespace(records=made)


def test_coverage_is_of_operators_that_were_asked_for_and_of_all_of_their_rows():
    found = recording(q=5, k=7, f_q=9, norm=3)
    assert by_checksums(found, {"q", "norm"}) == {
        "q": {"rows": 5, "replayed": 0, "checksums": 5},
        "norm": {"rows": 3, "replayed": 0, "checksums": 3},
    }
    covered = by_twin(found, SimpleNamespace(outputs=lambda: {"k", "norm"}))
    assert covered == {"k": {"rows": 7, "twin": 7}, "norm": {"rows": 3, "twin": 3}}


# ---- weights, attributes, repeats and links


def weighed(has_file=True, **weights):
    """A bench whose file holds these weights."""
    reference = SimpleNamespace(
        has_file=has_file, weight=weights.__getitem__, other_numbers=lambda *_: iter(()), own_numbers=lambda *_: iter(())
    )
    return SimpleNamespace(reference=reference, precision=None, seed=0)


def model_with(**weights):
    return SimpleNamespace(get_submodule=lambda path: torch.nn.Identity(), get_parameter=weights.__getitem__)


W = torch.arange(6.0).view(3, 2)


def test_weights_that_are_those_of_the_file_pass_and_without_a_file_nobody_can_tell():
    same_bits = {"a.weight": W, "b.weight": torch.tensor([float("nan"), -0.0])}
    names = list(same_bits)
    clones = {name: w.clone() for name, w in same_bits.items()}
    assert layer_probes.weights(names, model_with(**clones), weighed(**same_bits), 1, "") == (Result("pass", 0.0), [])
    skipped = Result("skipped", reason="no file to compare with")
    assert layer_probes.weights(names, model_with(**clones), weighed(False), 1, "") == (skipped, [])


def test_every_weight_that_differs_is_evidence_with_its_rows_and_the_first_values():
    wrong, slightly = W.clone(), W.clone()
    wrong[1:], slightly[0, 0] = wrong[1:] + 8, -0.0
    names = ["layers.1.mlp.weight", "layers.1.mlp.bias", "layers.1.attn.weight"]
    here = {names[0]: slightly, names[1]: W[:, 0].clone(), names[2]: wrong}
    file = {names[0]: W, names[1]: W[:, 0], names[2]: W}
    result, [first, second] = layer_probes.weights(names, model_with(**here), weighed(**file), 1, "layers.1")
    text = "1 of 6 values of its weight are not those of the file"
    assert (result.status, result.score, result.op, result.reason) == ("fail", pytest.approx(4 / 6), "mlp", text)
    assert (first.layer, first.op, first.function, first.probe, first.text, first.fault_class) == (
        1,
        "mlp",
        None,
        "weights",
        text,
        "weight",
    )
    assert (first.lanes, first.lanes_of) == ([0], 3) and first.examples == [
        {"index": "(0, 0)", "got": -0.0, "low": 0.0, "high": 0.0}
    ]
    assert (second.op, second.lanes) == ("attn", [1, 2]) and second.text.startswith("4 of 6")
    assert [e["index"] for e in second.examples] == ["(1, 0)", "(1, 1)", "(2, 0)", "(2, 1)"]
    assert second.examples[0] == {"index": "(1, 0)", "got": 10.0, "low": 2.0, "high": 2.0}
    vector = layer_probes.weights(["b"], model_with(b=torch.tensor([1.0, 5.0])), weighed(b=torch.tensor([1.0, 4.0])), None, "")[
        1
    ][0]
    assert (vector.lanes, vector.lanes_of, vector.layer) == ([1], 2, None)


@pytest.mark.parametrize(("before", "status", "op"), [(Result("pass", 0.0), "fail", "mlp"), (Result("fail", 0.5, "attn", "w"), "fail", "attn")])  # fmt: skip
def test_a_number_that_the_config_does_not_give_is_evidence_and_wrong_weights_are_told_first(before, status, op):
    bench, asked = weighed(), []
    bench.reference.other_numbers = lambda *given: asked.append(given) or iter([("mlp", "its eps is 1"), ("x", "more")])
    result, [found] = layer_probes.attributes(before, "module", "layers.1", bench, 1, {"skip"})
    assert asked == [("module", "layers.1", {"skip"})]
    assert (result.status, result.op) == (status, op) and (result is before) == (before.status == "fail")
    assert (found.layer, found.op, found.probe, found.text, found.fault_class) == (
        1,
        "mlp",
        "weights",
        "its eps is 1",
        "attribute",
    )
    assert layer_probes.attributes(before, "module", "layers.1", weighed(), 1) == (before, [])


def repeated(second, records=(), again=(), monkeypatch=None):
    """A call that gave ones, and then `second`; its operators made `records`, and `again` when asked once more."""
    call = SimpleNamespace(y=torch.ones(1, 2, 4), x=torch.ones(1, 2, 4), index=1)
    made = SimpleNamespace(output=second, records=list(records), part_before=lambda order: f"part {order}")
    monkeypatch.setattr(layer_probes, "record_layer", lambda *_: SimpleNamespace(records=list(again)))
    return layer_probes.repeat(call, made, SimpleNamespace(reference=None, precision=None))


def operator(path, output, function=None):
    return SimpleNamespace(path=path, function=function, output=output)


def test_the_same_call_must_give_the_same_bits(monkeypatch):
    assert repeated(torch.ones(1, 2, 4), monkeypatch=monkeypatch) == (Result("pass", 0.0), [])


def test_a_result_that_changes_is_blamed_on_the_first_operator_that_does(monkeypatch):
    second = torch.ones(1, 2, 4)
    second[0, 1, 2] = 5.0
    one = [operator("attn", torch.zeros(2, 3)), operator("mlp", torch.zeros(2, 3)), operator("late", torch.zeros(2, 3))]
    changed = torch.zeros(2, 3)
    changed[:, 1] = 1.0
    two = [operator("attn", torch.zeros(2, 3)), operator("mlp", changed), operator("late", torch.ones(2, 3))]
    result, [found] = repeated(second, one, two, monkeypatch)
    text = "12.5% of the layer's results change from call to call"
    assert (result.status, result.score, result.op, result.reason) == ("fail", pytest.approx(1 / 8), "mlp", text)
    assert (found.layer, found.op, found.function, found.probe, found.text) == (1, "mlp", None, "repeat", text)
    assert (found.lanes, found.lanes_of, found.after, found.fault_class) == ([1], 3, None, "noise")


def test_a_function_of_the_layer_itself_says_after_which_part_and_some_add_in_any_order_by_design(monkeypatch):
    second = torch.ones(1, 2, 4) * 2
    for function, status in (("add", "fail"), ("index_add_", "inconclusive")):
        one, two = [operator("", torch.zeros(1, 4), function)], [operator("", torch.ones(1, 4), function)]
        result, found = repeated(second, one, two, monkeypatch)
        assert result.status == status and [e.after for e in found] == (["part 0"] if status == "fail" else [])
    assert result.reason.endswith("from call to call: index_add_ adds in any order, by design")


def test_a_change_that_does_not_come_again_is_told_of_the_layer(monkeypatch):
    second = torch.ones(1, 2, 4)
    second[0, 0, 3] = 2.0
    same_again = [operator("mlp", torch.zeros(2, 3))]
    result, [found] = repeated(second, same_again, same_again, monkeypatch)
    assert (result.op, found.op, found.lanes, found.lanes_of) == (None, None, [3], 4)


@pytest.mark.parametrize("path", ["mlp", ""])
def test_what_was_changed_between_two_operators_is_a_broken_link(path):
    expected, got = torch.ones(2, 4), torch.ones(2, 4)
    got[:, 1] = 0.0
    broken = SimpleNamespace(path=path, door="input", expected=expected, got=got)
    result, [found] = layer_probes.links(2, SimpleNamespace(breaks=[broken, None]))
    text = f"the input of {path or 'the layer'} is not what was made for it"
    assert (result.status, result.score, result.op, result.reason) == ("fail", 0.25, path or None, text)
    assert (found.layer, found.op, found.probe, found.fault_class, found.lanes, found.lanes_of) == (
        2,
        path or None,
        "links",
        "dead_zone",
        [1],
        4,
    )
    assert layer_probes.links(2, SimpleNamespace(breaks=[])) == (Result("pass", 0.0), [])


@pytest.mark.parametrize(("wiring", "status", "reason"), [("no wiring", "inconclusive", "no wiring"), (SimpleNamespace(routed=True, causal=True), "skipped", "experts compute other groups of tokens then"), (SimpleNamespace(routed=False, causal=False), "skipped", "this attention is not causal")])  # fmt: skip
def test_a_probe_that_does_not_fit_a_layer_says_why(wiring, status, reason):
    assert layer_probes.causal(None, None, wiring, None) == (Result(status, reason=reason), [])
    if isinstance(wiring, str):
        assert layer_probes.twin(None, None, wiring, None) == ((Result(status, reason=reason), []), False)


def test_how_far_two_results_are_apart_over_what_is_allowed(monkeypatch):
    monkeypatch.setattr(layer_probes, "tolerance", lambda precision, dtype: (2.0, 0.5))
    x, y = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, -2.0]])
    z = y + torch.tensor([[0.5, 0.0]])
    change = (4.0 / 2) ** 0.5
    allowed = 2.0 * 0.5 * (1.0 + 3.0 + 4 * change)
    assert layer_probes._beyond(y, z, x, None) == pytest.approx(0.5 / allowed)
    assert layer_probes._beyond(y, y * float("nan"), x, None) == float("inf")
    call, recording = SimpleNamespace(y=y, x=x), SimpleNamespace(output=z)
    assert layer_probes.is_within_summation(call, recording, SimpleNamespace(precision=None))
