"""Verdicts from probes that are made up by hand: every word of the sentence, and what decides."""

import json
from dataclasses import fields

import pytest

from shaketable.locate.diagnosis import (
    ASSUMPTIONS,
    EXIT,
    MODES,
    NOT_SEEN_BY_REPLAY,
    NOT_SEEN_BY_TWINS,
    NOT_SEEN_IN_FEW_BITS,
    PROBES,
    Diagnosis,
    Evidence,
    LayerReport,
    Result,
    _plain,
)


def made(mode="host", layers=2, dtype="float32", results=None, **more):
    """A diagnosis whose layers all have the same results; outside of them only a repeat."""
    found = Diagnosis("m", "M", layers, dtype, "cpu", "sdpa", mode, "today", {}, 1, 8, 0, **more)
    deciding = "twin" if mode == "device" else "replay"
    for i in range(layers):
        found.probes.append(LayerReport(i, f"layers.{i}", {n: Result("pass") for n in results or (deciding, "repeat")}))
    found.probes.append(LayerReport(None, "", {"repeat": Result("pass")}))
    return found


def because(layer, probe="replay", place=None, **more):
    facts = {"op": "mlp", "function": None, "text": "it is off", "fault_class": "gain"} | more
    return Evidence(layer=layer, probe=probe, place=layer if place is None else place, **facts)


def decided(found, has_file=True):
    found.decide(has_file)
    return found


def blamed(*evidence, layers=9):
    found = made(layers=layers)
    found.evidence = list(evidence)
    return decided(found)


# ---- what it rests on


def test_the_words_of_the_package():
    assert MODES == ("device", "host", "all") and EXIT == {"HEALTHY": 0, "FAULT": 1, "INCONCLUSIVE": 4}
    assert PROBES == ("weights", "repeat", "links", "twin", "causal", "checksum", "replay", "batch", "decode")


@pytest.mark.parametrize(
    ("mode", "has_file", "key"),
    [
        ("device", True, "device"),
        ("device", False, "device"),
        ("host", True, "host"),
        ("host", False, "own"),
        ("all", True, "host"),
        ("all", False, "own"),
    ],
)
def test_what_is_assumed_follows_the_mode_and_the_file(mode, has_file, key):
    assert decided(made(mode), has_file).assumption == ASSUMPTIONS[key]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_not_covered_follows_the_mode_and_the_dtype(mode, dtype):
    expected = list(NOT_SEEN_BY_TWINS) if mode == "device" else list(NOT_SEEN_BY_REPLAY)
    expected += [NOT_SEEN_IN_FEW_BITS] if mode == "device" and dtype != "float32" else []
    found = decided(made(mode, dtype=dtype))
    assert found.not_covered == expected and decided(found).not_covered == expected, "deciding again adds nothing"


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("host", "HEALTHY: all 2 layers compute what they should, as far as a replay on the host can see."),
        ("all", "HEALTHY: all 2 layers compute what they should, as far as a replay on the host can see."),
        ("device", "HEALTHY: all 2 layers compute what they should, as far as twins on the device can see; embeddings, rotation, last norm "
                   "and head were only repeated."),
    ],
)  # fmt: skip
def test_a_healthy_model_is_told_in_one_sentence(mode, sentence):
    found = decided(made(mode))
    assert str(found) == found.sentence == sentence and (found.verdict, found.exit_code) == ("HEALTHY", 0)
    assert (found.layer, found.op, found.fault_class, found.evidence, found.suspicions) == (None, None, None, [], [])


def test_a_diagnosis_that_nobody_decided_is_inconclusive():
    found = made()
    assert (found.verdict, found.exit_code, str(found)) == ("INCONCLUSIVE", 4, "")


# ---- gaps


def test_nothing_probed_is_nothing_known():
    found = made()
    found.probes = []
    assert str(decided(found)) == "INCONCLUSIVE: nothing was probed; nothing that was judged is wrong." and found.exit_code == 4
    strict = made(strict=True, foreign=["a hook"])
    strict.probes = []
    assert str(decided(strict)).startswith("INCONCLUSIVE: nothing was probed;")


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_without_the_deciding_probe_is_a_gap_and_what_is_outside_is_none(mode):
    probe = "twin" if mode == "device" else "replay"
    found = made(mode)
    assert decided(found).verdict == "HEALTHY", "outside of the layers the deciding probe may be missing"
    del found.probes[1].results[probe]
    assert str(decided(found)) == f"INCONCLUSIVE: layer 1 was not judged by {probe}; nothing that was judged is wrong."


def test_a_layer_that_was_not_repeated_is_no_gap():
    found = made()
    del found.probes[0].results["repeat"]
    assert decided(found).verdict == "HEALTHY"


@pytest.mark.parametrize(
    ("name", "gap"), [("replay", True), ("repeat", True), ("twin", False), ("links", False), ("causal", False)]
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_probe_that_could_not_tell_is_a_gap_where_it_decides(name, gap, place):
    found = made()
    found.probes[place].results[name] = Result("inconclusive", reason="who knows")
    where = "outside of the layers" if place == 2 else f"layer {place}"
    expected = f"INCONCLUSIVE: {where}, {name}: who knows; nothing that was judged is wrong." if gap else "HEALTHY"
    assert str(decided(found)).startswith(expected)


@pytest.mark.parametrize("status", ["fail", "skipped", "pass"])
def test_other_results_are_no_gap(status):
    found = made()
    found.probes[0].results["replay"] = Result(status)
    assert decided(found).verdict == "HEALTHY"


def test_gaps_come_layer_by_layer_and_foreign_code_last():
    found = made(strict=True, foreign=["a hook", "b hook"])
    found.probes[1].results["repeat"] = Result("inconclusive", reason="unsteady")
    found.probes[0].results = {"repeat": Result("inconclusive", reason="first")}
    assert decided(found)._gaps() == [
        "layer 0 was not judged by replay", "layer 0, repeat: first", "layer 1, repeat: unsteady",
        "a hook is not the model's code", "b hook is not the model's code",
    ]  # fmt: skip
    assert str(found) == "INCONCLUSIVE: layer 0 was not judged by replay and 4 more; nothing that was judged is wrong."


# ---- suspicions


def test_the_first_suspicion_is_told_and_all_are_kept():
    found = made("device")
    found.probes[1].results["links"] = Result("suspect", 2.0, reason="second")
    found.probes[0].results["causal"] = Result("suspect", 2.0, reason="first")
    found.probes[2].results["repeat"] = Result("suspect", 2.0, reason="third")
    assert str(decided(found)) == "INCONCLUSIVE: layer 0 is suspect (causal: first). Host mode decides."
    assert found.suspicions == [
        {"layer": 0, "probe": "causal", "text": "first"}, {"layer": 1, "probe": "links", "text": "second"},
        {"layer": None, "probe": "repeat", "text": "third"},
    ]  # fmt: skip


def test_a_suspicion_comes_before_a_gap_and_after_evidence():
    found = made()
    found.probes[1].results["replay"] = Result("inconclusive", reason="gap")
    found.probes[1].results["repeat"] = Result("suspect", reason="odd")
    assert str(decided(found)) == "INCONCLUSIVE: layer 1 is suspect (repeat: odd)."
    found.evidence = [because(0)]
    assert decided(found).verdict == "FAULT"


@pytest.mark.parametrize(
    ("name", "replay", "suspect"),
    [
        ("checksum", "pass", False),
        ("checksum", "fail", True),
        ("checksum", "inconclusive", True),
        ("twin", "pass", True),
        ("repeat", "pass", True),
    ],
)
def test_only_a_checksum_is_overruled_and_only_by_a_replay_that_passed(name, replay, suspect):
    found = made()
    found.probes[0].results |= {"replay": Result(replay), name: Result("suspect", reason="odd")}
    assert bool(decided(found).suspicions) is suspect


# ---- blame


ORDER = ["weights", "replay", "links", "repeat", "twin", "causal", "batch", "decode"]


@pytest.mark.parametrize(("stronger", "weaker"), [(a, b) for i, a in enumerate(ORDER) for b in ORDER[i + 1 :]])
def test_the_stronger_of_two_probes_names_the_operator(stronger, weaker):
    found = blamed(because(1, weaker, op=weaker), because(1, stronger, op=stronger))
    assert (found.op, [e.probe for e in found.evidence]) == (stronger, [stronger, weaker])


def test_of_equal_evidence_the_first_that_came_is_told():
    assert blamed(because(1, op="a"), because(1, op="b")).op == "a"


def test_the_place_counts_more_than_the_strength():
    found = blamed(because(3, "weights", op="late"), because(2, "causal", op="early"))
    assert (found.layer, found.op) == (2, "early")


def test_everything_of_the_first_evidence_is_taken_over():
    first = because(1, op="attn", function="add", after="mlp", lanes=[1, 5], lanes_of=8, fault_class="bias", text="off")
    found = blamed(first, because(2, lanes=[7], lanes_of=9))
    facts = (found.layer, found.op, found.function, found.after, found.lanes, found.lanes_of, found.fault_class)
    assert facts == (1, "attn", "add", "mlp", [1, 5], 8, "bias") and (found.verdict, found.exit_code) == ("FAULT", 1)
    assert str(found) == "FAULT: layer 1, attn (add after mlp): 2 of 8 channels are wrong; off (bias). Also faulty: layer 2."


@pytest.mark.parametrize(
    ("op", "function", "after", "layer", "where"),
    [
        (None, "add", "mlp", 1, "layer 1, output (add after mlp)"), (None, None, "mlp", 1, "layer 1, output (after mlp)"),
        ("mlp", "mul", None, 1, "layer 1, mlp (mul)"), (None, "add", None, None, "outside of the layers, the model (add)"),
        ("head", None, None, None, "outside of the layers, head"), (None, None, None, 0, "layer 0, output"),
    ],
)  # fmt: skip
def test_where_it_is_in_words(op, function, after, layer, where):
    found = blamed(because(layer, op=op, function=function, after=after, place=0))
    assert str(found) == f"FAULT: {where}: it is off (gain)."


@pytest.mark.parametrize(
    ("lanes", "size", "words"),
    [
        ([], 8, ""),
        ([3], None, ""),
        ([3], 0, ""),
        ([3], 8, "1 of 8 channels are wrong; "),
        ([0, 1], 2, "all 2 channels are wrong; "),
    ],
)
def test_channels_are_counted_where_they_are_known(lanes, size, words):
    assert str(blamed(because(1, lanes=lanes, lanes_of=size))) == f"FAULT: layer 1, mlp: {words}it is off (gain)."


def test_a_fault_that_changes_from_call_to_call_is_classed_so_in_its_own_place_only():
    noisy = because(1, "repeat", fault_class="noise")
    assert blamed(because(1), noisy).fault_class == "noise" and "(noise)" in str(blamed(because(1), noisy))
    assert blamed(because(0), noisy).fault_class == "gain"
    outside = because(None, "repeat", place=9, fault_class="noise")
    assert blamed(because(None, place=-1), outside).fault_class == "gain", "before and behind the layers are two places"


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([0], ""), ([0, 0], ""), ([0, 3], "layer 3"), ([0, 3, 3], "layer 3"), ([0, 3, 5], "layers 3, 5"), ([0, None], "outside of the layers"),
        ([0, 3, None], "layer 3 and outside of the layers"), ([0, 1, 2, None], "layers 1, 2 and outside of the layers"),
        ([0, 1, 2, 3, 4], "layers 1, 2, 3, 4"), ([0, 1, 2, 3, 4, None], "layers 1, 2, 3, 4 and outside of the layers"),
        ([0, 1, 2, 3, 4, 5], "layers 1, 2, 3, 4 and 1 more places"), ([0, 1, 2, 3, 4, 5, None], "layers 1, 2, 3, 4 and 2 more places"),
        ([None, 1, 0], "layers 0, 1"),
    ],
)  # fmt: skip
def test_where_else_there_is_evidence_is_told(layers, says):
    first_outside = layers[0] is None
    found = blamed(*(because(n, place=(-1 if first_outside else 99) if n is None else n) for n in layers))
    assert str(found).partition("(gain).")[2] == (f" Also faulty: {says}." if says else "")


# ---- coverage


def test_coverage_is_summed_over_operators_of_all_places():
    found = made()
    found.probes[0].coverage = {"a": {"rows": 5, "replayed": 3}, "b": {"rows": 2, "twin": 2}}
    found.probes[2].coverage = {"a": {"rows": 7, "replayed": 7, "checksums": 1}}
    assert decided(found).coverage == {"operators": 3, "rows": 14, "replayed": 10, "twin": 2, "checksums": 1}
    assert decided(made()).coverage == {"operators": 0}


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({"rows": 8, "checksums": 8}, "; of 1 products, 8 of 8 rows passed by checksums alone"),
        ({"rows": 8, "checksums": 3}, "; of 1 products, 3 of 8 rows passed by checksums alone"), ({"rows": 8, "checksums": 0}, ""),
        ({"rows": 8, "agreed": 1}, "; of f only that the host makes the same bits is known"),
        ({"rows": 8, "agreed": 0}, ""), ({"rows": 8}, ""),
        ({"rows": 2000, "checksums": 1000}, "; of 1 products, 1,000 of 2,000 rows passed by checksums alone"),
    ],
)  # fmt: skip
def test_what_was_judged_less_closely_is_told(counts, says):
    found = made()
    found.probes[1].coverage = {"attn:f": counts}
    assert (
        str(decided(found)) == f"HEALTHY: all 2 layers compute what they should, as far as a replay on the host can see{says}."
    )


# ---- what is written


def test_plain_data_is_json_all_the_way_down():
    nan, inf = float("nan"), float("inf")
    given = {1: (nan, [inf, -inf, 2.5, {"a": nan}]), "b": None, "c": True, "d": "nan", "e": 7}
    assert _plain(given) == {"1": [None, [None, None, 2.5, {"a": None}]], "b": None, "c": True, "d": "nan", "e": 7}


def test_a_record_has_every_field_but_the_order_of_evidence():
    found = blamed(because(1, examples=[{"got": 1.0}], lanes=[3], lanes_of=4), because(2))
    plain = found.as_dict()
    assert set(plain) == {"schema", "kind"} | {f.name for f in fields(Diagnosis)} and list(plain)[:2] == ["schema", "kind"]
    for item in plain["evidence"]:
        assert set(item) == {f.name for f in fields(Evidence)} - {"place"}
    assert [e.place for e in found.evidence] == [1, 2], "the diagnosis keeps its own"
    assert (
        json.loads(found.to_json()) == plain
        and found.to_json().endswith("\n}\n")
        and '\n "kind": "diagnosis"' in found.to_json()
    )


def test_what_is_saved_is_utf8(tmp_path):
    found = blamed(because(1, text="größer"))
    found.save(tmp_path / "d.json")
    assert json.loads((tmp_path / "d.json").read_bytes().decode("utf-8"))["evidence"][0]["text"] == "größer"
    assert (tmp_path / "d.json").read_text(encoding="utf-8") == found.to_json()


def test_two_diagnoses_share_nothing():
    one, two = made(), made()
    one.notes.append("x")
    one.evidence.append(because(1))
    one.cost["a"] = 1.0
    one.probes[0].results["x"] = Result("pass")
    assert (two.notes, two.evidence, two.cost) == ([], [], {}) and "x" not in two.probes[0].results
    assert LayerReport(0, "").results is not LayerReport(0, "").results and because(1).lanes is not because(1).lanes
