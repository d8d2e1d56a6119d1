"""One run of locate step by step: what is passed on, which probe runs when, and what comes of results that are made up."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shaketable as st
from shaketable.errors import InertError, ModelError, ShaketableError
from shaketable.locate import locate as module
from shaketable.locate import srdd
from shaketable.locate.capture.trace import LayerCall, record_layer, trace
from shaketable.locate.diagnosis import Diagnosis, Evidence, LayerReport, Result
from shaketable.locate.locate import Locator, _failed
from shaketable.locate.probes.replay import Judgement
from shaketable.locate.probes.rounding import Precision
from tests.locate.architectures import build, tokens
from tests.tensors import draw

IDS = tokens(n=6)
PASS = Result("pass", 0.0)
CHANGES = "the layer's results change from call to call"


@pytest.fixture(scope="module")
def model():
    return build("llama", positions=40)


def locator(model, mode="all", **attributes):
    found = Locator(model, mode, None, 7, None)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


@pytest.fixture(scope="module")
def second(model):
    """The second layer's call and its recording."""
    found = locator(model)
    call = trace(model, IDS, found.reference).calls[1]
    return call, record_layer(call, found.reference)


# ---- what locate passes on


class Letters:
    def __call__(self, text):
        return {"input_ids": [1 + ord(c) % 90 for c in text]}


@pytest.fixture
def passed(monkeypatch):
    """What a locator would run with."""
    seen = SimpleNamespace()

    def run(self, ids, plan):
        seen.locator, seen.ids, seen.plan, seen.training = self, ids, plan, self.model.training
        return "the diagnosis"

    monkeypatch.setattr(Locator, "run", run)
    return seen


def test_every_option_reaches_the_locator(model, passed):
    told, scans = [], srdd.Scans(0.2, 2, 3)
    found = st.locate(
        model, mode="device", input_ids=IDS, plan="a plan", seed=5, quick=True, strict=True, scans=scans,
        progress=lambda *facts: told.append(facts),
    )  # fmt: skip
    made = passed.locator
    assert found == "the diagnosis" and passed.ids is IDS and passed.plan == "a plan" and made.model is model
    assert (made.mode, made.seed, made.quick, made.strict, made.scans) == ("device", 5, True, True, scans)
    assert made.bench.seed == 5 and made.bench.reference is made.reference and made.reference.source is None
    made.tell(1, 2, "x")
    assert told == [(1, 2, "x")]


def test_what_is_not_said_has_these_values(model, passed):
    st.locate(model, Letters())
    made = passed.locator
    assert (made.mode, made.seed, made.quick, made.strict, made.thorough) == ("all", 0, False, False, False)
    assert made.scans == srdd.Scans() and passed.plan is None and made.tell(0, 1, "x") is None
    assert passed.ids.shape == (1, 40), "of 256 tokens as many as there are positions"


@pytest.mark.parametrize(("tokens", "kept"), [(2, 2), (39, 39), (40, 40), (41, 40)])
def test_as_many_tokens_are_run_as_were_asked_for_and_the_model_can_take(model, passed, tokens, kept):
    st.locate(model, Letters(), tokens=tokens)
    assert passed.ids.shape == (1, kept)
    st.locate(model, Letters(), prompts=["abc", "de"], tokens=tokens)
    assert passed.ids.tolist() == [[1 + ord(c) % 90 for c in "abc\nde"][:kept]]


def test_token_ids_are_taken_as_they_are(model, passed):
    longer = tokens(n=99)
    st.locate(model, Letters(), input_ids=longer, tokens=3)
    assert passed.ids is longer


def test_a_source_is_read(model, passed, tmp_path):
    model.save_pretrained(tmp_path)
    st.locate(model, input_ids=IDS, source=str(tmp_path))
    assert passed.locator.reference.source == str(tmp_path) and passed.locator.reference.has_file


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("full")])
def test_full_memory_is_told_with_its_cause_and_the_mode_of_the_model_comes_back(model, monkeypatch, error):
    def run(self, ids, plan):
        raise error

    monkeypatch.setattr(Locator, "run", run)
    model.train()
    try:
        with pytest.raises(ModelError, match="not enough memory on cpu") as refused:
            st.locate(model, input_ids=IDS)
        assert refused.value.__cause__ is error and model.training
    finally:
        model.eval()


@pytest.mark.parametrize(("mode", "host", "device"), [("host", True, False), ("device", False, True), ("all", True, True)])
def test_a_mode_says_where_is_judged(model, mode, host, device):
    made = locator(model, mode)
    assert (made.on_host, made.on_device) == (host, device) and (made.spent, made.unmade) == ({}, [])


# ---- the run


class Probed(Locator):
    """A locator whose probes find what they are told to find."""

    def _probe(self, ids, diagnosis):
        self.given = ids
        self.unmade = ["b", "a", "b"]
        self.model(ids)


def probed(model, plan=None):
    made = Probed(model, "host", None, 7, None)
    return made, made.run(IDS, plan)


def test_values_from_nowhere_are_foreign_once_each_and_in_order(model):
    made, found = probed(model)
    assert found.foreign == ["b", "a"] and found.planted is None and torch.equal(made.given, IDS)
    assert found.sentence.startswith("INCONCLUSIVE: nothing was probed") and "in memory" in found.assumption


def test_what_a_planted_plan_makes_is_not_foreign(model):
    _, found = probed(model, "gain:0.1@layer.1")
    assert found.foreign == [] and found.planted["plan"] == "gain:0.1@layer.1" and found.planted["changed"] > 0
    assert not any(m._forward_hooks for m in model.modules())


def test_a_plan_that_did_nothing_is_told_and_gone(model):
    with pytest.raises(
        InertError, match=r"^gain:0\.1@layer\.1,phase=train matched 1 spots and never fired: there was nothing to find$"
    ):
        probed(model, "gain:0.1@layer.1,phase=train")
    assert not any(m._forward_hooks for m in model.modules())


def results(*names, status="pass"):
    return {name: Result(status) for name in names}


@pytest.mark.parametrize(
    ("ran", "statistics", "forwards"),
    [
        ({}, False, 2), (results("repeat", "links", "replay", "weights", "checksum"), False, 2), (results("twin"), False, 3),
        (results("causal"), False, 3), (results("permutation"), False, 4), (results("twin", "causal", "permutation"), True, 8), ({}, True, 4),
        (results("twin", "causal", "permutation", status="skipped"), False, 2), (results("twin", "causal", status="inconclusive"), False, 2),
        (results("twin", status="fail"), False, 3), (results("permutation", status="suspect"), False, 4),
    ],
)  # fmt: skip
def test_forwards_of_the_device_are_counted_by_what_ran(model, ran, statistics, forwards):
    found = Diagnosis("m", "M", 2, "float32", "cpu", "sdpa", "all", "today", {}, 1, 8, 0)
    found.probes = [LayerReport(0, "a", results("repeat")), LayerReport(1, "b", ran), LayerReport(None, "")]
    found.srdd = {} if statistics else None
    assert locator(model)._device_forwards(found) == forwards


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "^full$"), (ShaketableError("its own"), ShaketableError, "^its own$"),
        (ValueError("one\ntwo"), ModelError, "^a plain forward of LlamaForCausalLM fails on these tokens: one$"),
        (ValueError(), ModelError, "^a plain forward of LlamaForCausalLM fails on these tokens: ValueError$"),
        (IndexError("index out of range"), ModelError, "fails on these tokens: index out of range$"),
    ],
)  # fmt: skip
def test_a_plain_forward_that_fails_is_told_and_full_memory_is_passed_on(model, monkeypatch, error, raised, said):
    def fails(*_):
        raise error

    monkeypatch.setattr(module, "forward", fails)
    with pytest.raises(raised, match=said) as refused:
        locator(model)._plain_forwards(IDS)
    assert type(refused.value) is raised


def test_costs_are_in_units_of_a_plain_forward(model):
    made = locator(model, "host")
    logits = module.forward(model, IDS)
    made._plain_forwards = lambda ids: ([logits, logits], 0.125)
    made._timed = lambda name, work: (made.spent.update({name: made.spent.get(name, 0.0) + 0.5}), work())[1]
    found = made.run(IDS, None)
    assert (
        found.cost == {"trace": 4.0, "repeat": 24.0, "weights": 16.0, "links": 12.0, "replay": 16.0}
        and found.cost_forwards == 72.0
    )


def test_weights_that_were_read_are_forgotten_after_every_layer_and_at_the_end(model):
    made, forgotten = locator(model, "host"), []
    forget = made.reference.forget
    made.reference.forget = lambda: (forgotten.append(len(made.reference._wide)), forget())
    found = made.run(IDS, None)
    assert found.verdict == "HEALTHY" and len(forgotten) == 4 and all(forgotten) and made.reference._wide == {}


def test_the_statistics_of_every_layer_and_the_scans_are_kept(model):
    made = locator(model, "device", scans=srdd.Scans(0.2, 2, 3))
    found = made.run(IDS, None)
    assert found.srdd["scans"] == {"gain_scale": 0.2, "gain_trials": 2, "ambient_trials": 3} and "blames" in found.srdd
    assert all(p.statistics["distinct"] > 0 for p in found.probes[:3]) and found.probes[3].statistics is None


# ---- one layer


def one_layer(model, second, monkeypatch, mode="all", judged=None, **attributes):
    """Every probe of the second layer; replay may be made up."""
    made = locator(model, mode, **attributes)
    if judged is not None:
        monkeypatch.setattr(module, "judge", lambda *given: judged)
    evidence = []
    report, own = made.layer(*second, evidence)
    return made, report, own, evidence


@pytest.mark.parametrize("mode", ["host", "device", "all"])
def test_operators_are_covered_by_what_looked_at_them(model, second, monkeypatch, mode):
    _, report, own, evidence = one_layer(model, second, monkeypatch, mode)
    assert (report.layer, report.name, evidence) == (1, "model.layers.1", [])
    expected = {"rows": 6, "twin": 6, "permuted": 6} if mode == "device" else {"rows": 6, "replayed": 6, "checksums": 0}
    assert report.coverage["mlp.up_proj"] == expected
    assert (own is None) is (mode == "host") and {r.status for r in report.results.values()} <= {"pass", "skipped"}


def test_a_replay_that_cannot_tell_leaves_it_to_the_device(model, second, monkeypatch):
    unknown = Judgement(unknown={"attn": "no definition"}, coverage={"x": {"rows": 1}})
    _, report, _, _ = one_layer(model, second, monkeypatch, judged=unknown)
    assert [report.results[n].status for n in ("replay", "causal", "permutation", "twin")] == [
        "inconclusive",
        "pass",
        "pass",
        "pass",
    ]
    assert report.coverage == {"x": {"rows": 1}}, "only device mode counts permuted rows"


@pytest.mark.parametrize(("thorough", "status"), [(False, "skipped"), (True, "pass")])
def test_a_benchmark_runs_what_is_needless(model, second, monkeypatch, thorough, status):
    _, report, _, _ = one_layer(model, second, monkeypatch, thorough=thorough)
    assert [report.results[n].status for n in ("causal", "permutation", "checksum")] == [status] * 3
    assert report.results["replay"].status == "pass" and report.coverage["mlp.up_proj"]["replayed"] == 6


def test_quick_leaves_to_checksums_what_passes_them(model, second, monkeypatch):
    made, report, _, _ = one_layer(model, second, monkeypatch, "host", quick=True)
    assert report.results["checksum"].status == "pass" and report.results["replay"].status == "pass"
    assert report.coverage["mlp.up_proj"] == {"rows": 6, "replayed": 0, "checksums": 6}
    assert report.coverage["input_layernorm"] == {"rows": 6, "replayed": 6, "checksums": 0} and "checksum" in made.spent


@pytest.mark.parametrize(
    ("quick", "thorough", "status", "kept"),
    [
        (False, False, "skipped", set()),
        (True, False, "suspect", {"a", "b"}),
        (False, True, "suspect", set()),
        (True, True, "suspect", {"a", "b"}),
    ],
)
def test_a_checksum_at_its_threshold_passes(model, second, monkeypatch, quick, thorough, status, kept):
    given = []
    monkeypatch.setattr(module, "check_products", lambda *args: given.append(args) or {"a": 0.5, "b": 1.0, "c": 1.5})
    made = locator(model, quick=quick, thorough=thorough)
    result, passed = made._checksum(*second)
    assert (result.status, passed) == (status, kept)
    assert [(args[0], args[2]) for args in given] == ([] if status == "skipped" else [(second[1], "model.layers.1")])


def test_evidence_of_a_layer_has_its_place(model, second, monkeypatch):
    wrong = Evidence(1, "mlp", None, "links", "odd", "gain")
    monkeypatch.setattr(module.layer_probes, "links", lambda layer, recording: (Result("fail"), [wrong]))
    _, report, _, evidence = one_layer(model, second, monkeypatch, "host")
    assert evidence == [wrong] and wrong.place == 1 and report.results["links"].status == "fail"


@pytest.mark.parametrize("status", ["fail", "inconclusive"])
def test_a_layer_that_changes_from_call_to_call_has_no_twin(model, second, monkeypatch, status):
    monkeypatch.setattr(module.layer_probes, "repeat", lambda *given: (Result(status), []))
    _, report, _, _ = one_layer(model, second, monkeypatch, "device")
    for name in ("twin", "causal", "permutation"):
        assert (report.results[name].status, report.results[name].reason) == ("inconclusive", CHANGES)
    assert report.coverage == {}


FAILING = [
    ("twin", "the twin cannot be called: no such head"), ("causal", "the layer with another token cannot be called: no such head"),
    ("permutation", "the permuted pair cannot be called: no such head"),
]  # fmt: skip


def failing(error):
    def fails(*given):
        raise error

    return fails


@pytest.mark.parametrize(("name", "reason"), FAILING)
def test_a_layer_that_cannot_be_called_otherwise_is_no_fault(model, second, monkeypatch, name, reason):
    monkeypatch.setattr(module.layer_probes, name, failing(RuntimeError("no such head\nat all")))
    _, report, _, evidence = one_layer(model, second, monkeypatch, "device")
    assert (report.results[name].status, report.results[name].reason, evidence) == ("inconclusive", reason, [])
    covered = report.coverage.get("mlp.up_proj", {})
    assert covered == {"twin": {}, "causal": {"rows": 6, "twin": 6, "permuted": 6}, "permutation": {"rows": 6, "twin": 6}}[name]


@pytest.mark.parametrize(
    "kind", [RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, NotImplementedError]
)
def test_a_layer_may_fail_in_these_ways(model, second, monkeypatch, kind):
    monkeypatch.setattr(module.layer_probes, "permutation", failing(kind("no")))
    result = locator(model)._permutation(*second, PASS, False)
    assert result.status == "inconclusive" and result.reason.replace("'", "") == "the permuted pair cannot be called: no"


@pytest.mark.parametrize("status", ["pass", "fail"])
def test_where_replay_has_judged_nothing_with_a_tolerance_is_run(model, second, monkeypatch, status):
    monkeypatch.setattr(module.layer_probes, "replay", lambda *given: (Result(status), []))
    _, report, _, _ = one_layer(model, second, monkeypatch)
    assert [report.results[n].status for n in ("replay", "causal", "permutation")] == [status, "skipped", "skipped"]


@pytest.mark.parametrize("name", ["twin", "causal", "permutation"])
def test_full_memory_and_other_errors_are_passed_on(model, second, monkeypatch, name):
    made, ignore = locator(model), lambda *given: None
    ask = {
        "twin": (made._twin, ignore, PASS),
        "causal": (made._causal, ignore, PASS, False),
        "permutation": (made._permutation, PASS, False),
    }
    method, *given = ask[name]
    for error in (torch.OutOfMemoryError("full"), ZeroDivisionError("a bug")):
        monkeypatch.setattr(module.layer_probes, name, failing(error))
        with pytest.raises(type(error)):
            method(*second, *given)


def test_a_layer_without_a_circuit_is_not_covered_by_a_twin(model, second, monkeypatch):
    monkeypatch.setattr(module, "circuit_of", lambda layer, config: "nobody knows its wiring")
    _, report, _, _ = one_layer(model, second, monkeypatch, "device")
    assert report.results["twin"].reason == "nobody knows its wiring" and report.coverage == {}
    assert report.results["permutation"].status == "inconclusive"


def test_a_circuit_is_read_off_the_reference_with_the_models_config(model, second, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "circuit_of", lambda layer, config: asked.append((layer, config)) or "none")
    made = locator(model)
    assert made._circuit(second[0]) == "none"
    assert asked[0][0] is made.reference.skeleton.get_submodule("model.layers.1") and asked[0][1] is model.config


@pytest.mark.parametrize(("status", "permuted"), [("pass", True), ("suspect", True), ("inconclusive", False)])
def test_rows_of_a_permuted_pair_are_counted_where_it_could_be_compared(model, second, monkeypatch, status, permuted):
    monkeypatch.setattr(module.layer_probes, "permutation", lambda *given: Result(status))
    _, report, _, _ = one_layer(model, second, monkeypatch, "device")
    assert ("permuted" in report.coverage["mlp.up_proj"]) is permuted


def test_a_failed_weight_is_not_overwritten_by_a_right_attribute(model, second, monkeypatch):
    monkeypatch.setattr(module.layer_probes, "weights", lambda *given: (Result("fail", reason="other bits"), []))
    _, report, _, _ = one_layer(model, second, monkeypatch, "host")
    assert (report.results["weights"].status, report.results["weights"].reason) == ("fail", "other bits")


def test_every_parameter_is_compared_once_in_its_layer_or_outside_of_them(model, monkeypatch):
    asked = []
    monkeypatch.setattr(module.layer_probes, "weights", lambda *given: asked.append(given) or (Result("pass"), []))
    locator(model, "host").run(IDS, None)
    places = [(index, prefix) for _, root, _, index, prefix in asked if root is model]
    assert places == [(0, "model.layers.0"), (1, "model.layers.1"), (2, "model.layers.2"), (None, "")]
    everything = [n for n, _ in model.named_parameters()]
    for names, _, _, _, prefix in asked[:3]:
        assert set(names) == {n for n in everything if n.startswith(f"{prefix}.")}
    assert set(asked[3][0]) == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


# ---- another order of summation


def excused(model, second, monkeypatch, repeat="fail", replay="pass", device="cuda", within=True):
    monkeypatch.setattr(module.layer_probes, "is_within_summation", lambda *given: within)
    made = locator(model, device=torch.device(device))
    report = LayerReport(1, "x", {"repeat": Result(repeat, reason="it changes"), "replay": Result(replay)})
    evidence = [
        Evidence(layer, None, None, probe, "", "")
        for layer, probe in ((0, "repeat"), (1, "repeat"), (1, "links"), (None, "repeat"))
    ]
    kept = evidence
    made._excuse(*second, report, evidence)
    assert evidence is kept
    return report.results["repeat"], [(e.layer, e.probe) for e in evidence]


def test_an_accelerator_may_sum_in_any_order_where_every_result_is_right(model, second, monkeypatch):
    result, left = excused(model, second, monkeypatch)
    assert result.status == "inconclusive" and left == [(0, "repeat"), (1, "links"), (None, "repeat")]
    assert result.reason == "it changes, no more than another order of summation explains"


@pytest.mark.parametrize(
    "given",
    [
        {"repeat": "pass"},
        {"repeat": "inconclusive"},
        {"replay": "fail"},
        {"replay": "inconclusive"},
        {"device": "cpu"},
        {"within": False},
    ],
)
def test_nothing_else_is_excused(model, second, monkeypatch, given):
    result, left = excused(model, second, monkeypatch, **given)
    assert (result.status, result.reason, len(left)) == (given.get("repeat", "fail"), "it changes", 4)


# ---- statistics


def doubling(seen, fails=False):
    class Doubles(nn.Module):
        def forward(self, x):
            seen.append(x)
            if fails and x.shape[0] > 1:
                raise RuntimeError("made for one sequence")
            return x * 2

    x = draw(1, 300, 4)
    return LayerCall(2, "layers.2", Doubles(), (x,), {}, x * 2)


@pytest.mark.parametrize("fails", [False, True])
def test_answers_come_in_one_batch_or_one_by_one(model, fails):
    seen = []
    call = doubling(seen, fails)
    inputs = [draw(1, 300, 4, seed=i) for i in range(3)]
    answers = locator(model)._answers(call, *inputs)
    assert len(answers) == 3 and all(torch.equal(a, x * 2) for a, x in zip(answers, inputs, strict=True))
    assert [x.shape[0] for x in seen] == ([3, 1, 1, 1] if fails else [3])


@pytest.mark.parametrize(("gains", "repeats"), [(1, 2), (3, 2), (1, 5), (2, 3)])
def test_a_layer_is_called_as_often_as_the_scans_say(model, gains, repeats):
    seen = []
    call = doubling(seen)
    found = locator(model, scans=srdd.Scans(0.5, gains, repeats))._statistics(call, (call.y,))
    assert [x.shape[0] for x in seen] == [gains + 1] + [1] * (repeats - 2)
    assert found.gain == pytest.approx(2, rel=1e-5) and found.min_gain == pytest.approx(2, rel=1e-3) and found.instability == 0
    first, *_, shifted = seen[0].split(1)
    assert torch.equal(first, srdd.probe_input(call.x, 7 + 2, 0.5)), "the seed of the run and the number of the layer"
    assert torch.equal(shifted, srdd.dc_input(call.x, 0.5)) and all(torch.equal(x, call.x) for x in seen[1:])


def test_the_gain_is_the_mean_of_all_probes(model, monkeypatch):
    gains = iter([1.0, 2.0, 3.0, 6.0, 8.0])
    found = srdd.LayerStatistics(5.0, 0.5, 0.25, 0.0, 0.125, 9)
    monkeypatch.setattr(srdd, "gain", lambda *given: next(gains))
    monkeypatch.setattr(srdd, "layer_statistics", lambda *given: found)
    call = doubling([])
    several = locator(model, scans=srdd.Scans(0.5, 4, 2))._statistics(call, call.y)
    assert (several.gain, several.min_gain, several.distinct) == (3.0, 0.5, 9)
    assert locator(model)._statistics(call, call.y) is found, "one probe is the statistics' own"


def test_the_instability_is_that_of_the_recorded_answer_and_every_second_token_of_a_long_sequence_counts(model):
    call = doubling([])
    other = call.y.clone()
    other[:, 1::2] += 1
    made = locator(model)
    assert call.x.shape[1] == 300 and made._statistics(call, other).instability == 0, "300 tokens are 150 for the statistics"
    other[:, ::2] += 1
    assert made._statistics(call, other).instability > 0.1
    assert made._statistics(call, call.y).distinct == call.y[:, ::2].unique().numel()


# ---- outside of the layers


def placed(model, **options):
    found = st.locate(model, mode="host", input_ids=IDS, **options)
    return found, [(e.probe, e.op, e.place) for e in found.evidence]


@pytest.mark.parametrize(
    ("plan", "place"),
    [
        ("gain:0.1@module.rotary_emb", ("links", "model.rotary_emb", -1)), ("gain:0.1@module.model", ("links", "model", 3)),
        ("gain:0.1@module.lm_head", ("replay", "lm_head", 3)), ("gain:0.1@module.embed_tokens,include=embedding", ("replay", "model.embed_tokens", -1)),
    ],
)  # fmt: skip
def test_what_is_wrong_outside_of_the_layers_has_its_place_before_or_behind_them(model, plan, place):
    found, places = placed(model, plan=plan)
    assert place in places and found.layer is None and found.op == place[1]


@pytest.mark.parametrize(("name", "place"), [("lm_head", 3), ("model.norm", 3), ("model.embed_tokens", -1)])
def test_a_wrong_weight_outside_of_the_layers_is_told_at_its_place(model, tmp_path, name, place):
    model.save_pretrained(tmp_path)
    other = build("llama", positions=40)
    with torch.no_grad():
        other.get_parameter(f"{name}.weight").view(-1)[0] += 1
    found, places = placed(other, source=str(tmp_path))
    assert places[0] == ("weights", name, place) and {p for p, _, _ in places} <= {"weights", "replay"}
    assert found.probes[-1].results["weights"].status == "fail"
    assert [p.results["weights"].status for p in found.probes[:3]] == ["pass"] * 3, "the layers' own are right"


def test_a_wrong_number_outside_of_the_layers_is_not_looked_for_inside_and_the_other_way_round():
    other = build("llama", positions=40)
    other.model.rotary_emb.inv_freq = other.model.rotary_emb.inv_freq * 2
    found, places = placed(other)
    assert ("weights", "model.rotary_emb", -1) in places and found.probes[-1].results["weights"].status == "fail"
    inside = build("llama", positions=40)
    inside.model.layers[1].self_attn.scaling *= 2
    found, places = placed(inside)
    assert ("weights", "self_attn", 1) in places and found.probes[-1].results["weights"].status == "skipped"


def test_the_device_alone_judges_no_weights_outside_of_the_layers(model):
    made = locator(model, "device")
    traced = trace(model, IDS, made.reference)
    report = made._outside(traced, [traced.logits, traced.logits], [])
    assert set(report.results) == {"repeat", "links"} and report.coverage == {} and (report.layer, report.name) == (None, "")


def test_logits_that_are_no_numbers_twice_are_the_same(model):
    nan = torch.full((1, 2, 3), float("nan"))
    assert locator(model)._logits([nan, nan.clone()], SimpleNamespace(logits=nan.clone())).status == "pass"
    result = locator(model)._logits([nan, torch.zeros(1, 2, 3)], SimpleNamespace(logits=torch.zeros(1, 2, 3)))
    assert (result.status, result.score) == ("suspect", 1.0) and "of 2 of 2 tokens" in result.reason


# ---- what a diagnosis says of itself


def test_a_model_is_called_by_its_source_or_its_config_or_its_class(model):
    made, config = locator(model), model.config
    before = config.name_or_path
    try:
        config.name_or_path = "some/model"
        assert made._blank(IDS).model == "some/model"
        made.reference.source = "a/folder"
        assert made._blank(IDS).model == "a/folder"
        config.name_or_path, made.reference.source = "", None
        assert made._blank(IDS).model == "LlamaForCausalLM"
    finally:
        config.name_or_path = before


def test_a_diagnosis_begins_with_what_is_known_before_any_probe(model):
    found = locator(model, "host", strict=True)._blank(tokens(n=9))
    assert (found.sequences, found.tokens, found.seed, found.strict, found.mode, found.num_layers) == (1, 9, 7, True, "host", 3)
    assert (found.device, found.attention, found.dtype, found.probes, found.evidence) == ("cpu", "sdpa", "float32", [], [])
    assert found.detectable_rate["repeats"] == 2 and found.date.endswith("+00:00") and "." not in found.date


@pytest.mark.parametrize(
    ("mode", "file", "rebuilt", "note", "said"),
    [
        ("host", True, True, "", []), ("host", False, True, "", ["file"]), ("device", False, True, "", []), ("all", False, False, "", ["file", "anew"]),
        ("host", True, False, "short", ["short", "anew"]), ("device", False, False, "short", ["short", "anew"]),
    ],
)  # fmt: skip
def test_notes_say_what_was_believed(model, mode, file, rebuilt, note, said):
    made = locator(model, mode)
    made.reference = SimpleNamespace(has_file=file, is_rebuilt=rebuilt)
    made.bench = SimpleNamespace(precision=Precision(note=note))
    texts = {
        "file": "the weights were not compared with a file: none was given", "short": "short",
        "anew": "the model could not be built anew from its config: its own modules define what is right",
    }  # fmt: skip
    assert made._notes() == [texts[key] for key in said]


def test_a_failure_in_one_line():
    assert _failed("the pair", KeyError("x")) == "the pair cannot be called: 'x'"
    assert _failed("the pair", RuntimeError("\nsecond")) == "the pair cannot be called: "


def test_values_that_no_operator_made_are_told_with_the_path_of_their_layer(model, monkeypatch):
    told = []
    monkeypatch.setattr(module, "unmade", lambda recording, prefix="": told.append(prefix) or [])
    locator(model, "host").run(IDS, None)
    assert told == ["model.layers.0", "model.layers.1", "model.layers.2", ""]
