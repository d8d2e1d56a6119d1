"""What the probes of a layer hand on: every field of a result and of its evidence, from findings made up for it."""

from types import SimpleNamespace

import pytest
import torch

from shaketable.locate.diagnosis import Result
from shaketable.locate.probes import layer_probes, twins
from shaketable.locate.probes.layer_probes import EXAMPLES, by_checksums, by_permutation, by_twin, checksum, replay
from shaketable.locate.probes.replay import Judgement, Violation

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
    by_permutation(covered)
    for counts in covered.values():
        assert counts["permuted"] == len(range(0, counts["rows"], twins.compared_step(counts["rows"])))


def test_moved_scores_are_the_worst_value_or_the_worst_lane_over_its_tolerance(monkeypatch):
    """Held against the formula, value by value."""
    torch.manual_seed(0)
    y = torch.randn(2, 5, 4)
    value, lane, unit = 8.0, 3.0, 0.001
    monkeypatch.setattr(layer_probes, "moved_tolerance", lambda precision, dtype, place: (value, lane, unit))
    for change in (
        0.01 * torch.randn(2, 5, 4),
        torch.zeros(2, 5, 4).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(0.3)),
    ):
        monkeypatch.setattr(twins, "moved_pairs", lambda *_, other=y + change: [("mlp", y, other)])
        [(score, path)] = layer_probes._moved_scores(SimpleNamespace(maps=[], norms=[]), None, None, None, None)
        rows, moved = y.double().reshape(10, 4), change.double().reshape(10, 4)
        scale = unit * (rows.abs() + rows.square().mean(1, keepdim=True).sqrt())
        worst = max(float(abs(moved[i, j]) / scale[i, j]) for i in range(10) for j in range(4)) / value
        lanes = [
            abs(float((moved[:, j] * rows[:, j]).sum())) / float((scale[:, j] * rows[:, j]).square().sum().sqrt()) / lane
            for j in range(4)
        ]
        assert path == "mlp" and score == pytest.approx(max(worst, *lanes), rel=1e-3)


@pytest.mark.parametrize("path", [None, "attn.q", "norm", "mlp.up"])
def test_a_tolerance_is_that_of_the_place(monkeypatch, path):
    asked = []
    monkeypatch.setattr(
        layer_probes, "moved_tolerance", lambda p, dtype, place: asked.append((p, dtype, place)) or (1.0, 1.0, 1.0)
    )
    monkeypatch.setattr(twins, "moved_pairs", lambda *_: [(path, torch.ones(1, 2), torch.ones(1, 2))])
    circuit = SimpleNamespace(
        maps=[SimpleNamespace(module="attn.q", reads="n1"), SimpleNamespace(module="mlp.up", reads="n2")],
        norms=[SimpleNamespace(module="norm", writes="n1"), SimpleNamespace(module="norm2", writes="n2")],
    )
    list(layer_probes._moved_scores(circuit, None, None, None, "precise"))
    place = {None: "layer", "attn.q": "first", "norm": "first", "mlp.up": "later"}[path]
    assert asked == [("precise", torch.float32, place)]


@pytest.mark.parametrize(
    ("size", "dtype"), [(1.0, torch.float32), (1.0, torch.float16), (1000.0, torch.float16), (0.0, torch.float16)]
)
def test_a_companion_is_64_times_as_large_or_as_large_as_fits(size, dtype):
    factor = layer_probes._companion(torch.full((3,), size, dtype=dtype))
    room = torch.finfo(dtype).max / 16
    assert (
        factor in {2.0**n for n in range(7)}
        and (factor == 64 or 2 * factor * size > room)
        and (factor == 1 or factor * size <= room)
    )
